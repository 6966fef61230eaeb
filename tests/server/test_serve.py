"""A server as a process: its socket, its signals, its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from echoing import Running, wait_for

from headrace.server.serve import bind
from headrace.types import CapacityError

HERE = Path(__file__).parent


@contextlib.contextmanager
def process(arguments: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    command = [sys.executable, "-c", f"import echoing; echoing.serve_until_signalled({arguments})"]
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
            fields = {"prompt": "Hi", "max_tokens": 150, "temperature": 0}
            answers.append(httpx.post(f"{url}/v1/completions", json=fields, trust_env=False, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        with httpx.Client(base_url=url, trust_env=False) as client:
            wait_for(lambda: 'headrace_requests_running{model_name="echo"} 1.0' in client.get("/metrics").text)
        child.send_signal(number)
        thread.join(30)
        assert child.wait(10) == 0
    assert answers[0].json()["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_third_signal_ends_a_process_whose_step_does_not_end(number: signal.Signals) -> None:
    with process("is_stuck=True") as (child, url):
        host, _, port = url.removeprefix("http://").partition(":")
        body = b'{"prompt":"Hi"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection((host, int(port))) as sock, httpx.Client(base_url=url, trust_env=False) as client:
            sock.sendall(head + body)
            wait_for(lambda: 'headrace_requests_running{model_name="echo"} 1.0' in client.get("/metrics").text)
            child.send_signal(number)
            wait_for(lambda: client.get("/health").status_code == 503)
            child.send_signal(number)
            wait_for(lambda: is_refused(host, int(port)))
            time.sleep(0.5)
            assert child.poll() is None  # it waits for the step
            child.send_signal(number)
            assert child.wait(10) == 128 + number


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(CapacityError, match=r"cannot listen on 127.0.0.1:\d+.*--port"):
        bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(CapacityError, match="cannot listen"):
        bind("203.0.113.1", 0)
