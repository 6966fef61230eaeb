"""An executor without a model: its KV slots store token ids, and the next token is a hash of what it reads back.

Reading goes through the block table of the plan, group by group, so a slot that was overwritten, freed too early,
shared wrongly or never computed changes the answer. `solo_answer` computes the same answer from the tokens alone.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.run.executor import Foresee
from headrace.types import (
    FAILED_TOKEN,
    FinishReason,
    KVGroup,
    KVKind,
    Request,
    Slice,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB_SIZE = 40
FAIL_ONE_IN = 151  # rows whose logits hold nothing that can be drawn


def kept_tokens(group: KVGroup, tokens: Sequence[int]) -> Sequence[int]:
    """What the last of `tokens` sees in `group`: itself, and all or the last `window` before it."""
    return tokens[-group.window - 1 :] if group.kind is KVKind.WINDOW else tokens[:]


def _hash(seen: Sequence[Sequence[int]], seed: int) -> int:
    return zlib.crc32(b"|".join(array("i", tokens).tobytes() for tokens in (*seen, [seed])))


def draw(seen: Sequence[Sequence[int]], seed: int) -> int:
    """The next token, given what the last position sees in each group."""
    value = _hash(seen, seed)
    return FAILED_TOKEN if value % FAIL_ONE_IN == 0 else value // FAIL_ONE_IN % VOCAB_SIZE


def score(seen: Sequence[Sequence[int]], seed: int, token: int) -> TokenLogprobs:
    """A logprob that tells which row it came from and which token it is of."""
    return TokenLogprobs(-float(_hash([*seen, [token]], seed)))


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None


def solo_answer(request: Request, groups: tuple[KVGroup, ...], max_len: int) -> Answer:
    """What `request` must be answered, whoever else is there."""
    answer, tokens, params = Answer(), list(request.prompt), request.params
    if params.prompt_logprobs is not None:
        for end in range(1, len(tokens)):
            seen = [kept_tokens(group, tokens[:end]) for group in groups]
            answer.prompt_logprobs.append(score(seen, request.seed, tokens[end]))
    room = max_len - len(tokens)
    max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    while len(answer.tokens) < max_tokens:
        seen = [kept_tokens(group, tokens) for group in groups]
        token = draw(seen, request.seed)
        if token == FAILED_TOKEN:
            answer.reason = FinishReason.ERROR
            return answer
        tokens.append(token)
        answer.tokens.append(token)
        answer.logprobs.append(score(seen, request.seed, token))
        if token in request.stop_ids and len(answer.tokens) >= params.min_tokens:
            answer.reason = FinishReason.STOP
            return answer
    answer.reason = FinishReason.LENGTH
    return answer


class FakeExecutor:
    """Runs plans against slots of token ids. Remembers nothing about sequences, as a real one must not."""

    def __init__(self, groups: tuple[KVGroup, ...], num_blocks: tuple[int, ...], block_size: int) -> None:
        self.groups = groups
        self.block_size = block_size
        self.slots = [[[None] * block_size for _ in range(count)] for count in num_blocks]
        self.num_fed = 0

    def run(self, plan: StepPlan, masks: object = None, foresee: Foresee | None = None) -> StepResult:
        if foresee is not None:
            foresee()
        slices = list(plan.slices())
        self._check_exclusive(slices)
        for part in slices:
            self._write(part)
        self.num_fed += plan.num_tokens
        tokens, offsets = array("i"), array("i", [0])
        logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        for part in slices:
            drawn, scores, prompt_scores = self._rows(part)
            tokens.extend(drawn)
            offsets.append(len(tokens))
            logprobs.append(tuple(scores) if part.request.params.logprobs is not None else None)
            prompt_logprobs.append(tuple(prompt_scores) if part.request.params.prompt_logprobs is not None else None)
        return StepResult(plan.step, tokens, offsets, tuple(logprobs), tuple(prompt_logprobs))

    def _check_exclusive(self, slices: list[Slice]) -> None:
        """No slice writes a block that another slice writes or reads."""
        for g in range(len(self.groups)):
            for writer in slices:
                last = (writer.start + len(writer.tokens) - 1) // self.block_size
                written = set(writer.blocks[g][writer.start // self.block_size : last + 1])
                assert -1 not in written
                for other in slices:
                    assert other is writer or not written & set(other.blocks[g]), "a block in two hands is written"

    def _write(self, part: Slice) -> None:
        for position, token in enumerate(part.tokens, start=part.start):
            index, slot = divmod(position, self.block_size)
            for g in range(len(self.groups)):
                self.slots[g][part.blocks[g][index]][slot] = token

    def _seen(self, part: Slice, position: int) -> list[list[int]]:
        seen = []
        for g, group in enumerate(self.groups):
            positions = kept_tokens(group, range(position + 1))
            places = [divmod(p, self.block_size) for p in positions]
            assert all(part.blocks[g][index] >= 0 for index, _ in places), "a freed block is read"
            tokens = [self.slots[g][part.blocks[g][index]][slot] for index, slot in places]
            assert None not in tokens, "a slot is read that was never written"
            seen.append(tokens)
        return seen

    def _rows(self, part: Slice) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
        """Accepted drafts and the token after them; their logprobs; the prompt's."""
        drawn: list[int] = []
        scores: list[TokenLogprobs] = []
        prompt_scores: list[TokenLogprobs] = []
        request, end = part.request, part.start + len(part.tokens)
        drafts = list(part.tokens[len(part.tokens) - part.num_drafts :])
        self._check_history(part, end)
        is_accepted = True
        for position, target in zip(range(end - part.num_logits, end), part.targets, strict=True):
            seen = self._seen(part, position)
            if target != -1:
                prompt_scores.append(score(seen, request.seed, target))
                continue
            if not is_accepted:
                continue
            token = draw(seen, request.seed)
            drawn.append(token)
            scores.append(score(seen, request.seed, token))
            is_accepted = len(drawn) <= len(drafts) and token == drafts[len(drawn) - 1]
        return drawn, scores, prompt_scores

    def _check_history(self, part: Slice, end: int) -> None:
        if not part.request.params.needs_history:
            assert part.history is None
            return
        assert part.history is not None and len(part.history) == end
        assert part.history[part.start :] == part.tokens
        num_prompt = min(end, len(part.request.prompt))
        assert part.history[:num_prompt] == part.request.prompt[:num_prompt]
