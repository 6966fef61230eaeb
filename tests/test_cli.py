"""The command line: what each command prints where, and how mistakes end."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import cli
from headrace.cli.ask import say
from headrace.cli.flags import parse_size
from headrace.cli.serve import checked_api_key, served_name
from headrace.model import open_model
from tiny import write_tiny_llama_gguf


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_llama_gguf(path)
    return path


def run(*arguments: str) -> int:
    return cli.main([*arguments, "--threads", "1"] if arguments[0] != "pull" else arguments)


def test_generate_prints_the_text_alone_on_standard_output(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", str(tiny_gguf), "--temperature", "0", "--max-tokens", "8")
    assert run("generate", *flags, "the man") == 0
    first = capsys.readouterr()
    assert run("generate", *flags, "the man") == 0
    assert capsys.readouterr().out == first.out
    assert len(first.out) > 1 and first.out.endswith("\n")
    assert "8 steps in" in first.err


def test_generate_reads_the_prompt_from_standard_input_where_it_is_a_dash(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--model", str(tiny_gguf), "--temperature", "0", "--max-tokens", "8")
    run("generate", *flags, "the man")
    given = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the man"))
    run("generate", *flags, "-")
    assert capsys.readouterr().out == given


def test_pack_prints_the_file_that_later_starts_map(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run("pack", "--cache-dir", str(tmp_path), str(tiny_gguf)) == 0
    told = capsys.readouterr()
    (file,) = (tmp_path / "packed").iterdir()
    assert told.out == f"{file}\n"
    assert re.search(r"\d MB in \d+\.\d s", told.err)
    os.truncate(file, 0)
    run("generate", "--cache-dir", str(tmp_path), "--model", str(tiny_gguf), "--max-tokens", "2", "the man")
    assert f"{file} is not used" in caplog.text
    run("pack", "--cache-dir", str(tmp_path), str(tiny_gguf))
    caplog.clear()
    run("generate", "--cache-dir", str(tmp_path), "--model", str(tiny_gguf), "--max-tokens", "2", "the man")
    assert caplog.text == ""


def test_pack_names_what_it_left_behind_when_the_model_changed(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = tmp_path / "a[1].gguf", tmp_path / "a[1]-b.gguf"
    for file in (model, other):
        shutil.copy(tiny_gguf, file)
        run("pack", "--cache-dir", str(tmp_path), str(file))
    first = Path(capsys.readouterr().out.splitlines()[0])
    run("pack", "--cache-dir", str(tmp_path), str(model))
    assert "Beside it" not in capsys.readouterr().err
    os.utime(model, (0, 0))
    run("pack", "--cache-dir", str(tmp_path), str(model))
    told = capsys.readouterr()
    assert told.out != f"{first}\n"
    assert re.findall(r"Beside it lies (\S+) \(0 MB\)", told.err) == [str(first)]


def test_ctrl_c_cuts_an_answer_and_not_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    is_closed = []

    def pieces() -> Generator[str, None, None]:
        try:
            yield "one "
            raise KeyboardInterrupt
        finally:
            is_closed.append(True)

    assert say(pieces()) == "one "
    assert is_closed and capsys.readouterr().out == "one \n"


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("hf:org/name@v1:file.gguf", "org/name"), ("some/where.gguf", "where")],
)
def test_a_model_is_served_under_the_name_that_it_was_asked_for(tiny_gguf: Path, model: str, name: str) -> None:
    files = replace(open_model(tiny_gguf), name="where")
    assert served_name(model, files) == name


def test_chat_answers_line_by_line_until_the_end_of_the_input(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["the man", "", "and the house"])

    def next_line(prompt: str) -> str:
        if (line := next(said, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", next_line)
    assert run("chat", "--model", str(tiny_gguf), "--temperature", "0", "--max-tokens", "4", "--system", "a") == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_pull_names_the_file_and_its_licence(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", str(tiny_gguf)) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(tiny_gguf)
    assert "licence" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "no-such-model", "x"], "there is no model 'no-such-model'"),
        (["generate", "--model", "", "x"], "there is no model ''"),
        (["generate", "--model", "org/name", "x"], "then hf:org/name"),
        (["generate", "--model", "{tiny}", "--temperature", "-1", "x"], "temperature is -1.0; it must be at least 0"),
        (["generate", "--model", "{tiny}", "--max-len", "100000", "x"], "made for at most 512 tokens"),
        (
            ["generate", "--model", "{tiny}", "--max-seqs", "0", "x"],
            "max_seqs is 0; it must be 1 to 65536: change --max-seqs",
        ),
        (
            ["generate", "--model", "{tiny}", "--max-step-tokens", "9999999999", "x"],
            "it must be 1 to 65536: change --max-s",
        ),
        (
            ["generate", "--model", "{tiny}", "--max-len", "99999999", "x"],
            "max_len is 99999999; it must be 2 to 16777216",
        ),
        (["generate", "--model", "{tiny}", "--max-kv-bytes", f"{1 << 70}", "x"], "change --max-kv-bytes"),
        (["generate", "--model", "{tiny}", "--max-seqs", "600", "x"], "a step must have room for one token of every"),
        (["serve", "--model", "{tiny}", "--port", "99999"], "cannot listen on 127.0.0.1:99999: ports are 0 to 65535"),
        (["generate", "--model", "{tiny}", "--isa", "vax", "x"], "no kernels for vax"),
        (["generate", "--model", "{tiny}", "--max-kv-bytes", "1K", "x"], "lower --max-len or raise --max-kv-bytes"),
        (["serve", "{tiny}", "--model", "another", "--port", "0"], "two models are given"),
        (["serve", "--model", "{tiny}", "--host", "0.0.0.0"], "needed: give --api-key KEY"),
        (["serve", "--model", "{tiny}", "--chat-template", "/none", "--port", "0"], "--chat-template /none"),
    ],
)
def test_a_mistake_ends_in_one_line_that_says_what_to_do(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*(argument.replace("{tiny}", str(tiny_gguf)) for argument in arguments)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("headrace: ") and message in error


def test_more_threads_than_the_core_can_run_are_refused(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--model", str(tiny_gguf), "--threads", "5000", "x"]) == 2
    assert capsys.readouterr().err == "headrace: threads is 5000; it must be 1 to 1024: change --threads\n"


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_api_key_opens_no_server(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", key)
    assert run("serve", "--model", str(tiny_gguf), "--host", "0.0.0.0", "--port", "0") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("headrace: ") and "HEADRACE_API_KEY" in error and "empty" in error


def test_a_key_is_taken_without_the_space_around_it() -> None:
    assert checked_api_key(" secret\n") == "secret"
    assert checked_api_key(None) is None


@pytest.mark.parametrize(("text", "size"), [("123", 123), ("4k", 4096), ("512M", 512 << 20), ("2G", 2 << 30)])
def test_sizes_may_have_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1.5G", "-1", "1T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="is no size"):
        parse_size(text)


def test_serve_tells_what_it_loaded_answers_and_ends_on_sigterm(tiny_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "headrace", "serve", str(tiny_gguf), "--port", "0", "--order", "priority"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            url = wait_for_url(log, server)
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
                assert json.load(answer)["data"][0]["id"] == "tiny"
            asked = b'{"prompt": "a", "max_tokens": 1, "priority": 5}'  # refused unless the order is that of priorities
            with urllib.request.urlopen(f"{url}/v1/completions", asked, timeout=10) as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    told = log.read_text()
    for part in ("licence", "KV cache", "tokens a step", "fetch 0.0", "weights 0.", "curl http://127.0.0.1:"):
        assert part in told
    assert "leaked" not in told  # the core says so at the very end of the process


def wait_for_url(log: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"serving  (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_flag_that_a_command_lacks_is_told_with_that_commands_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("serve", "--foo")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: headrace serve") and "unrecognized arguments: --foo" in error


def test_a_reader_that_leaves_early_is_no_error(tiny_gguf: Path) -> None:
    command = [sys.executable, "-m", "headrace", "generate", "--model", str(tiny_gguf), "--max-tokens", "400"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*command, "--temperature", "2", "a"], stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


UNCLOSED = """
import time
from pathlib import Path
from headrace import LLM, SamplingParams

