// What the forms of the matrix product share: the layout of packed weights, the operand they read, a tile of work.
//
// A packed weight is a row of panels: sixteen outputs over all inputs, each panel one stretch of memory.
//   f32   [inputs][16]
//   bf16  [inputs / 2][16][2]: a word is two inputs of one output, which is what vdpbf16ps and AMX multiply
//   int8  blocks of 64 inputs: [2 groups][16] scales, then [16][16 outputs][4 inputs] of q + 128
//   int4  blocks of 64 inputs: [2 groups][16] scales, [2 groups][16] leasts, then [8][16 outputs][4] bytes, each the
//         input j in its lower half and j + 4 in its upper half
// Outputs are padded to whole panels, inputs to whole blocks, with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lanes.h"
#include "matmul.h"

namespace meterhouse {

constexpr int64_t kPanel = kLanes;
constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int64_t kBlock = 64;  // inputs of a block of int8 or int4
constexpr int64_t kTileDepth = 32;  // inputs of an AMX tile of bf16

constexpr int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Inputs with their padding. For bf16 it is an AMX tile's depth; no more than a step of AVX-512 for the few inputs of
// an adapter's expand, which would be twice their size.
constexpr int64_t padded_inputs(Format format, int64_t inputs) {
    const int64_t unit = format == Format::f32 ? 1 : format != Format::bf16 ? kBlock : inputs > 16 ? kTileDepth : 8;
    return divided_up(inputs, unit) * unit;
}

constexpr int64_t panels_of(int64_t outputs, bool gated) {
    return gated ? 2 * divided_up(outputs / 2, kPanel) : divided_up(outputs, kPanel);
}

constexpr int64_t block_bytes(Format format) {
    return format == Format::int8 ? 64 + kBlock * kPanel : 128 + kBlock * kPanel / 2;
}

constexpr int64_t panel_bytes(Format format, int64_t inputs) {
    const int64_t padded = padded_inputs(format, inputs);
    if (format == Format::f32) return padded * kPanel * 4;
    if (format == Format::bf16) return padded * kPanel * 2;
    return padded / kBlock * block_bytes(format);
}

// The first output of a panel, in the order of the results: a gated weight's panels are a gate and what it gates by
// turns. `valid` is how many of the sixteen exist.
struct PanelOutputs {
    int64_t first, valid;
};

constexpr PanelOutputs panel_outputs(int64_t panel, int64_t outputs, bool gated) {
    const int64_t half = gated ? outputs / 2 : outputs;
    const int64_t within = (gated ? panel / 2 : panel) * kPanel;
    const int64_t valid = half - within < kPanel ? half - within : kPanel;
    return {gated && panel % 2 ? half + within : within, valid};
}

// How a row of activations is given to a form; inputs padded with zeros.
enum class Operand : int32_t {
    f32,   // floats
    bf16,  // bfloat16
    int8,  // int8, then a GroupScale for every group: x = q * scale
};

struct GroupScale {
    float scale;
    float sum;      // of the group's q * scale
    int32_t start;  // -128 times the sum of its q: what int8 weights, kept as q + 128, have too much
    int32_t none;
};

// The stride of operand rows: an odd number of cache lines, so that the rows of a tile never share one set of L1.
constexpr int64_t operand_row_bytes(Operand operand, int64_t padded) {
    const int64_t bytes = operand == Operand::f32    ? padded * 4
                          : operand == Operand::bf16 ? padded * 2
                                                     : padded + padded / kGroup * int64_t(sizeof(GroupScale));
    return (divided_up(bytes, 64) | 1) * 64;
}

// Rounds one row of `inputs` floats to an operand row of `padded` inputs.
void make_operand(Operand operand, const float* x, int64_t inputs, int64_t padded, std::byte* row);

// The work of one call: result[row][panel * 16 + output] = the product. Nothing is read or written beyond `rows` and
// `panels`; results are 64-byte aligned.
struct Tile {
    const std::byte* weights;  // the first panel
    int64_t panel_bytes;
    int64_t panels;
    const std::byte* operand;  // the first row
    int64_t operand_bytes;
    int64_t rows;
    int64_t inputs;  // padded
    float* result;
    int64_t result_stride;  // in floats
    // What to bring into the caches meanwhile: with line l of panel p, the line at fetch + p * panel_bytes + l * step;
    // from line `fetch_turn` on, that of the panels after those that the kernel reads abreast.
    const std::byte* fetch;
    int64_t fetch_step, fetch_turn;
};

template <int abreast>
inline void fetch(const Tile& t, int64_t panel, int64_t line) {
    const int64_t on = abreast > 1 && line >= t.fetch_turn ? (abreast - 1) * t.panel_bytes : 0;
    __builtin_prefetch(t.fetch + panel * t.panel_bytes + line * t.fetch_step + on);
}

struct Kernel {
    Operand operand;
    int64_t rows;     // a tile's most rows
    int64_t panels;   // a tile's most panels, even
    int64_t abreast;  // how many of them it reads at once
    void (*run)(const Tile& tile);
};

// A form's kernel for a format and a number of rows, or null where it has none or this machine is not made for it.
const Kernel* generic_kernel(Format format, int64_t rows);
const Kernel* avx512_kernel(Format format, int64_t rows);
const Kernel* amx_kernel(Format format, int64_t rows);

// Inputs [at, at + count) of a panel as [count][16] floats; `at` is the first of a block of 64.
void widen_block(Format format, const std::byte* panel, int64_t at, int64_t count, float* to);

// The forms in the order of preference; `use_forms` limits the choice to the bits set, for tests and for a form that
// has failed its check. The generic form is always there.
enum Form : int32_t { kGeneric = 1, kAvx512 = 2, kAmx = 4 };
int32_t available_forms();
void use_forms(int32_t forms);

}  // namespace meterhouse
