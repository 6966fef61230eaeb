"""The CPU backend: against the reference, and bit for bit against itself however a step is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace import _core
from headrace.backend.cpu import CpuBackend, Profile, StepBounds
from headrace.backend.reference import ReferenceBackend
from headrace.ops import RowResults, RowScores
from headrace.run.sampler import sample_rows
from headrace.types import CapacityError, KVKind, ModelError
from tiny_weights import BLOCK_SIZE, Part, TinySpec, batch_of

ISAS = _core.available_isas()
BOUNDS = StepBounds(max_tokens=700, max_rows=700, max_seqs=70, max_len=2048)
NUM_BLOCKS = 160
SPECS = {
    "plain": TinySpec("q8_0"),
    "no-groups": TinySpec("q4_0", num_heads=2, num_kv_heads=2, head_dim=32),
    "four-heads-per-kv": TinySpec("q4_1", num_heads=4, num_kv_heads=1, head_dim=16, vocab_size=131),
    "three-heads-per-kv": TinySpec("bf16", hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=48, is_tied=False),
    "wide-heads": TinySpec("f16", hidden_size=32, num_heads=1, num_kv_heads=1, head_dim=128, rotary_dim=32),
    "partial-rotary": TinySpec("f32", num_heads=2, num_kv_heads=1, head_dim=80, rotary_dim=20, vocab_size=33),
    "mixed": TinySpec(
        "q4_0", mixed=(("v", "q8_0"), ("k", "f16"), ("down", "bf16"), ("embedding", "q8_0"), ("up", "q4_1"))
    ),
}


@pytest.fixture(scope="module")
def two_threads() -> Iterator[_core.ThreadPool]:
    pool = _core.ThreadPool(2)
    yield pool
    pool.close()


def loaded(spec: TinySpec, pool: _core.ThreadPool, *, isa: str | None = None, is_exact: bool = False) -> CpuBackend:
    backend = CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=pool, isa=isa, is_exact=is_exact)
    backend.load(NUM_BLOCKS)
    return backend


def reference(spec: TinySpec, *, is_exact: bool) -> ReferenceBackend:
    return ReferenceBackend(
        spec.forward(),
        spec.weights(),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        sampler=sample_rows,
        is_exact=is_exact,
    )


def tokens_of(spec: TinySpec, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


def two_sequences(spec: TinySpec) -> list[Part]:
    """One over several tiles, blocks and a segment's border, all its tokens scored; one of a few drawn tokens."""
    long, short = tokens_of(spec, 540), tokens_of(spec, 5, 1)
    return [
        Part(long, 0, list(range(40, 6, -1)), num_rows=540, targets=[*long[1:], 0]),
        Part(short, 0, [3], num_rows=5),
    ]


# Against the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_exact_mode_gives_the_references_logprobs(name: str, isa: str, two_threads: _core.ThreadPool) -> None:
    spec = SPECS[name]
    batch = batch_of(two_sequences(spec))
    ours = loaded(spec, two_threads, isa=isa, is_exact=True).run(batch)
    theirs = reference(spec, is_exact=True).run(batch)
    # both round to f32, in other orders: logits of up to 15 after sums of about 100 terms through 2 layers
    np.testing.assert_allclose(ours.scores.logprobs, theirs.scores.logprobs, atol=3e-4)
    np.testing.assert_allclose(ours.scores.top_logprobs, theirs.scores.top_logprobs, atol=3e-4)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_the_fast_path_rounds_as_the_reference_says(name: str, isa: str, two_threads: _core.ThreadPool) -> None:
    spec = SPECS[name]
    batch = batch_of(two_sequences(spec))
    ours = loaded(spec, two_threads, isa=isa).run(batch).scores.logprobs
    fast, exact = (reference(spec, is_exact=is_exact).run(batch).scores.logprobs for is_exact in (False, True))
    rounding = np.abs(fast - exact).mean()
    # A last bit that differs can tip an 8-bit code or a bf16 over, and so grow to one rounding step of one number:
    # the two fast paths differ by less than either does from the exact one, on average over 545 rows.
    assert np.abs(ours - fast).mean() < 0.9 * rounding
    assert np.abs(ours - exact).mean() < 1.5 * rounding


# Bit for bit ----------------------------------------------------------------------------------------------------


