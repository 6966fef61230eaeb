"""From the moments at which tokens arrived to the figures that engines are compared by. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; moments in seconds of one clock."""

    sent: float
    arrivals: tuple[float, ...]  # of each piece of the stream that carries output: one token, seldom several
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of a load. Medians over its requests, but for `output_tokens_per_s`, which is over the whole run."""

    output_tokens_per_s: float
    prefill_tokens_per_s: float  # prompt tokens over the time to first token
    decode_tokens_per_s: float  # of one request, from its first token to its last
    ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float  # of all gaps of all requests
    client_cpu_share: float = 0.0  # of one core


def percentile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least `quantile` of all do not exceed (nearest rank)."""
    if not values:
        raise ValueError("no percentile of no values")
    ordered = sorted(values)
    rank = -int(-quantile * len(ordered) // 1)  # ceiling
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def summarize(answers: Sequence[Answer], wall_s: float, client_cpu_share: float = 0.0) -> Figures:
    """Every answer needs two arrivals or more: shorter ones have no decode speed."""
    if not answers or any(len(answer.arrivals) < 2 for answer in answers):
        raise ValueError("an answer came in fewer than two pieces; a load needs streamed answers of several tokens")
    gaps = [b - a for answer in answers for a, b in itertools.pairwise(answer.arrivals)]
    ttft = [answer.arrivals[0] - answer.sent for answer in answers]
    return Figures(
        output_tokens_per_s=sum(answer.output_tokens for answer in answers) / wall_s,
        prefill_tokens_per_s=statistics.median(a.prompt_tokens / t for a, t in zip(answers, ttft, strict=True)),
        decode_tokens_per_s=statistics.median(
            (answer.output_tokens - 1) / (answer.arrivals[-1] - answer.arrivals[0]) for answer in answers
        ),
        ttft_ms=statistics.median(ttft) * 1e3,
        itl_p50_ms=percentile(gaps, 0.5) * 1e3,
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        client_cpu_share=client_cpu_share,
    )
