"""The page of metrics."""

from __future__ import annotations

import math
from array import array

from echoing import tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.stream import EngineGauges
from headrace.server.answer import Answer
from headrace.server.metrics import BUCKETS, Histogram, MetricsPage, RequestMetrics
from headrace.server.timing import Timing
from headrace.text.answer import AnswerText, TextOptions
from headrace.types import Request, SamplingParams, Tokens


def page(requests: RequestMetrics) -> str:
    return MetricsPage("m", requests, lambda: EngineGauges(1, 2, 0.25, 30, 1, 500, 1.5)).render().decode()


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 8.0


def test_buckets_begin_at_half_a_millisecond_and_rise() -> None:
    assert BUCKETS[0] == 0.0005 and list(BUCKETS) == sorted(set(BUCKETS))


def test_the_page_is_what_a_parser_of_prometheus_takes() -> None:
    requests = RequestMetrics()
    requests._observe(Timing(0, 1000, 3000, 9000, 4))
    families = {family.name: family for family in text_string_to_metric_families(page(requests))}
    assert families["headrace_steps"].samples[0].value == 30
    assert families["vllm:num_requests_running"].samples[0].value == 1
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == 0.25
    ttft = families["headrace_time_to_first_token_seconds"].samples
    assert ttft[-1].value == 0.003 and ttft[-2].value == 1
    assert any(sample.labels.get("le") == "+Inf" for sample in ttft)
    tpot = families["headrace_time_per_output_token_seconds"].samples[-1].value
    assert math.isclose(tpot, 0.002)


def test_counters_end_in_total_and_no_sample_is_there_twice() -> None:
    text = page(RequestMetrics())
    counters = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and line.endswith("counter")]
    assert counters and all(name.endswith("_total") for name in counters)
    samples = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_an_answer_that_was_left_counts_its_tokens_but_not_its_prompt() -> None:
    request = Request(7, array("i", [5]), SamplingParams(), seed=1, stop_ids=frozenset({2}), arrival_us=100)
    answer = Answer(0, request, AnswerText(tiny_tokenizer(), TextOptions()))
    answer.take(Tokens(7, array("i", [70, 71])), 200)
    requests = RequestMetrics()
    requests.count(answer)
    assert (requests.completion_tokens, requests.prompt_tokens, requests.answers["abort"]) == (2, 0, 1)


def test_aliases_have_the_same_values() -> None:
    requests = RequestMetrics(prompt_tokens=7, completion_tokens=5)
    text = page(requests)
    for name in ("headrace_prompt_tokens_total", "vllm:prompt_tokens_total"):
        assert f'{name}{{model_name="m"}} 7.0' in text


def test_a_page_does_not_touch_the_library_s_global_registry() -> None:
    from prometheus_client import REGISTRY

    before = set(REGISTRY._names_to_collectors)
    page(RequestMetrics())
    assert set(REGISTRY._names_to_collectors) == before
