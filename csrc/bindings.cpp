// headrace._core: checks shapes, releases the GIL, calls. The Python face is described in _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bandwidth.h"
#include "digest.h"
#include "program.h"
#include "threads.h"
#include "weight.h"

namespace headrace {

void bind_kernels(nb::module_& module);
void bind_sample(nb::module_& module);

namespace {

using nb::literals::operator""_a;
using WeightRefs = std::vector<std::shared_ptr<Weight>>;

// A program and the views of its last batch's arrays.
struct BoundProgram : Program {
    using Program::Program;
    KeptViews views;
};

constexpr int kMaxSide = 1 << 24;  // rows or columns of a weight, tokens, blocks: products fit into 64 bits

void check_count(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    raise_if(std::string(name) + " is " + std::to_string(value) + "; it must be " + std::to_string(low) + " to " +
             std::to_string(high));
}

RowKind kind(bool is_rows) { return is_rows ? RowKind::logits : RowKind::tokens; }

std::vector<double> doubles(nb::handle object, const char* name) {
    const auto values = view<double>(object, name);
    return {values.begin(), values.end()};
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::neon, Isa::scalar}) {
        if (const Kernels* kernels = kernels_for(isa)) names.emplace_back(kernels->name);
    }
    return names;
}

void check_usable(const ThreadPool& pool) {
    if (!pool.is_usable()) raise_if("the thread pool is closed, or of another process");
}

std::shared_ptr<ThreadPool> make_pool(int num_threads) {
    check_count("num_threads", num_threads, 1, ThreadPool::kMaxThreads);
    return std::make_shared<ThreadPool>(num_threads);
}

std::shared_ptr<Weight> make_weight(const std::string& isa, const std::string& format, int rows, int columns) {
    const FormatTraits& traits_of = traits(format_named(format));
    check_count("rows", rows, 1, kMaxSide);
    check_count("columns", columns, 1, kMaxSide);
    if (columns % traits_of.file_block_values != 0) {
        raise_if(format + " stores whole blocks of 32; a row of " + std::to_string(columns) + " is not");
    }
    return std::make_shared<Weight>(kernels_named(isa), format_named(format), rows, columns);
}

void pack(Weight& weight, ThreadPool& pool, nb::handle data) {
    const Matrix& w = weight.matrix();
    const FormatTraits& it = traits(w.format);
    const auto source = view<std::uint8_t>(data, "data");
    const std::size_t expected = std::size_t(w.rows) * (w.cols / it.file_block_values) * it.file_block_bytes;
    if (source.size() != expected) {
        raise_if("the weight takes " + std::to_string(expected) + " bytes, not " + std::to_string(source.size()));
    }
    if (weight.is_packed()) raise_if("the weight is packed already");
    check_usable(pool);
    nb::gil_scoped_release release;
    weight.pack(pool, reinterpret_cast<const std::byte*>(source.data()));
}

void check_unplaced(const WeightRefs& weights) {
    std::set<const Weight*> seen;
    for (const auto& weight : weights) {
        if (weight->has_place()) raise_if("a weight has its memory already");
        if (!seen.insert(weight.get()).second) raise_if("a weight is named twice");
    }
}

nb::object place_together(const WeightRefs& weights) {
    check_unplaced(weights);
    auto block = std::make_unique<Weight::Block>(Weight::place_together(weights));
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(block->get());
    nb::capsule owner(block.release(), [](void* it) noexcept { delete static_cast<Weight::Block*>(it); });
    const std::size_t shape[] = {Weight::nbytes_together(weights)};
    return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t>(bytes, 1, shape, owner));
}

void place_packed(const WeightRefs& weights, nb::handle data) {
    check_unplaced(weights);
    const auto bytes = view<std::uint8_t>(data, "data");
    if (bytes.size() != Weight::nbytes_together(weights)) {
        raise_if("the weights take " + std::to_string(Weight::nbytes_together(weights)) + " bytes, not " +
                 std::to_string(bytes.size()));
    }
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % kAlign != 0) {
        raise_if("data must begin at a multiple of " + std::to_string(kAlign) + " bytes");
    }
    // The view, which keeps the memory where it is; until the last of the weights goes, on whichever thread that is.
    using Held = nb::ndarray<nb::ro, nb::device::cpu>;
    const auto let_go = [held = new Held(nb::cast<Held>(data))](std::byte*) {
        const nb::gil_scoped_acquire gil;
        delete held;
    };
    auto* start = reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(bytes.data()));
    Weight::place_packed(weights, Weight::Block(start, let_go));
}

