"""From a plan to the ragged arrays that kernels read.

Owns the translation of requests' sampling parameters into columns, one entry per logit row, and what follows from a
row's position: the counter of its noise, what min_tokens forbids, which history it sees. Refuses to know the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headrace.ops import F32, I32, Batch, SamplingRows
from headrace.types import StepPlan

NO_LOGPROBS = -1

_Item = TypeVar("_Item", bound=np.generic)
_Draw = tuple[int, int]  # the slice that draws, and the position of the token drawn


def pack(plan: StepPlan) -> Batch:
    """The plan's arrays are shared, not copied: it must not change while the batch is in use."""
    token_offsets, starts, rows = _ints(plan.token_offsets), _ints(plan.starts), _Rows(plan)
    # the rows of a slice belong to the last tokens that it feeds
    row_tokens = rows.index + rows.spread(token_offsets[1:] - rows.ends)
    positions = row_tokens + rows.spread(starts - token_offsets[:-1] + np.int32(1))
    return Batch(
        tokens=_ints(plan.tokens),
        token_offsets=token_offsets,
        starts=starts,
        row_tokens=row_tokens,
        block_offsets=tuple(map(_ints, plan.block_offsets)),
        blocks=tuple(map(_ints, plan.blocks)),
        sampling=_sampling(plan, rows, positions),
    )


class Packer:
    """pack() for one plan after another, taking over what a step of decodes has in common with the one before it.

    What it remembers changes no batch: it is used only where both plans say that it is the same. Beside kernels that
    pass a model's weights through the caches, numpy's code comes from memory at every call: 70 µs a step became 12.
    """

    def __init__(self) -> None:
        self._last: tuple[StepPlan, Batch] | None = None
        self._can_move_on = False  # the last batch

    def pack(self, plan: StepPlan) -> Batch:
        if self._last is not None:
            earlier, batch = self._last
            if plan is earlier:
                return batch  # made ready before; it shares the plan's arrays, and so has the tokens drawn since
            if self._can_move_on and plan.is_decode and plan.requests == earlier.requests:
                has_same_blocks = plan.blocks == earlier.blocks and plan.block_offsets == earlier.block_offsets
                batch = _moved_on(plan, batch, has_same_blocks=has_same_blocks)
                self._last = plan, batch
                return batch
        batch = pack(plan)
        self._last, self._can_move_on = (plan, batch), _is_plain_decode(plan)
        return batch


def _is_plain_decode(plan: StepPlan) -> bool:
    """Whether all that its sequences' next decode is told, beside tokens, positions and blocks, is what this one is."""
    return plan.is_decode and not any(
        request.params.min_tokens or request.params.needs_history for request in plan.requests
    )


def _moved_on(plan: StepPlan, earlier: Batch, *, has_same_blocks: bool) -> Batch:
    """The batch of a decode after an earlier one. Blocks that are the same are the same arrays: whoever looks through
    them need not do so again.
    """
    positions = _ints(array("i", [start + 1 for start in plan.starts]))
    return Batch(
        tokens=_ints(plan.tokens),
        token_offsets=earlier.token_offsets,
        starts=_ints(plan.starts),
        row_tokens=earlier.row_tokens,
        block_offsets=earlier.block_offsets if has_same_blocks else tuple(map(_ints, plan.block_offsets)),
        blocks=earlier.blocks if has_same_blocks else tuple(map(_ints, plan.blocks)),
        sampling=SamplingRows(earlier.sampling.targets, positions, *earlier.sampling[2:]),
    )


class _Rows:
    """The logit rows of a plan: how many each slice has, and their number in the step."""

    def __init__(self, plan: StepPlan) -> None:
        offsets = _ints(plan.row_offsets)
        self.ends = offsets[1:]
        self.index = np.arange(plan.num_rows, dtype=np.int32)
        self._counts = offsets[1:] - offsets[:-1]
        self._is_one_each = bool((self._counts == 1).all())
        self._num_slices = plan.num_slices

    def spread(self, column: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
        """One value per slice (the last axis), repeated for each of its rows."""
        return column if self._is_one_each else np.repeat(column, self._counts, axis=-1)

    def ints(self, columns: list[list[int]]) -> I32:
        """Columns of one value per slice: an array is made for all at once, since each costs a microsecond or two."""
        return self.spread(np.array(columns, np.int32))

    def floats(self, columns: list[list[float]]) -> F32:
        return self.spread(np.array(columns, np.float32))

    def draws(self, targets: Sequence[int], positions: I32) -> list[_Draw | None]:
        """What is drawn, row by row; a row that scores a known token needs neither biases nor a history."""
        slices = self.spread(np.arange(self._num_slices)).tolist()
        return [
            (s, position) if target < 0 else None
            for s, position, target in zip(slices, positions.tolist(), targets, strict=True)
        ]


def _sampling(plan: StepPlan, rows: _Rows, positions: I32) -> SamplingRows:
    requests, params = plan.requests, [request.params for request in plan.requests]
    targets = _ints(plan.targets)
    choices, top_k, drawn, scored, num_prompt = rows.ints(
        [
            [request.choice for request in requests],
            [p.top_k for p in params],
            [NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params],
            [NO_LOGPROBS if p.prompt_logprobs is None else p.prompt_logprobs for p in params],
            [len(request.prompt) for request in requests],
        ]
    )
    temperature, top_p, min_p, repetition, presence, frequency = rows.floats(
        [
            [p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
    )
    bias_offsets, bias_ids, bias_values = _biases(plan, rows, positions)
    history_offsets, history = _histories(plan, rows, positions)
    return SamplingRows(
        targets=targets,
        positions=positions,
        seeds=rows.spread(np.array([request.seed for request in requests], np.uint64)),
        choices=choices,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        num_top=np.where(targets < 0, drawn, scored),
        bias_offsets=bias_offsets,
        bias_ids=bias_ids,
        bias_values=bias_values,
        history_offsets=history_offsets,
        history=history,
        num_prompt=np.minimum(num_prompt, positions),
    )


def _biases(plan: StepPlan, rows: _Rows, positions: I32) -> tuple[I32, I32, F32]:
    """Each row's biases: the request's own, and -inf on what must not end the answer yet (min_tokens)."""
    requests = plan.requests
    if not any(request.params.logit_bias or request.params.min_tokens for request in requests):
        return np.zeros(plan.num_rows + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    offsets, ids, values = array("i", [0]), array("i"), array("f")
    for draw in rows.draws(plan.targets, positions):
        if draw is not None:
            s, position = draw
            bias = requests[s].bias_at(position)
            ids += bias.ids
            values += bias.values
        offsets.append(len(ids))
    return _ints(offsets), _ints(ids), np.asarray(values)


def _histories(plan: StepPlan, rows: _Rows, positions: I32) -> tuple[I32, I32]:
    """Each row's tokens before the one that it predicts, where its request wants them."""
    histories = plan.histories
    if all(history is None for history in histories):
        return np.zeros(plan.num_rows + 1, np.int32), np.zeros(0, np.int32)
    offsets, tokens = array("i", [0]), array("i")
    for draw in rows.draws(plan.targets, positions):
        if draw is not None:
            s, position = draw
            if (history := histories[s]) is not None:
                tokens += history if position == len(history) else history[:position]
        offsets.append(len(tokens))
    return _ints(offsets), _ints(tokens)


def _ints(values: array[int]) -> I32:
    """A view of an array('i')."""
    return np.asarray(values, np.int32)
