"""A server as a process: its socket, its signals, its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from echoing import Running

from headrace.server.serve import bind
from headrace.types import CapacityError

HERE = Path(__file__).parent


@contextlib.contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    command = [sys.executable, "-c", "import echoing; echoing.serve_until_signalled()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as child:
        try:
            yield child, f"http://127.0.0.1:{int(child.stdout.readline())}"  # type: ignore[union-attr]
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_a_signal_the_process_finishes_its_answers_and_exits_with_0(number: signal.Signals) -> None:
    answers: list[httpx.Response] = []
    with process() as (child, url):

        def ask() -> None:
            fields = {"prompt": "Hi", "max_tokens": 30, "temperature": 0}
            answers.append(httpx.post(f"{url}/v1/completions", json=fields, trust_env=False, timeout=10))

        thread = threading.Thread(target=ask)
        thread.start()
        with httpx.Client(base_url=url, trust_env=False) as client:
            while 'headrace_requests_running{model_name="echo"} 1.0' not in client.get("/metrics").text:
                time.sleep(0.01)
        child.send_signal(number)
        thread.join(10)
        assert child.wait(10) == 0
    assert answers[0].json()["usage"]["completion_tokens"] == 30


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(CapacityError, match=r"cannot listen on 127.0.0.1:\d+.*--port"):
        bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(CapacityError, match="cannot listen"):
        bind("203.0.113.1", 0)