// Which thread computed each of `count` tiles, of so many microseconds each.
std::vector<int> tile_threads(ThreadPool& pool, int count, int tile_us) {
    check_count("count", count, 1, ThreadPool::kMaxTiles);
    check_count("tile_us", tile_us, 0, 1000);
    check_usable(pool);
    std::vector<int> threads(count);
    nb::gil_scoped_release release;
    parallel_for(pool, count, [&](int tile, int thread) {
        threads[tile] = thread;
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(tile_us);
        while (std::chrono::steady_clock::now() < end) {
        }
    });
    return threads;
}

std::uint64_t digest_of(ThreadPool& pool, nb::handle data) {
    const auto bytes = view<std::uint8_t>(data, "data");
    check_usable(pool);
    nb::gil_scoped_release release;
    return digest(pool, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}

nb::object to_f32(const Weight& weight) {
    const Matrix& w = weight.matrix();
    if (!weight.is_packed()) raise_if("the weight is not packed yet");
    NewArray<float> values(w.rows, w.cols, 0.0f, true);
    for (int row = 0; row < w.rows; ++row) weight.unpack_row(row, values.data + std::size_t(row) * w.cols);
    return values.object;
}

std::shared_ptr<KvCache> make_kv(const std::string& dtype, int num_layers, int num_kv_heads, int head_dim) {
    if (dtype != "bf16" && dtype != "f32") raise_if("keys and values are stored as bf16 or f32, not " + dtype);
    check_count("num_layers", num_layers, 1, 1 << 16);
    check_count("num_kv_heads", num_kv_heads, 1, 1 << 16);
    check_count("head_dim", head_dim, kLanes, kMaxHeadDim);
    if (head_dim % kLanes != 0) raise_if("head_dim is " + std::to_string(head_dim) + "; kernels need a multiple of 16");
    return std::make_shared<KvCache>(dtype == "bf16" ? KvType::bf16 : KvType::f32, num_layers, num_kv_heads, head_dim);
}

void allocate_kv(KvCache& cache, int num_blocks) {
    check_count("num_blocks", num_blocks, 1, kMaxSide);
    if (cache.num_blocks() != 0) raise_if("the KV cache is allocated already");
    cache.allocate(num_blocks);
}

void touch_kv(const KvCache& cache, int first_block, int num_blocks) {
    check_count("first_block", first_block, 0, cache.num_blocks());
    check_count("num_blocks", num_blocks, 0, cache.num_blocks() - first_block);
    nb::gil_scoped_release release;
    cache.touch(first_block, num_blocks);
}

std::shared_ptr<BoundProgram> make_program(std::shared_ptr<ThreadPool> pool, const std::string& isa, int max_tokens,
                                           int max_rows, int max_seqs, int max_len) {
    check_count("max_tokens", max_tokens, 1, kMaxSide);
    check_count("max_rows", max_rows, 1, kMaxSide);
    check_count("max_seqs", max_seqs, 1, kMaxSide);
    check_count("max_len", max_len, 1, kMaxSide);
    return std::make_shared<BoundProgram>(std::move(pool), kernels_named(isa),
                                          Bounds{max_tokens, max_rows, max_seqs, max_len});
}

void record_linear(BoundProgram& program, const std::vector<std::size_t>& outs, Program::Place x,
                   const WeightRefs& weights, Program::Place add, bool is_rows) {
    program.linear(outs, x, {weights.begin(), weights.end()}, add, kind(is_rows));
}

void record_norm(BoundProgram& program, Program::Place out, std::size_t x, nb::handle weight, float eps, bool is_rows) {
    const auto values = view<float>(weight, "weight");
    program.rms_norm(out, x, {values.begin(), values.end()}, eps, kind(is_rows));
}

struct BatchArrays {  // the columns of ops.Batch, in their order, but for `sampling`
    nb::object tokens, token_offsets, starts, row_tokens;
    nb::tuple block_offsets, blocks;
};

void view_batch(KeptViews& views, const BatchArrays& arrays, const nb::tuple& sampling, Batch& batch) {
    batch.sampling = view_sampling(views, sampling);
    std::size_t slot = kNumSamplingColumns;
    const auto next = [&](nb::handle array, const char* name) { return views.of<std::int32_t>(slot++, array, name); };
    batch.tokens = next(arrays.tokens, "tokens");
    batch.token_offsets = next(arrays.token_offsets, "token_offsets");
    batch.starts = next(arrays.starts, "starts");
    batch.row_tokens = next(arrays.row_tokens, "row_tokens");
    const std::size_t num_groups = nb::len(arrays.blocks);
    check_count("block_offsets", std::int64_t(nb::len(arrays.block_offsets)), 0, kMaxKvGroups);
    if (nb::len(arrays.block_offsets) != num_groups) raise_if("block_offsets and blocks differ in groups");
    batch.num_groups = int(num_groups);
    for (std::size_t i = 0; i < num_groups; ++i) {
        batch.block_offsets[i] = next(arrays.block_offsets[i], "block_offsets");
        batch.blocks[i] = next(arrays.blocks[i], "blocks");
    }
}

// Calls a Python function on a thread that has released the GIL, and keeps what it raises.
class Meanwhile {
public:
    explicit Meanwhile(const nb::object& function) : function_(function) {}

    void operator()() {
        nb::gil_scoped_acquire acquire;
        try {
            function_();
        } catch (...) {
            error_ = std::current_exception();
        }
    }

    void raise_error() {
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

private:
    const nb::object& function_;
    std::exception_ptr error_;
};

nb::tuple run(BoundProgram& program, const BatchArrays& arrays, const nb::tuple& sampling, const nb::object& mask,
              const nb::object& function) {
    Batch batch;
    view_batch(program.views, arrays, sampling, batch);
    if (!mask.is_none()) batch.mask = view<std::uint32_t>(mask, "mask");
    raise_if(program.find_obstacle());
    raise_if(find_problem(batch, program.bounds()));

    const NewResults results(batch.sampling);
    Meanwhile meanwhile(function);
    {
        nb::gil_scoped_release release;
        program.run(batch, results.rows(), function.is_none() ? nullptr : std::function<void()>(std::ref(meanwhile)));
    }
    meanwhile.raise_error();
    return results.to_tuple();
}

std::vector<double> measure_read_bandwidth(ThreadPool& pool, std::int64_t num_bytes, int num_passes) {
    check_count("num_bytes", num_bytes, 1, std::int64_t(1) << 40);
    check_count("num_passes", num_passes, 1, 1 << 16);
    check_usable(pool);
    nb::gil_scoped_release release;
    return read_bandwidth(pool, std::size_t(num_bytes), num_passes);
}

std::vector<double> measure_line_transfer(ThreadPool& pool, int num_passes) {
    check_count("num_passes", num_passes, 1, 1 << 16);
    check_usable(pool);
    nb::gil_scoped_release release;
    return line_transfer(pool, num_passes);
}

nb::object profile(const BoundProgram& program) {
    const std::optional<Profile> it = program.profile();
    if (!it) return nb::none();
    static_assert(std::variant_size_v<Phase> == 4);
    return nb::make_tuple(it->total, it->phases[0], it->phases[1], it->phases[2], it->phases[3]);
}

void bind_memory(nb::module_& module) {
    nb::class_<ThreadPool>(module, "ThreadPool")
        .def(nb::new_(&make_pool), "num_threads"_a)
        .def_prop_ro("num_threads", &ThreadPool::num_threads)
        .def("tile_threads", &tile_threads, "count"_a, "tile_us"_a)
        .def("lend_core", &ThreadPool::lend_core)
        .def("take_core_back", &ThreadPool::take_core_back)
        .def("close", &ThreadPool::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Weight>(module, "Weight")
        .def(nb::new_(&make_weight), "isa"_a, "format"_a, "rows"_a, "columns"_a)
        .def_prop_ro("nbytes", &Weight::nbytes)
        .def_prop_ro("format", [](const Weight& it) { return std::string(traits(it.matrix().format).name); })
        .def_prop_ro("rows", [](const Weight& it) { return it.matrix().rows; })
        .def_prop_ro("columns", [](const Weight& it) { return it.matrix().cols; })
        .def("pack", &pack, "pool"_a, "data"_a)
        .def("to_f32", &to_f32);
    module.def("place_together", &place_together, "weights"_a);
    module.def("place_packed", &place_packed, "weights"_a, "data"_a);
    module.def("digest", &digest_of, "pool"_a, "data"_a);
    nb::class_<KvCache>(module, "KvCache")
        .def(nb::new_(&make_kv), "dtype"_a, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a)
        .def_prop_ro("block_nbytes", &KvCache::block_nbytes)
        .def_prop_ro("nbytes", &KvCache::nbytes)
        .def_prop_ro("num_blocks", &KvCache::num_blocks)
        .def("allocate", &allocate_kv, "num_blocks"_a)
        .def("touch", &touch_kv, "first_block"_a, "num_blocks"_a);
}

void bind_program(nb::module_& module) {
    nb::class_<BoundProgram>(module, "Program")
        .def(nb::new_(&make_program), "pool"_a, "isa"_a, nb::kw_only(), "max_tokens"_a, "max_rows"_a, "max_seqs"_a,
             "max_len"_a)
        .def(
            "embed", [](BoundProgram& it, std::size_t out, std::shared_ptr<Weight> table) { it.embed(out, table); },
            "out"_a, "table"_a)
        .def("rms_norm", &record_norm, "out"_a.none(), "x"_a, "weight"_a, "eps"_a, "is_rows"_a)
        .def("linear", &record_linear, "outs"_a, "x"_a.none(), "weights"_a, "add"_a.none(), "is_rows"_a)
        .def(
            "rotate",
            [](BoundProgram& it, std::size_t out, std::size_t x, int width, int head_dim, nb::handle frequencies,
               double magnitude) {
                it.rotate(out, x, width, head_dim, doubles(frequencies, "frequencies"), magnitude);
            },
            "out"_a, "x"_a, "width"_a, "head_dim"_a, "frequencies"_a, "magnitude"_a)
        .def(
            "attention",
            [](BoundProgram& it, std::size_t out, std::size_t q, std::size_t k, std::size_t v,
               std::shared_ptr<KvCache> kv, int group, int layer, int num_heads,
               float scale) { it.attention(out, q, k, v, {std::move(kv), group, layer, num_heads, scale}); },
            "out"_a, "q"_a, "k"_a, "v"_a, "kv"_a, nb::kw_only(), "group"_a, "layer"_a, "num_heads"_a, "scale"_a)
        .def(
            "silu_mul",
            [](BoundProgram& it, Program::Place out, std::size_t gate, std::size_t up, int width, bool is_rows) {
                it.silu_mul(out, gate, up, width, kind(is_rows));
            },
            "out"_a.none(), "gate"_a, "up"_a, "width"_a, "is_rows"_a)
        .def(
            "add",
            [](BoundProgram& it, std::size_t out, std::size_t x, std::size_t y, int width, bool is_rows) {
                it.add(out, x, y, width, kind(is_rows));
            },
            "out"_a, "x"_a, "y"_a, "width"_a, "is_rows"_a)
        .def("select_rows", &Program::select_rows, "out"_a, "x"_a, "width"_a)
        .def(
            "head", [](BoundProgram& it, Program::Place x, std::shared_ptr<Weight> weight) { it.head(x, weight); },
            "x"_a.none(), "weight"_a)
        .def_prop_ro("arena_nbytes", &Program::arena_nbytes)
        .def_prop_ro("scratch_nbytes", &Program::scratch_nbytes)
        .def_prop_ro("max_tiles", &Program::max_tiles)
        .def("allocate", &Program::allocate)
        .def("start_profile", &Program::start_profile)
        .def_prop_ro("profile", &profile)
        .def(
            "run",
            [](BoundProgram& it, nb::object tokens, nb::object token_offsets, nb::object starts, nb::object row_tokens,
               nb::tuple block_offsets, nb::tuple blocks, nb::tuple sampling, nb::object mask, nb::object meanwhile) {
                return run(it, {tokens, token_offsets, starts, row_tokens, block_offsets, blocks}, sampling, mask,
                           meanwhile);
            },
            "tokens"_a, "token_offsets"_a, "starts"_a, "row_tokens"_a, "block_offsets"_a, "blocks"_a, "sampling"_a,
            "mask"_a.none(), "meanwhile"_a.none());
}

}  // namespace

NB_MODULE(_core, module) {
    module.attr("BLOCK_TOKENS") = kBlockTokens;
    module.attr("CONTENDER_MARGIN") = kContenderMargin;
    module.attr("MARGIN_HALVINGS") = kMarginHalvings;
    module.attr("MAX_CONTENDERS") = kMaxContenders;
    module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    module.attr("MAX_SIDE") = kMaxSide;
    module.attr("MAX_THREADS") = ThreadPool::kMaxThreads;
    module.attr("MAX_TILES") = ThreadPool::kMaxTiles;
    module.attr("MAX_TOP") = kMaxTop;
    module.def("available_isas", &available_isas);
    module.def("read_bandwidth", &measure_read_bandwidth, "pool"_a, "num_bytes"_a, "num_passes"_a);
    module.def("line_transfer", &measure_line_transfer, "pool"_a, "num_passes"_a);
    bind_memory(module);
    bind_program(module);
    bind_kernels(module);
    bind_sample(module);
}

}  // namespace headrace
