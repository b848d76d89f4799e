#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace meterhouse {

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

Pool::Pool(int threads, int spin_us)
        : threads_(std::max(1, threads)), spin_us_(std::max(0, spin_us)), runs_(new Run[std::max(1, threads)]) {
    for (int worker = 1; worker < threads_; ++worker) workers_.emplace_back([this, worker] { live(worker); });
}

Pool::~Pool() {
    stop_ = true;
    ring(opened_, sleeping_workers_);
    for (std::thread& worker : workers_) worker.join();
}

// Spins for a while, then sleeps until `ready`. Whoever makes it ready rings the bell; it looks for sleepers after its
// write and a sleeper looks for the write after it has counted itself, so one of the two sees the other.
template <class Ready>
void Pool::wait(std::condition_variable& bell, std::atomic<int>& sleepers, Ready ready) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    do {
        for (int turn = 0; turn < 64; ++turn) {
            if (ready()) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers.fetch_add(1);
    bell.wait(lock, ready);
    sleepers.fetch_sub(1);
}

void Pool::ring(std::condition_variable& bell, std::atomic<int>& sleepers) {
    if (sleepers.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper between its last look and its sleep holds the mutex
    bell.notify_all();
}

void Pool::start(int64_t pieces, Call call, void* context) {
    if (pieces <= 0) return;
    if (threads_ == 1 || pieces == 1) {
        for (int64_t piece = 0; piece < pieces; ++piece) call(context, piece, 0);
        return;
    }
    call_ = call;
    context_ = context;
    for (int worker = 0; worker < threads_; ++worker) {
        runs_[worker].next.store(pieces * worker / threads_, std::memory_order_relaxed);
        runs_[worker].end = pieces * (worker + 1) / threads_;
    }
    left_.store(0, std::memory_order_relaxed);
    region_.store((region_.load(std::memory_order_relaxed) & ~(kOpen | kJoined)) + kRegion + kOpen);
    ring(opened_, sleeping_workers_);
    share(0);
    const uint64_t joined = region_.fetch_and(~kOpen) & kJoined;
    const auto done = [&] { return left_.load() == joined; };
    if (!done()) wait(finished_, sleeping_callers_, done);
}

// Own pieces first, then those that the others have not come to.
void Pool::share(int worker) {
    for (int offset = 0; offset < threads_; ++offset) {
        Run& run = runs_[(worker + offset) % threads_];
        if (run.next.load(std::memory_order_relaxed) >= run.end) continue;
        for (int64_t piece; (piece = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
            call_(context_, piece, worker);
        }
    }
}

// Enters the open region, if there is one that this worker has not seen.
bool Pool::join(uint64_t* seen) {
    uint64_t now = region_.load();
    while ((now & kOpen) && now / kRegion != *seen) {
        if (region_.compare_exchange_weak(now, now + 1)) {
            *seen = now / kRegion;
            return true;
        }
    }
    return false;
}

void Pool::live(int worker) {
    for (uint64_t seen = 0;;) {
        wait(opened_, sleeping_workers_, [&] {
            const uint64_t now = region_.load();
            return stop_.load() || ((now & kOpen) && now / kRegion != seen);
        });
        if (stop_.load()) return;
        if (!join(&seen)) continue;
        share(worker);
        left_.fetch_add(1);
        ring(finished_, sleeping_callers_);
    }
}

}  // namespace meterhouse