def assert_same(ours: RowResults, theirs: RowResults, rows: slice = slice(None)) -> None:
    """The same tokens and the same bits of every logprob."""
    assert ours.tokens[rows] == theirs.tokens
    for mine, others in zip(ours.scores, theirs.scores, strict=True):
        np.testing.assert_array_equal(mine[rows], others)


def in_chunks(backend: CpuBackend, part: Part, size: int, others: list[Part] | None = None) -> RowResults:
    """Every row of `part`, fed `size` tokens at a time, with others in the same steps before and after it."""
    tokens, scores = [], []
    for begin in range(0, len(part.tokens), size):
        fed = part.tokens[begin : begin + size]
        targets = part.targets[begin : begin + size]
        chunk = replace(part, tokens=fed, start=part.start + begin, num_rows=len(fed), targets=targets)
        before, after = (others[::2], others[1::2]) if others else ([], [])
        first = sum(other.num_rows for other in before)
        rows = backend.run(batch_of([*before, chunk, *after]))
        own = slice(first, first + len(fed))
        tokens += rows.tokens[own]
        scores.append([rows.scores.logprobs[own], rows.scores.top_ids[own, :5], rows.scores.top_logprobs[own, :5]])
    return RowResults(tokens, RowScores(*(np.concatenate(column) for column in zip(*scores, strict=True))))


@pytest.fixture(scope="module", params=[(isa, fmt) for isa in ISAS for fmt in ("q4_1", "bf16")], ids="-".join)
def cut(request: pytest.FixtureRequest, two_threads: _core.ThreadPool) -> tuple[CpuBackend, Part, RowResults]:
    """A backend, a sequence over more than one segment, drawn with a seed, and what it gives fed at once."""
    isa, fmt = request.param
    spec = TinySpec(fmt, num_heads=6, num_kv_heads=2, head_dim=32)
    backend = loaded(spec, two_threads, isa=isa)
    part = Part(tokens_of(spec, 560), 0, list(range(36)), num_rows=560, temperature=0.8, seed=7)
    return backend, part, backend.run(batch_of([part]))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_of_any_size_give_the_same_bits(cut: tuple[CpuBackend, Part, RowResults], size: int) -> None:
    backend, part, alone = cut
    blocks = list(range(100, 64, -1))  # in another order of blocks, too
    assert_same(in_chunks(backend, replace(part, blocks=blocks), size), alone)


@pytest.mark.parametrize("num_others", [1, 3, 63])
def test_company_in_the_step_changes_no_bit(cut: tuple[CpuBackend, Part, RowResults], num_others: int) -> None:
    backend, part, alone = cut
    others = [
        Part([i % 70] * (1 + i % 3), 3 * i % 5, [159 - i], num_rows=1, temperature=1.0, num_top=i % 7)
        for i in range(num_others)
    ]
    assert_same(in_chunks(backend, part, 400, others), alone)


