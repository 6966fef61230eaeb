"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream.

Owns the JSON that a client sees. Both shapes are made from the same deltas, so that streaming equals not streaming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine.answers import Ending
from headrace.server.answer import Delta, Receipt, ScoredToken
from headrace.text.tokenizer import Tokenizer

Json = dict[str, Any]


def usage_block(receipts: Sequence[Receipt]) -> Json:
    """What a request used. The n choices of a prompt share it, so it counts once."""
    firsts = [receipt for receipt in receipts if receipt.is_first_of_prompt]
    prompt_tokens = sum(receipt.prompt_tokens for receipt in firsts)
    completion_tokens = sum(receipt.completion_tokens for receipt in receipts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(receipt.cached_tokens for receipt in firsts)},
    }


def timing_block(receipts: Sequence[Receipt]) -> Json:
    """The times of the answer that ended last, so that the identity of timing.py holds for several too."""
    return max((receipt.timing for receipt in receipts), key=lambda timing: timing.last_us).block()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of an answer, and the whole answer, have in common."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def closed(self, kind: str, choices: list[Json], receipts: Sequence[Receipt]) -> Json:
        """What says what the request took: a whole answer, or a stream's last chunk."""
        return self.wrap(kind, choices, usage=usage_block(receipts), timing=timing_block(receipts))


class Completions:
    """The shapes of /v1/completions."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def whole(self, choices: Sequence[Sequence[Delta]], receipts: Sequence[Receipt]) -> Json:
        return self._envelope.closed("text_completion", [self._choice(deltas) for deltas in choices], receipts)

    def chunks(self, delta: Delta) -> list[Json]:
        return [self._envelope.wrap("text_completion", [self._choice((delta,))])]

    def usage_chunk(self, receipts: Sequence[Receipt]) -> Json:
        return self._envelope.closed("text_completion", [], receipts)

    def _choice(self, deltas: Sequence[Delta]) -> Json:
        return {
            "index": deltas[0].choice,
            "text": "".join([delta.text for delta in deltas]),
            "logprobs": self._logprobs(deltas),
            **_ending(deltas[-1].ending),
        }

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        if all(delta.pieces is None for delta in deltas):
            return None
        pieces = [piece for delta in deltas for piece in delta.pieces or ()]
        return {
            "tokens": [piece.token.text for piece in pieces],
            "token_logprobs": [piece.logprobs and piece.logprobs.logprob for piece in pieces],
            "top_logprobs": [self._top(piece) for piece in pieces],
            "text_offset": [piece.token.offset for piece in pieces],
        }

    def _top(self, piece: ScoredToken) -> dict[str, float] | None:
        """By the tokens' names, the drawn token among them. Names, since texts of parts of characters are alike."""
        if piece.logprobs is None:
            return None
        name = self._tokenizer.token_text
        pairs = zip(piece.logprobs.top_ids, piece.logprobs.top_logprobs, strict=True)
        top = {name(token): logprob for token, logprob in pairs}
        top.setdefault(name(piece.token.token), piece.logprobs.logprob)
        return top


class Chats:
    """The shapes of /v1/chat/completions."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._begun: set[int] = set()  # choices whose role was sent

    def whole(self, choices: Sequence[Sequence[Delta]], receipts: Sequence[Receipt]) -> Json:
        return self._envelope.closed("chat.completion", [self._choice(deltas) for deltas in choices], receipts)

    def _choice(self, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        return {
            "index": deltas[0].choice,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(deltas),
            **_ending(deltas[-1].ending),
        }

    def chunks(self, delta: Delta) -> list[Json]:
        """The role first; then text; the end in a chunk of its own, with an empty delta."""
        chunks = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            chunks.append(self._chunk(delta, {"role": "assistant", "content": ""}))
        if delta.text or delta.pieces:
            chunks.append(self._chunk(delta, {"content": delta.text}, logprobs=self._logprobs([delta])))
        if delta.ending is not None:
            chunks.append(self._chunk(delta, {}, ending=delta.ending))
        return chunks

    def usage_chunk(self, receipts: Sequence[Receipt]) -> Json:
        return self._envelope.closed("chat.completion.chunk", [], receipts)

    def _chunk(
        self, delta: Delta, content: Mapping[str, str], *, logprobs: Json | None = None, ending: Ending | None = None
    ) -> Json:
        choice = {"index": delta.choice, "delta": content, "logprobs": logprobs, **_ending(ending)}
        return self._envelope.wrap("chat.completion.chunk", [choice])

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        if all(delta.pieces is None for delta in deltas):
            return None
        entries = []
        for piece in (piece for delta in deltas for piece in delta.pieces or ()):
            if (found := piece.logprobs) is not None:
                top = zip(found.top_ids, found.top_logprobs, strict=True)
                entry = self._entry(piece.token.token, found.logprob)
                entries.append({**entry, "top_logprobs": [self._entry(token, logprob) for token, logprob in top]})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        content = self._tokenizer.token_bytes[token]
        return {"token": self._tokenizer.token_text(token), "logprob": logprob, "bytes": list(content)}


def _ending(ending: Ending | None) -> Json:
    if ending is None:
        return {"finish_reason": None}
    return {"finish_reason": ending.reason, "stop_reason": ending.stop_reason}
