// From a plain weight [outputs, inputs] to panels: the layout of matmul_forms.h, and the rounding to groups.
#include "matmul_forms.h"

namespace meterhouse {
namespace {

inline float value(float x) { return x; }
inline float value(uint16_t bits) { return widened(bits); }

// A block of inputs of one panel as [input][output] floats, zeros where there is nothing.
template <class T>
struct Source {
    const T* rows;
    int64_t stride, outputs, inputs;
    bool gated;

    void block(int64_t panel, int64_t at, int64_t count, float* to) const {
        const PanelOutputs out = panel_outputs(panel, outputs, gated);
        std::memset(to, 0, size_t(count * kPanel) * 4);
        for (int64_t n = 0; n < out.valid; n++) {
            const T* row = rows + (out.first + n) * stride;
            for (int64_t k = 0; k < count && at + k < inputs; k++) to[k * kPanel + n] = value(row[at + k]);
        }
    }
};

inline void store_bf16(std::byte* to, Lanes v) {
    uint16_t bits[kPanel];
    for (int64_t n = 0; n < kPanel; n++) bits[n] = rounded(v[n]);
    std::memcpy(to, bits, sizeof bits);
}

inline Lanes as_bf16(Lanes v) {
    for (int64_t n = 0; n < kPanel; n++) v[n] = widened(rounded(v[n]));
    return v;
}

inline Lanes inverse(Lanes v) { return v > 0.0f ? 1.0f / v : Lanes{}; }

// The nearest whole number in [0, most]. What is not a number becomes 0.
inline Ints whole(Lanes v, float most) {
    v += 0.5f;
    v = v > 0.0f ? v : Lanes{};
    v = v < most + 0.5f ? v : splat(most);
    return __builtin_convertvector(v, Ints);
}

// int8: scale = the largest magnitude / 127.
void pack_int8(const float* w, std::byte* block) {
    for (int64_t group = 0; group < 2; group++, w += kGroup * kPanel) {
        Lanes most{};
        for (int64_t k = 0; k < kGroup; k++) {
            const Lanes v = load<Lanes>(w + k * kPanel);
            most = larger(most, larger(v, -v));
        }
        const Lanes scale = as_bf16(most / 127.0f);
        const Lanes factor = inverse(scale);
        store_bf16(block + group * 32, scale);
        std::byte* q = block + 64 + group * kGroup * kPanel;
        for (int64_t k = 0; k < kGroup; k++) {
            const Ints codes = whole(load<Lanes>(w + k * kPanel) * factor + 128.0f, 255.0f);
            for (int64_t n = 0; n < kPanel; n++) q[k / 4 * 64 + n * 4 + k % 4] = std::byte(codes[n]);
        }
    }
}

// One group of int4, sixteen outputs side by side: q * scale + least.
struct Affine {
    Lanes scale, least, factor;  // factor: 1 / scale

    Affine(Lanes low, Lanes high)
        : scale(as_bf16(larger(high - low, Lanes{}) / 15.0f)), least(as_bf16(low)), factor(inverse(scale)) {}
    Ints code(Lanes w) const { return whole((w - least) * factor, 15.0f); }
};

inline Lanes total_error(const float* w, const Affine& tried) {
    Lanes error{};
    for (int64_t k = 0; k < kGroup; k++) {
        const Lanes v = load<Lanes>(w + k * kPanel);
        const Lanes off = __builtin_convertvector(tried.code(v), Lanes) * tried.scale + tried.least - v;
        error += off * off;
    }
    return error;
}

// The range of codes with the least squared error: the group's own, or one that cuts off its ends a little. A finer
// step for the many is worth more than the extremes of a few.
Affine best_range(const float* w) {
    Lanes low = load<Lanes>(w), high = low;
    for (int64_t k = 1; k < kGroup; k++) {
        const Lanes v = load<Lanes>(w + k * kPanel);
        low = v < low ? v : low;
        high = larger(high, v);
    }
    const Lanes cut = (high - low) * 0.025f;
    Affine best(low, high);
    Lanes least = total_error(w, best);
    for (int64_t tried = 1; tried < 16; tried++) {
        const Affine next(low + cut * float(tried / 4), high - cut * float(tried % 4));
        const Lanes error = total_error(w, next);
        best.scale = error < least ? next.scale : best.scale;
        best.least = error < least ? next.least : best.least;
        best.factor = error < least ? next.factor : best.factor;
        least = error < least ? error : least;
    }
    return best;
}

void pack_int4(const float* w, std::byte* block) {
    std::memset(block + 128, 0, kBlock * kPanel / 2);
    for (int64_t group = 0; group < 2; group++, w += kGroup * kPanel) {
        const Affine range = best_range(w);
        store_bf16(block + group * 32, range.scale);
        store_bf16(block + 64 + group * 32, range.least);
        std::byte* q = block + 128 + group * kGroup * kPanel / 2;
        for (int64_t k = 0; k < kGroup; k++) {
            const Ints codes = range.code(load<Lanes>(w + k * kPanel));
            for (int64_t n = 0; n < kPanel; n++) {
                q[k / 8 * 64 + n * 4 + k % 4] |= std::byte(codes[n] << (k % 8 / 4 * 4));
            }
        }
    }
}

template <class T>
void pack_panel(Format format, const Source<T>& source, int64_t panel, std::byte* to) {
    alignas(64) float block[kBlock * kPanel];
    const int64_t padded = padded_inputs(format, source.inputs);
    for (int64_t at = 0; at < padded; at += kBlock) {
        const int64_t count = std::min(kBlock, padded - at);
        source.block(panel, at, count, block);
        if (format == Format::f32) {
            std::memcpy(to + at * kPanel * 4, block, size_t(count * kPanel) * 4);
        } else if (format == Format::bf16) {
            auto* pairs = reinterpret_cast<uint16_t*>(to) + at * kPanel;
            for (int64_t k = 0; k < count; k++) {
                for (int64_t n = 0; n < kPanel; n++) {
                    pairs[(k / 2 * kPanel + n) * 2 + k % 2] = rounded(block[k * kPanel + n]);
                }
            }
        } else {
            std::byte* its = to + at / kBlock * block_bytes(format);
            format == Format::int8 ? pack_int8(block, its) : pack_int4(block, its);
        }
    }
}

template <class T>
void pack_all(Pool& pool, Format format, const Source<T>& source, void* packed) {
    const int64_t bytes = panel_bytes(format, source.inputs);
    pool.run(panels_of(source.outputs, source.gated), [&](int64_t panel, int) {
        pack_panel(format, source, panel, static_cast<std::byte*>(packed) + panel * bytes);
    });
}

}  // namespace

size_t packed_bytes(Format format, int64_t outputs, int64_t inputs, bool gated) {
    return size_t(panels_of(outputs, gated) * panel_bytes(format, inputs));
}

void pack(Pool& pool, Format format, bool gated, const float* source, int64_t lds, int64_t outputs, int64_t inputs,
          void* packed) {
    pack_all(pool, format, Source<float>{source, lds, outputs, inputs, gated}, packed);
}

void pack(Pool& pool, Format format, bool gated, const uint16_t* source, int64_t lds, int64_t outputs, int64_t inputs,
          void* packed) {
    pack_all(pool, format, Source<uint16_t>{source, lds, outputs, inputs, gated}, packed);
}

}  // namespace meterhouse
