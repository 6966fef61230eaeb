"""Clients that leave, queues that are full, engines that are stuck, and the end of the server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from echoing import NUM_BLOCKS, EchoingExecutor, Running, running, wait_for

from headrace.engine.engine import Engine, EngineThread
from headrace.server import serving
from headrace.server.boundary import CLIENT_LEFT, Boundary
from headrace.server.openai.errors import ENGINE_FAILED, SHUTTING_DOWN
from headrace.types import Event

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(executor=EchoingExecutor(step_s=0.02)) as found:
        yield found


@contextlib.contextmanager
def raw_request(server: Running, **fields: Any) -> Iterator[socket.socket]:
    """A request whose connection can be dropped at any moment."""
    body = json.dumps(fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield sock


def num_running(server: Running) -> int:
    return server.engine.scheduler.num_running


# Disconnects --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_is_in_no_step_that_begins_after_the_engine_heard_of_it(
    slow: Running, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How soon the engine hears is the operating system's and the event loop's: a moment, but no count of steps.

    A step that is planned while the cancellation enters the inbox may still begin: one, and not two.
    """
    begun = slow.executor.begun
    sent: dict[int, int] = {}  # steps begun when the request's cancellation entered the inbox
    heard: dict[int, int] = {}  # and when the engine took it out
    send, hear = EngineThread.cancel, Engine.cancel

    def watched_send(self: EngineThread, request_id: int) -> None:
        send(self, request_id)
        sent.setdefault(request_id, len(begun))

    def watched_hear(self: Engine, request_id: int) -> list[Event]:
        heard.setdefault(request_id, len(begun))
        return hear(self, request_id)

    monkeypatch.setattr(EngineThread, "cancel", watched_send)
    monkeypatch.setattr(Engine, "cancel", watched_hear)
    with raw_request(slow, **LONG, n=4, stream=is_streamed) as sock:
        wait_for(lambda: num_running(slow) == 4)
        if is_streamed:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    assert slow.wait_until_idle() and slow.num_free_blocks == NUM_BLOCKS
    slow.completion(prompt="and another", max_tokens=3)
    assert len(sent) == len(heard) == 4
    for request_id in sent:
        assert not any(request_id in step for step in begun[heard[request_id] :])
        assert sum(request_id in step for step in begun[sent[request_id] :]) <= 1


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("pause_s", [0.0, 0.2])
@pytest.mark.parametrize("num_behind", [1, 3])
def test_a_client_that_leaves_with_requests_behind_the_running_one_is_noticed(
    slow: Running, is_streamed: bool, pause_s: float, num_behind: int
) -> None:
    with raw_request(slow, **LONG, stream=is_streamed) as sock:
        time.sleep(pause_s)
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * num_behind)
        wait_for(lambda: num_running(slow) == 1)
        time.sleep(0.1)
    assert slow.wait_until_idle(3)  # the whole answer takes 9 s


def test_a_write_to_a_connection_that_has_just_closed_counts_as_the_client_having_left() -> None:
    responses: Counter[int] = Counter()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {}}
    asyncio.run(Boundary(app, responses)(scope, lambda: asyncio.sleep(9), send))  # type: ignore[arg-type]
    assert responses == {CLIENT_LEFT: 1}


def test_leaving_while_waiting_in_the_queue_frees_the_place(slow: Running) -> None:
    with raw_request(slow, **LONG, n=16), raw_request(slow, **LONG):
        wait_for(lambda: slow.engine.scheduler.num_waiting == 1)
    assert slow.wait_until_idle() and slow.num_free_blocks == NUM_BLOCKS


def test_leaving_early_is_counted_as_an_abort() -> None:
    with running(executor=EchoingExecutor(step_s=0.01)) as server:
        with raw_request(server, **LONG, stream=True) as sock:
            sock.recv(100)
        assert server.wait_until_idle()
        assert server.metric('headrace_answers_total{model_name="echo",reason="abort"}') == 1
        assert server.metric('headrace_http_responses_total{status="200"}') >= 1


def test_a_reader_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.SEND_TIMEOUT_S", 0.3)
    with running() as server:
        socks = []
        with contextlib.ExitStack() as stack:
            fields = {**LONG, "prompt": "x" * 60, "logprobs": 20, "n": 16, "stream": True}
            for _ in range(2):
                sock = stack.enter_context(raw_request(server, **fields))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                socks.append(sock)
            wait_for(lambda: server.admission.num_open == 2 * fields["n"])  # else idle may mean that neither has come
            assert server.wait_until_idle(10)
        assert server.num_free_blocks == NUM_BLOCKS


