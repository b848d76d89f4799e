// One step of the model: a batch of decodes and prefill chunks from tokens to logits, in one call.
//
// Knows: the order of operations of the layer plan, the buffers between them, and how rows are shared among the
// threads. Does not know: families, sequences' past or future, sampling.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "lora.h"
#include "matmul.h"
#include "plan.h"
#include "pool.h"

namespace meterhouse {

class Step {
public:
    Step(const Plan& plan, Pool& pool);

    // Writes the step's keys and values to the cache and the wanted rows' logits. Throws std::bad_alloc.
    void run(const StepInput& input);

private:
    class Timer;

    void reserve(int64_t rows);
    void embed(const StepInput& input);
    void normalise(const float* x, const float* weight, int64_t rows, float* out);
    void project(int64_t layer, const Weight& weight, const float* bias, int first, int count, const int64_t* columns,
                 const float* x, int64_t rows, float* out, Epilogue epilogue, Timer& timer);
    void feed_forward(int64_t index, int64_t rows, Timer& timer);
    int64_t keep_wanted(const StepInput& input);

    const Plan& plan_;
    Pool& pool_;
    Scratch scratch_;
    Attention attention_;
    Lora lora_;
    std::vector<Job> jobs_;
    std::vector<Segment> segments_;
    int64_t capacity_ = 0;  // rows that the buffers hold
    std::vector<float> hidden_, normed_, qkv_, attended_, gate_up_, active_, cosines_, sines_;
};

}  // namespace meterhouse
