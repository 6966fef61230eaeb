"""The core's border: a batch or a recording that is wrong in any way raises ValueError and touches nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from headrace import _core
from headrace.backend.cpu import CpuBackend, StepBounds
from headrace.backend.kv import MAX_AHEAD_BYTES, MIN_AHEAD_BYTES, REST_S, KVStore, num_ahead
from headrace.ops import Batch
from tiny_weights import Part, TinySpec, batch_of, floats, ints

ISA = _core.available_isas()[0]
VOCAB = TinySpec().vocab_size
BOUNDS = StepBounds(max_tokens=40, max_rows=12, max_seqs=3, max_len=100)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    pool = _core.ThreadPool(2)
    backend = CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=pool)
    backend.load(num_blocks=8)
    yield backend
    backend.close()
    pool.close()


def good() -> Batch:
    return batch_of([Part([1, 2, 3], 14, [5, 2], num_rows=2), Part([4, 5], 0, [7])])


def columns(**changes: Any) -> Callable[[Batch], Batch]:
    return lambda batch: batch._replace(**changes)


def sampling(**changes: Any) -> Callable[[Batch], Batch]:
    return lambda batch: batch._replace(sampling=batch.sampling._replace(**changes))


HOSTILE: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "token beyond the vocabulary": (columns(tokens=ints([1, 2, VOCAB, 4, 5])), r"tokens\[2\] is 77"),
    "negative token": (columns(tokens=ints([1, -2, 3, 4, 5])), r"tokens\[1\] is -2"),
    "tokens of 64 bits": (columns(tokens=np.array([1, 2, 3, 4, 5])), "tokens must be an array of int32"),
    "tokens with strides": (columns(tokens=ints(range(10))[::2]), "tokens must be contiguous"),
    "tokens as a list": (columns(tokens=[1, 2, 3, 4, 5]), "tokens must be an array"),
    "too many tokens": (columns(tokens=ints([1] * 41)), "feeds 41 tokens, at most 40"),
    "falling offsets": (columns(token_offsets=ints([0, 6, 5])), "token_offsets falls"),
    "offsets that end early": (columns(token_offsets=ints([0, 3, 4])), "end at 5"),
    "offsets that begin late": (columns(token_offsets=ints([1, 3, 5])), "begin at 0"),
    "an offset too few": (columns(token_offsets=ints([0, 5])), "token_offsets has 2 entries, not 3"),
    "no offsets": (columns(token_offsets=ints([])), "token_offsets has 0 entries"),
    "a slice without tokens": (columns(token_offsets=ints([0, 0, 5])), "slice 0 feeds no token"),
    "negative start": (columns(starts=ints([14, -1])), "slice 1 feeds 2 tokens at position -1"),
    "start past the longest sequence": (columns(starts=ints([98, 0])), "at most 100"),
    "start that overflows": (columns(starts=ints([2**31 - 1, 0])), "at most 100"),
    "too many slices": (
        lambda _: batch_of([Part([1], 0, [i]) for i in range(4)]),
        "has 4 slices, at most 3",
    ),
    "too many rows": (lambda _: batch_of([Part([1] * 13, 0, [0], num_rows=13)]), "13 logit rows, at most 12"),
    "row of no token": (columns(row_tokens=ints([1, 2, 5])), r"row_tokens\[2\] is 5"),
    "negative row": (columns(row_tokens=ints([1, -1, 4])), r"row_tokens\[1\] is -1"),
    "more rows than sampled": (columns(row_tokens=ints([1, 2, 3, 4])), "targets has 3 entries, not 4"),
    "block beyond the pool": (columns(blocks=(ints([5, 8, 7]),)), "blocks.* is 8"),
    "freed block": (columns(blocks=(ints([5, -1, 7]),)), "blocks.* is -1"),
    "too few blocks": (columns(blocks=(ints([5, 7]),), block_offsets=(ints([0, 1, 2]),)), "it needs 2"),
    "block offsets past the end": (columns(block_offsets=(ints([0, 2, 4]),)), "block_offsets must begin at 0"),
    "no groups": (columns(blocks=(), block_offsets=()), "blocks has 0 entries, not 1"),
    "two groups": (lambda b: b._replace(blocks=b.blocks * 2, block_offsets=b.block_offsets * 2), "2 entries, not 1"),
    "nine groups": (lambda b: b._replace(blocks=b.blocks * 9, block_offsets=b.block_offsets * 9), "block_offsets is 9"),
    "groups that differ": (lambda b: b._replace(blocks=b.blocks * 2), "differ in groups"),
    "target beyond the vocabulary": (sampling(targets=ints([VOCAB, -1, -1])), r"targets\[0\]"),
    "target below draw": (sampling(targets=ints([-2, -1, -1])), r"targets\[0\]"),
    "temperature of doubles": (sampling(temperature=np.zeros(3)), "temperature must be an array of float32"),
    "seeds of int64": (sampling(seeds=np.zeros(3, np.int64)), "seeds must be an array of uint64"),
    "a short column": (sampling(min_p=floats([0, 0])), "min_p has 2 entries, not 3"),
    "too many alternatives": (sampling(num_top=ints([65, 0, 0])), r"num_top\[0\] is 65"),
    "bias past the vocabulary": (
        sampling(bias_offsets=ints([0, 1, 1, 1]), bias_ids=ints([VOCAB]), bias_values=floats([1])),
        r"bias_ids\[0\]",
    ),
    "bias without values": (sampling(bias_offsets=ints([0, 1, 1, 1]), bias_ids=ints([1])), "bias_values has 0"),
    "history past the vocabulary": (
        sampling(history_offsets=ints([0, 0, 0, 1]), history=ints([-1])),
        r"history\[0\]",
    ),
    "history offsets that fall": (
        sampling(history_offsets=ints([0, 2, 1, 2]), history=ints([1, 1])),
        "history_offsets falls",
    ),
    "negative prompt": (sampling(num_prompt=ints([0, 0, -1])), r"num_prompt\[2\]"),
    "negative top_k": (sampling(top_k=ints([0, 0, -1])), r"top_k\[2\]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_batch_is_refused_with_what_is_wrong(backend: CpuBackend, name: str) -> None:
    change, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        backend.run(change(good()))


def test_the_batch_that_the_hostile_ones_are_made_of_runs(backend: CpuBackend) -> None:
    assert len(backend.run(good()).tokens) == 3


@pytest.mark.parametrize("mask", [np.zeros(2, np.uint32), np.zeros((3, 3), np.int32), np.zeros((2, 3), np.uint32)])
def test_a_mask_of_another_shape_or_type_is_refused(backend: CpuBackend, mask: Any) -> None:
    with pytest.raises(ValueError, match="mask"):
        backend.run(good(), mask)


def test_a_mask_allows_only_its_tokens(backend: CpuBackend) -> None:
    mask = np.zeros((3, 3), np.uint32)
    mask[:, 1] = [1 << 3, 1 << 4, 0]
    np.testing.assert_array_equal(backend.run(good(), mask).tokens, [35, 36, -1])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_to_be_done_meanwhile_is_done_once_by_the_thread_that_runs_the_step(num_threads: int) -> None:
    pool = _core.ThreadPool(num_threads)
    backend = CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=pool)
    backend.load(num_blocks=8)
    alone = backend.run(good())
    called: list[threading.Thread] = []
    assert backend.run(good(), None, lambda: called.append(threading.current_thread())).tokens == alone.tokens
    assert called == [threading.current_thread()]
    backend.close()
    pool.close()


def test_what_is_raised_meanwhile_is_raised_when_the_step_is_done(backend: CpuBackend) -> None:
    def fail() -> None:
        raise KeyboardInterrupt("meanwhile")

    with pytest.raises(KeyboardInterrupt, match="meanwhile"):
        backend.run(good(), None, fail)
    assert len(backend.run(good()).tokens) == 3


def test_arrays_that_come_again_are_read_again(backend: CpuBackend) -> None:
    mask = np.full((3, 3), 0xFFFFFFFF, np.uint32)
    first, second = good(), sampling(targets=ints([7, 8, 9]))(good())
    drawn, scored = backend.run(first, mask).tokens, backend.run(second, mask).tokens
    assert scored == [7, 8, 9] != drawn
    assert [backend.run(batch, mask).tokens for batch in (second, first, second)] == [scored, drawn, scored]
    first.sampling.targets[:] = [1, 2, 3]  # what it holds may change, where it lies does not
    assert backend.run(first, mask).tokens == [1, 2, 3]
    first.sampling.targets[0] = VOCAB
    with pytest.raises(ValueError, match=r"targets\[0\]"):
        backend.run(first, mask)


def test_an_empty_step_gives_nothing(backend: CpuBackend) -> None:
    assert len(backend.run(batch_of([])).tokens) == 0


def test_more_alternatives_than_the_vocabulary_has_leave_the_rest_empty(backend: CpuBackend) -> None:
    spec = TinySpec("f32", vocab_size=3)
    pool = _core.ThreadPool(1)
    small = CpuBackend(spec.forward(), spec.weights(), BOUNDS, pool=pool)
    small.load(num_blocks=1)
    results = small.run(batch_of([Part([1, 2], 0, [0], num_top=5)]))
    assert sorted(results.scores.top_ids[0, :3]) == [0, 1, 2]
    np.testing.assert_array_equal(results.scores.top_ids[0, 3:], -1)


def test_a_closed_pool_is_refused() -> None:
    pool = _core.ThreadPool(2)
    backend = CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=pool)
    backend.load(num_blocks=8)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        backend.run(good())


# Recording ------------------------------------------------------------------------------------------------------


def program() -> _core.Program:
    return _core.Program(_core.ThreadPool(1), ISA, max_tokens=4, max_rows=4, max_seqs=2, max_len=64)


def weight(rows: int = 32, columns: int = 32) -> _core.Weight:
    return _core.Weight(ISA, "f32", rows, columns)


def record_attention(it: _core.Program, **changes: Any) -> None:
    kv = _core.KvCache("bf16", 2, 2, 16)
    it.attention(0, 0, 0, 0, kv, **{"group": 0, "layer": 0, "num_heads": 4, "scale": 1.0, **changes})


def record_unstored(it: _core.Program) -> _core.Program:
    it.silu_mul(None, 0, 0, 32, False)
    return it


def record_head_beside_unstored(it: _core.Program) -> _core.Program:
    it.embed(0, weight())
    record_unstored(it).head(0, weight())
    return it


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda it: it.linear([0], 0, [weight(), weight()], None, False), "one output per weight"),
        (lambda it: it.linear([], 0, [], None, False), "one output per weight"),
        (lambda it: it.linear([0, 0], 0, [weight(), weight(columns=64)], None, False), "columns differ"),
        (lambda it: it.rotate(0, 0, 32, 12, np.ones(4), 1.0), "whole heads"),
        (lambda it: it.rotate(0, 0, 32, 16, np.ones(9), 1.0), "fit into the head"),
        (lambda it: record_attention(it, layer=2), "no such layer"),
        (lambda it: record_attention(it, num_heads=3), "evenly"),
        (lambda it: record_attention(it, group=4), "KV groups"),
        (lambda it: it.head(0, weight()), "differ from the embedding's"),
        (lambda it: it.rms_norm(0, 0, np.ones(3), 1e-5, False), "weight must be an array of float32"),
        (lambda it: it.linear([0], None, [weight()], None, False), "norm or gate recorded before"),
        (lambda it: record_unstored(it).linear([0], None, [weight()], None, True), "norm or gate recorded before"),
        (lambda it: record_unstored(it).linear([0], None, [weight(columns=64)], None, False), "of its width"),
        (lambda it: record_unstored(record_unstored(it)), "two inputs without a place"),
        (lambda it: record_head_beside_unstored(it).allocate(), "no linear or head takes"),
        (lambda it: it.allocate(), "no head"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(record: Callable[[_core.Program], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(program())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sse9", "f32", 32, 32), "sse9"),
        ((ISA, "q3_k", 32, 32), "q3_k"),
        ((ISA, "q8_0", 32, 33), "whole blocks of 32"),
        ((ISA, "f32", 0, 32), "rows is 0"),
        ((ISA, "f32", 32, 2**25), "columns is 33554432"),
    ],
)
def test_a_weight_of_impossible_shape_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Weight(*arguments)


def test_a_weight_takes_exactly_its_bytes_once() -> None:
    pool, it = _core.ThreadPool(1), weight(2, 32)
    with pytest.raises(ValueError, match="not packed"):
        it.to_f32()
    with pytest.raises(ValueError, match="takes 256 bytes, not 255"):
        it.pack(pool, np.zeros(255, np.uint8))
    it.pack(pool, np.zeros(256, np.uint8))
    with pytest.raises(ValueError, match="packed already"):
        it.pack(pool, np.zeros(256, np.uint8))


def test_weights_that_lie_together_hold_their_own_values() -> None:
    pool, shapes = _core.ThreadPool(2), [(20, 32), (1, 40), (33, 7)]
    weights = [weight(*shape) for shape in shapes]
    values = [np.full(shape, i + 1, np.float32) for i, shape in enumerate(shapes)]
    _core.place_together(weights)
    for it, data in reversed(list(zip(weights, values, strict=True))):
        it.pack(pool, data.reshape(-1).view(np.uint8))
    for it, data in zip(weights, values, strict=True):
        np.testing.assert_array_equal(it.to_f32(), data)


def test_a_weight_has_one_place() -> None:
    it = weight()
    with pytest.raises(ValueError, match="named twice"):
        _core.place_together([it, it])
    _core.place_together([it])
    with pytest.raises(ValueError, match="its memory already"):
        _core.place_together([it])


# KV cache -------------------------------------------------------------------------------------------------------


def test_a_store_knows_its_size_and_takes_no_memory_before_it_must() -> None:
    store = KVStore(num_layers=3, num_kv_heads=2, head_dim=32, is_exact=False)
    assert store.block_nbytes == 3 * 2 * 2 * 32 * 2 * _core.BLOCK_TOKENS
    assert store.cache.nbytes == 0
    store.allocate(9)
    assert store.cache.nbytes == 9 * store.block_nbytes
    store.close()


def touched_at_least(store: KVStore, expected: int) -> bool:
    deadline = time.monotonic() + 10
    while store.num_touched < expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return store.num_touched >= expected


def touched(store: KVStore, expected: int) -> bool:
    return touched_at_least(store, expected) and store.num_touched == expected


def step(store: KVStore, last_block: int) -> None:
    store.begin_step()
    store.use(ints([0, last_block]))
    store.end_step()


@pytest.mark.parametrize("mib", [1, 2, 40])
def test_as_much_is_touched_ahead_as_has_been_used_within_limits(mib: int) -> None:
    at_least, at_most = (-(-limit // (mib << 20)) for limit in (MIN_AHEAD_BYTES, MAX_AHEAD_BYTES))
    assert [num_ahead(used, mib << 20) for used in (0, 1, at_least)] == [at_least] * 3
    assert num_ahead(at_least + 1, mib << 20) == at_least + 1
    assert num_ahead(at_most + 1, mib << 20) == num_ahead(10**6, mib << 20) == at_most


@pytest.fixture
def store() -> Iterator[KVStore]:
    it = KVStore(num_layers=64, num_kv_heads=4, head_dim=256, is_exact=False)
    it.allocate(3 * num_ahead(0, it.block_nbytes))
    yield it
    it.close()


def test_blocks_are_touched_ahead_of_use_to_the_last_one(store: KVStore) -> None:
    ahead = num_ahead(0, store.block_nbytes)
    assert touched(store, ahead)
    step(store, 2)
    assert touched(store, 3 + ahead)
    step(store, 3 * ahead - 1)
    assert touched(store, 3 * ahead)


def test_no_block_is_touched_beside_a_step_nor_shortly_after(store: KVStore) -> None:
    ahead = num_ahead(0, store.block_nbytes)
    assert touched(store, ahead)
    store.begin_step()
    store.use(ints([ahead]))
    time.sleep(3 * REST_S)
    assert store.num_touched == ahead
    ended = time.monotonic()
    store.end_step()
    assert touched_at_least(store, ahead + 1)
    assert time.monotonic() - ended >= REST_S


def test_blocks_are_touched_after_steps_that_used_more_than_was_about_to_be(store: KVStore) -> None:
    ahead = num_ahead(0, store.block_nbytes)
    assert touched(store, ahead)
    step(store, 0)
    time.sleep(REST_S / 5)  # the thread has seen what is wanted, and waits for steps to end
    step(store, 2 * ahead)
    assert touched(store, 3 * ahead)


def test_after_a_step_that_was_refused_blocks_are_touched_too() -> None:
    pool = _core.ThreadPool(1)
    backend = CpuBackend(TinySpec().forward(), TinySpec().weights(), BOUNDS, pool=pool)
    backend.load(num_blocks=8)
    with pytest.raises(ValueError, match="group"):
        backend.run(good()._replace(blocks=()))
    assert touched(backend._store, 8)
    backend.close()


def test_touching_past_the_end_is_refused() -> None:
    memory = _core.KvCache("f32", 1, 1, 16)
    memory.allocate(4)
    memory.touch(0, 4)
    for first, count in ((0, 5), (4, 1), (-1, 1), (2, -1)):
        with pytest.raises(ValueError, match="block"):
            memory.touch(first, count)


@pytest.mark.parametrize("arguments", [("f16", 1, 1, 16), ("bf16", 0, 1, 16), ("bf16", 1, 1, 24), ("bf16", 1, 1, 272)])
def test_a_kv_cache_of_impossible_shape_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"stored as|num_layers|head_dim"):
        _core.KvCache(*arguments)
