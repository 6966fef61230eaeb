"""The values that every layer shares: what a request asks, what a step does, what came of it.

Owns no behaviour beyond checking itself. Knows nothing of models, kernels, HTTP or clocks: times are integers
handed in by the caller, in microseconds.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import NamedTuple

# Errors -------------------------------------------------------------------------------------------------------
#
# HeadraceError
# ├── RequestError        a request asks for something that is not allowed; names the parameter
# ├── ModelError          a model's files are damaged, contradictory or of a kind that is not supported
# ├── CapacityError       something does not fit into the memory or the limits it was given
# └── InvariantError      headrace contradicts itself: a bug, never repaired silently


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class RequestError(HeadraceError):
    """A request asks for something that is not allowed; `param` names the field, `code` is a stable name."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(HeadraceError):
    """A model's files are damaged, contradictory or not supported; the message names the file and the field."""


class CapacityError(HeadraceError):
    """Something does not fit: the message says what is needed, what there is and what to change."""


class InvariantError(HeadraceError):
    """An internal contradiction. Always a bug of headrace."""


# What a client asks -------------------------------------------------------------------------------------------

MAX_LOGPROBS = 64  # top-N alternatives per position; OpenAI allows 20, vLLM's clients ask for more
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1

_OPTIONAL_INTEGERS = (
    ("seed", MAX_SEED),
    ("max_tokens", MAX_INT32),
    ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", MAX_LOGPROBS),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are drawn and when it ends. Ranges are checked here, once, for every door.

    Logits pass through: logit_bias, then repetition, presence and frequency penalties, then temperature, top_k, top_p
    (over what top_k left, renormalized), min_p. Temperature 0 takes the argmax of the biased and penalized logits.
    Logprobs are those of the model's own distribution: the log-softmax of the raw logits, before any of the above.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, section 4.1)
    presence_penalty: float = 0.0  # over output tokens only, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = None  # None: as many as the context has room for
    min_tokens: int = 0  # end and stop tokens are forbidden before this many
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; N: of the token drawn and of the N most likely
    prompt_logprobs: int | None = None  # the same for every prompt token after the first

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_low_open=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_integer("top_k", self.top_k, MAX_INT32)
        _check_integer("min_tokens", self.min_tokens, MAX_INT32)
        for name, limit in _OPTIONAL_INTEGERS:
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, limit)
        _check_type("ignore_eos", self.ignore_eos, bool, "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        _check_tuple("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        for token in self.stop_token_ids:
            _check_type("stop_token_ids", token, int, "a tuple of token ids, which are integers")
        _check_tuple("logit_bias", self.logit_bias, MAX_LOGIT_BIAS, "pairs (token id, bias)")
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise RequestError(
                    f"logit_bias has {entry!r}; each entry must be a pair (token id, bias)", "logit_bias"
                )
            _check_type("logit_bias", entry[0], int, "pairs (token id, bias), and token ids are integers")
            _check_real("logit_bias", entry[1], -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a token id named here is outside a vocabulary of `vocab_size`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} has the token id {token}; the vocabulary is 0 to {vocab_size - 1}", name
                    )

    @property
    def needs_history(self) -> bool:
        """Whether drawing a token needs the tokens before it (the penalties do)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_type(name: str, value: object, kind: type | UnionType, meaning: str) -> None:
    """A bool is an int to Python, and to nobody else."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{name} is {value!r}; it must be {meaning}", name, "invalid_type")


