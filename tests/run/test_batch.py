"""Packing a plan: what each logit row is told."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.run.batch import Packer, pack
from headrace.types import MAX_LOGIT_BIAS, Request, SamplingParams, StepPlan


def request(
    prompt: Sequence[int], *, stop_ids: frozenset[int] = frozenset(), choice: int = 0, **params: Any
) -> Request:
    seed = params.pop("seed", 7)
    return Request(1, array("i", prompt), SamplingParams(**params), seed, stop_ids, choice)


def plan_of(*parts: dict[str, Any]) -> StepPlan:
    """Each part: request, tokens, start, targets of its rows; optionally blocks, drafts, history."""
    tokens, targets, blocks = array("i"), array("i"), array("i")
    offsets = {name: array("i", [0]) for name in ("tokens", "rows", "blocks")}
    for part in parts:
        tokens.extend(part["tokens"])
        targets.extend(part["targets"])
        blocks.extend(part.get("blocks", [0]))
        for name, values in (("tokens", tokens), ("rows", targets), ("blocks", blocks)):
            offsets[name].append(len(values))
    histories = tuple(array("i", part["history"]) if "history" in part else None for part in parts)
    return StepPlan(
        step=3,
        requests=tuple(part["request"] for part in parts),
        tokens=tokens,
        token_offsets=offsets["tokens"],
        starts=array("i", [part["start"] for part in parts]),
        num_drafts=array("i", [part.get("drafts", 0) for part in parts]),
        row_offsets=offsets["rows"],
        targets=targets,
        block_offsets=(offsets["blocks"],),
        blocks=(blocks,),
        histories=histories,
    )


MIDDLE = {"request": request([1] * 9), "tokens": [1, 2, 3], "start": 4, "targets": []}
DECODE = {
    "request": request([1, 2], temperature=0.5, seed=2**64 - 1, choice=3),
    "tokens": [9],
    "start": 6,
    "targets": [-1],
}
VERIFY = {"request": request([5] * 4, top_k=3), "tokens": [6, 7, 8], "start": 10, "targets": [-1] * 3, "drafts": 2}


def test_rows_belong_to_the_last_tokens_that_their_slice_feeds() -> None:
    batch = pack(plan_of(MIDDLE, DECODE, VERIFY))
    np.testing.assert_array_equal(batch.row_tokens, [3, 4, 5, 6])
    np.testing.assert_array_equal(batch.tokens, [1, 2, 3, 9, 6, 7, 8])
    np.testing.assert_array_equal(batch.token_offsets, [0, 3, 4, 7])
    np.testing.assert_array_equal(batch.starts, [4, 6, 10])


def test_a_rows_position_is_that_of_the_token_it_predicts() -> None:
    np.testing.assert_array_equal(pack(plan_of(MIDDLE, DECODE, VERIFY)).sampling.positions, [7, 11, 12, 13])


def test_each_row_has_its_requests_parameters() -> None:
    rows = pack(plan_of(MIDDLE, DECODE, VERIFY)).sampling
    np.testing.assert_array_equal(rows.seeds, np.array([2**64 - 1, 7, 7, 7], np.uint64))
    np.testing.assert_array_equal(rows.choices, [3, 0, 0, 0])
    np.testing.assert_array_equal(rows.temperature, np.array([0.5, 1, 1, 1], np.float32))
    np.testing.assert_array_equal(rows.top_k, [0, 3, 3, 3])
    np.testing.assert_array_equal(rows.num_prompt, [2, 4, 4, 4])


def test_rows_that_score_a_prompt_have_its_number_of_logprobs() -> None:
    part = {
        "request": request([1, 2, 3], logprobs=2, prompt_logprobs=5),
        "tokens": [1, 2, 3],
        "start": 0,
        "targets": [2, 3, -1],
    }
    rows = pack(plan_of(part, DECODE)).sampling
    np.testing.assert_array_equal(rows.num_top, [5, 5, 2, -1])
    np.testing.assert_array_equal(rows.targets, [2, 3, -1, -1])
    np.testing.assert_array_equal(rows.num_prompt, [1, 2, 3, 2])
    assert rows.max_top == 5


def test_end_tokens_are_forbidden_until_min_tokens_have_been_drawn() -> None:
    wants_two = request([1, 2, 3], min_tokens=2, stop_ids=frozenset({40, 4}), logit_bias=((8, 2.5),))
    # rows predict output tokens 0, 1, 2 of the answer
    part = {"request": wants_two, "tokens": [3, 5, 6], "start": 2, "targets": [-1] * 3, "drafts": 2}
    rows = pack(plan_of(DECODE, part)).sampling
    np.testing.assert_array_equal(rows.bias_offsets, [0, 0, 3, 6, 7])
    np.testing.assert_array_equal(rows.bias_ids, [8, 4, 40, 8, 4, 40, 8])
    inf = np.float32(np.inf)
    np.testing.assert_array_equal(rows.bias_values, np.array([2.5, -inf, -inf, 2.5, -inf, -inf, 2.5], np.float32))


def test_a_rows_history_ends_before_the_token_it_predicts() -> None:
    penalized = request([1, 2, 3], repetition_penalty=1.5)
    part = {
        "request": penalized,
        "tokens": [4, 5],
        "start": 3,
        "targets": [-1, -1],
        "drafts": 1,
        "history": [1, 2, 3, 4, 5],
    }
    rows = pack(plan_of(DECODE, part)).sampling
    np.testing.assert_array_equal(rows.history_offsets, [0, 0, 4, 9])
    np.testing.assert_array_equal(rows.history, [1, 2, 3, 4, 1, 2, 3, 4, 5])


def test_a_row_that_scores_a_known_token_has_no_biases_and_no_history() -> None:
    """It would use neither, and a prompt's rows together have as many history tokens as its length squared."""
    part = {
        "request": request([1, 2, 3], prompt_logprobs=0, presence_penalty=1.0, logit_bias=((8, 2.5),)),
        "tokens": [1, 2, 3],
        "start": 0,
        "targets": [2, 3, -1],
        "history": [1, 2, 3],
    }
    rows = pack(plan_of(part)).sampling
    np.testing.assert_array_equal(rows.bias_offsets, [0, 0, 0, 1])
    np.testing.assert_array_equal(rows.history_offsets, [0, 0, 0, 3])
    np.testing.assert_array_equal(rows.history, [1, 2, 3])


