"""The sampler's definition, in numpy: from a row of logits to a token, its logprob and the most likely alternatives.

Owns what every sampling parameter means; the native sampler (`csrc/kernels/sample.inc`) must give the same tokens.
Refuses to know requests, sequences and batches: a row is its logits and its columns of SamplingRows.

A row goes through, in this order:

1.  Clean: NaN counts as -inf, +inf as the largest float, denormals as 0. Of this row come all logprobs: log-softmax.
2.  A row with a target ends here: it is scored, nothing is drawn.
3.  Bias: each entry is added (-inf forbids). Mask: what it leaves out becomes -inf.
4.  Repetition penalty r, once for each distinct token of the history: x / r if x > 0, else x * r (Keskar et al. 2019,
    section 4.1). Then, for a token seen c > 0 times among the output: x - frequency * c - presence (OpenAI's).
5.  Nothing above -inf: the token is -1. Temperature below GREEDY_BELOW: the argmax, ties to the lower id.
6.  z = (x - max x) / temperature. Tokens are ranked by descending z, then ascending id; p is the softmax of z.
7.  Survivors are the first n of that ranking: the shortest that top_k, top_p and min_p ask for, at least one.
    top_k: the first k. top_p: the fewest whose p, renormalized over what top_k left, add up to top_p (Holtzman et al.
    2020). min_p: those with p >= min_p * max p (Nguyen et al. 2024).
8.  The exponential race: of the survivors, the one with the greatest z - log(E), E = -log(u), ties to the lower id.
    With u uniform, E is exponential and the winner has exactly the survivors' renormalized p (Gumbel-max: Maddison et
    al. 2014, section 2). u = 1 - (k + 1/2) / 2^32 is exact, never 0 or 1; k is a word of Philox4x32-10 (Salmon et al.
    2011) with the seed as key and the counter (position, block, choice, NOISE_DOMAIN).

So a token's noise is a function of (seed, choice, position, token id) alone: never of the batch, of which other tokens
survive or of what was drawn before. Token id t has word t // 16 % 4 of block t // 64 * 16 + t % 16: a block serves four
tokens that are one vector apart, so that 16 lanes draw 64 neighbours without moving a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.ops import F32, I32, I64, U32, RowResults, RowScores, SamplingRows

F64 = npt.NDArray[np.float64]

NOTHING = -1  # the token of a row in which none can be drawn
NOISE_DOMAIN = 1  # last word of the counter: another use of the same key takes another
# Logits near 20 are 2e-6 apart in f32. Below this temperature, that rounding alone would be a fifth of a nat.
GREEDY_BELOW = np.float32(1e-5)

_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).tiny
_WORD = np.uint64(0xFFFFFFFF)
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key each round


def sample_rows(logits: F32, rows: SamplingRows, mask: U32 | None = None) -> RowResults:
    """Score or draw each row of `logits` [R, vocab]; bit t % 32 of `mask` [R, words] at word t // 32 allows token t."""
    tokens: list[int] = []
    logprobs = np.zeros(rows.num_rows, np.float32)
    top_ids = np.full((rows.num_rows, rows.max_top), -1, np.int32)
    top_logprobs = np.zeros((rows.num_rows, rows.max_top), np.float32)
    for r in range(rows.num_rows):
        raw = clean(logits[r])
        target = int(rows.targets[r])
        token = target if target >= 0 else _draw(raw, rows, r, None if mask is None else mask[r])
        tokens.append(token)
        if rows.num_top[r] < 0:
            continue
        scores = log_softmax(raw)
        if token != NOTHING:
            logprobs[r] = scores[token]
        top = ranked(raw)[: rows.num_top[r]]
        top_ids[r, : len(top)] = top
        top_logprobs[r, : len(top)] = scores[top]
    wants_scores = bool((rows.num_top >= 0).any())
    return RowResults(tokens, RowScores(logprobs, top_ids, top_logprobs) if wants_scores else None)


def clean(x: F32) -> F32:
    """`x` with NaN as -inf, +inf as the largest float and denormals as 0."""
    x = np.where(np.isnan(x), np.float32(-np.inf), np.minimum(x, _MAX))
    return np.where(np.abs(x) < _TINY, np.float32(0), x)


