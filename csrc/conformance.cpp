// Replays the conformance vectors on every instruction set that the build and the processor have. Needs no Python, so
// that it runs where only a compiler does: under sanitizers, and cross-compiled under an emulator.
//
//   conformance FILE           the oracle's output must be the file's; every other set's must be the oracle's
//   conformance --write FILE   writes what the oracle gives
//
// A line of the file: a case's name, a digest of what it left, and the first values of that, for people. Sets give the
// same bits but for products of bf16, where those that round in their own way are held to a bound
// (conformance/cases.h).
#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <string_view>

#include "conformance/cases.h"
#include "threads.h"

namespace headrace::conformance {
namespace {

constexpr int kShownValues = 3;
constexpr Isa kIsas[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon};
constexpr const char* kIsaNames[] = {"scalar", "avx2", "avx512", "neon"};

bool rounds_bf16_products_its_own_way(Isa isa) { return isa == Isa::avx512; }  // vdpbf16ps

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    add_linear_cases(cases);
    add_row_cases(cases);
    add_attention_cases(cases);
    add_sample_cases(cases);
    add_program_cases(cases);
    add_thread_cases(cases);
    return cases;
}

// Computing threads flush denormals; so does this one.
Output run(const Case& it, const Kernels& kernels) {
    const FlushDenormals flush;
    return it.run(kernels);
}

// FNV-1a of 64 bits over the words (Fowler, Noll and Vo).
std::uint64_t digest(std::span<const std::uint32_t> words) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const std::uint32_t word : words) {
        for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ (word >> shift & 0xff)) * 0x100000001b3u;
    }
    return hash;
}

std::string vector_line(const Case& it, const Output& output) {
    char text[32];
    std::snprintf(text, sizeof text, " %016" PRIx64, digest(output.words()));
    std::string line = it.name + text;
    for (const std::uint32_t word : output.words().first(std::min<std::size_t>(kShownValues, output.words().size()))) {
        std::snprintf(text, sizeof text, " %08x", word);
        line += text;
    }
    return line;
}

std::string describe(std::uint32_t word) {
    char text[64];
    std::snprintf(text, sizeof text, "%08x (%.9g)", word, double(std::bit_cast<float>(word)));
    return text;
}

// What is wrong with an output, or "". No bounds: the same bits.
std::string compare(std::span<const std::uint32_t> got, std::span<const std::uint32_t> oracle,
                    std::span<const float> bounds) {
    if (got.size() != oracle.size()) {
        return "left " + std::to_string(got.size()) + " words, not " + std::to_string(oracle.size());
    }
    if (!bounds.empty() && bounds.size() != oracle.size()) {
        return "has " + std::to_string(bounds.size()) + " bounds for " + std::to_string(oracle.size()) + " words";
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
        if (got[i] == oracle[i]) continue;
        const float distance = std::fabs(std::bit_cast<float>(got[i]) - std::bit_cast<float>(oracle[i]));
        if (!bounds.empty() && distance <= bounds[i]) continue;
        std::string problem = "word " + std::to_string(i) + " of " + std::to_string(got.size()) + " is " +
                              describe(got[i]) + ", not " + describe(oracle[i]);
        if (!bounds.empty()) problem += " within " + std::to_string(bounds[i]);
        return problem;
    }
    return "";
}

std::vector<Output> run_oracle(const std::vector<Case>& cases) {
    std::vector<Output> outputs;
    for (const Case& it : cases) outputs.push_back(run(it, *kernels_for(Isa::scalar)));
    return outputs;
}

int write_vectors(const char* path) {
    const std::vector<Case> cases = all_cases();
    const std::vector<Output> outputs = run_oracle(cases);
    std::ofstream file(path);
    file << "# Written by `make vectors`: a case, the FNV-1a of what the scalar kernels leave, the first values.\n";
    for (std::size_t i = 0; i < cases.size(); ++i) file << vector_line(cases[i], outputs[i]) << "\n";
    file.close();
    if (file) return 0;
    std::fprintf(stderr, "conformance: can't write %s\n", path);
    return 1;
}

std::vector<std::string> read_vectors(const char* path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error(std::string("can't read ") + path + "; `make vectors` writes it");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
        if (!line.empty() && line[0] != '#') lines.push_back(line);
    }
    return lines;
}

// How many vectors the oracle does not reproduce, each reported.
int check_oracle(const std::vector<Case>& cases, const std::vector<Output>& outputs,
                 const std::vector<std::string>& lines) {
    int num_wrong = 0;
    for (std::size_t i = 0; i < std::max(cases.size(), lines.size()); ++i) {
        const std::string got = i < cases.size() ? vector_line(cases[i], outputs[i]) : "no such case";
        const std::string expected = i < lines.size() ? lines[i] : "no such line";
        if (got == expected) continue;
        std::fprintf(stderr, "scalar: got       %s\n        committed %s\n", got.c_str(), expected.c_str());
        ++num_wrong;
    }
    return num_wrong;
}

int check_isa(Isa isa, const std::vector<Case>& cases, const std::vector<Output>& outputs) {
    const Kernels& kernels = *kernels_for(isa);
    int num_wrong = 0;
    for (std::size_t i = 0; i < cases.size(); ++i) {
        std::vector<float> bounds;
        if (cases[i].bounds && rounds_bf16_products_its_own_way(isa)) {
            bounds = cases[i].bounds(*kernels_for(Isa::scalar));
        }
        std::string problem;
        try {
            problem = compare(run(cases[i], kernels).words(), outputs[i].words(), bounds);
        } catch (const std::exception& error) {
            problem = error.what();
        }
        if (problem.empty()) continue;
        std::fprintf(stderr, "%s: %s: %s\n", kernels.name, cases[i].name.c_str(), problem.c_str());
        ++num_wrong;
    }
    return num_wrong;
}

int replay(const char* path) {
    const std::vector<std::string> lines = read_vectors(path);
    const std::vector<Case> cases = all_cases();
    const std::vector<Output> outputs = run_oracle(cases);
    int num_wrong = 0;
    for (const Isa isa : kIsas) {
        const char* name = kIsaNames[int(isa)];
        if (kernels_for(isa) == nullptr) {
            std::printf("%s: skipped, this build or this processor does not have it\n", name);
            continue;
        }
        const int wrong = isa == Isa::scalar ? check_oracle(cases, outputs, lines) : check_isa(isa, cases, outputs);
        std::printf("%s: %zu of %zu cases as they should be\n", name, cases.size() - wrong, cases.size());
        num_wrong += wrong;
    }
    return num_wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace headrace::conformance

int main(int argc, char** argv) {
    using namespace headrace::conformance;
    try {
        if (argc == 2) return replay(argv[1]);
        if (argc == 3 && std::string_view(argv[1]) == "--write") return write_vectors(argv[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "conformance: %s\n", error.what());
        return 1;
    }
    std::fprintf(stderr, "usage: conformance [--write] FILE\n");
    return 2;
}
