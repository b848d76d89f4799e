// Cuts products into pieces, rounds the activations, runs the forms' kernels and finishes their results.
#include <cstdlib>
#include <new>
#include <vector>

#include "matmul_forms.h"

namespace meterhouse {
namespace {

constexpr int64_t kFewRows = 64;         // up to here each worker rounds the rows for itself: cheaper than a barrier
constexpr int64_t kOperandBytes = 384 << 10;  // with more rows, a piece's operand: it stays in the second-level cache
constexpr int64_t kRowsOfRounding = 16;  // rows of a piece of the rounding's own region
constexpr int64_t kPieceBytes = 40 << 10;  // weights of a piece when rows are few: microseconds of reading memory
constexpr int64_t kFewPieces = 24;       // with fewer they are cut finer: threads wait for the last one
constexpr int64_t kAheadBytes = 12 << 10;  // what is fetched before it is read: the hardware stops at a page

int32_t allowed_forms = ~0;

const Kernel* choose(const Weight& w, int64_t rows) {
    const Kernel* kernel = nullptr;
    const bool deep = padded_inputs(w.format, w.inputs) % kTileDepth == 0;
    if (deep && (allowed_forms & kAmx)) kernel = amx_kernel(w.format, rows);
    if (!kernel && (allowed_forms & kAvx512)) kernel = avx512_kernel(w.format, rows);
    return kernel ? kernel : generic_kernel(w.format, rows);
}

// Memory that only grows, aligned to cache lines.
class Buffer {
public:
    ~Buffer() { std::free(data_); }
    std::byte* at_least(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = divided_up(bytes, 4096) * 4096;
            data_ = static_cast<std::byte*>(std::aligned_alloc(4096, size_t(size_)));
            if (!data_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return data_;
    }
    std::byte* data() const { return data_; }
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

private:
    std::byte* data_ = nullptr;
    int64_t size_ = 0;
};

// Rows of activations in the form that a kernel reads; jobs with the same rows share one.
struct OperandRows {
    Operand operand;
    const float* x;
    int64_t ldx, rows, inputs, padded, row_bytes;
    int64_t offset;  // in the buffer of operands, the workers' own or the shared one
    bool shared;
    int64_t first_piece;  // of the rounding's region

