#include "attention.h"

#include <algorithm>
#include <cmath>

#include "rope.h"

namespace meterhouse {
namespace {

constexpr float kHidden = -1e30f;  // a score that is not seen: its weight is exactly 0

// Sixteen tokens at a time; what the machine has registers for is what one pass keeps in them.
#if defined(__AVX512F__)
constexpr int kGroups = 4, kQueries = 4, kColumns = 4;
#else
constexpr int kGroups = 1, kQueries = 4, kColumns = 1;
#endif

constexpr int64_t kTileQueries = 32;  // of one key head in a tile: their scores and weights stay in the first cache
constexpr int64_t kSpanLeast = 128, kSpanMost = 512, kSpansAim = 16;

// Tokens in one part of a context: a matter of the context alone, so that its result is too.
int64_t span_of(int64_t context) {
    const int64_t aimed = (context + kSpansAim * 64 - 1) / (kSpansAim * 64) * 64;
    return std::clamp(aimed, kSpanLeast, kSpanMost);
}

void grow(std::vector<float>& buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size);
}

// ---- the two products, for a few queries at once ----

// Keys and values of sixteen tokens: `keys` by rows `stride` words apart, `values` one line of the cache after the other.
struct Group {
    const uint32_t* keys;
    const uint32_t* values;
};

// scores[q][16 g + lane] = query q . key of token `lane` of group g. Meanwhile the keys that are read later come nearer.
template <class E, int Q, int G>
inline void score(const Group* groups, const Group* ahead, int64_t stride, int64_t steps, const uint32_t* queries,
                  int64_t ldq, float* scores, int64_t lds) {
    Lanes total[Q][G] = {};
    for (int64_t step = 0; step < steps; step++) {
        Words key[G];
        UNROLLED for (int g = 0; g < G; g++) {
            key[g] = load<Words>(groups[g].keys + step * stride);
            if (ahead != nullptr) __builtin_prefetch(ahead[g].keys + step * stride);
        }
        UNROLLED for (int q = 0; q < Q; q++) {
            const Words word = splat(queries[q * ldq + step]);
            UNROLLED for (int g = 0; g < G; g++) total[q][g] = E::dot(total[q][g], key[g], word);
        }
    }
    UNROLLED for (int q = 0; q < Q; q++) {
        UNROLLED for (int g = 0; g < G; g++) store(scores + q * lds + g * kLanes, total[q][g]);
    }
}

template <class E, int G>
void score_all(const Group* groups, const Group* ahead, int64_t stride, int64_t steps, const uint32_t* queries,
               int64_t ldq, int64_t count, float* scores, int64_t lds) {
    for (int64_t q = 0; q < count; q += kQueries) {
        const uint32_t* from = queries + q * ldq;
        float* to = scores + q * lds;
        switch (std::min<int64_t>(kQueries, count - q)) {
            case 1: score<E, 1, G>(groups, ahead, stride, steps, from, ldq, to, lds); break;
            case 2: score<E, 2, G>(groups, ahead, stride, steps, from, ldq, to, lds); break;
            case 3: score<E, 3, G>(groups, ahead, stride, steps, from, ldq, to, lds); break;
            default: score<E, 4, G>(groups, ahead, stride, steps, from, ldq, to, lds);
        }
        ahead = nullptr;
    }
}

// mixed[q][16 c + lane] += sum over tokens of weight of the token . its value's dimension `lane` of column c.
template <class E, int Q, int C>
inline void mix(const Group* groups, const Group* ahead, int64_t count, int64_t first_column, int64_t head_dim,
                const uint32_t* weights, int64_t ldw, float* mixed, int64_t ldm) {
    constexpr int64_t kSteps = kLanes / E::kPack;
    Lanes total[Q][C];
    UNROLLED for (int q = 0; q < Q; q++) {
        UNROLLED for (int c = 0; c < C; c++) total[q][c] = load<Lanes>(mixed + q * ldm + c * kLanes);
    }
    for (int64_t group = 0; group < count; group++) {
        const uint32_t* value = groups[group].values + first_column;
        const uint32_t* weight = weights + group * kSteps;
        for (int64_t step = 0; step < kSteps; step++) {
            Words column[C];
            UNROLLED for (int c = 0; c < C; c++) {
                const int64_t place = step * head_dim + c * kLanes;
                column[c] = load<Words>(value + place);
                if (ahead != nullptr) __builtin_prefetch(ahead[group].values + first_column + place);
            }
            UNROLLED for (int q = 0; q < Q; q++) {
                const Words word = splat(weight[q * ldw + step]);
                UNROLLED for (int c = 0; c < C; c++) total[q][c] = E::dot(total[q][c], column[c], word);
            }
        }
    }
    UNROLLED for (int q = 0; q < Q; q++) {
        UNROLLED for (int c = 0; c < C; c++) store(mixed + q * ldm + c * kLanes, total[q][c]);
    }
}

template <class E, int C>
void mix_columns(const Group* groups, const Group* ahead, int64_t count, int64_t first_column, int64_t head_dim,
                 const uint32_t* weights, int64_t ldw, int64_t queries, float* mixed, int64_t ldm) {
    for (int64_t q = 0; q < queries; q += kQueries) {
        const uint32_t* from = weights + q * ldw;
        float* to = mixed + q * ldm + first_column;
        switch (std::min<int64_t>(kQueries, queries - q)) {
            case 1: mix<E, 1, C>(groups, ahead, count, first_column, head_dim, from, ldw, to, ldm); break;
            case 2: mix<E, 2, C>(groups, ahead, count, first_column, head_dim, from, ldw, to, ldm); break;
            case 3: mix<E, 3, C>(groups, ahead, count, first_column, head_dim, from, ldw, to, ldm); break;
            default: mix<E, 4, C>(groups, ahead, count, first_column, head_dim, from, ldw, to, ldm);
        }
        ahead = nullptr;
    }
}

template <class E>
void mix_all(const Group* groups, const Group* ahead, int64_t count, int64_t head_dim, const uint32_t* weights,
             int64_t ldw, int64_t queries, float* mixed) {
    for (int64_t column = 0; column < head_dim;) {
        const int64_t taken = std::min<int64_t>(kColumns, (head_dim - column) / kLanes);
        switch (taken) {
            case 1: mix_columns<E, 1>(groups, ahead, count, column, head_dim, weights, ldw, queries, mixed, head_dim); break;
            case 2: mix_columns<E, 2>(groups, ahead, count, column, head_dim, weights, ldw, queries, mixed, head_dim); break;
            case 3: mix_columns<E, 3>(groups, ahead, count, column, head_dim, weights, ldw, queries, mixed, head_dim); break;
            default: mix_columns<E, 4>(groups, ahead, count, column, head_dim, weights, ldw, queries, mixed, head_dim);
        }
        column += taken * kLanes;
    }
}

// The largest score of a query over a span of which tokens [low, high) are seen, or `best` if that is larger. The scores
// of the others are hidden.
inline float largest_seen(float* scores, int64_t width, int64_t low, int64_t high, float best) {
    std::fill(scores, scores + low, kHidden);
    std::fill(scores + high, scores + width, kHidden);
    Lanes most = splat(best);
    for (int64_t i = 0; i < width; i += kLanes) most = larger(load<Lanes>(scores + i), most);
    return largest(most);
}

// The weights of one query over a span, as words for `mix`: its scores less `best`, through the exponential. Returns
// their sum.
template <class E>
float weigh(const float* scores, int64_t width, float best, uint32_t* weights) {
    Lanes added = {};
    for (int64_t i = 0; i < width; i += kLanes) {
        const Lanes weight = E::exponential(load<Lanes>(scores + i) - best);
        added = added + weight;
        E::put_lanes(weights + i / E::kPack, weight);
    }
    return sum(added);
}

}  // namespace

