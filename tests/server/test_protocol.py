"""Connections as they come over the wire: slow, malformed, too large, too many."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from typing import Any

import httpx
import pytest
from echoing import EchoingExecutor, Running, running, wait_for

from headrace.server.serve import bind

BODY = json.dumps({"prompt": "Hi", "max_tokens": 2, "temperature": 0}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            received += chunk
    return received


def read_one(sock: socket.socket) -> int:
    """The status of one answer, which is read to its end and no further."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    response.read()
    return response.status


def exchange(server: Running, *parts: bytes) -> bytes:
    with connect(server) as sock:
        for part in parts:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(part)
        return read_all(sock)


def test_expect_100_continue_is_answered(server: Running) -> None:
    with connect(server) as sock:
        head = HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n" % len(BODY)
        sock.sendall(head)
        assert sock.recv(1000).startswith(b"HTTP/1.1 100")
        sock.sendall(BODY)
        assert b" 200 " in read_all(sock)


def test_a_chunked_body_is_read(server: Running) -> None:
    pieces = (BODY[i : i + 7] for i in range(0, len(BODY), 7))
    headers = {"Content-Type": "application/json"}
    response = server.client.post("/v1/completions", content=pieces, headers=headers)
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "Hi"


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_gets_a_400_in_json(server: Running, raw: bytes) -> None:
    answer = exchange(server, raw)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_headers_that_are_too_large_get_a_431(server: Running) -> None:
    for head in (b"X-Pad: " + b"a" * 100_000, b"".join(b"X-%d: a\r\n" % i for i in range(10_000))):
        answer = exchange(server, HEAD + head)
        assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("trailer", [b"X-Pad: " + b"a" * 300_000 + b"\r\n", b"X-Pad: a\r\n" * 30_000])
