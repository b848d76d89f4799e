// Causal attention over the paged KV cache: decodes and prefill chunks of one step, grouped heads, sliding window.
//
// Knows: the layout of the cache, rotation of queries and keys, and how the work is cut into pieces. Does not know:
// projections, layers, or why a sequence is in the step.
//
// Source: PagedAttention (https://arxiv.org/abs/2309.06180), the online softmax of FlashAttention
// (https://arxiv.org/abs/2205.14135), and Flash-Decoding's split of long contexts.
//
// The cache of one layer is [blocks][kv_heads][keys, then values], in words of 32 bits that hold one float32 or two
// bfloat16 (`pack` numbers):
//   keys   [head_dim / pack][block_size]: a word holds dimensions of one token, sixteen tokens lie side by side;
//   values [block_size / pack][head_dim]: a word holds tokens of one dimension, sixteen dimensions lie side by side;
// so that both products read whole vectors and broadcast the query's, or the weight's, word.
//
// What a row gets depends on its own sequence alone, bit for bit: a context is cut at places that only its own length
// decides, and the parts are joined in order, whoever computed them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lanes.h"
#include "plan.h"
#include "pool.h"

namespace meterhouse {

// What the layers of one step share, for one window: who computes what.
struct AttentionWork {
    struct Decode {  // `spans` parts of the context of a sequence with one row
        int32_t sequence;
        int32_t span;
        int32_t spans;
    };
    struct Tile {  // query rows side by side
        int32_t sequence;
        int32_t row;  // of the sequence's rows
        int32_t rows;
    };
    int64_t window = 0;
    std::vector<Decode> decodes;
    std::vector<Tile> tiles;
    std::vector<int64_t> partial;  // a sequence's first place among the partial results
    int64_t partials = 0;
};

class Attention {
   public:
    Attention(const Plan& plan, int workers);

    // Look at a step once, before its layers.
    void begin(const StepInput& input, const float* cosines, const float* sines);

    // Rotate, write this step's keys and values to `cache`, attend. `qkv` [rows][(heads + 2 kv_heads) head_dim],
    // `out` [rows][heads head_dim].
    void run(Pool& pool, const Layer& layer, const float* qkv, uint32_t* cache, float* out);

   private:
    template <class E>
    friend class LayerAttention;

    struct Write {  // rows of a sequence with several that go to one block
        int32_t sequence;
        int32_t row;
        int32_t rows;
    };
    struct Local {  // buffers of one worker
        std::vector<uint32_t> queries, weights, keys, values;
        std::vector<float> scores, mixed, totals, bests, nows;
    };

    const AttentionWork& work_for(int64_t window);
    AttentionWork cut(int64_t window) const;

    const Plan& plan_;
    const StepInput* input_ = nullptr;
    const float* cosines_ = nullptr;
    const float* sines_ = nullptr;
    std::vector<Write> writes_;
    std::vector<AttentionWork> works_;
    std::vector<Local> locals_;
    std::vector<float> partials_;
    std::unique_ptr<std::atomic<int32_t>[]> finished_;  // spans done, by (sequence, kv head)
    int64_t finished_size_ = 0;
};

}  // namespace meterhouse