@pytest.mark.parametrize("num_tokens", [1, 6, 560])  # one row; few enough to split the context; many claims
def test_the_number_of_threads_changes_no_bit(num_tokens: int) -> None:
    spec = TinySpec("q4_1", num_heads=6, num_kv_heads=2, head_dim=32)
    context = Part(tokens_of(spec, 600), 0, list(range(80)))
    part = Part(tokens_of(spec, num_tokens, 1), 600, list(range(80)), num_rows=num_tokens, temperature=1.0)
    results = []
    for num_threads in (1, 2, 3):
        pool = _core.ThreadPool(num_threads)
        backend = loaded(spec, pool)
        backend.run(batch_of([context]))
        results.append(backend.run(batch_of([part])))
        pool.close()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def sharers(spec: TinySpec, backend: CpuBackend, counts: Sequence[int], prefix: int) -> tuple[list[Part], list[Part]]:
    """Slices of `counts` tokens after one context of `prefix` tokens, in blocks of their own and in shared ones.

    Both lists feed the same: in the second, all but the last sequence keep the prefix in the first one's blocks.
    """
    context, num_prefix, num_own = tokens_of(spec, prefix), prefix // BLOCK_SIZE, -(-prefix // BLOCK_SIZE) + 2
    tables = [list(range(i * num_own, (i + 1) * num_own)) for i in range(len(counts))]
    apart = [
        Part(tokens_of(spec, count, i), prefix, table, num_rows=count, temperature=1.0, seed=i)
        for i, (count, table) in enumerate(zip(counts, tables, strict=True))
    ]
    for table in tables:
        backend.run(batch_of([Part(context, 0, table)]))
    shared = [replace(part, blocks=[*tables[0][:num_prefix], *part.blocks[num_prefix:]]) for part in apart[:-1]]
    return apart, [*shared, apart[-1]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("prefix", [256, 528, 560])  # one whole segment; two and a block; a part of the third's blocks
def test_sequences_that_share_blocks_get_the_bits_of_those_that_do_not(
    prefix: int, isa: str, two_threads: _core.ThreadPool
) -> None:
    spec = TinySpec("q4_1", num_heads=6, num_kv_heads=2, head_dim=32)
    backend = loaded(spec, two_threads, isa=isa)
    apart, shared = sharers(spec, backend, [1, 5, 16, 17], prefix)  # 17: too long to share a pass
    alone = [backend.run(batch_of([part])) for part in apart]
    for parts in (apart, shared, shared[::-1], [*shared, *apart[:1]][1:]):
        together, first = backend.run(batch_of(parts)), 0
        for part in parts:
            assert_same(together, alone[part.seed], slice(first, first + part.num_rows))
            first += part.num_rows


def test_more_sharers_than_one_pass_takes_get_their_own_bits(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("q4_1", num_heads=6, num_kv_heads=2, head_dim=32)
    backend = loaded(spec, two_threads)
    backend.run(batch_of([Part(tokens_of(spec, 272), 0, list(range(17)))]))
    parts = [
        Part(tokens_of(spec, 1, i), 272, [*range(17), 17 + i], temperature=1.0, seed=i) for i in range(BOUNDS.max_seqs)
    ]
    together = backend.run(batch_of(parts))
    for i, part in enumerate(parts):
        assert_same(together, backend.run(batch_of([part])), slice(i, i + 1))


def test_stale_keys_and_values_of_others_never_matter(cut: tuple[CpuBackend, Part, RowResults]) -> None:
    backend, part, alone = cut
    backend.run(batch_of([Part([5] * 560, 0, part.blocks)]))
    assert_same(in_chunks(backend, part, 200), alone)


def test_integer_paths_give_the_same_bits_on_every_instruction_set(two_threads: _core.ThreadPool) -> None:
    spec = SPECS["plain"]
    # exact mode's keys and values: bf16 products are the one thing in which instruction sets differ
    batch = batch_of(two_sequences(spec))
    first, *others = [loaded(spec, two_threads, isa=isa, is_exact=True).run(batch) for isa in ISAS]
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_step_that_memory_was_taken_for_runs(isa: str, two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("q8_0", num_heads=3, num_kv_heads=3, head_dim=32)
    bounds = StepBounds(max_tokens=37, max_rows=37, max_seqs=2, max_len=529)
    backend = CpuBackend(spec.forward(), spec.weights(), bounds, pool=two_threads, isa=isa)
    backend.load(num_blocks=36)
    part = Part(tokens_of(spec, 529), 0, list(range(35, 1, -1)), num_rows=529, temperature=1.0)
    one = Part([7], 0, [0])
    # the last chunk ends at max_len and fills max_tokens beside another slice; the others split the context in two
    assert_same(in_chunks(backend, part, 36, [one]), in_chunks(backend, part, 11))
    with pytest.raises(ValueError, match="at most 529"):
        backend.run(batch_of([replace(part, tokens=[1], start=529, num_rows=1)]))


# Loading --------------------------------------------------------------------------------------------------------


def test_memory_is_known_before_it_is_taken(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("q8_0", vocab_size=80, hidden_size=64)
    backend = CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=two_threads)
    embedding = 80 * 64 // 32 * 34
    assert backend.memory.kv_block == 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 * BLOCK_SIZE
    per_layer = 64 * (2 * 64 + 2 * 32 + 3 * 96) // 32 * 34
    assert backend.memory.weights == embedding + spec.num_layers * per_layer
    assert backend.memory.arena > 0
    assert backend.memory.scratch > 0


def test_exact_mode_keeps_weights_keys_and_values_in_f32(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("bf16")
    fast, exact = (
        CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=two_threads, is_exact=is_exact)
        for is_exact in (False, True)
    )
    assert exact.memory.weights == 2 * fast.memory.weights
    assert exact.memory.kv_block == 2 * fast.memory.kv_block


def test_scratch_does_not_grow_with_rows_times_vocabulary(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("q4_0", vocab_size=70_000, hidden_size=32)
    few, many = (
        CpuBackend(
            spec.forward(), spec.weights(), replace(BOUNDS, max_rows=rows, max_tokens=rows), pool=two_threads
        ).memory.scratch
        for rows in (100, 500)
    )
    assert many - few < 400 * 4096


def test_a_head_in_many_row_tiles_gives_every_row_its_own_result(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("q4_0", vocab_size=70_000, hidden_size=32)  # 16 MiB hold 59 rows of logits
    backend = CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=two_threads)
    backend.load(NUM_BLOCKS)
    part = Part(tokens_of(spec, 130), 0, list(range(9)), num_rows=130, temperature=1.0)
    assert_same(in_chunks(backend, part, 13), backend.run(batch_of([part])))


def test_the_kv_group_describes_what_a_token_costs(two_threads: _core.ThreadPool) -> None:
    (group,) = CpuBackend(
        TinySpec(num_layers=3).forward(), TinySpec(num_layers=3).weights(), BOUNDS, pool=two_threads
    ).kv_groups
    assert (group.kind, group.layers) == (KVKind.FULL, (0, 1, 2))
    assert group.key_bytes_per_token == group.value_bytes_per_token == 2 * 16 * 2


def test_a_head_size_that_kernels_cannot_do_is_refused_by_its_number(two_threads: _core.ThreadPool) -> None:
    spec = TinySpec("f32", head_dim=24)
    with pytest.raises(ModelError, match="head_dim is 24"):
        CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=two_threads)


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(two_threads: _core.ThreadPool) -> None:
    with pytest.raises(CapacityError, match="scalar"):
        CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=two_threads, isa="sve2")


def test_running_before_loading_is_refused(two_threads: _core.ThreadPool) -> None:
    backend = CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=two_threads)
    with pytest.raises(ValueError, match="allocate"):
        backend.run(batch_of([Part([1], 0, [0])]))


def test_a_step_that_is_cut_into_more_parts_than_the_pool_counts_is_refused(two_threads: _core.ThreadPool) -> None:
    bounds = replace(BOUNDS, max_tokens=_core.MAX_TILES + 1)
    with pytest.raises(CapacityError, match="at most 1,048,575 are allowed: lower --max-step-tokens"):
        CpuBackend(TinySpec().forward(), TinySpec().weights(), bounds, pool=two_threads)
    assert CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=two_threads).memory.arena > 0