@pytest.mark.parametrize("head", [HEAD, b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_trailers_count_as_headers(server: Running, head: bytes, trailer: bytes) -> None:
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    with connect(server) as sock:
        sock.sendall(chunked)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(50):  # megabytes, were they taken
                sock.sendall(trailer)
                time.sleep(0.01)
            pytest.fail("the trailers were taken")
    assert server.client.get("/health").status_code == 200


def test_a_chunked_body_may_have_more_framing_than_headers_may_have_bytes(server: Running) -> None:
    prompt = json.dumps({"prompt": "x" * 30_000}).encode()
    response = server.client.post("/v1/completions", content=(prompt[i : i + 1] for i in range(len(prompt))))
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_trailer_is_no_header_of_the_request(server: Running) -> None:
    chunked = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\nX-Request-Id: smuggled\r\nX-Last: one\r\n\r\n" % (len(BODY), BODY)
    seen: list[Any] = []
    app = server.server.config.loaded_app

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        seen.append(scope["headers"])

    server.server.config.loaded_app, kept = watched, app
    try:
        assert b" 200 " in exchange(server, chunked, body)
    finally:
        server.server.config.loaded_app = kept
    assert seen and not any(value == b"smuggled" for headers in seen for _, value in headers)


def test_a_body_that_goes_on_after_the_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.BODY_TIMEOUT_S", 0.3)
    with running() as server, connect(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert sock.recv(10_000).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 10:
                sock.sendall(b"1\r\nx\r\n")
                time.sleep(0.02)
        assert time.monotonic() - began < 8


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n"


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_wish_to_upgrade_is_overlooked(server: Running, wish: bytes, is_chunked: bool, piece: int) -> None:
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(BODY)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if is_chunked else BODY
    last = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    raw = (HEAD + wish + framing + b"\r\n\r\n" + body) * 2 + last
    answer = exchange(server, *(raw[i : i + piece] for i in range(0, len(raw), piece)))
    assert answer.count(b"HTTP/1.1 200") == 3 and b"HTTP/1.1 4" not in answer
    assert answer.count(b'"text":"Hi"') == 2


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("has_body", [True, False])
def test_a_wish_to_upgrade_a_connection_that_is_to_close_is_overlooked(
    server: Running, version: bytes, has_body: bool
) -> None:
    line = b"POST /v1/completions" if has_body else b"GET /ping"
    length = b"Content-Length: %d\r\n" % len(BODY) if has_body else b""
    connection = b"close, Upgrade" if version == b"1.1" else b"Upgrade"
    head = b"%s HTTP/%s\r\nHost: localhost\r\nConnection: %s\r\n" % (line, version, connection)
    raw = head + b"Upgrade: websocket\r\n" + length + b"\r\n" + (BODY if has_body else b"")
    for piece in (1, len(raw)):
        answer = exchange(server, *(raw[i : i + piece] for i in range(0, len(raw), piece)))
        assert answer.count(b"HTTP/1.1 200") == 1


def test_a_trailer_cannot_upgrade(server: Running) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    trailer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    last = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(server, chunked + trailer + last)
    assert answer.count(b"HTTP/1.1 200") == 2


def test_a_tunnel_is_refused(server: Running) -> None:
    answer = exchange(server, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 4")


def test_a_stream_is_not_cut_by_the_next_request_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.HEADER_TIMEOUT_S", 0.5)
    body = json.dumps({"prompt": "Hi", "max_tokens": 50, "temperature": 0, "stream": True}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with running(executor=EchoingExecutor(step_s=0.02)) as server:
        began = time.monotonic()
        answer = exchange(server, request, HEAD)  # of the next request only the beginning
        assert time.monotonic() - began > 1.0
    streamed, done, rest = answer.partition(b"data: [DONE]")
    assert streamed.startswith(b"HTTP/1.1 200") and done
    assert b"HTTP/1.1 408" in rest  # once the first was answered, its time began


def test_many_requests_on_one_connection_are_no_large_header(server: Running) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for _ in range(300):
            response = client.get("/ping", headers={"X-Pad": "a" * 1000})
            assert response.status_code == 200


def test_a_body_that_is_too_large_gets_a_413(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.wire.MAX_BODY_BYTES", 10_000)
    declared = server.client.post("/v1/completions", json={"prompt": "x" * 20_000})
    chunked = server.client.post("/v1/completions", content=(b"x" * 1000 for _ in range(20)))
    for response in (declared, chunked):
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert exchange(server, HEAD, b"Content-Length: 99999999999999999999\r\n\r\n").startswith(b"HTTP/1.1 4")
    assert server.completion(prompt="Hi", max_tokens=1).status_code == 200


def test_a_client_that_sends_its_whole_body_before_it_reads_sees_the_413(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.wire.MAX_BODY_BYTES", 10_000)
    size = 32 << 20  # more than the sockets' buffers hold
    with connect(server) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 20):
            client.sendall(bytes(1 << 20))
        assert read_all(client).startswith(b"HTTP/1.1 413")


def test_a_client_that_goes_on_sending_behind_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.wire.MAX_BODY_BYTES", 10_000)
    monkeypatch.setattr("headrace.server.protocol.LINGER_S", 0.3)
    with running() as server, connect(server) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 40))
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() < began + 5.0:
                client.sendall(bytes(1 << 16))
        assert time.monotonic() > began + 0.2
        assert server.completion(prompt="Hi", max_tokens=1).status_code == 200


def test_a_compressed_body_is_refused(server: Running) -> None:
    headers = {"Content-Encoding": "gzip"}
    assert server.client.post("/v1/completions", content=BODY, headers=headers).status_code == 415


def test_headers_and_bodies_that_do_not_come_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("headrace.server.wire.BODY_TIMEOUT_S", 0.5)
    with running() as server:
        for parts in ((), (HEAD,), (HEAD + b"Content-Length: 100\r\n\r\n", b"{")):
            began = time.monotonic()
            assert exchange(server, *parts).startswith(b"HTTP/1.1 408")
            assert time.monotonic() - began < 5
        answered = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        with connect(server) as sock:  # a connection that is idle between two requests is another thing
            for _ in range(2):
                sock.sendall(answered)
                assert read_one(sock) == 200
                time.sleep(0.8)


def test_a_blank_line_after_an_answer_does_not_keep_a_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.HEADER_TIMEOUT_S", 0.5)
    with running() as server, connect(server) as sock:
        for _ in range(2):  # it is no end either, if a request follows
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert read_one(sock) == 200
            sock.sendall(b"\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 408")
        wait_for(lambda: not server.server.server_state.connections)


def test_200_connections_with_half_a_header_stop_nobody(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            sock = stack.enter_context(connect(server))
            sock.sendall(HEAD + b"Content-Le")
        began = time.monotonic()
        assert server.client.get("/v1/models").status_code == 200
        assert server.completion(prompt="Hi", max_tokens=2).status_code == 200
        assert time.monotonic() - began < 5


def test_more_connections_than_the_cap_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.protocol.MAX_CONNECTIONS", 3)
    with running() as server, contextlib.ExitStack() as stack:
        assert server.client.get("/ping").status_code == 200
        held = [stack.enter_context(connect(server)) for _ in range(2)]
        for sock in held:
            sock.sendall(b"GET")
        wait_for(lambda: len(server.server.server_state.connections) == 3)
        assert exchange(server).startswith(b"HTTP/1.1 503")
        assert server.client.get("/ping").status_code == 200  # on the connection it has


def test_a_slow_reader_gets_a_large_answer_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_with_small_buffer(host: str, port: int) -> socket.socket:
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of its connections too
        return sock

    monkeypatch.setattr("echoing.bind", bind_with_small_buffer)
    monkeypatch.setattr("headrace.server.protocol.SEND_TIMEOUT_S", 0.5)
    body = json.dumps({"prompt": ["x" * 60] * 4, "max_tokens": 400, "ignore_eos": True, "logprobs": 20}).encode()
    with running() as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        sock.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = sock.recv(4096)
        began = time.monotonic()
        while chunk := sock.recv(8192):
            received += chunk
            time.sleep(0.03)
    assert time.monotonic() - began > 3 * 0.5
    assert len(json.loads(received.partition(b"\r\n\r\n")[2])["choices"]) == 4