def answered():
    llm = LLM({model!r})
    llm.generate("the man", SamplingParams(max_tokens=2))
    time.sleep({seconds})
    return llm

{keep}answered()
"""


@pytest.mark.parametrize("keep", ["llm = ", ""], ids=["global", "local"])
@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_program_that_never_closes_its_model_ends_quietly(tiny_gguf: Path, keep: str, seconds: float) -> None:
    script = UNCLOSED.format(model=str(tiny_gguf), seconds=seconds, keep=keep)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


UNSTOPPED = """
import time
from array import array
from pathlib import Path
from headrace import EngineConfig, Request, SamplingParams
from headrace.engine.engine import EngineThread
from headrace.engine.load import load

thread = EngineThread(load(Path({model!r}), EngineConfig()).engine, lambda delivery: None)
thread.start()
for i in range(20):
    thread.submit(Request(i, array("i", [1, 2, 3]), SamplingParams(max_tokens=400), seed=1))
time.sleep(0.1)
"""


def test_a_program_that_never_stops_its_engine_ends_quietly(tiny_gguf: Path) -> None:
    script = UNSTOPPED.format(model=str(tiny_gguf))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_synth_writes_a_model_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    assert cli.main(["synth", "smollm2-135m", "--layers", "1", "--out", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{path}\n" and "MB in" in printed.err
    assert open_model(path).spec.num_layers == 1


def test_bench_prints_a_table_and_a_last_line_of_json(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--batch", "1", "2", "--prompt-tokens", "8", "--output-tokens", "4", "--repeats", "1")
    assert run("bench", "offline", "--model", str(tiny_gguf), *load) == 0
    _, head, one, two, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["batch", "prompt", "threads"]
    assert one.split()[:3] == ["1", "8", "1"] and two.split()[:3] == ["2", "8", "1"]
    document = json.loads(last)
    assert [row["batch"] for row in document["rows"]] == [1, 2]
    assert run("bench", "offline", "--model", str(tiny_gguf), *load[:2], *load[3:]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() >= {
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "decode_step_ms",
        "decode_bytes_per_s",
        "prefill_flops_per_s",
        "roof_share_decode",
        "host_share",
        "start_s",
        "rss_bytes",
    }