// One layer's attention with keys and values of one kind.
template <class E>
class LayerAttention {
public:
    LayerAttention(Attention& whole, const Layer& layer, const float* qkv, uint32_t* cache, float* out)
        : whole_(whole),
          plan_(whole.plan_),
          input_(*whole.input_),
          layer_(layer),
          qkv_(qkv),
          cache_(cache),
          out_(out),
          dim_(plan_.head_dim),
          block_size_(plan_.block_size),
          shared_(plan_.heads / plan_.kv_heads),
          steps_(dim_ / E::kPack),
          width_((plan_.heads + 2 * plan_.kv_heads) * dim_),
          half_words_(steps_ * block_size_),
          scale_(1.0f / std::sqrt(float(dim_))) {}

    void run(Pool& pool, const AttentionWork& work) {
        const int64_t kv_heads = plan_.kv_heads, decodes = int64_t(work.decodes.size()) * kv_heads;
        const int64_t tiles = int64_t(work.tiles.size()) * kv_heads;
        if (!whole_.writes_.empty())
            pool.run(int64_t(whole_.writes_.size()), [&](int64_t piece, int) { write(whole_.writes_[piece]); });
        pool.run(decodes + tiles, [&](int64_t piece, int worker) {
            Attention::Local& local = whole_.locals_[worker];
            if (piece < tiles)
                tile(work, work.tiles[piece / kv_heads], piece % kv_heads, local);
            else
                decode(work, piece - tiles, local);
        });
    }

private:
    const float* cosines(int64_t row) const { return layer_.rope ? whole_.cosines_ + row * (dim_ / 2) : nullptr; }
    const float* sines(int64_t row) const { return layer_.rope ? whole_.sines_ + row * (dim_ / 2) : nullptr; }

