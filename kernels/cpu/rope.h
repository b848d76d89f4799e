// Rotary embedding (https://arxiv.org/abs/2104.09864, half-split as in Llama) of one head.
#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"
#include "norm.h"

namespace meterhouse {

// cosines and sines [head_dim / 2] of one position, as `engine.layers.Rotary` computes them: the angle is rounded to
// float32 before its cosine is taken.
inline void angles(int64_t position, const float* frequencies, int64_t half, float magnitude, float* cosines,
                   float* sines) {
    for (int64_t i = 0; i < half; i++) {
        const float angle = float(position) * frequencies[i];
        cosines[i] = std::cos(angle) * magnitude;
        sines[i] = std::sin(angle) * magnitude;
    }
}

// One head [head_dim] of a query or key: normalised where `norm` is given, turned where `cosines` are, scaled.
inline void turn_head(const float* head, int64_t head_dim, const float* norm, float eps, const float* cosines,
                      const float* sines, float scale, float* out) {
    const int64_t half = head_dim / 2;
    if (norm != nullptr) {
        rms_norm(head, norm, head_dim, eps, out);
        head = out;
    }
    if (cosines == nullptr) {
        for (int64_t i = 0; i < head_dim; i++) out[i] = head[i] * scale;
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        const float low = head[i], high = head[i + half];
        out[i] = (low * cosines[i] - high * sines[i]) * scale;
        out[i + half] = (high * cosines[i] + low * sines[i]) * scale;
    }
}

}  // namespace meterhouse
