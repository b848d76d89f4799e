// The form for AMX: two blocks of up to 16 rows by two panels, 32 inputs a step, in the eight tile registers.
//
// int8 and int4 weights are widened to bfloat16 two panels at a time, for as many rows as a piece has; for few rows
// that would cost more than it saves, and another form takes them.
#include "matmul_forms.h"

#if defined(METERHOUSE_EMULATED_AMX)
#include "amx_emulation.h"
#define METERHOUSE_AMX 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define METERHOUSE_AMX 1
#endif

#if defined(METERHOUSE_AMX)
#include <vector>

namespace meterhouse {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;            // of weights: 16 pairs of inputs by 16 outputs
constexpr int64_t kFew = 4;                     // rows that leave the tiles too empty

// The compiler does not know that a tile load reads memory.
inline void memory_is_written() { __asm__ volatile("" ::: "memory"); }

// Linux lets a process use the tiles once it has asked (Documentation/arch/x86/xstate.rst).
bool permitted() {
#if defined(METERHOUSE_EMULATED_AMX)
    return true;
#else
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#endif
}

// Tiles 0 to 3: sums of (rows, panel) = (low, first), (high, first), (low, second), (high, second); 4 and 5: the low
// and the high rows; 6 and 7: the panels.
void configure(int64_t rows) {
    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, none[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const int64_t low = std::min(rows, kTileRows), high = std::max<int64_t>(rows - kTileRows, 1);
    const int64_t of_tile[] = {low, high, low, high, low, high, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = uint8_t(of_tile[tile]);
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 drops the stores to it otherwise
    _tile_loadconfig(&config);
}

template <bool high, bool second>
void sum(const Tile& t, int64_t panel, const std::byte* weights, int64_t weights_bytes, const std::byte* x,
         float* result) {
    const int64_t steps = t.inputs / kTileDepth, stride = t.operand_bytes;
    const int64_t lines = t.panel_bytes / 64 / steps;  // of the packed weight, in a step
    _tile_zero(0);
    if (high) _tile_zero(1);
    if (second) _tile_zero(2);
    if (high && second) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, x += kTileDepth * 2, weights += kTileBytes) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (second) {
            _tile_loadd(7, weights + weights_bytes, 64);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (high) {
            _tile_loadd(5, x + kTileRows * stride, stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (high && second) _tile_dpbf16ps(3, 5, 7);
        for (int64_t line = step * lines; line < (step + 1) * lines; line++) fetch<2>(t, panel, line);
        if (second) {
            for (int64_t line = step * lines; line < (step + 1) * lines; line++) fetch<2>(t, panel + 1, line);
        }
    }
    const int64_t result_bytes = t.result_stride * 4;
    _tile_stored(0, result, result_bytes);
    if (high) _tile_stored(1, result + kTileRows * t.result_stride, result_bytes);
    if (second) _tile_stored(2, result + kPanel, result_bytes);
    if (high && second) _tile_stored(3, result + kTileRows * t.result_stride + kPanel, result_bytes);
}

// All rows by one or two panels whose weights are bfloat16, `weights_bytes` apart.
void run_panels(const Tile& t, int64_t panel, bool second, const std::byte* weights, int64_t weights_bytes) {
    memory_is_written();
    for (int64_t row = 0; row < t.rows; row += 2 * kTileRows) {
        const int64_t rows = std::min(2 * kTileRows, t.rows - row);
        if (row == 0 || rows < 2 * kTileRows) configure(rows);
        const auto its = rows > kTileRows ? (second ? sum<true, true> : sum<true, false>)
                                          : (second ? sum<false, true> : sum<false, false>);
        its(t, panel, weights, weights_bytes, t.operand + row * t.operand_bytes,
            t.result + row * t.result_stride + panel * kPanel);
    }
    _tile_release();
    memory_is_written();
}

void run_bf16(const Tile& t) {
    for (int64_t panel = 0; panel < t.panels; panel += 2) {
        run_panels(t, panel, panel + 1 < t.panels, t.weights + panel * t.panel_bytes, t.panel_bytes);
    }
}

// Pairs of bfloat16 from two rows of floats.
inline Words paired(Lanes even, Lanes odd) {
    const Words half = splat(0x8000u);
    return ((bits_of<Words>(even) + half) >> 16) | ((bits_of<Words>(odd) + half) & splat(0xffff0000u));
}

template <Format format>
void widen_panel(const std::byte* panel, int64_t inputs, std::byte* to) {
    alignas(64) float block[kBlock * kPanel];
    for (int64_t at = 0; at < inputs; at += kBlock) {
        widen_block(format, panel, at, kBlock, block);
        for (int64_t k = 0; k < kBlock; k += 2) {
            store(to + (at + k) * kPanel * 2,
                  paired(load<Lanes>(block + k * kPanel), load<Lanes>(block + (k + 1) * kPanel)));
        }
    }
}

template <Format format>
void run_widened(const Tile& t) {
    thread_local std::vector<std::byte> buffer;
    const int64_t bytes = t.inputs * kPanel * 2;
    if (int64_t(buffer.size()) < 2 * bytes + 64) buffer.resize(size_t(2 * bytes + 64));
    std::byte* wide = buffer.data() + (-reinterpret_cast<intptr_t>(buffer.data()) & 63);
    for (int64_t panel = 0; panel < t.panels; panel += 2) {
        const int64_t count = std::min<int64_t>(2, t.panels - panel);
        for (int64_t p = 0; p < count; p++) {
            widen_panel<format>(t.weights + (panel + p) * t.panel_bytes, t.inputs, wide + p * bytes);
        }
        run_panels(t, panel, count == 2, wide, bytes);
    }
}

}  // namespace

const Kernel* amx_kernel(Format format, int64_t rows) {
    static const Kernel bf16{Operand::bf16, 32, 4, 2, run_bf16};
    static const Kernel int8{Operand::bf16, 128, 4, 2, run_widened<Format::int8>};
    static const Kernel int4{Operand::bf16, 128, 4, 2, run_widened<Format::int4>};
    if (format == Format::f32 || rows <= kFew || !permitted()) return nullptr;
    return format == Format::bf16 ? &bf16 : rows <= 2 * kTileRows ? nullptr : format == Format::int8 ? &int8 : &int4;
}

}  // namespace meterhouse

#else

namespace meterhouse {

const Kernel* amx_kernel(Format, int64_t) { return nullptr; }

}  // namespace meterhouse
#endif