    uint32_t* keys_of(int64_t block, int64_t kv_head) const {
        return cache_ + (block * plan_.kv_heads + kv_head) * 2 * half_words_;
    }

    int32_t block_of(const Sequence& sequence, int64_t position) const {
        return input_.tables[sequence.table + position / block_size_];
    }

    // The row's key and value of one head, to their place. The first token of a block clears its values: what its last
    // owner left, finite or not, is multiplied by 0 later.
    void write_one(const Sequence& sequence, int64_t row, int64_t kv_head, float* turned) const {
        const int64_t position = sequence.start + row, offset = position % block_size_;
        uint32_t* keys = keys_of(block_of(sequence, position), kv_head);
        uint32_t* values = keys + half_words_;
        const float* heads = qkv_ + (sequence.row + row) * width_ + plan_.heads * dim_;
        const float* key = heads + kv_head * dim_;
        const float* value = heads + (plan_.kv_heads + kv_head) * dim_;
        turn_head(key, dim_, layer_.key_norm, plan_.eps, cosines(sequence.row + row), sines(sequence.row + row), 1.0f,
                  turned);
        if (offset == 0) std::fill(values, values + half_words_, 0u);
        for (int64_t i = 0; i < dim_; i++)
            E::put(keys + i / E::kPack * block_size_, offset * E::kPack + i % E::kPack, turned[i]);
        uint32_t* line = values + offset / E::kPack * dim_;
        for (int64_t i = 0; i < dim_; i++) E::put(line, i * E::kPack + offset % E::kPack, value[i]);
    }

    void write(const Attention::Write& rows) const {
        float turned[kHeadDimMost];
        const Sequence& sequence = input_.sequence[rows.sequence];
        for (int64_t kv_head = 0; kv_head < plan_.kv_heads; kv_head++)
            for (int64_t row = rows.row; row < rows.row + rows.rows; row++) write_one(sequence, row, kv_head, turned);
    }

    // The queries of one row that share a key head, as words.
    void queries_of(int64_t row, int64_t kv_head, uint32_t* words) const {
        alignas(64) float turned[kHeadDimMost];
        for (int64_t g = 0; g < shared_; g++) {
            turn_head(qkv_ + row * width_ + (kv_head * shared_ + g) * dim_, dim_, layer_.query_norm, plan_.eps,
                      cosines(row), sines(row), scale_, turned);
            uint32_t* to = words + g * steps_;
            for (int64_t i = 0; i < dim_; i += kLanes) E::put_lanes(to + i / E::kPack, load<Lanes>(turned + i));
        }
    }