def test_after_aborts_in_every_state_all_blocks_are_free(slow: Running) -> None:
    def abort(i: int) -> None:
        with raw_request(slow, **{**LONG, "prompt": "x" * (1 + 7 * i), "stream": i % 2 == 0}):
            time.sleep(0.004 * i)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(abort, range(32)))
    assert slow.wait_until_idle() and slow.num_free_blocks == NUM_BLOCKS
    slow.engine.scheduler.check()


def test_a_stop_string_frees_the_blocks_at_once_too(slow: Running) -> None:
    before = slow.engine.counts.steps
    answer = slow.completion(prompt="abcdefgh", max_tokens=400, temperature=0, stop="d").json()
    assert answer["choices"][0]["text"] == "abc"
    assert slow.engine.counts.steps - before < 100  # not 400: a loaded machine is slow to cancel
    assert slow.wait_until_idle() and slow.num_free_blocks == NUM_BLOCKS


def test_a_stream_that_breaks_says_so_in_an_event_and_ends() -> None:
    with running(executor=EchoingExecutor(fails_at=3)) as server:
        whole = server.completion(prompt="abcdefgh", temperature=0)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == ENGINE_FAILED
        streamed = server.completion(prompt="abcdefgh", temperature=0, stream=True)
        events = streamed.text.split("\n\n")
        assert streamed.status_code == 200 and events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == ENGINE_FAILED
        assert server.metric('headrace_answers_total{model_name="echo",reason="error"}') == 2


# Load ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_retry_after_and_the_numbers() -> None:
    with running(executor=EchoingExecutor(step_s=0.01), max_open=4) as server:
        with raw_request(server, **LONG, n=3):
            wait_for(lambda: server.admission.num_open == 3)
            refused = server.completion(prompt="Hi", n=2)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "at most 4 may be open" in refused.json()["error"]["message"]
            assert server.completion(prompt="Hi", max_tokens=1).status_code == 200
        assert server.wait_until_idle()
        assert server.completion(prompt="Hi", n=2, max_tokens=1).status_code == 200


def test_the_engine_expects_a_request_until_all_of_its_prompts_are_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    submit, expect = EngineThread.submit, EngineThread.expect
    monkeypatch.setattr(EngineThread, "submit", lambda self, it: (calls.append("submit"), submit(self, it)))
    monkeypatch.setattr(EngineThread, "expect", lambda self, change: (calls.append(change), expect(self, change)))
    with running() as server:
        for prompts in (["ab", "cd", "ef"], ["ab"]):
            calls.clear()
            assert server.completion(prompt=prompts, max_tokens=1).status_code == 200
            assert calls == [1, *["submit"] * len(prompts), -1]


def test_64_requests_at_once_get_each_its_own_answer(server: Running) -> None:
    def ask(i: int) -> str:
        answer = server.completion(prompt=f"code {i};", max_tokens=12, temperature=0).json()
        return str(answer["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(300, 364)))
    assert all(str(300 + i) in answer for i, answer in enumerate(answers))


# Health -------------------------------------------------------------------------------------------------------


def test_health_says_when_no_step_ends_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", 0.2)
    with running() as server, raw_request(server, prompt="Hi", max_tokens=3):
        server.executor.stuck.set()
        with raw_request(server, prompt="Ho", max_tokens=3) as sock:
            wait_for(lambda: server.client.get("/health").status_code == 503)
            assert "no step has ended" in server.client.get("/health").json()["error"]["message"]
            assert server.client.get("/v1/models").status_code == 200
            server.executor.stuck.clear()
            sock.settimeout(5)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.client.get("/health").status_code == 200)


def test_a_step_that_does_not_end_is_logged_once_with_its_requests_and_the_stacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.server.watchdog.WATCH_S", 0.02)
    with running() as server:
        server.completion(prompt="Hi", max_tokens=1)
        assert server.wait_until_idle()
        monkeypatch.setattr(serving, "STALL_S", 0.1)  # not before, nor counted after: slow steps are no stall to test
        server.executor.stuck.set()
        with raw_request(server, prompt="secret words", max_tokens=3) as sock:
            wait_for(lambda: "no step has ended" in caplog.text)
            (request_id,) = server.admission.request_ids
            wait_for(lambda: "where every thread is" in caplog.text)
            time.sleep(0.1)  # five more looks
            assert caplog.text.count("no step has ended") == 1
            server.executor.stuck.clear()
            sock.settimeout(5)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: "the engine goes on" in caplog.text)
    assert f"open requests: [{request_id}]" in caplog.text and "echoing.py" in caplog.text
    assert "secret" not in caplog.text