# What the core tells of itself ------------------------------------------------------------------------------------


def test_a_profile_has_the_time_of_every_kind_of_phase_and_no_more_than_the_whole(
    two_threads: _core.ThreadPool,
) -> None:
    backend, batch = loaded(SPECS["plain"], two_threads), batch_of(two_sequences(SPECS["plain"]))
    backend.run(batch)
    assert backend.profile == Profile(0.0)
    backend.start_profile()
    backend.run(batch)
    once = backend.profile
    parts = (once.rows, once.linear, once.attention, once.head)
    assert all(part > 0 for part in parts) and sum(parts) <= once.total
    backend.run(batch)
    again = backend.profile.since(once)
    assert 0 < again.total < backend.profile.total


def test_reading_memory_takes_time_and_only_counts_that_make_sense_are_allowed(two_threads: _core.ThreadPool) -> None:
    speeds = _core.read_bandwidth(two_threads, 1 << 22, 3)
    assert len(speeds) == 3 and all(1e7 < speed < 1e13 for speed in speeds)
    for num_bytes, num_passes in ((0, 1), (-1, 1), (1, 0), (1 << 50, 1)):
        with pytest.raises(ValueError, match="it must be 1 to"):
            _core.read_bandwidth(two_threads, num_bytes, num_passes)


def test_a_line_takes_time_from_core_to_core_and_one_thread_has_nobody_to_hand_it_to(
    two_threads: _core.ThreadPool,
) -> None:
    seconds = _core.line_transfer(two_threads, 50)  # a pass may find one of the threads off its core
    assert 1 <= len(seconds) <= 50 and all(1e-9 < it < 1e-4 for it in seconds)
    alone = _core.ThreadPool(1)
    assert _core.line_transfer(alone, 5) == []
    with pytest.raises(ValueError, match="it must be 1 to"):
        _core.line_transfer(two_threads, 0)
    alone.close()
    with pytest.raises(ValueError, match="closed"):
        _core.line_transfer(alone, 1)