    // Where the tokens [first, first + 16 count) of a sequence lie; a block size that sixteen does not divide is copied
    // into the worker's buffers, in the same layout. Returns the stride of keys.
    int64_t locate(const Sequence& sequence, int64_t kv_head, int64_t first, int64_t count, Attention::Local& local,
                   Group* groups) const {
        if (block_size_ % kLanes == 0) {
            for (int64_t group = 0; group < count; group++) {
                const int64_t token = first + group * kLanes, offset = token % block_size_;
                const uint32_t* base = keys_of(block_of(sequence, token), kv_head);
                groups[group] = {base + offset, base + half_words_ + offset / E::kPack * dim_};
            }
            return block_size_;
        }
        const int64_t words = kLanes / E::kPack * dim_;  // of the keys of a group, and of its values
        local.keys.assign(count * words, 0u);
        local.values.assign(count * words, 0u);
        for (int64_t group = 0; group < count; group++)
            groups[group] = {local.keys.data() + group * words, local.values.data() + group * words};
        const int64_t end = std::min<int64_t>(first + count * kLanes, sequence.start + sequence.count);
        for (int64_t token = first; token < end; token++) {
            const int64_t offset = token % block_size_, group = (token - first) / kLanes, lane = (token - first) % kLanes;
            const uint32_t* base = keys_of(block_of(sequence, token), kv_head);
            uint32_t* key = local.keys.data() + group * words;
            for (int64_t step = 0; step < steps_; step++) key[step * kLanes + lane] = base[step * block_size_ + offset];
            if (token % E::kPack != 0) continue;  // its word came with the token before
            const uint32_t* value = base + half_words_ + offset / E::kPack * dim_;
            std::copy(value, value + dim_, local.values.data() + group * words + lane / E::kPack * dim_);
        }
        return kLanes;
    }

    // Queries of `rows` rows from `row` on over the tokens [first, first + 16 groups), going on from the spans before.
    // What lies `ahead`, if that is known, has as many groups.
    void span(const AttentionWork& work, const Sequence& sequence, int64_t kv_head, int64_t row, int64_t rows,
              int64_t first, int64_t groups, const Group* ahead, Attention::Local& local) const {
        Group group[kSpanMost / kLanes];
        const int64_t stride = locate(sequence, kv_head, first, groups, local, group);
        // Rows a line further apart than they are long do not all fall into the same places of the first cache.
        const int64_t lds = (groups + 1) * kLanes, ldw = groups * kLanes / E::kPack + kLanes, count = rows * shared_;
        const uint32_t* queries = local.queries.data();
        for (int64_t at = 0; at < groups;) {
            const int64_t taken = std::min<int64_t>(kGroups, groups - at);
            const Group* next = ahead == nullptr ? nullptr : ahead + at;
            float* scores = local.scores.data() + at * kLanes;
            switch (taken) {
                case 1: score_all<E, 1>(group + at, next, stride, steps_, queries, steps_, count, scores, lds); break;
                case 2: score_all<E, 2>(group + at, next, stride, steps_, queries, steps_, count, scores, lds); break;
                case 3: score_all<E, 3>(group + at, next, stride, steps_, queries, steps_, count, scores, lds); break;
                default: score_all<E, 4>(group + at, next, stride, steps_, queries, steps_, count, scores, lds);
            }
            at += taken;
        }
        const int64_t width = groups * kLanes;
        for (int64_t q = 0; q < count; q++) {
            const int64_t position = sequence.start + row + q / shared_;
            const int64_t high = std::clamp<int64_t>(position + 1 - first, 0, width);
            const int64_t low = work.window ? std::clamp<int64_t>(position + 1 - work.window - first, 0, high) : 0;
            local.nows[q] = largest_seen(local.scores.data() + q * lds, width, low, high, local.bests[q]);
        }
        forget(local, count);
        for (int64_t q = 0; q < count; q++) {
            uint32_t* weights = local.weights.data() + q * ldw;
            if (local.bests[q] == kHidden)  // nothing seen yet
                std::fill_n(weights, width / E::kPack, 0u);
            else
                local.totals[q] += weigh<E>(local.scores.data() + q * lds, width, local.bests[q], weights);
        }
        mix_all<E>(group, ahead, groups, dim_, local.weights.data(), ldw, count, local.mixed.data());
    }

