"""The load client against a server of a few lines: streams cut anywhere, errors, counts."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.client import LoadError, complete, run_load
from bench.workloads import Load

LOAD = Load(clients=2, requests=4, prompt_tokens=4, output_tokens=3)
EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n',  # half a character is a token
    b'data: {"choices": [{"text": "b"}], "usage": null}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 30}}\n\ndata: [DONE]\n\n',
)


@contextmanager
def serving(status: bytes, pieces: tuple[bytes, ...]) -> Iterator[int]:
    """Answers every request with these pieces, each a chunk of its own; gives the port."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            chunks = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
            with contextlib.suppress(ConnectionError):  # a client that has seen enough leaves
                for part in (b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"):
                    self.wfile.write(part)
                    time.sleep(0.001)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_tokens_are_the_servers_and_moments_the_clients() -> None:
    with serving(b"200 OK", EVENTS) as port:
        answer = asyncio.run(complete(port, "model", "prompt", 3))
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 30)
    moments = [answer.sent, *answer.arrivals]
    assert len(answer.arrivals) == 3 and moments == sorted(moments) and moments[-1] - moments[0] >= 0.003


def test_every_request_of_a_load_is_sent() -> None:
    with serving(b"200 OK", EVENTS) as port:
        figures = run_load(port, "model", "x", LOAD, seed=0)
    assert figures.output_tokens_per_s > 30 * LOAD.requests / 5


def test_events_may_be_cut_anywhere() -> None:
    stream = b"".join(EVENTS)
    pieces = tuple(stream[i : i + 7] for i in range(0, len(stream), 7))
    with serving(b"200 OK", pieces) as port:
        answer = asyncio.run(complete(port, "model", "prompt", 3))
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.arrivals)) == (7, 30, 3)


@pytest.mark.parametrize(
    ("status", "pieces", "message"),
    [
        (b"503 Service Unavailable", (b"loading",), "HTTP 503"),
        (b"200 OK", (EVENTS[0], b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (b"200 OK", (EVENTS[0], b"data: {\n\n"), "x: "),
        (b"200 OK", EVENTS[:1], "fewer than two pieces"),
    ],
)
def test_one_failed_request_fails_the_load(status: bytes, pieces: tuple[bytes, ...], message: str) -> None:
    with serving(status, pieces) as port, pytest.raises(LoadError, match=message):
        run_load(port, "model", "x", LOAD, seed=0)


def test_nobody_listening_is_said() -> None:
    with pytest.raises(LoadError, match="x: "):
        run_load(1, "model", "x", LOAD, seed=0)
