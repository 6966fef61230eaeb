"""SamplingRows for tests, and every sampler there is behind one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace import _core
from headrace.ops import F32, RowResults, RowScores, SamplingRows
from headrace.run.sampler import sample_rows

Sampler = Callable[[F32, SamplingRows, npt.NDArray[np.uint32] | None], RowResults]
Lists = Sequence[Sequence[float]]

ISAS = _core.available_isas()
DEFAULTS: dict[str, float] = {
    "targets": -1,
    "positions": 0,
    "seeds": 0,
    "choices": 0,
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "num_top": -1,
    "num_prompt": 0,
}
FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}


def sampling_rows(
    num_rows: int,
    *,
    bias: Sequence[Sequence[tuple[int, float]]] = (),
    history: Sequence[Sequence[int]] = (),
    **columns: npt.ArrayLike,
) -> SamplingRows:
    """Columns broadcast to `num_rows`; `bias` and `history` hold one list per row, or one for all."""
    arrays = {}
    for name, default in DEFAULTS.items():
        dtype = np.float32 if name in FLOATS else np.uint64 if name == "seeds" else np.int32
        arrays[name] = np.ascontiguousarray(np.broadcast_to(np.asarray(columns.pop(name, default), dtype), num_rows))
    assert not columns
    bias_offsets, entries = _ragged(bias, num_rows)
    history_offsets, tokens = _ragged(history, num_rows)
    return SamplingRows(
        **arrays,
        bias_offsets=bias_offsets,
        bias_ids=np.array([token for token, _ in entries], np.int32),
        bias_values=np.array([value for _, value in entries], np.float32),
        history_offsets=history_offsets,
        history=np.array(tokens, np.int32),
    )


def _ragged(lists: Sequence[Sequence], num_rows: int) -> tuple[npt.NDArray[np.int32], list]:
    lists = lists or [[]]
    lists = list(lists) * num_rows if len(lists) == 1 else lists
    assert len(lists) == num_rows
    offsets = np.cumsum([0, *(len(items) for items in lists)], dtype=np.int32)
    return offsets, [item for items in lists for item in items]


def draw_natively(isa: str, logits: F32, rows: SamplingRows, mask: npt.NDArray[np.uint32] | None = None) -> RowResults:
    tokens, scores = _core.sample(isa, logits, rows, mask)
    return RowResults(tokens, None if scores is None else RowScores(*scores))


SAMPLERS: dict[str, Sampler] = {"definition": sample_rows, **{isa: partial(draw_natively, isa) for isa in ISAS}}


def draw_many(logits: Sequence[float], num_rows: int, **columns) -> npt.NDArray[np.int32]:
    """`num_rows` draws from one row of logits, on the best instruction set; seeds 0, 1, 2... unless given."""
    columns.setdefault("seeds", np.arange(num_rows))
    tiled = np.tile(np.array(logits, np.float32), (num_rows, 1))
    return np.array(draw_natively(ISAS[0], tiled, sampling_rows(num_rows, **columns)).tokens)


def pack_mask(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """[R, vocab] booleans as the bits of [R, ceil(vocab / 32)] words."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)