    // Bring what is mixed so far down to each query's new largest score.
    void forget(Attention::Local& local, int64_t count) const {
        for (int64_t q = 0; q < count; q += kLanes) {
            const Lanes now = load<Lanes>(&local.nows[q]), kept = exponential(load<Lanes>(&local.bests[q]) - now);
            store(&local.totals[q], load<Lanes>(&local.totals[q]) * kept);
            store(&local.bests[q], now);
            for (int64_t one = 0; one < std::min(kLanes, count - q); one++) {
                if (kept[one] == 1.0f) continue;
                float* mixed = local.mixed.data() + (q + one) * dim_;
                for (int64_t i = 0; i < dim_; i += kLanes) store(mixed + i, load<Lanes>(mixed + i) * kept[one]);
            }
        }
    }

    void clear(Attention::Local& local, int64_t count) const {
        std::fill_n(local.bests.begin(), count, kHidden);
        std::fill_n(local.totals.begin(), count, 0.0f);
        std::fill_n(local.mixed.begin(), count * dim_, 0.0f);
    }

    void tile(const AttentionWork& work, const AttentionWork::Tile& tile, int64_t kv_head,
              Attention::Local& local) const {
        const Sequence& sequence = input_.sequence[tile.sequence];
        const int64_t count = tile.rows * shared_, from = sequence.start + tile.row, end = from + tile.rows;
        for (int64_t row = 0; row < tile.rows; row++)
            queries_of(sequence.row + tile.row + row, kv_head, local.queries.data() + row * shared_ * steps_);
        clear(local, count);
        const int64_t first = work.window ? std::max<int64_t>(0, from + 1 - work.window) / kSpanLeast * kSpanLeast : 0;
        for (int64_t token = first; token < end; token += kSpanLeast) {
            const int64_t groups = (std::min(kSpanLeast, end - token) + kLanes - 1) / kLanes;
            span(work, sequence, kv_head, tile.row, tile.rows, token, groups, nullptr, local);
        }
        for (int64_t q = 0; q < count; q++) {
            float* to = out_ + (sequence.row + tile.row + q / shared_) * plan_.heads * dim_ +
                        (kv_head * shared_ + q % shared_) * dim_;
            finish(to, local.mixed.data() + q * dim_, 1.0f / local.totals[q]);
        }
    }

    void finish(float* to, const float* from, float scale) const {
        for (int64_t i = 0; i < dim_; i += kLanes) store(to + i, load<Lanes>(from + i) * scale);
    }

    // A part of one sequence's context for one key head; `piece` counts both.
    void decode(const AttentionWork& work, int64_t piece, Attention::Local& local) const {
        const AttentionWork::Decode& part = work.decodes[piece / plan_.kv_heads];
        const int64_t kv_head = piece % plan_.kv_heads;
        const Sequence& sequence = input_.sequence[part.sequence];
        const int64_t context = sequence.start + 1, spans = spans_of(context, work.window);
        if (part.span + part.spans == spans) write_one(sequence, 0, kv_head, local.mixed.data());
        queries_of(sequence.row, kv_head, local.queries.data());
        float* out = out_ + sequence.row * plan_.heads * dim_ + kv_head * shared_ * dim_;
        float* partials = whole_.partials_.data() +
                          (work.partial[part.sequence] + kv_head * spans) * shared_ * (dim_ + 2);
        Group near[kSpanMost / kLanes];
        for (int64_t number = part.span; number < part.span + part.spans; number++) {
            clear(local, shared_);
            const Extent here = extent(sequence, work.window, number);
            const bool last = number + 1 == part.span + part.spans;
            const bool known = last ? follow(work, piece + 1, here.groups, near)
                                    : approach(sequence, kv_head, work.window, number + 1, here.groups, near);
            span(work, sequence, kv_head, 0, 1, here.first, here.groups, known ? near : nullptr, local);
            for (int64_t g = 0; g < shared_; g++) {
                const float* mixed = local.mixed.data() + g * dim_;
                if (spans == 1) {
                    finish(out + g * dim_, mixed, 1.0f / local.totals[g]);
                    continue;
                }
                float* partial = partials + (number * shared_ + g) * (dim_ + 2);
                std::copy(mixed, mixed + dim_, partial);
                partial[dim_] = local.bests[g];
                partial[dim_ + 1] = local.totals[g];
            }
        }
        if (spans == 1) return;
        std::atomic<int32_t>& done = whole_.finished_[part.sequence * plan_.kv_heads + kv_head];
        if (done.fetch_add(part.spans, std::memory_order_acq_rel) + part.spans < spans) return;
        done.store(0, std::memory_order_relaxed);
        for (int64_t g = 0; g < shared_; g++) join(partials + g * (dim_ + 2), spans, out + g * dim_);
    }

