"""From a plan to the ragged arrays that kernels read.

Owns the translation of requests' sampling parameters into columns, one entry per logit row, and what follows from a
row's position: the counter of its noise, what min_tokens forbids, which history it sees. Refuses to know the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.ops import F32, I32, Batch, SamplingRows
from headrace.types import Request, StepPlan

NO_LOGPROBS = -1


def pack(plan: StepPlan) -> Batch:
    """The plan's arrays are shared, not copied: it must not change while the batch is in use."""
    token_ends, rows = _ints(plan.token_offsets)[1:], _Rows(plan)
    # the rows of a slice belong to the last tokens that it feeds
    row_tokens = rows.index + np.repeat(token_ends - rows.ends, rows.counts).astype(np.int32)
    slice_shift = _ints(plan.starts) - _ints(plan.token_offsets)[:-1]
    positions = row_tokens + np.repeat(slice_shift, rows.counts) + np.int32(1)
    return Batch(
        tokens=_ints(plan.tokens),
        token_offsets=_ints(plan.token_offsets),
        starts=_ints(plan.starts),
        row_tokens=row_tokens,
        block_offsets=tuple(map(_ints, plan.block_offsets)),
        blocks=tuple(map(_ints, plan.blocks)),
        sampling=_sampling(plan, rows, positions),
    )


class _Rows:
    """The logit rows of a plan: how many each slice has, and their number in the step."""

    def __init__(self, plan: StepPlan) -> None:
        offsets = _ints(plan.row_offsets)
        self.ends = offsets[1:]
        self.counts = offsets[1:] - offsets[:-1]
        self.index = np.arange(plan.num_rows, dtype=np.int32)
        self.slices = np.repeat(np.arange(plan.num_slices), self.counts)
        self.is_one_each = bool((self.counts == 1).all())

    def spread(self, values: Iterable[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """One value per slice, repeated for each of its rows."""
        column = np.array(list(values), dtype)
        return column if self.is_one_each else column[self.slices]


def _sampling(plan: StepPlan, rows: _Rows, positions: I32) -> SamplingRows:
    requests, params = plan.requests, [request.params for request in plan.requests]
    targets = _ints(plan.targets)
    drawn = rows.spread((NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params), np.int32)
    scored = rows.spread((NO_LOGPROBS if p.prompt_logprobs is None else p.prompt_logprobs for p in params), np.int32)
    num_prompt = rows.spread((len(request.prompt) for request in requests), np.int32)
    bias_offsets, bias_ids, bias_values = _biases(requests, rows, positions)
    history_offsets, history = _histories(plan.histories, rows, positions)
    return SamplingRows(
        targets=targets,
        positions=positions,
        seeds=rows.spread((request.seed for request in requests), np.uint64),
        choices=rows.spread((request.choice for request in requests), np.int32),
        temperature=rows.spread((p.temperature for p in params), np.float32),
        top_k=rows.spread((p.top_k for p in params), np.int32),
        top_p=rows.spread((p.top_p for p in params), np.float32),
        min_p=rows.spread((p.min_p for p in params), np.float32),
        repetition_penalty=rows.spread((p.repetition_penalty for p in params), np.float32),
        presence_penalty=rows.spread((p.presence_penalty for p in params), np.float32),
        frequency_penalty=rows.spread((p.frequency_penalty for p in params), np.float32),
        num_top=np.where(targets < 0, drawn, scored),
        bias_offsets=bias_offsets,
        bias_ids=bias_ids,
        bias_values=bias_values,
        history_offsets=history_offsets,
        history=history,
        num_prompt=np.minimum(num_prompt, positions),
    )


def _biases(requests: Sequence[Request], rows: _Rows, positions: I32) -> tuple[I32, I32, F32]:
    """Each row's biases: the request's own, and -inf on what must not end the answer yet (min_tokens)."""
    if not any(request.params.logit_bias or request.params.min_tokens for request in requests):
        return np.zeros(len(positions) + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    offsets, ids, values = [0], array("i"), array("f")
    for s, position in zip(rows.slices.tolist(), positions.tolist(), strict=True):
        request = requests[s]
        for token, bias in request.params.logit_bias:
            ids.append(token)
            values.append(bias)
        if position - len(request.prompt) < request.params.min_tokens:
            ids.extend(sorted(request.stop_ids))
            values.extend([-np.inf] * len(request.stop_ids))
        offsets.append(len(ids))
    return np.array(offsets, np.int32), _ints(ids), np.asarray(values)


def _histories(histories: Sequence[array[int] | None], rows: _Rows, positions: I32) -> tuple[I32, I32]:
    """Each row's tokens before the one that it predicts, where its request wants them."""
    if all(history is None for history in histories):
        return np.zeros(len(positions) + 1, np.int32), np.zeros(0, np.int32)
    empty = np.zeros(0, np.int32)
    tables = [empty if history is None else _ints(history) for history in histories]
    parts = [tables[s][:position] for s, position in zip(rows.slices.tolist(), positions.tolist(), strict=True)]
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return offsets, np.concatenate(parts) if parts else empty


def _ints(values: array[int]) -> I32:
    """A view of an array('i')."""
    return np.asarray(values, np.int32)
