// The threads of a step: N - 1 workers and the caller, who hand out a region's pieces among themselves.
//
// Knows: how work is shared and when a thread may sleep. Does not know: what a piece is.
//
// Each thread has a run of consecutive pieces (memory is read in order) behind an atomic counter and takes from the
// others' runs when its own is done: a core that another process takes away slows a region and does not stall it. A
// worker that wakes after the caller closed the region is not waited for.
//
// Waiting means spinning for `spin_us` and then sleeping: the gateway and its clients need these cores too.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace meterhouse {

class Pool {
public:
    explicit Pool(int threads, int spin_us = 40);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Calls f(piece, worker) once for every piece in [0, pieces), with worker in [0, threads()), and returns when all
    // are done. Neighbouring pieces mostly come to one worker, in order. f must not throw and not call run. One caller
    // at a time.
    template <class F>
    void run(int64_t pieces, F&& f) {
        using Function = std::remove_reference_t<F>;
        const Call call = [](void* context, int64_t piece, int worker) {
            (*static_cast<Function*>(context))(piece, worker);
        };
        start(pieces, call, const_cast<void*>(static_cast<const void*>(&f)));
    }

private:
    using Call = void (*)(void* context, int64_t piece, int worker);

    struct alignas(64) Run {  // one thread's pieces, on a cache line of its own
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    void start(int64_t pieces, Call call, void* context);
    void share(int worker);
    void live(int worker);
    bool join(uint64_t* seen);
    template <class Ready>
    void wait(std::condition_variable& bell, std::atomic<int>& sleepers, Ready ready);
    void ring(std::condition_variable& bell, std::atomic<int>& sleepers);

    const int threads_;
    const int spin_us_;
    std::unique_ptr<Run[]> runs_;
    Call call_ = nullptr;
    void* context_ = nullptr;

    // The region's number in the upper 32 bits, then whether it is open, then how many workers have joined it.
    static constexpr uint64_t kOpen = uint64_t{1} << 31, kJoined = kOpen - 1, kRegion = uint64_t{1} << 32;
    alignas(64) std::atomic<uint64_t> region_{0};
    alignas(64) std::atomic<uint64_t> left_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> sleeping_workers_{0}, sleeping_callers_{0};
    std::mutex mutex_;
    std::condition_variable opened_, finished_;
    std::vector<std::thread> workers_;
};

}  // namespace meterhouse
