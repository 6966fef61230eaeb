"""peers.toml: what it may say, and how a command is filled in."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client import LoadError
from bench.engines import PeersError, headrace, read_engines
from bench.goals import GOALS, LIMITS, Offline, loads_of, offline_runs_of
from bench.running import prepared
from bench.workloads import LOADS

PEERS = """
[[headrace]]
shape = "smollm2-135m"
format = "q8_0"
path = "{here}/q8.gguf"

[[peer]]
family = "llama.cpp"
shape = "smollm2-135m"
format = "q4_1"
path = "{here}/q4.gguf"
command = ["{here}/server", "-m", "{path}", "--port", "{port}", "-t", "{threads}", "-np", "{clients}", "-c{context}"]
loads = ["conc1", "conc16"]

[peer.environment]
LD_PRELOAD = "/lib/a.so:{here}/b.so"
"""


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "peers.toml").write_text(text)
    return tmp_path


def test_a_folder_adds_files_for_us_and_peers(tmp_path: Path) -> None:
    default, eight_bits, peer = read_engines(folder(tmp_path, PEERS), "smollm2-135m")
    assert (default.name, default.path) == ("headrace q4_1", "smollm2-135m")
    assert (eight_bits.name, eight_bits.path) == ("headrace q8_0", f"{tmp_path}/q8.gguf")
    assert peer.environment == {"LD_PRELOAD": f"/lib/a.so:{tmp_path}/b.so"}
    assert peer.arguments(8090, 2, LOADS["conc16"]) == [
        *(f"{tmp_path}/server", "-m", f"{tmp_path}/q4.gguf", "--port", "8090", "-t", "2", "-np", "16", "-c8192")
    ]
    assert peer.restarts and not default.restarts


def test_a_large_model_of_ours_is_packed_before_its_first_start(tmp_path: Path) -> None:
    small, large = headrace("smollm2-135m", "q4_1", "small.gguf"), headrace("llama3-8b", "q4_0", "large.gguf", "avx2")
    assert prepared(small) is small
    assert large.prepare[1:] == ("-m", "headrace", "pack", "large.gguf", "--isa", "avx2")
    says = replace(large, prepare=(sys.executable, "-c", "print('fetching'); print('large.packed')"))
    assert prepared(says).reads == "large.packed"


@pytest.mark.parametrize(
    ("code", "reason"), [("exit('no such file')", "no such file"), ("pass", "it ended with 0 and named no file")]
)
def test_an_engine_that_cannot_be_prepared_is_told_with_what_it_said(code: str, reason: str) -> None:
    fails = replace(headrace("llama3-8b", "q4_0", "large.gguf"), prepare=(sys.executable, "-c", code))
    with pytest.raises(LoadError, match=f"headrace q4_0 could not be prepared: {reason}"):
        prepared(fails)


def test_an_engine_is_asked_what_rows_want_and_it_offers(tmp_path: Path) -> None:
    default, eight_bits, peer = read_engines(folder(tmp_path, PEERS), "smollm2-135m")
    assert loads_of(peer) == {"conc1", "conc16"}
    assert loads_of(eight_bits) == {"conc1"}
    assert loads_of(default) == LOADS.keys() - {"large"}


def test_every_limit_and_cap_is_measured_by_some_run() -> None:
    subjects = {(goal.ours.shape, goal.ours.format, goal.ours.isa) for goal in GOALS}
    engines = [headrace(shape, weights, "m.gguf", isa) for shape, weights, isa in subjects]
    runs = {(engine.name, engine.shape, run) for engine in engines for run in offline_runs_of(engine)}
    for limit in LIMITS:
        if isinstance(limit.source, Offline):
            assert any(limit.ours(engine) and (engine.name, engine.shape, limit.source) in runs for engine in engines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[peers]]", "unknown tables"),
        ("[[peer]]\nfamily = 'x'", "needs the strings"),
        (PEERS.replace("conc16", "conc17"), "there are conc1"),
        (PEERS.replace("family", "kind = 'grpc'\nfamily"), "kind 'grpc'"),
        (PEERS.replace("command = [", "command = []\n# "), "needs a command"),
        ("a = ", "cannot read"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PeersError, match=message):
        read_engines(folder(tmp_path, text), "m")


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeersError, match=r"docs/benchmarks\.md"):
        read_engines(tmp_path, "m")