    struct Extent {
        int64_t first, groups;  // the first token, and how many times sixteen
    };

    // The tokens of one span of a sequence with one row.
    Extent extent(const Sequence& sequence, int64_t window, int64_t number) const {
        const int64_t context = sequence.start + 1, size = span_of(context);
        const int64_t first = first_seen(context, window) + number * size;
        return {first, (std::min(size, context - first) + kLanes - 1) / kLanes};
    }

    // Where a span lies that comes next, as `count` groups: it is fetched while this one is computed.
    bool approach(const Sequence& sequence, int64_t kv_head, int64_t window, int64_t number, int64_t count,
                  Group* near) const {
        if (block_size_ % kLanes != 0) return false;
        const Extent next = extent(sequence, window, number);
        for (int64_t group = 0; group < count; group++) {
            const int64_t token = next.first + std::min(group, next.groups - 1) * kLanes, offset = token % block_size_;
            const uint32_t* base = keys_of(block_of(sequence, token), kv_head);
            near[group] = {base + offset, base + half_words_ + offset / E::kPack * dim_};
        }
        return true;
    }

    // The same of the first span of the next piece, which mostly comes to the same worker.
    bool follow(const AttentionWork& work, int64_t piece, int64_t count, Group* near) const {
        if (piece >= int64_t(work.decodes.size()) * plan_.kv_heads) return false;
        const AttentionWork::Decode& part = work.decodes[piece / plan_.kv_heads];
        return approach(input_.sequence[part.sequence], piece % plan_.kv_heads, work.window, part.span, count, near);
    }

    // The parts of one query's context, in order.
    void join(const float* partials, int64_t spans, float* out) const {
        const int64_t stride = shared_ * (dim_ + 2);
        float best = kHidden, total = 0;
        for (int64_t i = 0; i < spans; i++) best = std::max(best, partials[i * stride + dim_]);
        std::fill(out, out + dim_, 0.0f);
        for (int64_t i = 0; i < spans; i++) {
            const float* partial = partials + i * stride;
            const float weight = std::exp(partial[dim_] - best);
            total += partial[dim_ + 1] * weight;
            for (int64_t j = 0; j < dim_; j += kLanes)
                store(out + j, load<Lanes>(partial + j) * weight + load<Lanes>(out + j));
        }
        finish(out, out, 1.0f / total);
    }

    // The first token that a decode reads: the start of the vector that holds the first one in its window.
    static int64_t first_seen(int64_t context, int64_t window) {
        return window ? std::max<int64_t>(0, context - window) / kLanes * kLanes : 0;
    }

    static int64_t spans_of(int64_t context, int64_t window) {
        const int64_t size = span_of(context);
        return (context - first_seen(context, window) + size - 1) / size;
    }

    friend class Attention;

    Attention& whole_;
    const Plan& plan_;
    const StepInput& input_;
    const Layer& layer_;
    const float* qkv_;
    uint32_t* cache_;
    float* out_;
    const int64_t dim_, block_size_, shared_, steps_, width_, half_words_;
    const float scale_;
};

