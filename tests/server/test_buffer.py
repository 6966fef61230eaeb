"""What many large bodies at once may take."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest
from echoing import Running, running, wait_for
from starlette.types import ASGIApp

from headrace.server.buffer import BodyBuffer
from headrace.server.limits import SMALL_BODY_BYTES

ROOM = 8 * SMALL_BODY_BYTES
LARGE = b'{"content":"%b"}' % (b"a" * (ROOM - 100))


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[BodyBuffer]:
    """The buffer of every server made from now on."""
    made: list[BodyBuffer] = []

    def kept(app: ASGIApp) -> BodyBuffer:
        made.append(BodyBuffer(app))
        return made[-1]

    monkeypatch.setattr("headrace.server.app.BodyBuffer", kept)
    return made


@pytest.fixture
def server(buffers: list[BodyBuffer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr("headrace.server.buffer.MAX_BUFFERED_BYTES", ROOM)
    with running() as found:
        yield found


@pytest.fixture
def buffer(server: Running, buffers: list[BodyBuffer]) -> BodyBuffer:
    (only,) = buffers
    return only


@contextlib.contextmanager
def unfinished(server: Running, buffer: BodyBuffer) -> Iterator[None]:
    """A client that has sent most of a large body and takes its time for the rest."""
    host, port = server.client.base_url.host, server.client.base_url.port
    with socket.create_connection((host, port or 0)) as sock:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(LARGE)
        sock.sendall(head + LARGE[:-10])
        wait_for(lambda: buffer.num_bytes == len(LARGE) - 10)
        yield


def tokenized(server: Running, body: bytes) -> httpx.Response:
    return server.client.post("/tokenize", content=body)


def test_bodies_that_do_not_fit_beside_those_of_others_are_to_come_back_later(
    server: Running, buffer: BodyBuffer
) -> None:
    with unfinished(server, buffer):
        response = tokenized(server, LARGE)
        assert response.status_code == 429 and response.json()["error"]["code"] == "bodies_full"
        assert response.headers["retry-after"] and f"{ROOM:,}" in response.text


def test_small_bodies_pass_whatever_others_send(server: Running, buffer: BodyBuffer) -> None:
    with unfinished(server, buffer):
        assert tokenized(server, b'{"content":"%b"}' % (b"a" * (SMALL_BODY_BYTES - 100))).status_code == 200


def test_there_is_room_again_once_an_exchange_has_ended_however_it_did(server: Running, buffer: BodyBuffer) -> None:
    with unfinished(server, buffer):
        pass
    for body in (LARGE, LARGE + b"x", LARGE):
        wait_for(lambda: buffer.num_bytes == 0)
        assert tokenized(server, body).status_code in (200, 400)
