#include "program.h"

#include <algorithm>
#include <numbers>
#include <stdexcept>
#include <utility>

namespace headrace {
namespace {

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// Cuts `bytes` off the front of a block of memory.
template <class T = std::byte>
T* take(std::byte*& rest, std::size_t bytes) {
    return reinterpret_cast<T*>(std::exchange(rest, rest + align_up(bytes)));
}

}  // namespace

// Recording --------------------------------------------------------------------------------------------------------

Buffer Program::buffer(std::size_t offset, int width, RowKind kind) {
    check_recording();
    require(width > 0, "a buffer must have a width");
    arena_floats_ = std::max(arena_floats_, offset + std::size_t(max_rows(bounds_, kind)) * width);
    return {offset, width};
}

void Program::check_recording() const {
    require(!arena_, "the program is recorded already");
    require(!has_head_, "the head is the last operation");
}

void Program::append(RowKind kind, RowOp op) {
    Rows* last = phases_.empty() ? nullptr : std::get_if<Rows>(&phases_.back());
    if (last == nullptr || last->kind != kind) {
        append_phase(Rows{kind, {}});
        last = std::get_if<Rows>(&phases_.back());
    }
    last->ops.push_back(std::move(op));
}

void Program::embed(std::size_t out, WeightRef table) {
    bounds_.vocab = table->matrix().rows;
    append(RowKind::tokens, Embed{buffer(out, table->matrix().cols, RowKind::tokens), table});
    weights_.push_back(std::move(table));
}

void Program::rms_norm(Place out, std::size_t x, std::vector<float> weight, float eps, RowKind kind) {
    const int width = int(weight.size());
    Norm norm{buffer(x, width, kind), std::make_shared<const std::vector<float>>(std::move(weight)), eps};
    if (out) return append(kind, RmsNorm{buffer(*out, width, kind), std::move(norm)});
    leave_unstored({std::move(norm), width, kind});
}

void Program::leave_unstored(Unstored rows) {
    require(!unstored_, "two inputs without a place were recorded before the linear or head that takes one");
    unstored_ = std::move(rows);
}

Input Program::input(Place x, int width, RowKind kind) {
    if (x) return buffer(*x, width, kind);
    require(unstored_ && unstored_->width == width && unstored_->kind == kind,
            "an input without a place must be the norm or gate recorded before, of its width");
    Input rows = std::move(unstored_->rows);
    unstored_.reset();
    return rows;
}

// One form of the input serves all weights that want it.
void Program::quantize(const Input& x, const std::vector<WeightRef>& weights, RowKind kind,
                       std::optional<int> rest_row) {
    const int rows = std::max(bounds_.max_tokens, bounds_.max_rows + rest_row.value_or(0));
    const int width = weights.front()->matrix().cols;
    bool is_done[kNumActs] = {};
    for (const WeightRef& weight : weights) {
        require(weight->matrix().cols == width, "a weight's columns differ from its input's width");
        const Act act = traits(weight->matrix().format).act;
        if (std::exchange(is_done[int(act)], true)) continue;
        act_bytes_[int(act)] = std::max(act_bytes_[int(act)], rows * act_row_bytes(act, width));
        append(kind, Quantize{x, width, act, rest_row});
    }
    weights_.insert(weights_.end(), weights.begin(), weights.end());
}

void Program::linear(const std::vector<std::size_t>& outs, Place x, const std::vector<WeightRef>& weights, Place add,
                     RowKind kind) {
    require(!weights.empty() && outs.size() == weights.size(), "a linear needs one output per weight");
    quantize(input(x, weights[0]->matrix().cols, kind), weights, kind, std::nullopt);
    std::vector<Linear::Product> products;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        products.push_back({weights[i], buffer(outs[i], weights[i]->matrix().rows, kind)});
    }
    std::optional<Buffer> addend;
    if (add) addend = buffer(*add, weights[0]->matrix().rows, kind);
    append_phase(Linear(kind, std::move(products), std::move(addend), pool_->num_threads()));
}