    bool serves(const OperandRows& other) const {
        return operand == other.operand && x == other.x && ldx == other.ldx && rows == other.rows &&
               inputs == other.inputs && padded == other.padded;
    }
    void make(int64_t first, int64_t count, std::byte* buffer) const {
        for (int64_t row = first; row < first + count; row++) {
            make_operand(operand, x + row * ldx, inputs, padded, buffer + offset + row * row_bytes);
        }
    }
};

// A job cut into pieces: blocks of rows, and in each of them blocks of panels.
struct Cut {
    const Job* job;
    const Kernel* kernel;
    int64_t operand;
    int64_t panels, panel_bytes;
    int64_t panels_of_piece, panel_blocks, rows_of_piece;
    int64_t first_piece;
};

struct Worker {
    Buffer operands, result;
    std::vector<char> made;  // which of the operands
};

}  // namespace

struct Scratch::Buffers {
    std::vector<OperandRows> operands;
    std::vector<Cut> cuts;
    std::vector<Worker> workers;
    Buffer shared;
    int64_t own_bytes, shared_bytes, result_floats, pieces, rounding_pieces;
};

Scratch::Scratch() : buffers_(new Buffers) {}
Scratch::~Scratch() = default;

namespace {

using Buffers = Scratch::Buffers;

int64_t plan_operand(Buffers& b, const Job& job, Operand operand, int64_t padded) {
    OperandRows wanted{operand, job.x, job.ldx, job.rows, job.weight->inputs, padded,
                       operand_row_bytes(operand, padded), 0, job.rows > kFewRows, 0};
    const auto count = int64_t(b.operands.size());
    for (int64_t i = count - 1; i >= std::max<int64_t>(0, count - 8); i--) {
        if (b.operands[i].serves(wanted)) return i;
    }
    int64_t& bytes = wanted.shared ? b.shared_bytes : b.own_bytes;
    wanted.offset = bytes;
    bytes += wanted.rows * wanted.row_bytes;
    if (wanted.shared) {
        wanted.first_piece = b.rounding_pieces;
        b.rounding_pieces += divided_up(wanted.rows, kRowsOfRounding);
    }
    b.operands.push_back(wanted);
    return count;
}

void plan_job(Buffers& b, const Job& job) {
    const Weight& w = *job.weight;
    const Kernel* kernel = choose(w, job.rows);
    Cut cut{&job, kernel, plan_operand(b, job, kernel->operand, padded_inputs(w.format, w.inputs)),
            panels_of(w.outputs, w.gated), panel_bytes(w.format, w.inputs), 0, 0, 0, b.pieces};
    const int64_t unit = std::max<int64_t>(kernel->abreast, w.gated ? 2 : 1);
    cut.rows_of_piece = job.rows;
    if (job.rows <= kFewRows) {
        cut.panels_of_piece = divided_up(divided_up(kPieceBytes, cut.panel_bytes), unit) * unit;
    } else {
        const int64_t most = std::max<int64_t>(48, kOperandBytes / b.operands[size_t(cut.operand)].row_bytes);
        const int64_t even = divided_up(job.rows, divided_up(job.rows, most));
        cut.rows_of_piece = divided_up(even, kernel->rows) * kernel->rows;
        const int64_t pieces = divided_up(job.rows, cut.rows_of_piece) * divided_up(cut.panels, kernel->panels);
        cut.panels_of_piece = pieces < kFewPieces ? unit : kernel->panels;
    }
    cut.panel_blocks = divided_up(cut.panels, cut.panels_of_piece);
    b.pieces += cut.panel_blocks * divided_up(job.rows, cut.rows_of_piece);
    b.result_floats = std::max(b.result_floats, kernel->rows * kernel->panels * kPanel);
    b.cuts.push_back(cut);
}

void plan(Buffers& b, const Job* jobs, int64_t count, int threads) {
    b.operands.clear();
    b.cuts.clear();
    b.own_bytes = b.shared_bytes = b.result_floats = b.pieces = b.rounding_pieces = 0;
    for (int64_t i = 0; i < count; i++) {
        if (jobs[i].rows > 0 && jobs[i].weight->outputs > 0) plan_job(b, jobs[i]);
    }
    b.workers.resize(size_t(threads));
    for (Worker& worker : b.workers) {  // here, where a lack of memory can be told to the caller
        worker.made.assign(b.operands.size(), 0);
        worker.operands.at_least(b.own_bytes);
        worker.result.at_least(b.result_floats * 4);
    }
    b.shared.at_least(b.shared_bytes);
}

// The planned entry that a piece belongs to: the last one that starts at or before it.
template <class T>
const T& owner(const std::vector<T>& planned, int64_t piece) {
    const auto after = std::upper_bound(planned.begin(), planned.end(), piece,
                                        [](int64_t p, const T& entry) { return p < entry.first_piece; });
    return *(after - 1);
}

// ---- what becomes of a result ----

inline Lanes silu(Lanes x) {
    const Lanes e = exponential(x > 0.0f ? -x : x);  // at most 1: no overflow
    return x * (x > 0.0f ? Lanes{} + 1.0f : e) / (1.0f + e);
}

inline Lanes load_some(const float* from, int64_t count) {
    if (count == kPanel) return load<Lanes>(from);
    Lanes v{};
    std::memcpy(&v, from, size_t(count) * 4);
    return v;
}

inline void store_some(float* to, Lanes v, int64_t count) {
    if (count == kPanel) return store(to, v);
    std::memcpy(to, &v, size_t(count) * 4);
}

// One panel of a tile's results, or a gate's and what it gates: [rows][16] at `result`, `stride` apart.
template <Epilogue epilogue>
void finish_panel(const Job& job, int64_t first_row, int64_t rows, int64_t panel, const float* result, int64_t stride) {
    const Weight& w = *job.weight;
    const PanelOutputs out = panel_outputs(panel, w.outputs, w.gated);
    const PanelOutputs up = panel_outputs(panel + 1, w.outputs, w.gated);
    const auto biased = [&](PanelOutputs its, const float* from) {
        const Lanes v = load<Lanes>(from);
        return job.bias ? v + load_some(job.bias + its.first, its.valid) : v;
    };
    for (int64_t r = 0; r < rows; r++, result += stride) {
        float* to = job.out + (first_row + r) * job.ldo + out.first;
        Lanes v = biased(out, result);
        if (epilogue == Epilogue::swiglu) v = silu(v) * biased(up, result + kPanel);
        if (epilogue == Epilogue::add) v += load_some(to, out.valid);
        store_some(to, v, out.valid);
    }
}

template <Epilogue epilogue>
void finish_panels(const Job& job, int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* result) {
    for (int64_t p = 0; p < panels; p += epilogue == Epilogue::swiglu ? 2 : 1) {
        finish_panel<epilogue>(job, row, rows, panel + p, result + p * kPanel, panels * kPanel);
    }
}

void finish(const Job& job, int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* result) {
    const auto its = job.epilogue == Epilogue::store ? finish_panels<Epilogue::store>
                     : job.epilogue == Epilogue::add ? finish_panels<Epilogue::add>
                                                     : finish_panels<Epilogue::swiglu>;
    its(job, row, rows, panel, panels, result);
}

// The lines that a tile's results will be added to: fetched while it is computed.
void fetch_out(const Job& job, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    const bool gated = job.weight->gated;
    const int64_t step = job.epilogue == Epilogue::swiglu ? 2 : 1;
    for (int64_t p = 0; p < panels; p += step) {
        const float* to = job.out + row * job.ldo + panel_outputs(panel + p, job.weight->outputs, gated).first;
        for (int64_t r = 0; r < rows; r++) __builtin_prefetch(to + r * job.ldo, 1);
    }
}

// ---- a piece ----

// The first tile of some panels brings their weights in, the others a share each of those that come next.
void fetch_weights(const Kernel& kernel, Tile& tile, int64_t index, int64_t tiles) {
    if (index == 0) {
        const int64_t ahead = kAheadBytes / kernel.abreast;
        tile.fetch = tile.weights + ahead;
        tile.fetch_step = 64;
        tile.fetch_turn = (tile.panel_bytes - ahead) / 64;
    } else {
        tile.fetch = tile.weights + tile.panels * tile.panel_bytes + (index - 1) * tile.panel_bytes / (tiles - 1);
        tile.fetch_step = divided_up(64, tiles - 1);
        tile.fetch_turn = tile.panel_bytes;
    }
}

void run_piece(const Buffers& b, const Cut& cut, int64_t piece, const std::byte* operand, float* result) {
    const Job& job = *cut.job;
    const OperandRows& x = b.operands[size_t(cut.operand)];
    const int64_t first_row = piece / cut.panel_blocks * cut.rows_of_piece;
    const int64_t end_row = std::min(first_row + cut.rows_of_piece, job.rows);
    const int64_t first_panel = piece % cut.panel_blocks * cut.panels_of_piece;
    const int64_t end_panel = std::min(first_panel + cut.panels_of_piece, cut.panels);
    const auto* weights = static_cast<const std::byte*>(job.weight->data);
    const int64_t tiles = divided_up(end_row - first_row, cut.kernel->rows);
    for (int64_t panel = first_panel; panel < end_panel; panel += cut.kernel->panels) {
        Tile tile{};
        tile.panels = std::min(cut.kernel->panels, end_panel - panel);
        tile.panel_bytes = cut.panel_bytes;
        tile.weights = weights + panel * cut.panel_bytes;
        tile.operand_bytes = x.row_bytes;
        tile.inputs = x.padded;
        tile.result = result;
        tile.result_stride = tile.panels * kPanel;
        int64_t row = first_row;
        for (int64_t index = 0; index < tiles; index++, row += tile.rows) {
            tile.rows = divided_up(end_row - row, tiles - index);
            tile.operand = operand + x.offset + row * x.row_bytes;
            fetch_weights(*cut.kernel, tile, index, tiles);
            if (job.epilogue == Epilogue::add) fetch_out(job, row, tile.rows, panel, tile.panels);
            cut.kernel->run(tile);
            finish(job, row, tile.rows, panel, tile.panels, result);
        }
    }
}

}  // namespace

int32_t available_forms() {
    return kGeneric | (avx512_kernel(Format::bf16, 1) ? kAvx512 : 0) | (amx_kernel(Format::bf16, 16) ? kAmx : 0);
}

void use_forms(int32_t forms) { allowed_forms = forms; }

void multiply(Pool& pool, const Job* jobs, int64_t count, Scratch& scratch) {
    Buffers& b = scratch.buffers();
    plan(b, jobs, count, pool.threads());
    pool.run(b.rounding_pieces, [&](int64_t piece, int) {
        const OperandRows* x = nullptr;
        for (const OperandRows& each : b.operands) {
            if (each.shared && each.first_piece <= piece) x = &each;
        }
        const int64_t first = (piece - x->first_piece) * kRowsOfRounding;
        x->make(first, std::min(kRowsOfRounding, x->rows - first), b.shared.data());
    });
    pool.run(b.pieces, [&](int64_t piece, int number) {
        const Cut& cut = owner(b.cuts, piece);
        const OperandRows& x = b.operands[size_t(cut.operand)];
        Worker& worker = b.workers[size_t(number)];
        std::byte* own = worker.operands.data();
        if (!x.shared && !worker.made[size_t(cut.operand)]) {
            x.make(0, x.rows, own);
            worker.made[size_t(cut.operand)] = 1;
        }
        auto* result = reinterpret_cast<float*>(worker.result.data());
        run_piece(b, cut, piece - cut.first_piece, x.shared ? b.shared.data() : own, result);
    });
}

}  // namespace meterhouse
