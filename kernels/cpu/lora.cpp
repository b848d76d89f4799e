#include "lora.h"

namespace meterhouse {

void Lora::shrink(const std::vector<Segment>& segments, int64_t layer, int first, int count, const float* x,
                  int64_t ldx, std::vector<Job>& jobs) {
    shrunk_.clear();
    int64_t size = 0;
    for (const Segment& segment : segments)
        for (int i = 0; i < count; i++) {
            const LoraPair& pair = segment.pairs[layer * kProjections + first + i];
            if (pair.shrink.outputs == 0) continue;
            shrunk_.push_back({&pair.expand, nullptr, segment.row, segment.rows, pair.shrink.outputs, i});
            size += segment.rows * pair.shrink.outputs;
        }
    if (int64_t(buffer_.size()) < size) buffer_.resize(size);
    float* to = buffer_.data();
    auto next = shrunk_.begin();
    for (const Segment& segment : segments)
        for (int i = 0; i < count; i++) {
            const LoraPair& pair = segment.pairs[layer * kProjections + first + i];
            if (pair.shrink.outputs == 0) continue;
            next->data = to;
            jobs.push_back({&pair.shrink, x + segment.row * ldx, ldx, segment.rows, to, next->rank, Epilogue::store});
            to += segment.rows * next->rank;
            ++next;
        }
}

bool Lora::expand(const int64_t* columns, float* out, int64_t ldo, std::vector<Job>& jobs) const {
    for (const Shrunk& shrunk : shrunk_)
        jobs.push_back({shrunk.expand, shrunk.data, shrunk.rank, shrunk.rows,
                        out + shrunk.row * ldo + columns[shrunk.projection], ldo, Epilogue::add});
    return !shrunk_.empty();
}

}  // namespace meterhouse
