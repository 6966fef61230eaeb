// Storing keys and values, attending to segments of them, merging what comes out.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

constexpr int kSpareBlocks = 3;  // of the pool: never written, so NaN

struct Shape {
    KvType type;
    int num_tokens;  // stored
    int num_kv_heads;
    int heads_per_kv;
    int head_dim;
    int first_query;          // tokens from here on attend
    bool is_damaged = false;  // NaN in the first query, infinity in a key and in a value

    int num_blocks() const { return (num_tokens + kBlockTokens - 1) / kBlockTokens; }
    int num_queries() const { return num_tokens - first_query; }
    int num_rows() const { return num_queries() * heads_per_kv; }  // of one KV head
    int num_segments() const { return (num_tokens - 1) / kSegmentTokens + 1; }
};

// What is made positive, so that sums become sums of magnitudes.
struct Magnitudes {
    bool scores = false;
    bool values = false;
};

Array<float> numbers(std::size_t size, std::uint64_t seed, bool is_magnitude) {
    Array<float> x = normal_floats(size, seed);
    if (is_magnitude) {
        for (float& it : x) it = std::fabs(it);
    }
    return x;
}

// Scattered blocks of one layer with every token stored; slots behind the last hold NaN.
struct Cache {
    KvLayer layer;
    Array<std::byte> memory;
    std::vector<std::int32_t> block_table;

    Cache(const Kernels& kernels, const Shape& shape, Magnitudes is_magnitude)
        : layer{shape.type, shape.num_kv_heads, shape.head_dim, nullptr, 0},
          memory((shape.num_blocks() + kSpareBlocks) * 2 * shape.num_kv_heads * layer.plane_bytes()),
          block_table(shape.num_blocks() + kSpareBlocks) {
        layer.base = memory.data();
        layer.block_stride = 2 * shape.num_kv_heads * layer.plane_bytes();
        std::iota(block_table.begin(), block_table.end(), 0);
        Random random(shape.num_tokens);
        for (int i = int(block_table.size()) - 1; i > 0; --i) {
            std::swap(block_table[i], block_table[random.below(i + 1)]);
        }
        block_table.resize(shape.num_blocks());
        block_table.shrink_to_fit();  // so that the address sanitizer sees its end
        const int width = shape.num_kv_heads * shape.head_dim;
        for (int token = 0; token < shape.num_tokens; ++token) {
            const Array<float> keys = numbers(width, 2 * token, is_magnitude.scores);
            const Array<float> values = numbers(width, 2 * token + 1, is_magnitude.values);
            if (shape.is_damaged && token == shape.first_query + 1) keys[9] = values[2] = INFINITY;
            kernels.store_kv(layer, block_table[token / kBlockTokens], token % kBlockTokens, keys.data(),
                             values.data());
        }
    }
};

Output store(const Kernels& kernels, const Shape& shape) {
    const Cache cache(kernels, shape, {});
    Output output;
    output.add(cache.memory.all());
    return output;
}

// What one KV head's queries leave: states [segment][row], and the merged rows.
struct Attended {
    Array<float> max, sum, acc, out;

    explicit Attended(const Shape& shape)
        : max(std::size_t(shape.num_segments()) * shape.num_rows()),
          sum(max.size()),
          acc(max.size() * shape.head_dim),
          out(std::size_t(shape.num_rows()) * shape.head_dim) {}
};

float scale_of(const Shape& shape) { return 1.0f / std::sqrt(float(shape.head_dim)); }

Attended attend_head(const Kernels& kernels, const Shape& shape, int kv_head, Magnitudes is_magnitude) {
    const Cache cache(kernels, shape, is_magnitude);
    const std::size_t query_stride = std::size_t(shape.num_kv_heads) * shape.heads_per_kv * shape.head_dim;
    const Array<float> queries = numbers(shape.num_queries() * query_stride, shape.head_dim, is_magnitude.scores);
    if (shape.is_damaged) queries[5] = NAN;
    Attended it(shape);
    const std::size_t num_rows = shape.num_rows(), head_dim = shape.head_dim;
    const float* of_head = queries.data() + std::size_t(kv_head) * shape.heads_per_kv * head_dim;
    std::vector<AttendQuery> rows(shape.num_queries());
    for (int segment = 0; segment < shape.num_segments(); ++segment) {
        const int first_block = segment * (kSegmentTokens / kBlockTokens);
        for (int query = 0; query < shape.num_queries(); ++query) {
            const std::size_t state = segment * num_rows + std::size_t(query) * shape.heads_per_kv;
            rows[query] = {of_head + query * query_stride, shape.first_query + query, it.max.data() + state,
                           it.sum.data() + state, it.acc.data() + state * head_dim};
        }
        kernels.attend({
            .kv = &cache.layer,
            .blocks = cache.block_table.data() + first_block,
            .num_blocks = shape.num_blocks() - first_block,
            .next_blocks = nullptr,
            .num_next_blocks = 0,
            .next_kv_head = kv_head,
            .kv_head = kv_head,
            .heads_per_kv = shape.heads_per_kv,
            .queries = rows.data(),
            .num_queries = shape.num_queries(),
            .segment = segment,
            .scale = scale_of(shape),
        });
    }
    for (std::size_t row = 0; row < num_rows; ++row) {
        kernels.merge(it.max.data() + row, it.sum.data() + row, num_rows, it.acc.data() + row * head_dim,
                      num_rows * head_dim, shape.num_segments(), shape.head_dim, it.out.data() + row * head_dim);
    }
    return it;
}

