"""The times of one answer, by the definitions that the whole project uses.

a: arrival at the server, before tokenization. s: first scheduled. f, l: first and last token delivered, which is the
end of the steps that made them. n: tokens. TTFT = f - a, TPOT = (l - f)/(n - 1), E2E = l - a = TTFT + (n - 1) TPOT.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of one answer in microseconds of the engine's clock."""

    arrival_us: int
    scheduled_us: int | None
    first_us: int | None  # None: no token came
    last_us: int  # where no token came: when the answer ended
    num_tokens: int

    @property
    def queue_us(self) -> int | None:
        return None if self.scheduled_us is None else self.scheduled_us - self.arrival_us

    @property
    def ttft_us(self) -> int | None:
        return None if self.first_us is None else self.first_us - self.arrival_us

    @property
    def tpot_us(self) -> float | None:
        """None for an answer of fewer than two tokens, for which it is not defined."""
        if self.first_us is None or self.num_tokens < 2:
            return None
        return (self.last_us - self.first_us) / (self.num_tokens - 1)

    @property
    def e2e_us(self) -> int:
        return self.last_us - self.arrival_us

    def block(self) -> dict[str, float | None]:
        """The `timing` block of an answer: milliseconds; null where a time is not defined."""
        times_us = {"queue": self.queue_us, "ttft": self.ttft_us, "tpot": self.tpot_us, "e2e": self.e2e_us}
        return {f"{name}_ms": None if us is None else us / 1e3 for name, us in times_us.items()}
