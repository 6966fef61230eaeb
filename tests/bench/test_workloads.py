"""Prompts: reproducible, no two alike, prefixes shared only where the load says so."""

from __future__ import annotations

from bench.workloads import LOADS, prompts


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    load = LOADS["conc16"]
    assert list(prompts("conc16", load, 0)) == list(prompts("conc16", load, 0))
    assert not set(prompts("conc16", load, 0)) & set(prompts("conc16", load, 1))


def test_no_prompt_of_a_run_begins_like_another() -> None:
    starts = [text[:6] for name in ("conc1", "conc4", "conc64", "single512") for text in prompts(name, LOADS[name], 3)]
    assert len(set(starts)) == len(starts)


def test_a_shared_prefix_is_the_same_in_the_cold_and_the_warm_run_and_what_follows_never_is() -> None:
    cold, warm = (list(prompts(name, LOADS[name], 0)) for name in ("shared_cold", "shared_warm"))
    prefixes = {text.rsplit(" and ", 1)[0] for text in cold + warm}
    assert len(prefixes) == 1 and len(prefixes.pop().split()) > 1000
    assert len(set(cold + warm)) == len(cold) + len(warm)


def test_a_closed_loop_has_work_for_all_clients() -> None:
    assert all(load.requests >= load.clients for load in LOADS.values())
