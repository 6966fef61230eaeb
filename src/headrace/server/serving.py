"""Serving: everything that the server needs from the layers below, as values. Built by the command line.

Owns no behaviour beyond reading the engine's gauges and its health.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.engine.stream import AsyncEngine, EngineGauges
from headrace.server.limits import STALL_S
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import SamplingParams


class UnknownFields(enum.Enum):
    IGNORE = "ignore"  # named in the answer's x-ignored-fields
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is loaded, and how it is to be served."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_names: tuple[str, ...]  # what clients may call it; answers carry the first
    max_len: int  # tokens of prompt and answer together
    num_blocks: tuple[int, ...]  # of each KV group
    vocab_size: int
    end_ids: frozenset[int]
    version: str
    created_s: int  # when the server started, for /v1/models
    defaults: SamplingParams = SamplingParams()  # what the model's authors recommend, for fields left out
    unknown_fields: UnknownFields = UnknownFields.IGNORE
    has_priorities: bool = False  # whether the engine runs requests in the order of their priority

    @property
    def model(self) -> str:
        return self.model_names[0]

    def gauges(self) -> EngineGauges:
        return self.engine.gauges(self.num_blocks)

    def now_us(self) -> int:
        return self.engine.now_us()

    def ailment(self, oldest_us: int | None) -> str | None:
        """Why the engine is not healthy, or None. `oldest_us`: when the oldest open request arrived.

        Progress is a step that ended; an engine without work owes none, and one that just got work not yet.
        """
        if not self.engine.is_alive:
            return "the engine's thread has ended"
        if oldest_us is None or self.engine.is_idle:
            return None
        silent_s = (self.now_us() - max(oldest_us, self.engine.last_step_us)) / 1e6
        return f"no step has ended for {silent_s:.0f} seconds" if silent_s > STALL_S else None