def log_softmax(x: F32) -> F32:
    """Logprobs of a cleaned row, summed in f64; -inf throughout where nothing is above it."""
    top = x.max()
    if top == -np.inf:
        return np.full_like(x, -np.inf)
    shifted = x.astype(np.float64) - float(top)
    with np.errstate(over="ignore"):
        return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)


def ranked(x: F32) -> I64:
    """Token ids by descending `x`, ties to the lower id."""
    return np.argsort(-x, kind="stable")


def _draw(raw: F32, rows: SamplingRows, r: int, mask: U32 | None) -> int:
    x = _penalized(_allowed(_biased(raw, rows, r), mask), rows, r)
    if x.max() == -np.inf:
        return NOTHING
    if not rows.temperature[r] >= GREEDY_BELOW:
        return int(np.argmax(x))
    z = scaled(x, rows.temperature[r])
    survivors = surviving(z, int(rows.top_k[r]), float(rows.top_p[r]), float(rows.min_p[r]))
    noise = gumbel(int(rows.seeds[r]), int(rows.choices[r]), int(rows.positions[r]), survivors)
    return int(survivors[np.argmax(z[survivors] + noise)])


def _biased(x: F32, rows: SamplingRows, r: int) -> F32:
    x = x.copy()
    entries = slice(rows.bias_offsets[r], rows.bias_offsets[r + 1])
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(x, rows.bias_ids[entries], rows.bias_values[entries])
    return clean(x)


def _allowed(x: F32, mask: U32 | None) -> F32:
    if mask is None:
        return x
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), count=len(x), bitorder="little")
    return np.where(bits == 1, x, np.float32(-np.inf))


def _penalized(x: F32, rows: SamplingRows, r: int) -> F32:
    history: I32 = rows.history[rows.history_offsets[r] : rows.history_offsets[r + 1]]
    output = np.bincount(history[rows.num_prompt[r] :], minlength=len(x))
    seen = np.bincount(history, minlength=len(x)) > 0
    repetition = max(rows.repetition_penalty[r], _TINY)
    count = output.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        repeated = np.where(x > 0, x / repetition, x * repetition)
        x = np.where(seen, repeated, x)
        spent = x - rows.frequency_penalty[r] * count - rows.presence_penalty[r]
        return clean(np.where(output > 0, spent, x))


def scaled(x: F32, temperature: np.float32) -> F32:
    """z of a row that has a finite maximum, in f32 with the operations that the native sampler uses: 0 at the top."""
    with np.errstate(over="ignore", under="ignore"):
        return clean(clean(x - x.max()) * (np.float32(1) / temperature))


def surviving(z: F32, top_k: int, top_p: float, min_p: float) -> I64:
    """Ids of the tokens that may be drawn, best first. `z` is at most 0; a parameter that is off is 0, 1 and 0."""
    ids = ranked(z)[: np.count_nonzero(z > -np.inf)]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        mass = np.cumsum(np.exp(z[ids], dtype=np.float64))
        ids = ids[: 1 + np.searchsorted(mass, top_p * mass[-1])]
    if min_p > 0:
        ids = ids[z[ids] >= np.float32(np.log(min_p))]
    return ids


def gumbel(seed: int, choice: int, position: int, ids: npt.ArrayLike) -> F64:
    """-log(E) of each token id: its noise at `position` of choice `choice` of the request with this seed."""
    tokens = np.asarray(ids, np.int64)
    counters = np.empty((*tokens.shape, 4), np.uint32)
    counters[..., 0] = position
    counters[..., 1] = tokens // 64 * 16 + tokens % 16
    counters[..., 2] = choice
    counters[..., 3] = NOISE_DOMAIN
    words = philox(counters, seed)
    k = np.take_along_axis(words, (tokens // 16 % 4)[..., None], axis=-1)[..., 0]
    return np.asarray(-np.log(-np.log1p(-(k + 0.5) / 2.0**32)), np.float64)


def philox(counters: U32, key: int) -> U32:
    """Philox4x32-10 of each counter [..., 4] under a 64-bit key, low word first (Salmon et al. 2011, section 4.3)."""
    c0, c1, c2, c3 = (counters[..., i].astype(np.uint64) for i in range(4))
    for i in range(_ROUNDS):
        k0, k1 = (
            np.uint64(((key >> shift) + i * weyl) & 0xFFFFFFFF) for shift, weyl in zip((0, 32), _WEYL, strict=True)
        )
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & _WORD, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & _WORD
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
