// Sixteen float32 lanes, and the two products that attention is made of.
//
// Knows: GCC's and Clang's vector extensions, which compile to whatever the machine has (AVX-512, AVX2, NEON), and
// the one instruction worth naming: AVX512_BF16's pairwise dot product. Does not know: any operation of a model.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only
#endif

namespace meterhouse {

// Before a loop over what is to stay in registers: arrays of vectors do once the loop is gone.
#define UNROLLED _Pragma("GCC unroll 16")

constexpr int64_t kLanes = 16;
constexpr int64_t kHeadDimMost = 512;

typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V, class T>
inline void store(T* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

template <class To, class From>
inline To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &value, sizeof(To));
    return out;
}

inline Lanes splat(float value) { return value - Lanes{}; }
inline Words splat(uint32_t value) { return value - Words{}; }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

inline float sum(Lanes v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int64_t i = 0; i < kLanes; i++) total += v[i];
    return total;
#endif
}

inline float largest(Lanes v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int64_t i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// e^x for x <= 0, within two units in the last place (Cephes' expf); exactly 0 below -87.
inline Lanes exponential(Lanes x) {
    const Lanes floor = splat(-87.0f);
    const Lanes bounded = larger(x, floor);
    const Lanes turns = bounded * 1.44269504088896341f;
#if defined(__AVX512F__)
    const Lanes n = (Lanes)_mm512_roundscale_ps((__m512)turns, 0);
    const Ints exponent = (Ints)_mm512_cvtps_epi32((__m512)n);
#else
    const Ints exponent = __builtin_convertvector(turns - 0.5f, Ints);  // towards zero: rounds what is negative
    const Lanes n = __builtin_convertvector(exponent, Lanes);
#endif
    const Lanes r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Lanes scaled = p * bits_of<Lanes>(Ints((exponent + 127) << 23));
    return x > floor ? scaled : Lanes{};
}

// The same within 1e-4 of itself, at half the cost: for what is rounded to bfloat16 next.
inline Lanes coarse_exponential(Lanes x) {
#if defined(__AVX512F__)
    const Lanes turns = x * 1.44269504088896341f;
    const Lanes n = (Lanes)_mm512_roundscale_ps((__m512)turns, 0), f = turns - n;
    Lanes p = splat(9.61812910e-3f);
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147182e-1f;
    p = p * f + 1.0f;
    return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return exponential(x);
#endif
}

// ---- bfloat16: the upper half of a float32 ----

inline float widened(uint16_t value) { return bits_of<float>(uint32_t(value) << 16); }

// To the nearest, ties to even; what is not a number stays none.
inline uint16_t rounded(float value) {
    const uint32_t bits = bits_of<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// ---- what a product reads: words of 32 bits, each a float32 or a pair of bfloat16 ----

struct Float32 {
    static constexpr int64_t kPack = 1;  // numbers in a word
    static Lanes dot(Lanes total, Words a, Words b) { return bits_of<Lanes>(a) * bits_of<Lanes>(b) + total; }
    static void put(uint32_t* words, int64_t index, float value) { words[index] = bits_of<uint32_t>(value); }
    static void put_lanes(uint32_t* words, Lanes value) { store(words, value); }
    static Lanes exponential(Lanes x) { return meterhouse::exponential(x); }
};

struct Bfloat16 {
    static constexpr int64_t kPack = 2;
    static Lanes dot(Lanes total, Words a, Words b) {
#if defined(__AVX512BF16__)
        return (Lanes)_mm512_dpbf16_ps((__m512)total, bits_of<__m512bh>(a), bits_of<__m512bh>(b));
#else
        const Words upper = splat(0xffff0000u);
        total = bits_of<Lanes>(a << 16) * bits_of<Lanes>(b << 16) + total;
        return bits_of<Lanes>(a & upper) * bits_of<Lanes>(b & upper) + total;
#endif
    }
    static Lanes exponential(Lanes x) { return coarse_exponential(x); }
    static void put(uint32_t* words, int64_t index, float value) {
        reinterpret_cast<uint16_t*>(words)[index] = rounded(value);
    }
    // Sixteen numbers as eight words.
    static void put_lanes(uint32_t* words, Lanes value) {
#if defined(__AVX512BF16__)
        const __m256bh packed = _mm512_cvtneps_pbh((__m512)value);
        std::memcpy(words, &packed, sizeof packed);
#else
        for (int64_t i = 0; i < kLanes; i++) put(words, i, value[i]);
#endif
    }
};

}  // namespace meterhouse
