// The form for AVX-512 with bfloat16 and VNNI: bf16 weights by vdpbf16ps, int8 and int4 weights by vpdpbusd with rows
// rounded to int8 in the weights' groups.
//
// A tile's sums stay in registers over all inputs. The weights are fetched ahead by hand: the hardware's own fetching
// stops at every page.
#include "matmul_forms.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <array>
#include <utility>

namespace meterhouse {
namespace {


// Independent sums for each result: a dot product takes its turn every other cycle and six to finish.
constexpr int chains(int results) { return results >= 12 ? 1 : results >= 5 ? 2 : 4; }

// ---- bf16 ----

template <int R, int P>
struct Bf16 {
    static void run(const Tile& t, int64_t panel) {
        const std::byte* weights = t.weights + panel * t.panel_bytes;
        float* result = t.result + panel * kPanel;
        constexpr int C = chains(R * P);
        __m512 total[C][R][P] = {};
        for (int64_t pair = 0; pair < t.inputs / 2; pair += C) {
            UNROLLED for (int c = 0; c < C; c++) {
                __m512bh w[P];
                UNROLLED for (int p = 0; p < P; p++) {
                    fetch<P>(t, panel + p, pair + c);
                    w[p] = (__m512bh)_mm512_load_si512(weights + p * t.panel_bytes + (pair + c) * 64);
                }
                UNROLLED for (int r = 0; r < R; r++) {
                    const std::byte* at = t.operand + r * t.operand_bytes + (pair + c) * 4;
                    const auto x = (__m512bh)_mm512_set1_epi32(load<int>(at));
                    UNROLLED for (int p = 0; p < P; p++) total[c][r][p] = _mm512_dpbf16_ps(total[c][r][p], w[p], x);
                }
            }
        }
        UNROLLED for (int r = 0; r < R; r++) {
            UNROLLED for (int p = 0; p < P; p++) {
                __m512 sum = total[0][r][p];
                UNROLLED for (int c = 1; c < C; c++) sum += total[c][r][p];
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
    UNROLLED for (int r = 0; r < R; r++) {
        const __m512i x = _mm512_set1_epi32(load<int>(t.operand + r * t.operand_bytes + at));
        UNROLLED for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w[p], x);
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
                UNROLLED for (int r = 0; r < R; r++) {
                    scale[r] = scales + r * t.operand_bytes / int64_t(sizeof(GroupScale)) + group;
                    UNROLLED for (int p = 0; p < P; p++) sum[r][p] = _mm512_set1_epi32(kFour ? 0 : scale[r]->start);
                }
                dot_group(sum, q, t, group * kGroup, panel, (q - weights) / 64);
                UNROLLED for (int p = 0; p < P; p++) {
                    const std::byte* at = block + p * t.panel_bytes + group % 2 * 32;
                    const __m512 its = wide(at), least = kFour ? wide(at + 64) : __m512{};
                    UNROLLED for (int r = 0; r < R; r++) {
                        const __m512 factor = its * _mm512_set1_ps(scale[r]->scale);
                        total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), factor, total[r][p]);
                        if (kFour) total[r][p] = _mm512_fmadd_ps(least, _mm512_set1_ps(scale[r]->sum), total[r][p]);
                    }
                }
            }
            UNROLLED for (int r = 0; r < R; r++) {
                UNROLLED for (int p = 0; p < P; p++) {
                    _mm512_store_ps(result + r * t.result_stride + p * kPanel, total[r][p]);
                }
            }
        }

        static void dot_group(__m512i (&sum)[R][P], const std::byte* q, const Tile& t, int64_t at, int64_t panel,
                              int64_t first_line) {
#pragma GCC unroll 8
            for (int64_t line = 0; line < kGroupBytes / 64; line++) {
                __m512i w[P];
                UNROLLED for (int p = 0; p < P; p++) {
                    const std::byte* from = q + p * t.panel_bytes + line * 64;
                    fetch<P>(t, panel + p, first_line + line);
                    w[p] = _mm512_load_si512(from);
                }
                if constexpr (!kFour) {
                    dot(sum, w, t, at + line * 4);
                } else {
                    const __m512i lower = _mm512_set1_epi8(0x0f);
                    __m512i half[P];
                    UNROLLED for (int p = 0; p < P; p++) half[p] = w[p] & lower;
                    dot(sum, half, t, at + line * 8);
                    UNROLLED for (int p = 0; p < P; p++) half[p] = _mm512_srli_epi16(w[p], 4) & lower;
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

// `P` panels at a time for up to `most` rows.
template <template <int, int> class T, int P, int most>
void run(const Tile& t) {
    static constexpr auto tiles = table<T, P>(std::make_integer_sequence<int, most>());
    static constexpr auto last = table<T, 1>(std::make_integer_sequence<int, most>());
    int64_t p = 0;
    for (; p + P <= t.panels; p += P) tiles[size_t(t.rows - 1)](t, p);
    if (p < t.panels) last[size_t(t.rows - 1)](t, p);
}

}  // namespace

// Few rows wait for memory, which is read fastest as one stream: a panel at a time. With more rows, two panels share
// the loading of the rows.
const Kernel* avx512_kernel(Format format, int64_t rows) {
    static const Kernel bf16{Operand::bf16, 8, 4, 1, run<Bf16, 1, 8>};
    static const Kernel bf16_pairs{Operand::bf16, 12, 4, 2, run<Bf16, 2, 12>};
    static const Kernel int8{Operand::int8, 8, 4, 1, run<Integers<Format::int8>::Tiled, 1, 8>};
    static const Kernel int8_pairs{Operand::int8, 6, 4, 2, run<Integers<Format::int8>::Tiled, 2, 6>};
    static const Kernel int4{Operand::int8, 8, 4, 1, run<Integers<Format::int4>::Tiled, 1, 8>};
    static const Kernel int4_pairs{Operand::int8, 6, 4, 2, run<Integers<Format::int4>::Tiled, 2, 6>};
    if (format == Format::bf16) return rows <= bf16.rows ? &bf16 : &bf16_pairs;
    if (format == Format::int8) return rows <= int8.rows ? &int8 : &int8_pairs;
    return format == Format::f32 ? nullptr : rows <= int4.rows ? &int4 : &int4_pairs;
}

}  // namespace meterhouse

#else

namespace meterhouse {

const Kernel* avx512_kernel(Format, int64_t) { return nullptr; }

}  // namespace meterhouse
#endif
