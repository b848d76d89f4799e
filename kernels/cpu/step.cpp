#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <new>

#include "norm.h"
#include "rope.h"

namespace meterhouse {

namespace {

constexpr int64_t kAlone = 12 << 10;   // so few numbers are through before another thread has come
constexpr int64_t kInPiece = 3 << 10;

// f(row) for rows of `width` numbers that cost about the same.
template <class F>
void by_rows(Pool& pool, int64_t rows, int64_t width, F&& f) {
    if (rows * width <= kAlone) {
        for (int64_t row = 0; row < rows; row++) f(row);
        return;
    }
    const int64_t each = std::max<int64_t>(1, kInPiece / width);
    pool.run((rows + each - 1) / each, [&](int64_t piece, int) {
        const int64_t end = std::min(rows, (piece + 1) * each);
        for (int64_t row = piece * each; row < end; row++) f(row);
    });
}

// gate [size] and up [size] side by side → silu(gate) * up.
void swiglu(const float* gate, const float* up, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Lanes g = load<Lanes>(gate + i), small = exponential(g > 0.0f ? -g : g);  // e^-|g|
        const Lanes sigmoid = (g > 0.0f ? splat(1.0f) : small) / (small + 1.0f);
        store(out + i, g * sigmoid * load<Lanes>(up + i));
    }
    for (; i < size; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

}  // namespace

// Where the time goes, when the caller asks: what has passed since the last word is added to a part.
class Step::Timer {
public:
    explicit Timer(int64_t* part_ns) : part_ns_(part_ns) { last_ = now(); }
    void done(Part part) {
        if (part_ns_ == nullptr) return;
        const int64_t time = now();
        part_ns_[part] += time - last_;
        last_ = time;
    }

private:
    int64_t now() const {
        if (part_ns_ == nullptr) return 0;
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
    int64_t* part_ns_;
    int64_t last_ = 0;
};

Step::Step(const Plan& plan, Pool& pool) : plan_(plan), pool_(pool), attention_(plan, pool.threads()) {}

void Step::run(const StepInput& input) {
    Timer timer(input.part_ns);
    const int64_t query = plan_.heads * plan_.head_dim, key = plan_.kv_heads * plan_.head_dim;
    const int64_t qkv_columns[] = {0, query, query + key}, whole[] = {0};
    const int64_t words = plan_.block_size * 2 * key / (plan_.kv_bfloat16 ? 2 : 1);  // of one block in one layer
    int64_t rows = input.rows;
    reserve(rows);
    segments_.assign(input.segment, input.segment + input.segments);
    embed(input);
    attention_.begin(input, cosines_.data(), sines_.data());
    timer.done(kPartOther);
    for (int64_t index = 0; index < plan_.layers; index++) {
        const Layer& layer = plan_.layer[index];
        normalise(hidden_.data(), layer.input_norm, rows, normed_.data());
        timer.done(kPartOther);
        project(index, layer.qkv, layer.qkv_bias, kQuery, 3, qkv_columns, normed_.data(), rows, qkv_.data(),
                Epilogue::store, timer);
        attention_.run(pool_, layer, qkv_.data(), static_cast<uint32_t*>(input.cache) + index * plan_.blocks * words,
                       attended_.data());
        timer.done(kPartAttention);
        if (index == plan_.layers - 1) rows = keep_wanted(input);
        if (rows == 0) return;
        project(index, layer.o, layer.o_bias, kOutput, 1, whole, attended_.data(), rows, hidden_.data(), Epilogue::add,
                timer);
        feed_forward(index, rows, timer);
    }
    normalise(hidden_.data(), plan_.norm, rows, normed_.data());
    timer.done(kPartOther);
    const Job head{&plan_.head, normed_.data(), plan_.hidden, rows, input.logits, plan_.vocab, Epilogue::store};
    multiply(pool_, &head, 1, scratch_);
    timer.done(kPartHead);
}

void Step::reserve(int64_t rows) {
    if (rows <= capacity_) return;
    const int64_t query = plan_.heads * plan_.head_dim, key = plan_.kv_heads * plan_.head_dim;
    hidden_.resize(rows * plan_.hidden);
    normed_.resize(rows * plan_.hidden);
    qkv_.resize(rows * (query + 2 * key));
    attended_.resize(rows * query);
    active_.resize(rows * plan_.ffn);
    cosines_.resize(rows * plan_.head_dim / 2);
    sines_.resize(rows * plan_.head_dim / 2);
    capacity_ = rows;
}

// Each token's embedding, and the angles of its position, which all layers share.
void Step::embed(const StepInput& input) {
    const int64_t half = plan_.head_dim / 2, hidden = plan_.hidden;
    auto one = [&](int64_t row, int64_t position) {
        angles(position, plan_.frequencies, half, plan_.rope_magnitude, &cosines_[row * half], &sines_[row * half]);
        float* to = &hidden_[row * hidden];
        const int64_t token = input.tokens[row];
        if (plan_.embedding_bfloat16) {
            const uint16_t* from = static_cast<const uint16_t*>(plan_.embedding) + token * hidden;
            for (int64_t i = 0; i < hidden; i++) to[i] = widened(from[i]);
        } else {
            const float* from = static_cast<const float*>(plan_.embedding) + token * hidden;
            std::copy(from, from + hidden, to);
        }
    };
    for (int64_t index = 0; index < input.sequences; index++) {
        const Sequence& sequence = input.sequence[index];
        by_rows(pool_, sequence.count, hidden, [&](int64_t row) { one(sequence.row + row, sequence.start + row); });
    }
}

void Step::normalise(const float* x, const float* weight, int64_t rows, float* out) {
    const int64_t hidden = plan_.hidden;
    by_rows(pool_, rows, hidden, [&](int64_t row) { rms_norm(x + row * hidden, weight, hidden, plan_.eps, out + row * hidden); });
}

// The base product and the adapters' shrinks in one region, the adapters' expands in the next.
void Step::project(int64_t layer, const Weight& weight, const float* bias, int first, int count,
                   const int64_t* columns, const float* x, int64_t rows, float* out, Epilogue epilogue, Timer& timer) {
    const int64_t ldo = epilogue == Epilogue::swiglu ? weight.outputs / 2 : weight.outputs;
    jobs_.clear();
    jobs_.push_back({&weight, x, weight.inputs, rows, out, ldo, epilogue, bias});
    lora_.shrink(segments_, layer, first, count, x, weight.inputs, jobs_);
    multiply(pool_, jobs_.data(), int64_t(jobs_.size()), scratch_);
    timer.done(kPartGemm);
    jobs_.clear();
    if (lora_.expand(columns, out, ldo, jobs_)) multiply(pool_, jobs_.data(), int64_t(jobs_.size()), scratch_);
    timer.done(kPartLora);
}

void Step::feed_forward(int64_t index, int64_t rows, Timer& timer) {
    const Layer& layer = plan_.layer[index];
    const int64_t columns[] = {0, plan_.ffn};
    normalise(hidden_.data(), layer.post_norm, rows, normed_.data());
    timer.done(kPartOther);
    bool adapted = false;
    for (const Segment& segment : segments_)
        for (int projection : {kGate, kUp})
            adapted |= segment.pairs[index * kProjections + projection].shrink.outputs != 0;
    if (adapted) {  // the gates change before they are applied
        if (int64_t(gate_up_.size()) < rows * 2 * plan_.ffn) gate_up_.resize(rows * 2 * plan_.ffn);
        project(index, layer.gate_up, layer.gate_up_bias, kGate, 2, columns, normed_.data(), rows, gate_up_.data(),
                Epilogue::store, timer);
        by_rows(pool_, rows, plan_.ffn, [&](int64_t row) {
            const float* gate = &gate_up_[row * 2 * plan_.ffn];
            swiglu(gate, gate + plan_.ffn, plan_.ffn, &active_[row * plan_.ffn]);
        });
        timer.done(kPartLora);
    } else {
        project(index, layer.gate_up, layer.gate_up_bias, kGate, 0, columns, normed_.data(), rows, active_.data(),
                Epilogue::swiglu, timer);
    }
    project(index, layer.down, layer.down_bias, kDown, 1, columns, active_.data(), rows, hidden_.data(), Epilogue::add,
            timer);
}

// After the last attention only the rows whose logits are wanted go on; they move to the front.
int64_t Step::keep_wanted(const StepInput& input) {
    if (input.wanted == input.rows) return input.rows;
    const int64_t hidden = plan_.hidden, query = plan_.heads * plan_.head_dim;
    for (int64_t to = 0; to < input.wanted; to++) {
        const int64_t from = input.wanted_rows[to];
        std::copy_n(&hidden_[from * hidden], hidden, &hidden_[to * hidden]);
        std::copy_n(&attended_[from * query], query, &attended_[to * query]);
    }
    for (Segment& segment : segments_) {
        const int32_t* end = input.wanted_rows + input.wanted;
        const int32_t* first = std::lower_bound(input.wanted_rows, end, int32_t(segment.row));
        const int32_t* last = std::lower_bound(first, end, int32_t(segment.row + segment.rows));
        segment.row = first - input.wanted_rows;
        segment.rows = last - first;
    }
    const auto empty = [](const Segment& segment) { return segment.rows == 0; };
    segments_.erase(std::remove_if(segments_.begin(), segments_.end(), empty), segments_.end());
    return input.wanted;
}

}  // namespace meterhouse

extern "C" {

// A step for a plan and a pool that outlive it; null when there is no memory.
void* meterhouse_step_create(const meterhouse::Plan* plan, meterhouse::Pool* pool) {
    try {
        return new meterhouse::Step(*plan, *pool);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void meterhouse_step_destroy(void* step) { delete static_cast<meterhouse::Step*>(step); }

// 0; 1 when there is no memory for so many rows. One caller at a time.
int32_t meterhouse_step_run(void* step, const meterhouse::StepInput* input) {
    try {
        static_cast<meterhouse::Step*>(step)->run(*input);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

}  // extern "C"
