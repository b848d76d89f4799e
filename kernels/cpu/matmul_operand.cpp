// Activations as the forms read them.
#include "matmul_forms.h"

namespace meterhouse {
namespace {

void make_f32(const float* x, int64_t inputs, int64_t padded, std::byte* row) {
    std::memcpy(row, x, size_t(inputs) * 4);
    std::memset(row + inputs * 4, 0, size_t(padded - inputs) * 4);
}

void make_bf16(const float* x, int64_t inputs, int64_t padded, std::byte* row) {
    auto* words = reinterpret_cast<uint32_t*>(row);
    int64_t k = 0;
    for (; k + kLanes <= inputs; k += kLanes) Bfloat16::put_lanes(words + k / 2, load<Lanes>(x + k));
    for (; k < inputs; k++) Bfloat16::put(words, k, x[k]);
    std::memset(row + inputs * 2, 0, size_t(padded - inputs) * 2);
}

typedef int8_t Bytes __attribute__((vector_size(16)));

// Sixteen numbers to the nearest whole ones in [-127, 127]; what is not finite becomes 0.
inline Ints nearest(Lanes scaled) {
    scaled = (scaled >= -127.5f) & (scaled <= 127.5f) ? scaled : Lanes{};
    return __builtin_convertvector(scaled + (scaled < 0.0f ? Lanes{} - 0.5f : Lanes{} + 0.5f), Ints);
}

// One group as q * scale. With a number that is not finite the scale is none either: that stays what it is in this
// row's results, and harms no other row.
GroupScale quantise(const float* x, int8_t* q) {
    const Lanes a = load<Lanes>(x), b = load<Lanes>(x + kLanes);
    const float most = largest(larger(larger(a, -a), larger(b, -b)));
    const float none = sum((a - a) + (b - b));  // 0, or not a number
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    const Ints low = nearest(a * inverse), high = nearest(b * inverse);
    store(q, __builtin_convertvector(low, Bytes));
    store(q + kLanes, __builtin_convertvector(high, Bytes));
    const float scale = most / 127.0f + none, total = sum(__builtin_convertvector(low + high, Lanes));
    return {scale, scale * total, -128 * int32_t(total), 0};
}

void make_int8(const float* x, int64_t inputs, int64_t padded, std::byte* row) {
    auto* q = reinterpret_cast<int8_t*>(row);
    auto* scales = reinterpret_cast<GroupScale*>(row + padded);
    for (int64_t k = 0; k < padded; k += kGroup) {
        if (k + kGroup <= inputs) {
            scales[k / kGroup] = quantise(x + k, q + k);
        } else {
            float rest[kGroup] = {};
            if (k < inputs) std::memcpy(rest, x + k, size_t(inputs - k) * 4);
            scales[k / kGroup] = quantise(rest, q + k);
        }
    }
}

}  // namespace

void make_operand(Operand operand, const float* x, int64_t inputs, int64_t padded, std::byte* row) {
    if (operand == Operand::f32) return make_f32(x, inputs, padded, row);
    if (operand == Operand::bf16) return make_bf16(x, inputs, padded, row);
    make_int8(x, inputs, padded, row);
}

}  // namespace meterhouse
