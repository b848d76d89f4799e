// Low-rank updates of many adapters in one step (https://arxiv.org/abs/2106.09685, batched as in
// https://arxiv.org/abs/2310.18547), as jobs of the matrix product: an adapter's rows lie side by side, so its shrink
// and its expand are two small products over them. Nothing is packed for a batch, and ranks may differ.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace meterhouse {

class Lora {
public:
    // Products that read `x` [rows][ldx] for the `count` projections from `first` on, appended to `jobs`. They may run
    // beside the base product.
    void shrink(const std::vector<Segment>& segments, int64_t layer, int first, int count, const float* x, int64_t ldx,
                std::vector<Job>& jobs);

    // What the last `shrink` left, expanded and added to `out` [rows][ldo], where projection `i` begins at column
    // `columns[i]`. To run after the base product; true if there is anything to run.
    bool expand(const int64_t* columns, float* out, int64_t ldo, std::vector<Job>& jobs) const;

private:
    struct Shrunk {
        const Weight* expand;
        const float* data;
        int64_t row, rows, rank;
        int projection;
    };
    std::vector<Shrunk> shrunk_;
    std::vector<float> buffer_;
};

}  // namespace meterhouse
