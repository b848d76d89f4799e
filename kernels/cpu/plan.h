// The one layer plan: a model of any family as sizes and pointers, and a step's tokens. Filled by
// `kernels/native_step.py`, whose structures mirror these field by field.
//
// Knows: nothing but shapes. All memory belongs to the caller and outlives what points to it.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace meterhouse {

struct Layer {
    Weight qkv, o, gate_up, down;
    const float* qkv_bias;  // null: none, as every pointer below
    const float* o_bias;
    const float* gate_up_bias;
    const float* down_bias;
    const float* input_norm;
    const float* post_norm;
    const float* query_norm;  // [head_dim]: each head by itself
    const float* key_norm;
    int64_t window;  // tokens a token sees, itself included; 0: all
    int64_t rope;    // 0: a layer without positions
};

struct Plan {
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
    int64_t block_size, blocks;
    int64_t kv_bfloat16;  // 1: keys and values are rounded to bfloat16; 0: float32
    int64_t embedding_bfloat16;
    float eps;
    float rope_magnitude;      // what cosines and sines are multiplied by
    const float* frequencies;  // [head_dim / 2] radians a token
    const void* embedding;     // [vocab][hidden]
    const float* norm;
    Weight head;
    const Layer* layer;
};

// An adapter's two matrices for one projection; `shrink.outputs` is the rank, 0 where it leaves the projection alone.
struct LoraPair {
    Weight shrink, expand;
};

// The projections in the order of the computation, as `engine.adapters.PROJECTIONS` has them.
enum Projection { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kProjections };

// Rows side by side that use one adapter.
struct Segment {
    int64_t row, rows;
    const LoraPair* pairs;  // [layers][kProjections]
};

// A sequence's rows in this step, which are its tokens `start` to `start + count - 1`.
struct Sequence {
    int32_t row, start, count;
    int32_t table;  // where in the tables its blocks begin
};

struct StepInput {
    int64_t rows;
    const int32_t* tokens;  // [rows]
    int64_t sequences;
    const Sequence* sequence;
    const int32_t* tables;
    int64_t wanted;
    const int32_t* wanted_rows;  // [wanted], ascending: whose logits
    int64_t segments;
    const Segment* segment;
    void* cache;    // [layers][blocks][kv_heads][keys, then values], see attention.h
    float* logits;  // [wanted][vocab]
    int64_t* part_ns;  // [kParts] added to, or null
};

enum Part { kPartGemm, kPartLora, kPartAttention, kPartHead, kPartOther, kParts };

}  // namespace meterhouse
