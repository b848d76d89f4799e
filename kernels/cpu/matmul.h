// The matrix product of a step: y = x W^T for weights packed once, in one of four formats.
//
// Knows: how weights are laid out and which of the forms (matmul_forms.h) multiplies them. Does not know: what a layer
// is. Activations and results are float32 in memory; a form rounds them to what it multiplies (bfloat16, or integers in
// groups), and sums in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "pool.h"

namespace meterhouse {

// int8: groups of 32 inputs, q * scale. int4: groups of 32 inputs, q * scale + least. Scales are bfloat16.
enum class Format : int32_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// A packed weight [outputs, inputs]. `gated`: the first half of its outputs are gates and the second half what they
// gate; the two are packed side by side, so that swiglu finds them together. Results keep the given order.
struct Weight {
    Format format;
    int32_t gated;
    int64_t outputs, inputs;
    const void* data;
};

// store: out = y. add: out += y. swiglu (gated weights only): out[rows, outputs / 2] = silu(gate) * up.
enum class Epilogue : int32_t { store = 0, add = 1, swiglu = 2 };

// y = x W^T + bias, for rows of x. `ldx` and `ldo` are strides in floats; bias [outputs] may be null. out must not
// overlap x.
struct Job {
    const Weight* weight;
    const float* x;
    int64_t ldx;
    int64_t rows;
    float* out;
    int64_t ldo;
    Epilogue epilogue;
    const float* bias = nullptr;
};

// The size of a packed weight; its data must be aligned to 64 bytes.
size_t packed_bytes(Format format, int64_t outputs, int64_t inputs, bool gated = false);

// Packs, and for int8 and int4 quantises, source [outputs, inputs] with rows `lds` elements apart: float32, or the bits
// of bfloat16.
void pack(Pool& pool, Format format, bool gated, const float* source, int64_t lds, int64_t outputs, int64_t inputs,
                    void* packed);
void pack(Pool& pool, Format format, bool gated, const uint16_t* source, int64_t lds, int64_t outputs, int64_t inputs,
                    void* packed);

// Buffers that multiply needs and keeps from call to call: one for each thread that calls it.
class Scratch {
public:
    Scratch();
    ~Scratch();
    struct Buffers;
    Buffers& buffers() { return *buffers_; }

private:
    std::unique_ptr<Buffers> buffers_;
};

// All jobs in one parallel region. No job may read or write what another one writes. Throws std::bad_alloc.
void multiply(Pool& pool, const Job* jobs, int64_t count, Scratch& scratch);

}  // namespace meterhouse