def _check_real(name: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> None:
    _check_type(name, value, int | float, "a number")
    if not low <= value <= high or (is_low_open and value == low):  # NaN is not in any range
        border = "greater than" if is_low_open else "at least"
        raise RequestError(f"{name} is {value}; it must be {border} {low} and at most {high}", name)


def _check_integer(name: str, value: int, high: int) -> None:
    _check_type(name, value, int, "an integer")
    if not 0 <= value <= high:
        raise RequestError(f"{name} is {value}; it must be at least 0 and at most {high}", name)


def _check_tuple(name: str, value: tuple[object, ...], limit: int, entries: str) -> None:
    _check_type(name, value, tuple, f"a tuple of {entries}")
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries; at most {limit} are allowed", name)


class Bias(NamedTuple):
    """What is added to the logits of some tokens, as the columns that kernels read."""

    ids: array[int]  # 'i'
    values: array[float]  # 'f'; -inf forbids


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate. A client's `n` choices are `n` requests that differ in `choice` alone."""

    id: int  # made by the engine, never by a client; unique in its lifetime
    prompt: array[int]  # 'i'; never changed once here
    params: SamplingParams
    seed: int  # the key of this request's randomness, already drawn: 0 to MAX_SEED
    stop_ids: frozenset[int] = frozenset()  # the model's end tokens (unless ignored) and params.stop_token_ids
    choice: int = 0
    priority: int = 0  # lower runs first, under the priority order
    cache_salt: bytes = b""
    arrival_us: int = 0
    # Of the params, made once: a step of 64 rows with 1,024 biases each must not go through them one by one.
    bias: Bias = field(init=False, repr=False, compare=False)  # logit_bias
    early_bias: Bias = field(init=False, repr=False, compare=False)  # and no end before min_tokens

    def __post_init__(self) -> None:
        bias, stops = self.params.logit_bias, sorted(self.stop_ids)
        ids, values = array("i", [token for token, _ in bias]), array("f", [value for _, value in bias])
        object.__setattr__(self, "bias", Bias(ids, values))
        early = Bias(ids + array("i", stops), values + array("f", [-math.inf] * len(stops)))
        object.__setattr__(self, "early_bias", early)

    def bias_at(self, position: int) -> Bias:
        """What is added to the logits of the token at `position`, counted from the start of the prompt."""
        return self.early_bias if position - len(self.prompt) < self.params.min_tokens else self.bias


# What a step does ---------------------------------------------------------------------------------------------


class KVKind(enum.Enum):
    FULL = "full"  # keeps every position
    WINDOW = "window"  # keeps the last `window` positions


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values are paged together: one pool of blocks, one block table per sequence."""

    kind: KVKind
    layers: tuple[int, ...]
    key_bytes_per_token: int  # per layer
    value_bytes_per_token: int
    window: int = 0  # tokens; only for WINDOW


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler must stay within."""

    max_seqs: int  # sequences running at once
    max_step_tokens: int  # tokens fed in one step
    max_len: int  # tokens of a sequence, prompt and output
    block_size: int  # tokens of a KV block
    num_blocks: tuple[int, ...]  # blocks of each KV group
    lookahead: int = 0  # draft tokens a sequence may carry in a step
    max_chunk_tokens: int | None = None  # of prompts, in a step in which others decode; None: all that it has room for
    num_eager: tuple[int, ...] | None = None  # blocks of each group used before anything is forgotten; None: all


@dataclass(frozen=True, slots=True)
class Slice:
    """A view of one sequence's part of a step."""

    request: Request
    tokens: array[int]  # fed now, drafts last
    start: int  # absolute position of tokens[0]
    num_drafts: int
    num_logits: int  # the last `num_logits` fed tokens have a logit row
    targets: array[int]  # per logit row: the known next token to score, or -1 where a token is to be drawn
    blocks: tuple[array[int], ...]  # per group; entry j holds positions [j*block_size, (j+1)*block_size); -1: freed
    history: array[int] | None  # every token up to the last one fed, drafts included; only if the params need it


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, complete: whoever executes it needs no memory of earlier plans. Columns are array('i').

    S slices feed T tokens and ask for R logit rows. Offsets have S + 1 entries.
    """

    step: int
    requests: tuple[Request, ...]  # [S]
    tokens: array[int]  # [T]
    token_offsets: array[int]  # [S + 1]
    starts: array[int]  # [S]
    num_drafts: array[int]  # [S]
    row_offsets: array[int]  # [S + 1] into targets: slice s has row_offsets[s+1] - row_offsets[s] logit rows
    targets: array[int]  # [R]
    block_offsets: tuple[array[int], ...]  # per group [S + 1]
    blocks: tuple[array[int], ...]  # per group
    histories: tuple[array[int] | None, ...]  # [S]

    @property
    def num_slices(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.targets)

    @property
    def is_decode(self) -> bool:
        """Whether each slice feeds one token and draws the next."""
        return self.num_tokens == self.num_rows == self.num_slices and max(self.targets, default=-1) < 0

    def slices(self) -> Iterator[Slice]:
        for s, request in enumerate(self.requests):
            rows = slice(self.row_offsets[s], self.row_offsets[s + 1])
            yield Slice(
                request=request,
                tokens=self.tokens[self.token_offsets[s] : self.token_offsets[s + 1]],
                start=self.starts[s],
                num_drafts=self.num_drafts[s],
                num_logits=rows.stop - rows.start,
                targets=self.targets[rows],
                blocks=tuple(
                    ids[offsets[s] : offsets[s + 1]]
                    for ids, offsets in zip(self.blocks, self.block_offsets, strict=True)
                ),
                history=self.histories[s],
            )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position: of the token there, and of the most likely ones, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


FAILED_TOKEN = -1  # a row whose logits held nothing that can be drawn (all NaN or forbidden)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave. Slices are in the plan's order.

    `tokens` holds, per slice, the accepted drafts and the one token drawn after them: none for a slice that drew
    nothing, 1 for a decode, up to 1 + drafts for a verified one; FAILED_TOKEN where a row could not be drawn.
    """

    step: int
    tokens: array[int]  # 'i', all slices after one another
    token_offsets: array[int]  # [S + 1]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]  # per slice, one per token; None if not asked for
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]  # per slice, one per row that scored a known token
    elapsed_us: int = 0


# What the scheduler tells -------------------------------------------------------------------------------------


class FinishReason(enum.Enum):
    STOP = "stop"  # an end or stop token was drawn; it is the last of the answer's tokens
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """The ledger of one request, from the scheduler that counted it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache when it was first scheduled
    num_preemptions: int
    scheduled_us: int | None  # when it was first in a plan; None: never


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a request; also carries the prompt's logprobs as they come (then `tokens` may be empty)."""

    request_id: int
    tokens: array[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: int
    reason: FinishReason
    usage: Usage
    message: str = ""  # why, for ERROR


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: int
    num_tokens: int  # computed positions given up


Event = Tokens | Finished | Preempted


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why the scheduler will not take a request: it could never run within the limits."""

    message: str
    param: str
    code: str = field(default="context_length_exceeded")