def test_columns_have_the_types_that_kernels_read_even_without_rows() -> None:
    for plan in (plan_of(MIDDLE), plan_of(MIDDLE, DECODE, VERIFY), plan_of()):
        rows = pack(plan).sampling
        types = {name: getattr(rows, name).dtype for name in rows._fields}
        floats = {"temperature", "top_p", "min_p", "bias_values"} | {name for name in types if "penalty" in name}
        assert {name for name, dtype in types.items() if dtype == np.float32} == floats
        assert {name for name, dtype in types.items() if dtype == np.uint64} == {"seeds"}
        assert {name for name, dtype in types.items() if dtype == np.int32} == types.keys() - floats - {"seeds"}


def decode_at(start: int, of: Request = DECODE["request"], **part: Any) -> StepPlan:
    """A step in which `of` decodes at `start`, in as many blocks as that takes."""
    return plan_of({"request": of, "tokens": [start], "start": start, "targets": [-1]} | part)


def assert_packed_as_alone(*plans: StepPlan) -> None:
    packer = Packer()
    for plan in plans:
        batch, alone = packer.pack(plan), pack(plan)
        for column, expected in zip((*batch[:4], *batch.sampling), (*alone[:4], *alone.sampling), strict=True):
            np.testing.assert_array_equal(column, expected)
            assert column.dtype == expected.dtype
        for groups, expected_groups in ((batch.block_offsets, alone.block_offsets), (batch.blocks, alone.blocks)):
            np.testing.assert_array_equal(groups, expected_groups)


def test_steps_packed_one_after_another_are_as_if_packed_alone() -> None:
    assert_packed_as_alone(decode_at(14), decode_at(15), decode_at(16, blocks=[0, 1]), decode_at(17, blocks=[0, 1]))
    assert_packed_as_alone(
        plan_of(DECODE), plan_of(MIDDLE, DECODE), plan_of(DECODE, DECODE), plan_of(), plan_of(DECODE)
    )
    assert_packed_as_alone(plan_of(VERIFY), plan_of(VERIFY), plan_of(VERIFY | {"tokens": [6], "targets": [-1]}))


def test_blocks_that_stay_are_the_same_arrays_and_others_are_not() -> None:
    packer = Packer()
    first, second, third = (
        packer.pack(decode_at(start, blocks=blocks)) for start, blocks in ((14, [0]), (15, [0]), (16, [0, 1]))
    )
    assert second.blocks[0] is first.blocks[0] and third.blocks[0] is not first.blocks[0]
    moved = packer.pack(decode_at(17, blocks=[0, 2]))
    np.testing.assert_array_equal(moved.blocks[0], [0, 2])


def test_a_plan_that_comes_again_is_packed_once() -> None:
    wants_two = request([1, 2, 3], min_tokens=2, stop_ids=frozenset({40}))
    packer = Packer()
    for plan in (decode_at(3), decode_at(4), decode_at(4, wants_two), decode_at(5, wants_two)):
        assert packer.pack(plan) is packer.pack(plan)


def test_a_step_takes_nothing_over_from_another_requests() -> None:
    others = [request([1, 2], seed=8), request([1, 2], temperature=0), request([1, 2], logit_bias=((8, 2.5),))]
    assert_packed_as_alone(*(decode_at(6, of) for of in (DECODE["request"], *others)))


def test_a_step_takes_nothing_over_that_depends_on_its_position() -> None:
    wants_two = request([1, 2, 3], min_tokens=2, stop_ids=frozenset({40}))
    assert_packed_as_alone(*(decode_at(start, wants_two) for start in (3, 4, 5, 3)))
    penalized = request([1, 2, 3], presence_penalty=1.0)
    assert_packed_as_alone(*(decode_at(start, penalized, history=range(start + 1)) for start in (3, 4, 5)))


def test_a_step_takes_nothing_over_from_rows_that_score() -> None:
    scored = request([1, 2, 2], prompt_logprobs=5, logprobs=2)
    assert_packed_as_alone(decode_at(0, scored, targets=[2]), decode_at(1, scored, targets=[2]), decode_at(2, scored))


def test_packing_64_decodes_takes_well_under_a_millisecond() -> None:
    plan = plan_of(*[DECODE] * 64)
    best = min(timed(plan) for _ in range(50))
    assert best < 1e-3  # 0.1 ms on a quiet machine; a loop over rows and columns would take over 1


def test_packing_64_rows_with_as_many_biases_as_allowed_takes_about_a_millisecond_at_most() -> None:
    bias = tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS))
    plan = plan_of(*[{**DECODE, "request": request([1, 2], logit_bias=bias)}] * 64)
    best = min(timed(plan) for _ in range(50))
    assert best < 1.5e-3  # 0.26 ms on a quiet machine; entry by entry it takes over 4


def timed(plan: StepPlan) -> float:
    began = time.perf_counter()
    pack(plan)
    return time.perf_counter() - began