void Program::rotate(std::size_t out, std::size_t x, int width, int head_dim, const std::vector<double>& frequencies,
                     double magnitude) {
    const int pairs = int(frequencies.size());
    require(head_dim > 0 && width % head_dim == 0, "a rotated row must consist of whole heads");
    require(pairs > 0 && 2 * pairs <= head_dim, "rotary pairs must fit into the head");
    auto same = std::find_if(rotary_.begin(), rotary_.end(), [&](const Tables& it) {
        return it.frequencies == frequencies && it.magnitude == magnitude;
    });
    if (same == rotary_.end()) {
        const RotaryTable table{rotary_floats_, pairs};
        rotary_floats_ += std::size_t(bounds_.max_tokens) * 2 * pairs;
        std::vector<double> turns = frequencies;
        for (double& it : turns) it *= 2 * std::numbers::inv_pi;
        append(RowKind::tokens, FillRotary{table, std::move(turns), float(magnitude)});
        same = rotary_.insert(rotary_.end(), {frequencies, magnitude, table});
    }
    append(RowKind::tokens,
           Rotate{buffer(out, width, RowKind::tokens), buffer(x, width, RowKind::tokens), same->table, head_dim});
}

void Program::attention(std::size_t out, std::size_t q, std::size_t k, std::size_t v, const AttentionSite& site) {
    const KvCache& cache = *site.cache;
    require(site.group >= 0 && site.group < kMaxKvGroups, "there are at most 4 KV groups");
    require(site.layer >= 0 && site.layer < cache.num_layers(), "the KV group has no such layer");
    require(site.num_heads > 0 && site.num_heads % cache.num_kv_heads() == 0, "query heads must share KV heads evenly");
    const int width = site.num_heads * cache.head_dim(), kv_width = cache.num_kv_heads() * cache.head_dim();
    const RowKind kind = RowKind::tokens;
    append(kind, StoreKv{buffer(k, kv_width, kind), buffer(v, kv_width, kind), site.cache, site.group, site.layer});
    const Buffer result = buffer(out, width, kind);
    append_phase(
        Attention{result, buffer(q, width, kind), site.cache, site.group, site.layer, site.num_heads, site.scale});
    fetch_beside_products();
    append(kind, Merge{result, site.num_heads});

    num_kv_heads_ = bounds_.num_groups == 0 ? cache.num_kv_heads() : std::min(num_kv_heads_, cache.num_kv_heads());
    num_heads_ = std::max(num_heads_, site.num_heads);
    heads_per_kv_ = std::max(heads_per_kv_, site.num_heads / cache.num_kv_heads());
    head_dim_ = std::max(head_dim_, cache.head_dim());
    bounds_.num_groups = std::max(bounds_.num_groups, site.group + 1);
    caches_.resize(std::max(caches_.size(), std::size_t(site.group) + 1));
    require(caches_[site.group] == nullptr || caches_[site.group] == site.cache, "a KV group has one cache");
    caches_[site.group] = site.cache;
}

// The products between the attention just recorded and the one before fetch what it reads, each as much as it works.
void Program::fetch_beside_products() {
    const Attention& attention = std::get<Attention>(phases_.back());
    std::vector<Linear*> linears;
    double work = 0.0;
    for (auto phase = phases_.rbegin() + 1; phase != phases_.rend() && !std::holds_alternative<Attention>(*phase);
         ++phase) {
        if (auto* linear = std::get_if<Linear>(&*phase)) {
            linears.push_back(linear);
            work += linear->work();
        }
    }
    double end = 1.0;
    for (Linear* linear : linears) {
        const double begin = end - linear->work() / work;
        linear->later = Linear::Later{attention.cache, attention.group, attention.layer, std::max(begin, 0.0), end};
        end = begin;
    }
}

void Program::silu_mul(Place out, std::size_t gate, std::size_t up, int width, RowKind kind) {
    const Gate rows{buffer(gate, width, kind), buffer(up, width, kind)};
    if (out) return append(kind, SiluMul{buffer(*out, width, kind), rows});
    leave_unstored({rows, width, kind});
}

void Program::add(std::size_t out, std::size_t x, std::size_t y, int width, RowKind kind) {
    append(kind, Add{buffer(out, width, kind), buffer(x, width, kind), buffer(y, width, kind)});
}

void Program::select_rows(std::size_t out, std::size_t x, int width) {
    append(RowKind::logits, SelectRows{buffer(out, width, RowKind::logits), buffer(x, width, RowKind::tokens)});
}

