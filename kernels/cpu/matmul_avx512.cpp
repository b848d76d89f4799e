// The form for AVX-512 with bfloat16 and VNNI: bf16 weights by vdpbf16ps, int8 and int4 weights by vpdpbusd with rows
// rounded to int8 in the weights' groups.
//
// A tile of up to 12 rows and 2 panels stays in registers over all inputs. The weights are one stream for each panel,
// which is fetched ahead by hand: the hardware's own fetching stops at every page.
#include "matmul_forms.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <array>
#include <utility>

namespace meterhouse {
namespace {

constexpr int kPanels = 2;

// Independent sums for each result: a dot product takes its turn every other cycle and six to finish.
constexpr int chains(int results) { return results >= 8 ? 1 : results >= 3 ? 2 : 4; }

// ---- bf16 ----

template <int R, int P>
struct Bf16 {
    static void run(const Tile& t, int64_t panel) {
        const std::byte* weights = t.weights + panel * t.panel_bytes;
        float* result = t.result + panel * kPanel;
        constexpr int C = chains(R * P);
        __m512 total[C][R][P] = {};
        for (int64_t pair = 0; pair < t.inputs / 2; pair += C) {
            for (int c = 0; c < C; c++) {
                __m512bh w[P];
                for (int p = 0; p < P; p++) {
                    fetch(t, panel + p, pair + c);
                    w[p] = (__m512bh)_mm512_load_si512(weights + p * t.panel_bytes + (pair + c) * 64);
                }
                for (int r = 0; r < R; r++) {
                    const auto x = (__m512bh)_mm512_set1_epi32(load<int>(t.operand + r * t.operand_bytes + (pair + c) * 4));
                    for (int p = 0; p < P; p++) total[c][r][p] = _mm512_dpbf16_ps(total[c][r][p], w[p], x);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int p = 0; p < P; p++) {
                __m512 sum = total[0][r][p];
                for (int c = 1; c < C; c++) sum += total[c][r][p];
                _mm512_store_ps(result + r * t.result_stride + p * kPanel, sum);
            }
        }
    }
};

// ---- int8 and int4 ----

inline __m512 wide(const std::byte* bf16) {
    const __m256i bits = _mm256_load_si256(reinterpret_cast<const __m256i*>(bf16));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// sum += the four products of each output, of unsigned weights and signed activations
template <int R, int P>
inline void dot(__m512i (&sum)[R][P], const __m512i (&w)[P], const Tile& t, int64_t at) {
    for (int r = 0; r < R; r++) {
        const __m512i x = _mm512_set1_epi32(load<int>(t.operand + r * t.operand_bytes + at));
        for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w[p], x);
    }
}

template <Format format>
struct Integers {
    static constexpr bool kFour = format == Format::int4;
    static constexpr int64_t kScales = kFour ? 128 : 64, kGroupBytes = kGroup * kPanel / (kFour ? 2 : 1);

    template <int R, int P>
    struct Tiled {
        static void run(const Tile& t, int64_t panel) {
        const std::byte* weights = t.weights + panel * t.panel_bytes;
        float* result = t.result + panel * kPanel;
            const auto* scales = reinterpret_cast<const GroupScale*>(t.operand + t.inputs);
            __m512 total[R][P] = {};
            for (int64_t group = 0; group < t.inputs / kGroup; group++) {
                const std::byte* block = weights + group / 2 * block_bytes(format);
                const std::byte* q = block + kScales + group % 2 * kGroupBytes;
                const GroupScale* scale[R];
                __m512i sum[R][P];
                for (int r = 0; r < R; r++) {
                    scale[r] = scales + r * t.operand_bytes / int64_t(sizeof(GroupScale)) + group;
                    for (int p = 0; p < P; p++) sum[r][p] = _mm512_set1_epi32(kFour ? 0 : scale[r]->start);
                }
                const int64_t line = group / 2 * (block_bytes(format) / 64) + kScales / 64 + group % 2 * (kGroupBytes / 64);
                dot_group(sum, q, t, group * kGroup, panel, line);
                for (int p = 0; p < P; p++) {
                    const std::byte* at = block + p * t.panel_bytes + group % 2 * 32;
                    const __m512 its = wide(at), least = kFour ? wide(at + 64) : __m512{};
                    for (int r = 0; r < R; r++) {
                        const __m512 factor = its * _mm512_set1_ps(scale[r]->scale);
                        total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), factor, total[r][p]);
                        if (kFour) total[r][p] = _mm512_fmadd_ps(least, _mm512_set1_ps(scale[r]->sum), total[r][p]);
                    }
                }
            }
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < P; p++) _mm512_store_ps(result + r * t.result_stride + p * kPanel, total[r][p]);
            }
        }

        static void dot_group(__m512i (&sum)[R][P], const std::byte* q, const Tile& t, int64_t at, int64_t panel,
                              int64_t first_line) {
#pragma GCC unroll 8
            for (int64_t line = 0; line < kGroupBytes / 64; line++) {
                __m512i w[P];
                for (int p = 0; p < P; p++) {
                    const std::byte* from = q + p * t.panel_bytes + line * 64;
                    fetch(t, panel + p, first_line + line);
                    w[p] = _mm512_load_si512(from);
                }
                if constexpr (!kFour) {
                    dot(sum, w, t, at + line * 4);
                } else {
                    const __m512i lower = _mm512_set1_epi8(0x0f);
                    __m512i half[P];
                    for (int p = 0; p < P; p++) half[p] = w[p] & lower;
                    dot(sum, half, t, at + line * 8);
                    for (int p = 0; p < P; p++) half[p] = _mm512_srli_epi16(w[p], 4) & lower;
                    dot(sum, half, t, at + line * 8 + 4);
                }
            }
        }
    };
};

// ---- from a number of rows to the tile made for it ----

using Run = void (*)(const Tile& t, int64_t panel);

template <template <int, int> class T, int P, int... R>
constexpr std::array<Run, sizeof...(R)> table(std::integer_sequence<int, R...>) {
    return {T<R + 1, P>::run...};
}

template <template <int, int> class T, int kRows>
void run(const Tile& t) {
    static constexpr auto pairs = table<T, kPanels>(std::make_integer_sequence<int, kRows>());
    static constexpr auto single = table<T, 1>(std::make_integer_sequence<int, kRows>());
    int64_t p = 0;
    for (; p + kPanels <= t.panels; p += kPanels) {
        pairs[size_t(t.rows - 1)](t, p);
    }
    if (p < t.panels) single[size_t(t.rows - 1)](t, p);
}

}  // namespace

const Kernel* avx512_kernel(Format format, int64_t) {
    static const Kernel bf16{Operand::bf16, 12, 4, run<Bf16, 12>};
    static const Kernel int8{Operand::int8, 6, 4, run<Integers<Format::int8>::Tiled, 6>};
    static const Kernel int4{Operand::int8, 6, 4, run<Integers<Format::int4>::Tiled, 6>};
    return format == Format::bf16 ? &bf16 : format == Format::int8 ? &int8 : format == Format::int4 ? &int4 : nullptr;
}

}  // namespace meterhouse

#else

namespace meterhouse {

const Kernel* avx512_kernel(Format, int64_t) { return nullptr; }

}  // namespace meterhouse
#endif