Output attend(const Kernels& kernels, const Shape& shape) {
    Output output;
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        const Attended it = attend_head(kernels, shape, kv_head, {});
        for (const Array<float>* values : {&it.max, &it.sum, &it.acc, &it.out}) output.add(values->all());
    }
    return output;
}

// A score is off by a chain of head_dim roundings of its magnitude, on either side, and a probability by ln 2 times as
// much (scores are in units of ln 2) relatively, twice: its own score's and the maximum's; and by what the pieces of
// its exponential differ where they meet. A probability that lies at a border of bf16 may be rounded to either
// neighbour, 2^-7 of it apart. A merged row has probabilities and their sum. A segment's state may be relative to a
// maximum that is another by kHeadroom.
std::vector<float> attend_bounds(const Kernels& oracle, const Shape& shape) {
    std::vector<float> bounds;
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        const Attended scores = attend_head(oracle, shape, kv_head, {.scores = true});
        const Attended values = attend_head(oracle, shape, kv_head, {.values = true});
        const float largest = *std::max_element(scores.max.begin(), scores.max.end()) + kHeadroom;
        const float score_error = float(shape.head_dim + 2) * 2 * kUnit * largest;
        const float weight_error = 2 * score_error * std::numbers::ln2_v<float>;
        const float sum_error = weight_error + 0x1p-12f + float(2 * kSegmentTokens) * kUnit;
        const float scaled = std::exp2(kHeadroom);
        for (std::size_t i = 0; i < values.max.size(); ++i) bounds.push_back(kHeadroom + score_error);
        for (const float sum : values.sum) bounds.push_back((scaled + sum_error) * sum);
        for (const float acc : values.acc) bounds.push_back((scaled + sum_error + 0x1p-7f) * acc);
        for (const float out : values.out) bounds.push_back((2 * sum_error + weight_error + 0x1p-7f) * out);
    }
    return bounds;
}

std::string name_of(std::string_view kernel, const Shape& it) {
    const std::string heads = std::to_string(it.num_kv_heads) + "x" + std::to_string(it.heads_per_kv);
    return join({kernel, it.type == KvType::bf16 ? "bf16" : "f32", heads + "x" + std::to_string(it.head_dim),
                 std::to_string(it.first_query) + ".." + std::to_string(it.num_tokens)});
}

}  // namespace

void add_attention_cases(std::vector<Case>& cases) {
    for (const KvType type : {KvType::bf16, KvType::f32}) {
        for (const Shape& it : {Shape{type, 5, 2, 1, 16, 0}, Shape{type, 33, 1, 1, 80, 0}}) {
            cases.push_back({name_of("store_kv", it), [it](const Kernels& kernels) { return store(kernels, it); }});
        }
        const Shape shapes[] = {{type, 1, 1, 1, 16, 0},      {type, 17, 2, 3, 64, 0},    {type, 40, 1, 4, 32, 0},
                                {type, 65, 1, 3, 64, 62},    {type, 130, 1, 5, 80, 125}, {type, 100, 2, 2, 112, 99},
                                {type, 90, 1, 1, 256, 83},   {type, 128, 1, 9, 48, 124}, {type, 513, 1, 2, 128, 508},
                                {type, 1030, 1, 3, 64, 1028}};
        for (const Shape& it : shapes) {
            Case added{name_of("attend", it), [it](const Kernels& kernels) { return attend(kernels, it); }};
            if (type == KvType::bf16) added.bounds = [it](const Kernels& oracle) { return attend_bounds(oracle, it); };
            cases.push_back(std::move(added));
        }
    }
    const Shape damaged{KvType::f32, 40, 1, 3, 16, 30, true};
    cases.push_back({"attend/damaged", [damaged](const Kernels& kernels) { return attend(kernels, damaged); }});
}

}  // namespace headrace::conformance