void Program::head(Place x, WeightRef weight) {
    const Matrix& w = weight->matrix();
    require(w.rows == bounds_.vocab, "the head's rows differ from the embedding's");
    std::optional<int> rest_row;
    if (traits(w.format).act == Act::q8) rest_row = bounds_.max_rows;
    quantize(input(x, w.cols, RowKind::logits), {weight}, RowKind::logits, rest_row);
    append_phase(Head(std::move(weight), rest_row, pool_->num_threads()));
    has_head_ = true;
}

// Memory -----------------------------------------------------------------------------------------------------------

int Program::head_rows() const {
    const std::size_t row_bytes = std::max(bounds_.vocab, 1) * sizeof(float);
    return int(std::clamp<std::size_t>(kHeadBytes / row_bytes, 1, bounds_.max_rows));
}

Program::Sizes Program::sizes() const {
    const AttentionBounds most(bounds_);
    const std::size_t split = most.split_states * num_heads_, thread = most.thread_states * heads_per_kv_;
    Sizes sizes{
        .acts = {},
        .rotary = align_up(rotary_floats_ * sizeof(float)),
        .split_states = align_up(split * sizeof(float)),
        .split_acc = align_up(split * head_dim_ * sizeof(float)),
        .thread_states = align_up(thread * sizeof(float)),
        .thread_acc = align_up(thread * head_dim_ * sizeof(float)),
        .logits = align_up(std::size_t(head_rows()) * bounds_.vocab * sizeof(float)),
        .sample = align_up(sample_scratch_bytes(bounds_.vocab)),
    };
    for (int act = 0; act < kNumActs; ++act) sizes.acts[act] = align_up(act_bytes_[act]);
    return sizes;
}

std::size_t Program::scratch_nbytes() const {
    const Sizes it = sizes();
    const std::size_t of_thread = 2 * it.thread_states + it.thread_acc + it.sample;
    std::size_t planning = AttentionBounds(bounds_).nbytes() + 2 * bounds_.max_tokens * sizeof(int);
    for (int group = 0; group < bounds_.num_groups; ++group) {
        planning += ((later_blocks(group) + 1) * pool_->num_threads() + 1) * sizeof(int);
    }
    return it.acts[0] + it.acts[1] + it.acts[2] + it.rotary + 2 * it.split_states + it.split_acc + it.logits +
           pool_->num_threads() * of_thread + align_up(planning);
}

std::size_t Program::max_tiles() const {
    std::size_t most = 0;
    for (const Phase& phase : phases_) {
        most = std::max(most, std::visit([&](const auto& it) { return it.max_tiles(bounds_); }, phase));
    }
    return most;
}

void Program::allocate() {
    require(!arena_, "the program has its memory already");
    require(has_head_, "the program has no head yet");
    require(!unstored_, "an input without a place was recorded that no linear or head takes");
    require(max_tiles() <= ThreadPool::kMaxTiles, "a step within the bounds has more tiles than the pool counts");
    arena_ = Memory(arena_nbytes());
    scratch_ = Memory(scratch_nbytes());
    replay_.arena = arena_.floats();
    const Sizes it = sizes();
    std::byte* rest = scratch_.data();
    for (int act = 0; act < kNumActs; ++act) replay_.acts[act] = take(rest, it.acts[act]);
    replay_.rotary = take<float>(rest, it.rotary);
    const auto take_states = [&](std::size_t states, std::size_t acc) {
        float* max = take<float>(rest, states);
        float* sum = take<float>(rest, states);
        return States{max, sum, take<float>(rest, acc)};
    };
    replay_.split_states = take_states(it.split_states, it.split_acc);
    for (int thread = 0; thread < pool_->num_threads(); ++thread) {
        replay_.thread_states.push_back(take_states(it.thread_states, it.thread_acc));
    }
    replay_.logits = take<float>(rest, it.logits);
    replay_.head_rows = head_rows();
    replay_.sample_scratch = take(rest, pool_->num_threads() * it.sample);
    replay_.sample_scratch_bytes = it.sample;
    replay_.attention.reserve(AttentionBounds(bounds_));
    for (int group = 0; group < bounds_.num_groups; ++group) {
        replay_.attention.blocks_read[group].blocks.reserve(later_blocks(group) * pool_->num_threads());
        replay_.attention.blocks_read[group].begins.reserve(pool_->num_threads() + 1);
    }
    replay_.positions.reserve(bounds_.max_tokens);
    replay_.token_slices.reserve(bounds_.max_tokens);
}

