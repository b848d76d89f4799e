// Root-mean-square normalisation (https://arxiv.org/abs/1910.07467) of one row.
#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace meterhouse {

// `out` [size] may be `x` itself.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    Lanes squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
        for (int64_t j = 0; j < 4; j++) {
            const Lanes v = load<Lanes>(x + i + j * kLanes);
            squares[j] = v * v + squares[j];
        }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < size; i++) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / float(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes)
        store(out + i, load<Lanes>(x + i) * scale * load<Lanes>(weight + i));
    for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace meterhouse
