"""The recorder's peephole and the layout of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from headrace import _core
from headrace.backend.layout import lay_out, lives_of
from headrace.backend.recording import Add, Attention, Linear, Operation, Recorder, RowKind, Value, fuse
from headrace.backend.weights import map_weights
from headrace.ops import Ops
from headrace.types import InvariantError
from tiny_weights import TinySpec

NUM_ROWS = {RowKind.TOKENS: 10, RowKind.LOGITS: 3}
NORM = np.ones(32, np.float32)
SQUARE = _core.Weight(_core.available_isas()[0], "f32", 32, 32)


def recorded(spec: TinySpec) -> list[Operation]:
    def prepare(tensor):
        if len(tensor.shape) == 1:
            return tensor.to_f32()
        return _core.Weight(_core.available_isas()[0], tensor.format.name, *tensor.shape)

    recorder = Recorder()
    spec.forward()(recorder, map_weights(spec.weights(), prepare))
    return recorder.operations


def test_both_residuals_of_a_layer_are_fused_into_their_linears() -> None:
    operations = recorded(TinySpec(num_layers=3))
    assert sum(isinstance(operation, Add) for operation in operations) == 6
    fused = fuse(operations)
    assert not [operation for operation in fused if isinstance(operation, Add)]
    assert sum(isinstance(operation, Linear) and operation.addend is not None for operation in fused) == 6


def test_after_the_last_keys_and_values_only_rows_with_logits_are_computed() -> None:
    operations = recorded(TinySpec(num_layers=3))
    last = max(i for i, operation in enumerate(operations) if isinstance(operation, Attention))
    assert {value.kind for operation in operations[last + 1 :] for value in operation.writes} == {RowKind.LOGITS}
    assert {value.kind for operation in operations[: last + 1] for value in operation.writes} == {RowKind.TOKENS}


def test_a_product_that_is_used_again_is_not_fused_away() -> None:
    ops = Recorder()
    x = ops.embed(SQUARE)
    (product,) = ops.linear(x, (SQUARE,))
    ops.add(x, product)
    ops.add(x, product)
    assert fuse(ops.operations) == ops.operations


def test_norms_and_gates_that_one_linear_or_the_head_reads_are_not_stored() -> None:
    operations = recorded(TinySpec(num_layers=3))
    fused = fuse(operations)
    gone = {value for it in operations for value in it.writes} - {value for it in fused for value in it.writes}
    assert len(gone) == 3 * 5 + 1  # two norms, a gate and two products that a residual joined per layer; the last norm
    assert not gone & {value for it in fused for value in (*it.reads, *it.reads_late)}


def test_a_norm_that_is_read_twice_is_stored() -> None:
    ops = Recorder()
    x = ops.rms_norm(ops.embed(SQUARE), NORM, 1e-5)
    ops.linear(x, (SQUARE,))
    ops.head(x, SQUARE)
    assert fuse(ops.operations) == ops.operations


def places(operations: Sequence[Operation]) -> list[tuple[Value, int, int, int, int]]:
    """(value, begin, end, first phase, last phase) of every value."""
    lives, offsets = lives_of(operations), lay_out(operations, NUM_ROWS)
    return [
        (value, begin, begin + value.width * NUM_ROWS[value.kind], lives[value].first, lives[value].last)
        for value, begin in offsets.items()
    ]


def test_values_that_live_in_the_same_phase_share_no_floats_unless_one_replaces_the_other() -> None:
    operations = fuse(recorded(TinySpec(num_layers=3)))
    replaced = {
        (out, operand) for operation in operations for out in operation.writes for operand in operation.replaceable
    }
    everything = places(operations)
    for a, begin_a, end_a, first_a, last_a in everything:
        for b, begin_b, end_b, first_b, last_b in everything:
            is_together = first_a <= last_b and first_b <= last_a
            is_overlapping = begin_a < end_b and begin_b < end_a
            if a != b and is_together and is_overlapping:
                assert (a, b) in replaced or (b, a) in replaced
                assert (begin_a, end_a) == (begin_b, end_b)


def test_the_arena_does_not_grow_with_the_number_of_layers() -> None:
    few, many = (max(end for _, _, end, _, _ in places(recorded(TinySpec(num_layers=n)))) for n in (2, 12))
    assert few == many


def test_an_operand_that_is_read_later_in_the_same_phase_is_not_replaced() -> None:
    ops = Recorder()
    x = ops.embed(SQUARE)
    y = ops.embed(SQUARE)
    total = ops.add(x, y)
    again = ops.rms_norm(x, NORM, 1e-5)
    ops.head(ops.select_rows(ops.add(total, again)), SQUARE)
    offsets = lay_out(ops.operations, NUM_ROWS)
    assert offsets[total] == offsets[y]
    assert offsets[total] != offsets[x]


def test_a_row_operations_result_never_takes_the_place_of_what_other_rows_still_read() -> None:
    ops = Recorder()
    x = ops.embed(SQUARE)
    h = ops.rms_norm(x, NORM, 1e-5)  # x ends here, but rows of one phase overtake each other
    g = ops.rms_norm(h, NORM, 1e-5)
    offsets = lay_out(ops.operations, NUM_ROWS)
    assert len({offsets[x], offsets[h], offsets[g]}) == 3


def test_reading_before_writing_is_a_bug_that_is_named() -> None:
    with pytest.raises(InvariantError, match="value 7"):
        lives_of([Add(Value(7, 32, RowKind.TOKENS), Value(8, 32, RowKind.TOKENS), Value(9, 32, RowKind.TOKENS))])


def test_vectors_and_matrices_are_not_confused() -> None:
    ops: Ops = Recorder()
    with pytest.raises(InvariantError, match="vector of 32"):
        ops.embed(NORM)
    with pytest.raises(InvariantError, match=r"matrix \[32, 32\]"):
        ops.rms_norm(Recorder().embed(SQUARE), SQUARE, 1e-5)


def test_a_tied_embedding_is_prepared_once() -> None:
    prepared = []
    tree = map_weights(TinySpec(is_tied=True).weights(), lambda tensor: prepared.append(tensor) or len(prepared))
    assert tree.embedding == tree.head
    untied = map_weights(TinySpec(is_tied=False).weights(), partial(id))
    assert untied.embedding != untied.head


def test_every_layers_attention_is_recorded_in_order() -> None:
    shapes = [operation.shape for operation in recorded(TinySpec(num_layers=3)) if isinstance(operation, Attention)]
    assert [shape.layer for shape in shapes] == [0, 1, 2]