// Replay -----------------------------------------------------------------------------------------------------------

std::string Program::find_obstacle() {
    if (!arena_) return "the program has no memory yet: allocate() first";
    if (!pool_->is_usable())
        return "the thread pool is closed, or belongs to the process that this one was forked from";
    if (is_filled_) return "";  // what is packed stays packed: hundreds of weights are not asked in each step
    for (const WeightRef& weight : weights_) {
        if (!weight->is_packed()) return "a weight is not packed yet";
    }
    for (int group = 0; group < bounds_.num_groups; ++group) {
        if (caches_[group] == nullptr || caches_[group]->num_blocks() == 0) return "a KV group has no memory yet";
    }
    is_filled_ = true;
    return "";
}

Bounds Program::bounds() const {
    Bounds bounds = bounds_;
    for (int group = 0; group < bounds.num_groups; ++group) bounds.num_blocks[group] = caches_[group]->num_blocks();
    return bounds;
}

void Program::bind(const Batch& batch, const RowResults& results) {
    replay_.batch = &batch;
    replay_.results = &results;
    replay_.round = -1;
    next_phase_ = 0;
    replay_.positions.clear();
    replay_.token_slices.clear();
    for (int s = 0; s < batch.num_slices(); ++s) {
        for (int i = 0; i < batch.token_offsets[s + 1] - batch.token_offsets[s]; ++i) {
            replay_.positions.push_back(batch.starts[s] + i);
            replay_.token_slices.push_back(s);
        }
    }
    replay_.attention.make(batch, replay_.num_threads, num_kv_heads_);
    for (int group = 0; group < bounds_.num_groups; ++group) {
        const std::size_t most = batch.num_tokens() > kFewRows ? later_blocks(group) : 0;
        replay_.attention.list_blocks_read(batch, group, replay_.num_threads, most);
    }
}

// Of one thread.
std::size_t Program::later_blocks(int group) const {
    if (caches_[group] == nullptr) return 0;
    return kLaterBytes / caches_[group]->layer_block_nbytes() / pool_->num_threads();
}

// What passed since the last phase was opened belongs to that phase: all its tiles are done.
void Program::lap() {
    const Clock::time_point now = Clock::now();
    if (replay_.round >= 0) {
        profile_->phases[phases_[next_phase_].index()] += std::chrono::duration<double>(now - lap_).count();
    }
    lap_ = now;
}

int Program::open() {
    if (profile_) lap();
    while (next_phase_ < phases_.size()) {
        const Phase& phase = phases_[next_phase_];
        const int rounds = std::visit([&](const auto& it) { return it.rounds(replay_); }, phase);
        if (++replay_.round < rounds) return std::visit([&](const auto& it) { return it.tiles(replay_); }, phase);
        ++next_phase_;
        replay_.round = -1;
    }
    return Job::kEnd;
}

std::span<const std::byte> Program::ahead(int thread) const {
    for (std::size_t i = next_phase_ + 1;; ++i) {  // around, into the next step: there is a head
        const Phase& phase = phases_[i % phases_.size()];
        if (const auto* linear = std::get_if<Linear>(&phase)) return linear->first_weights(thread);
        if (const auto* head = std::get_if<Head>(&phase)) return head->first_weights(thread);
    }
}

void Program::run(const Batch& batch, const RowResults& results, const std::function<void()>& meanwhile) {
    std::lock_guard one_run(run_mutex_);
    const Clock::time_point began = profile_ ? Clock::now() : Clock::time_point();
    bind(batch, results);
    meanwhile_ = &meanwhile;
    pool_->run({this, [](void* self) { return static_cast<Program*>(self)->open(); },
                [](void* self, int tile, int thread) {
                    const Program& it = *static_cast<const Program*>(self);
                    std::visit([&](const auto& phase) { phase.run(it.replay_, tile, thread); },
                               it.phases_[it.next_phase_]);
                },
                [](void* self, int thread) { return static_cast<const Program*>(self)->ahead(thread); },
                [](void* self) {
                    const std::function<void()>& function = *static_cast<const Program*>(self)->meanwhile_;
                    if (function) function();
                }});
    if (profile_) profile_->total += std::chrono::duration<double>(Clock::now() - began).count();
}

}  // namespace headrace
