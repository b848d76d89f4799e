// The pool and the product for a caller from C (kernels/native.py), and each form's check of itself.
#include <cmath>
#include <cstdlib>
#include <vector>

#include "matmul_forms.h"

using namespace meterhouse;

extern "C" {

Pool* meterhouse_pool_create(int32_t threads, int32_t spin_us) { return new Pool(threads, spin_us); }
void meterhouse_pool_destroy(Pool* pool) { delete pool; }

Scratch* meterhouse_scratch_create() { return new Scratch; }
void meterhouse_scratch_destroy(Scratch* scratch) { delete scratch; }

int64_t meterhouse_packed_bytes(int32_t format, int64_t outputs, int64_t inputs, int32_t gated) {
    return int64_t(packed_bytes(Format(format), outputs, inputs, gated != 0));
}

// `bits`: 32 for float32, 16 for bfloat16.
void meterhouse_pack(Pool* pool, int32_t format, int32_t gated, const void* source, int32_t bits, int64_t stride,
                     int64_t outputs, int64_t inputs, void* packed) {
    if (bits == 32) {
        pack(*pool, Format(format), gated != 0, static_cast<const float*>(source), stride, outputs, inputs, packed);
    } else {
        pack(*pool, Format(format), gated != 0, static_cast<const uint16_t*>(source), stride, outputs, inputs, packed);
    }
}

void meterhouse_multiply(Pool* pool, const Job* jobs, int64_t count, Scratch* scratch) {
    multiply(*pool, jobs, count, *scratch);
}

// Each job in a region of its own, as the products of a step that need one another.
void meterhouse_multiply_in_turn(Pool* pool, const Job* jobs, int64_t count, Scratch* scratch) {
    for (int64_t i = 0; i < count; i++) multiply(*pool, jobs + i, 1, *scratch);
}

int32_t meterhouse_available_forms() { return available_forms(); }
void meterhouse_use_forms(int32_t forms) { use_forms(forms); }

// The pool's contract: every piece of every region once, none after its region. Returns the number of faults.
int64_t meterhouse_pool_check(int32_t threads, int32_t spin_us, int64_t regions, int64_t pieces) {
    Pool pool(threads, spin_us);
    std::vector<std::atomic<int64_t>> seen(static_cast<size_t>(pieces));
    int64_t faults = 0;
    for (int64_t region = 0; region < regions; region++) {
        const int64_t count = region % (pieces + 1);
        pool.run(count, [&](int64_t piece, int worker) {
            seen[size_t(piece)].fetch_add(worker >= 0 && worker < pool.threads() ? 1 : 1000000);
        });
        for (int64_t piece = 0; piece < pieces; piece++) {
            faults += seen[size_t(piece)].exchange(0) != (piece < count ? 1 : 0);
        }
    }
    return faults;
}

// Whether `forms` multiply as a plain loop does, for every format: 0, or 1 + the format that is wrong.
int32_t meterhouse_check_forms(int32_t forms) {
    constexpr int64_t kOutputs = 70, kInputs = 90;
    Pool pool(1);
    Scratch scratch;
    uint32_t state = 1;
    const auto random = [&] { return float((state = state * 1664525u + 1013904223u) >> 8) / float(1 << 23) - 1.0f; };
    std::vector<float> w(kOutputs * kInputs), x(67 * kInputs), out(67 * kOutputs);
    for (float& v : w) v = random();
    for (float& v : x) v = random();
    use_forms(forms);
    for (int32_t format = 0; format < 4; format++) {
        const float tolerance = format == 0 ? 1e-5f : format == 3 ? 0.15f : 0.02f;
        void* packed = std::aligned_alloc(64, packed_bytes(Format(format), kOutputs, kInputs));
        pack(pool, Format(format), false, w.data(), kInputs, kOutputs, kInputs, packed);
        const Weight weight{Format(format), 0, kOutputs, kInputs, packed};
        for (int64_t rows : {1, 3, 16, 33, 67}) {
            const Job job{&weight, x.data(), kInputs, rows, out.data(), kOutputs, Epilogue::store};
            multiply(pool, &job, 1, scratch);
            double wrong = 0, right = 0;
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t n = 0; n < kOutputs; n++) {
                    double y = 0;
                    for (int64_t k = 0; k < kInputs; k++) y += double(w[n * kInputs + k]) * x[r * kInputs + k];
                    wrong += std::pow(out[r * kOutputs + n] - y, 2);
                    right += y * y;
                }
            }
            if (!(wrong <= tolerance * tolerance * right)) {
                std::free(packed);
                return format + 1;
            }
        }
        std::free(packed);
    }
    return 0;
}
}