Attention::Attention(const Plan& plan, int workers) : plan_(plan), locals_(workers) {
    const int64_t shared = plan.heads / plan.kv_heads, queries = std::max(shared, kTileQueries);
    for (Local& local : locals_) {
        local.queries.resize(queries * plan.head_dim);
        local.weights.resize(queries * (kSpanMost + kLanes));
        local.scores.resize(queries * (kSpanMost + kLanes));
        local.mixed.resize(queries * plan.head_dim);
        const int64_t padded = (queries + kLanes - 1) / kLanes * kLanes;
        for (std::vector<float>* each : {&local.totals, &local.bests, &local.nows}) each->resize(padded);
    }
}

void Attention::begin(const StepInput& input, const float* cosines, const float* sines) {
    input_ = &input;
    cosines_ = cosines;
    sines_ = sines;
    works_.clear();
    writes_.clear();
    for (int32_t index = 0; index < input.sequences; index++) {
        const Sequence& sequence = input.sequence[index];
        if (sequence.count == 1) continue;
        for (int32_t row = 0; row < sequence.count;) {
            const int64_t left = plan_.block_size - (sequence.start + row) % plan_.block_size;
            const int32_t rows = int32_t(std::min<int64_t>(left, sequence.count - row));
            writes_.push_back({index, row, rows});
            row += rows;
        }
    }
    const int64_t counters = input.sequences * plan_.kv_heads;
    if (finished_size_ < counters) {
        finished_.reset(new std::atomic<int32_t>[counters]());
        finished_size_ = counters;
    }
}

void Attention::run(Pool& pool, const Layer& layer, const float* qkv, uint32_t* cache, float* out) {
    const AttentionWork& work = work_for(layer.window);
    if (plan_.kv_bfloat16)
        LayerAttention<Bfloat16>(*this, layer, qkv, cache, out).run(pool, work);
    else
        LayerAttention<Float32>(*this, layer, qkv, cache, out).run(pool, work);
}

const AttentionWork& Attention::work_for(int64_t window) {
    for (const AttentionWork& work : works_)
        if (work.window == window) return work;
    works_.push_back(cut(window));
    grow(partials_, works_.back().partials);
    return works_.back();
}

AttentionWork Attention::cut(int64_t window) const {
    AttentionWork work;
    work.window = window;
    work.partial.resize(input_->sequences);
    const int64_t shared = plan_.heads / plan_.kv_heads;
    const int32_t tile_rows = int32_t(std::max<int64_t>(1, kTileQueries / shared));
    int64_t places = 0, all_spans = 0;
    for (int32_t index = 0; index < input_->sequences; index++) {
        const Sequence& sequence = input_->sequence[index];
        if (sequence.count == 1) all_spans += LayerAttention<Float32>::spans_of(sequence.start + 1, window);
    }
    // Pieces enough for every worker to have some, and no more: each turns its queries anew.
    const int64_t pieces = 16 * int64_t(locals_.size());
    const int32_t most = int32_t(std::clamp<int64_t>(all_spans * plan_.kv_heads / pieces, 1, 4));
    for (int32_t index = 0; index < input_->sequences; index++) {
        const Sequence& sequence = input_->sequence[index];
        if (sequence.count == 1) {
            const int32_t spans = int32_t(LayerAttention<Float32>::spans_of(sequence.start + 1, window));
            work.partial[index] = places;
            if (spans > 1) places += spans * plan_.kv_heads;
            for (int32_t span = 0; span < spans; span += most)
                work.decodes.push_back({index, span, std::min(most, spans - span)});
            continue;
        }
        for (int32_t row = 0; row < sequence.count; row += tile_rows)
            work.tiles.push_back({index, row, std::min(tile_rows, sequence.count - row)});
    }
    // The last rows of a chunk see the most keys: the largest pieces go first.
    std::reverse(work.tiles.begin(), work.tiles.end());
    work.partials = places * shared * (plan_.head_dim + 2);
    return work;
}

}  // namespace meterhouse
