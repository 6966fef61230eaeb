// The sampler alone, for its tests: what Program.run() does with the rows of logits that it computes itself.
#include <cstdlib>
#include <memory>
#include <string>

#include "arrays.h"
#include "philox.h"
#include "threads.h"

namespace headrace {
namespace {

using nb::literals::operator""_a;

constexpr int kMaxVocab = 1 << 24;

struct FreeMemory {
    void operator()(std::byte* memory) const { std::free(memory); }
};
using Scratch = std::unique_ptr<std::byte, FreeMemory>;

nb::tuple sample(const std::string& isa, const nb::ndarray<float, nb::ndim<2>, nb::device::cpu>& logits,
                 const nb::tuple& sampling, const nb::object& mask) {
    const Kernels& kernels = kernels_named(isa);
    const auto values = view<float>(nb::cast(logits), "logits");
    KeptViews views;
    const SamplingColumns rows = view_sampling(views, sampling);
    const std::size_t num_rows = logits.shape(0), vocab = logits.shape(1);
    if (num_rows != rows.targets.size()) raise_if("logits and targets differ in rows");
    if (vocab < 1 || vocab > kMaxVocab) raise_if("a vocabulary of " + std::to_string(vocab) + " is not supported");
    raise_if(find_problem(rows, int(vocab)));
    std::span<const std::uint32_t> allowed;
    if (!mask.is_none()) {
        allowed = view<std::uint32_t>(mask, "mask");
        if (allowed.size() != num_rows * ((vocab + 31) / 32)) raise_if("mask must have a bit for every logit");
    }

    const NewResults results(rows);
    const Scratch scratch(static_cast<std::byte*>(std::aligned_alloc(kAlign, sample_scratch_bytes(int(vocab)))));
    if (scratch == nullptr) throw std::bad_alloc();
    const FlushDenormals flush;
    for (std::size_t row = 0; row < num_rows; ++row) {
        SampleRow it = sample_row(rows, allowed, results.rows(), int(vocab), int(row));
        it.logits = values.data() + row * vocab;
        it.scratch = scratch.get();
        kernels.sample(it);
    }
    return results.to_tuple();
}

nb::tuple philox(const nb::handle& counter, std::uint64_t key) {
    const auto words = view<std::uint32_t>(counter, "counter");
    if (words.size() != 4) raise_if("a counter has 4 words, not " + std::to_string(words.size()));
    std::uint32_t out[] = {words[0], words[1], words[2], words[3]};
    philox4x32_10(out, {std::uint32_t(key), std::uint32_t(key >> 32)}, [](std::uint32_t word) { return word; });
    return nb::make_tuple(out[0], out[1], out[2], out[3]);
}

}  // namespace

void bind_sample(nb::module_& module) {
    module.def("sample", &sample, "isa"_a, "logits"_a.noconvert(), "sampling"_a, "mask"_a.none());
    module.def("philox", &philox, "counter"_a, "key"_a);
}

}  // namespace headrace
