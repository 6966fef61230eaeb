"""What /metrics shows: counters, gauges and histograms, under headrace's names and, for the main ones, vLLM's too.

Owns the numbers of requests as clients saw them and reads the engine's own when asked. Of answers that ended, the
sum of all usage blocks is these counters; those left or failed have no such block: what they delivered counts as
generated, and their prompts do not count. Written and read on the event loop alone. Labels come from fixed sets. No
global registry.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.engine.stream import EngineGauges
from headrace.server.answer import Answer
from headrace.server.timing import Timing

# Seconds, from 0.5 ms in steps of about 2, where small models on fast machines live.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound, the last for those above every bound."""

    bounds: tuple[float, ...] = BUCKETS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        rows, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


@dataclass(slots=True)
class RequestMetrics:
    """What requests came to, counted as their answers end."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by reason
    responses: Counter[int] = field(default_factory=Counter)  # by HTTP status
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)  # between deliveries of one answer, whatever number of tokens
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)

    def count(self, answer: Answer) -> None:
        """Count an answer that ended, or that was left: of the latter its tokens, as they were made, not its prompt."""
        self.preemptions += answer.num_preemptions
        self.completion_tokens += answer.text.num_tokens
        for gap_us in answer.gaps_us:
            self.itl.observe(gap_us / 1e6)
        receipt = answer.receipt
        if receipt is None or answer.ending is None:
            self.answers["error" if answer.has_failed else "abort"] += 1
            return
        self.answers[answer.ending.reason] += 1
        if receipt.is_first_of_prompt:
            self.prompt_tokens += receipt.prompt_tokens
            self.cached_tokens += receipt.cached_tokens
        self._observe(receipt.timing)

    def _observe(self, timing: Timing) -> None:
        for histogram, value_us in (
            (self.queue, timing.queue_us),
            (self.ttft, timing.ttft_us),
            (self.tpot, timing.tpot_us),
            (self.e2e, timing.e2e_us),
        ):
            if value_us is not None:
                histogram.observe(value_us / 1e6)


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class _Series:
    """A number with the model as its only label."""

    family: type[Family]
    alias: str | None  # vLLM's name without its prefix
    text: str
    value: Callable[[RequestMetrics, EngineGauges], float | Histogram]


# By headrace's name without its prefix.
_SERIES: Mapping[str, _Series] = {
    "prompt_tokens": _Series(
        CounterMetricFamily,
        "prompt_tokens",
        "Prompt tokens of answered requests, cached ones included.",
        lambda seen, now: seen.prompt_tokens,
    ),
    "generation_tokens": _Series(
        CounterMetricFamily,
        "generation_tokens",
        "Tokens of answers, those left or failed included.",
        lambda seen, now: seen.completion_tokens,
    ),
    "cached_tokens": _Series(
        CounterMetricFamily,
        "prefix_cache_hits",
        "Prompt tokens taken from the prefix cache.",
        lambda seen, now: seen.cached_tokens,
    ),
    "preemptions": _Series(
        CounterMetricFamily,
        "num_preemptions",
        "Sequences that gave up their blocks and were computed again.",
        lambda seen, now: seen.preemptions,
    ),
    "steps": _Series(CounterMetricFamily, None, "Forward passes.", lambda seen, now: now.steps),
    "failed_steps": _Series(
        CounterMetricFamily, None, "Forward passes that raised.", lambda seen, now: now.failed_steps
    ),
    "fed_tokens": _Series(
        CounterMetricFamily,
        None,
        "Tokens that went through the model: prompt, recomputed and output tokens.",
        lambda seen, now: now.fed_tokens,
    ),
    "busy_seconds": _Series(CounterMetricFamily, None, "Time in steps.", lambda seen, now: now.busy_s),
    "requests_running": _Series(
        GaugeMetricFamily,
        "num_requests_running",
        "Sequences that hold KV blocks.",
        lambda seen, now: now.num_running,
    ),
    "requests_waiting": _Series(
        GaugeMetricFamily, "num_requests_waiting", "Sequences in the queue.", lambda seen, now: now.num_waiting
    ),
    "kv_cache_usage_ratio": _Series(
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Share of the KV blocks in use, of the fullest group; 1 is full.",
        lambda seen, now: now.kv_usage,
    ),
    "time_to_first_token_seconds": _Series(
        HistogramMetricFamily,
        "time_to_first_token_seconds",
        "From arrival to the first token delivered.",
        lambda seen, now: seen.ttft,
    ),
    "inter_token_latency_seconds": _Series(
        HistogramMetricFamily,
        "inter_token_latency_seconds",
        "Between two deliveries of one answer.",
        lambda seen, now: seen.itl,
    ),
    "time_per_output_token_seconds": _Series(
        HistogramMetricFamily,
        "request_time_per_output_token_seconds",
        "Of an answer of n tokens: (last - first)/(n - 1).",
        lambda seen, now: seen.tpot,
    ),
    "e2e_latency_seconds": _Series(
        HistogramMetricFamily,
        "e2e_request_latency_seconds",
        "From arrival to the last token delivered.",
        lambda seen, now: seen.e2e,
    ),
    "queue_seconds": _Series(
        HistogramMetricFamily,
        "request_queue_time_seconds",
        "From arrival to the first step that had the request in it.",
        lambda seen, now: seen.queue,
    ),
}
_LABEL = "model_name"


@dataclass(frozen=True, slots=True, eq=False)  # a registry tells its collectors apart by identity
class MetricsPage:
    """Makes the page. A prometheus_client collector, in a registry of its own."""

    model: str
    requests: RequestMetrics
    engine: Callable[[], EngineGauges]

    def render(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self.engine()
        for name, series in _SERIES.items():
            value = series.value(self.requests, now)
            for full_name in _names(name, series.alias):
                family = series.family(full_name, series.text, labels=[_LABEL])
                if isinstance(family, HistogramMetricFamily) and isinstance(value, Histogram):
                    family.add_metric([self.model], value.cumulative(), value.total)
                elif not isinstance(family, HistogramMetricFamily) and not isinstance(value, Histogram):
                    family.add_metric([self.model], value)
                yield family
        yield from self._labelled()

    def _labelled(self) -> Iterator[Metric]:
        for full_name, label in (("headrace_answers", "reason"), ("vllm:request_success", "finished_reason")):
            family = CounterMetricFamily(full_name, "Answers by how they ended.", labels=[_LABEL, label])
            for reason in REASONS:
                family.add_metric([self.model, reason], self.requests.answers[reason])
            yield family
        responses = CounterMetricFamily("headrace_http_responses", "HTTP responses by status.", labels=["status"])
        for status, count in sorted(self.requests.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses


def _names(name: str, alias: str | None) -> tuple[str, ...]:
    return (f"headrace_{name}",) if alias is None else (f"headrace_{name}", f"vllm:{alias}")
