"""What an answer is asked for and how it ends: the rules that the server and the offline API share.

Owns the room that an answer has, what its choices have in common, which tokens and texts end it, and what its end is
called. Refuses to know who asks and how the answer is shown.
"""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.text.answer import TextOptions
from headrace.text.stops import StopStrings
from headrace.types import FinishReason, Request, RequestError, SamplingParams


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None  # the stop string, or the id of stop_token_ids, that ended it


def fitted(params: SamplingParams, num_prompt: int, max_len: int, *, default: int | None = None) -> SamplingParams:
    """`params` with a max_tokens that the context has room for; RequestError with the numbers if it has not.

    Where max_tokens was left out it is the room that is left, or `default` if that is less. Nothing is cut in silence.
    """
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; it must have at least 1", "prompt")
    room, asked = max_len - num_prompt, params.max_tokens
    if room < 0 or (room == 0 and asked != 0):
        raise too_long(f"the prompt has {num_prompt:,} tokens", max_len)
    if asked is None:
        return dataclasses.replace(params, max_tokens=room if default is None else min(default, room))
    if asked > room:
        raise RequestError(
            f"the prompt has {num_prompt:,} tokens and max_tokens is {asked:,}, together {num_prompt + asked:,}; "
            f"the context is {max_len:,} tokens, so there is room for {room:,}: lower max_tokens, shorten the "
            "prompt or raise max_len (--max-len)",
            "max_tokens",
            "context_length_exceeded",
        )
    return params


def too_long(what: str, max_len: int, param: str = "prompt") -> RequestError:
    return RequestError(
        f"{what}; the context is {max_len:,} tokens for prompt and answer: shorten the prompt or raise max_len "
        "(--max-len)",
        param,
        "context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class Asker:
    """What the requests of one engine have in common."""

    next_id: Callable[[], int]
    end_ids: frozenset[int]

    def requests(
        self,
        prompt: array[int],
        params: SamplingParams,
        n: int = 1,
        *,
        cache_salt: bytes = b"",
        priority: int = 0,
        arrival_us: int,
    ) -> list[Request]:
        """The n choices of a prompt. They share the seed, drawn here if there is none, and differ by index alone."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end_ids = frozenset() if params.ignore_eos else self.end_ids
        return [
            Request(
                id=self.next_id(),
                prompt=prompt,
                params=params,
                seed=seed,
                stop_ids=end_ids.union(params.stop_token_ids),
                choice=choice,
                cache_salt=cache_salt,
                priority=priority,
                arrival_us=arrival_us,
            )
            for choice in range(n)
        ]


def text_options(
    request: Request, stops: StopStrings, *, is_stop_included: bool = False, is_special_skipped: bool = True
) -> TextOptions:
    """How the answer to `request` is written."""
    return TextOptions(
        stops=stops,
        stop_ids=request.stop_ids,
        include_stop=is_stop_included,
        skip_special=is_special_skipped,
        min_tokens=request.params.min_tokens,
    )


def ending_of(reason: FinishReason, stop: str | None, last_token: int | None, params: SamplingParams) -> Ending:
    """The ending of an answer whose text ended at the stop string `stop`, or else by the engine's `reason`.

    A token of stop_token_ids is named; the model's own end tokens are not.
    """
    if stop is not None:
        return Ending("stop", stop)
    if reason is not FinishReason.STOP:
        return Ending("length")
    return Ending("stop", last_token if last_token in params.stop_token_ids else None)