def test_the_watchdog_goes_on_where_the_stacks_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_file() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("tempfile.TemporaryFile", no_file)
    monkeypatch.setattr("headrace.server.watchdog.WATCH_S", 0.02)
    with running() as server:
        for _ in range(2):
            caplog.clear()
            monkeypatch.setattr(serving, "STALL_S", 0.1)
            server.executor.stuck.set()
            with raw_request(server, prompt="Hi", max_tokens=3):
                wait_for(lambda: "too many open files" in caplog.text)
                assert "no step has ended" in caplog.text
                monkeypatch.setattr(serving, "STALL_S", 60.0)
                wait_for(lambda: "the engine goes on" in caplog.text)
                server.executor.stuck.clear()
            assert server.wait_until_idle()


def test_an_idle_engine_is_healthy_however_long_ago_its_last_step_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", 0.05)
    with running() as server:
        server.completion(prompt="Hi", max_tokens=1)
        time.sleep(0.1)
        assert server.client.get("/health").status_code == 200


def test_a_first_step_after_a_long_rest_is_no_sign_of_ill_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", 1.0)
    with running() as server:
        server.completion(prompt="Hi", max_tokens=1)
        assert server.wait_until_idle()
        server.engine.counts.last_step_us -= 10_000_000
        server.executor.stuck.set()
        with raw_request(server, prompt="Ho", max_tokens=3):
            wait_for(lambda: server.admission.oldest_us is not None)
            assert server.client.get("/health").status_code == 200


def test_health_says_when_the_engines_thread_has_ended() -> None:
    with running() as server:
        server.serving.engine._thread.stop()
        response = server.client.get("/health")
        assert response.status_code == 503 and "thread" in response.text


# The end ------------------------------------------------------------------------------------------------------


def terminate(server: Running) -> None:
    server.server.handle_exit(signal.SIGTERM, None)


def test_on_sigterm_work_under_way_finishes_and_new_work_is_refused() -> None:
    with running(executor=EchoingExecutor(step_s=0.02), grace_s=30) as server:
        with raw_request(server, prompt="Hi", max_tokens=150, temperature=0) as sock:
            wait_for(lambda: num_running(server) == 1)
            terminate(server)
            assert server.client.get("/health").status_code == 503
            refused = server.completion(prompt="Hi")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == SHUTTING_DOWN
            sock.settimeout(20)
            received = b""
            while b'"completion_tokens":150' not in received:
                received += (chunk := sock.recv(10000))
                assert chunk, received
        wait_for(lambda: server.server.should_exit)


def test_what_does_not_fit_into_the_grace_time_is_told_why_it_ends() -> None:
    with running(executor=EchoingExecutor(step_s=0.05), grace_s=0.2) as server:
        answers: dict[bool, bytes] = {}

        def ask(is_streamed: bool) -> None:
            response = httpx.post(
                f"{server.url}/v1/completions", json={**LONG, "stream": is_streamed}, trust_env=False, timeout=10
            )
            answers[is_streamed] = response.content

        threads = [threading.Thread(target=ask, args=(flag,)) for flag in (True, False)]
        for thread in threads:
            thread.start()
        wait_for(lambda: num_running(server) == 2)
        terminate(server)
        for thread in threads:
            thread.join(10)
        assert SHUTTING_DOWN.encode() in answers[True] and answers[True].endswith(b"data: [DONE]\n\n")
        assert json.loads(answers[False])["error"]["code"] == SHUTTING_DOWN


def test_a_second_signal_ends_at_once_and_the_log_says_that_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with running(executor=EchoingExecutor(step_s=0.05), grace_s=60) as server, raw_request(server, **LONG):
        wait_for(lambda: num_running(server) == 1)
        terminate(server)
        assert not server.server.should_exit
        terminate(server)
        assert server.server.should_exit
        wait_for(lambda: "second signal; cutting off 1 answers" in caplog.messages)
