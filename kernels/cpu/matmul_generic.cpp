// The form for every machine, and the only one for float32 weights: plain vector code, sums in float32.
//
// Weights that are not float32 are widened block by block into the first-level cache and multiplied there, so a block
// is widened once for all rows of a tile.
#include "matmul_forms.h"

namespace meterhouse {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
constexpr int kRows = 8;
#elif defined(__AVX__)
constexpr int64_t kWidth = 8;
constexpr int kRows = 4;
#else
constexpr int64_t kWidth = 4;
constexpr int kRows = 4;
#endif
constexpr int kVectors = kPanel / kWidth;  // a panel's outputs in the machine's own vectors

typedef float Native __attribute__((vector_size(kWidth * 4)));

// Some inputs of a panel as floats [inputs][16]. With each of their lines, the one at `ahead` is fetched.
struct Columns {
    const float* w;
    int64_t inputs;
    bool first;  // of the panel: sums begin at zero
    const std::byte* ahead;
    int64_t ahead_step;
};

// Rows of x [rows][inputs] and of their results [rows][16].
struct Rows {
    int64_t count;
    const float* x;
    int64_t x_stride;
    float* result;
    int64_t result_stride;
};

template <int R>
void accumulate(const Columns& columns, const Rows& rows) {
    Native total[R][kVectors];
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < kVectors; v++) {
            const float* before = rows.result + r * rows.result_stride + v * kWidth;
            total[r][v] = columns.first ? Native{} : load<Native>(before);
        }
    }
    const float *w = columns.w, *x = rows.x;
    const int64_t x_stride = rows.x_stride;
    for (int64_t k = 0; k < columns.inputs; k++) {
        __builtin_prefetch(columns.ahead + k * columns.ahead_step);
        Native column[kVectors];
        for (int v = 0; v < kVectors; v++) column[v] = load<Native>(w + k * kPanel + v * kWidth);
        for (int r = 0; r < R; r++) {
            const float factor = x[r * x_stride + k];
            for (int v = 0; v < kVectors; v++) total[r][v] += column[v] * factor;
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < kVectors; v++) store(rows.result + r * rows.result_stride + v * kWidth, total[r][v]);
    }
}

template <int R>
void accumulate_rows(const Columns& columns, Rows rows) {
    for (; rows.count >= R; rows.count -= R, rows.x += R * rows.x_stride, rows.result += R * rows.result_stride) {
        accumulate<R>(columns, rows);
    }
    if constexpr (R > 1) accumulate_rows<R / 2>(columns, rows);
}

inline Rows rows_of(const Tile& t, int64_t panel, int64_t from_input) {
    return {t.rows, reinterpret_cast<const float*>(t.operand) + from_input, t.operand_bytes / 4,
            t.result + panel * kPanel, t.result_stride};
}

inline Lanes scales(const std::byte* from) {
    uint16_t bits[kPanel];
    std::memcpy(bits, from, sizeof bits);
    Words wide;
    for (int64_t n = 0; n < kPanel; n++) wide[n] = bits[n];
    return bits_of<Lanes>(wide << 16);
}

// Widens inputs [at, at + count) of a panel to [count][16] floats.
void widen_bf16(const std::byte* panel, int64_t at, int64_t count, float* to) {
    for (int64_t k = 0; k < count; k += 2) {
        const Words pairs = load<Words>(panel + (at + k) * kPanel * 2);
        store(to + k * kPanel, pairs << 16);
        store(to + (k + 1) * kPanel, pairs & splat(0xffff0000u));
    }
}

void widen_int8(const std::byte* panel, int64_t at, float* to) {
    const std::byte* block = panel + at / kBlock * block_bytes(Format::int8);
    for (int64_t k = 0; k < kBlock; k += 4) {
        const Lanes scale = scales(block + k / kGroup * 32);
        const Words quads = load<Words>(block + 64 + k * kPanel);
        for (int64_t j = 0; j < 4; j++) {
            const Ints q = Ints((quads >> uint32_t(8 * j)) & splat(0xffu)) - 128;
            store(to + (k + j) * kPanel, __builtin_convertvector(q, Lanes) * scale);
        }
    }
}

void widen_int4(const std::byte* panel, int64_t at, float* to) {
    const std::byte* block = panel + at / kBlock * block_bytes(Format::int4);
    for (int64_t k = 0; k < kBlock; k += 8) {
        const Lanes scale = scales(block + k / kGroup * 32), least = scales(block + 64 + k / kGroup * 32);
        const Words quads = load<Words>(block + 128 + k * kPanel / 2);
        for (int64_t j = 0; j < 8; j++) {
            const Ints q = Ints((quads >> uint32_t(8 * (j % 4) + j / 4 * 4)) & splat(0x0fu));
            store(to + (k + j) * kPanel, __builtin_convertvector(q, Lanes) * scale + least);
        }
    }
}

void run_f32(const Tile& t) {
    for (int64_t p = 0; p < t.panels; p++) {
        const auto* w = reinterpret_cast<const float*>(t.weights + p * t.panel_bytes);
        const std::byte* ahead = t.fetch + p * t.panel_bytes;
        accumulate_rows<kRows>({w, t.inputs, true, ahead, t.fetch_step}, rows_of(t, p, 0));
    }
}

template <Format format>
void run_widened(const Tile& t) {
    alignas(64) float block[kBlock * kPanel];
    const int64_t bytes = t.panel_bytes / t.inputs * t.fetch_step / 64;  // of the packed weight, for an input
    for (int64_t p = 0; p < t.panels; p++) {
        for (int64_t k = 0; k < t.inputs; k += kBlock) {
            const int64_t count = std::min(kBlock, t.inputs - k);
            widen_block(format, t.weights + p * t.panel_bytes, k, count, block);
            const std::byte* ahead = t.fetch + p * t.panel_bytes + k * bytes;
            accumulate_rows<kRows>({block, count, k == 0, ahead, bytes}, rows_of(t, p, k));
        }
    }
}

}  // namespace

void widen_block(Format format, const std::byte* panel, int64_t at, int64_t count, float* to) {
    if (format == Format::bf16) return widen_bf16(panel, at, count, to);
    if (format == Format::int8) return widen_int8(panel, at, to);
    widen_int4(panel, at, to);
}

const Kernel* generic_kernel(Format format, int64_t) {
    static const Kernel kernels[] = {{Operand::f32, 64, 4, 1, run_f32},
                                     {Operand::f32, 64, 4, 1, run_widened<Format::bf16>},
                                     {Operand::f32, 64, 4, 1, run_widened<Format::int8>},
                                     {Operand::f32, 64, 4, 1, run_widened<Format::int4>}};
    return &kernels[int(format)];
}

}  // namespace meterhouse
