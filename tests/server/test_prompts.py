"""Where tokenizing happens, and what is refused before it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from echoing import Running, running, wait_for

from headrace.server.limits import INLINE_CHARS, MAX_SCORES, MAX_TOKENIZED_CHARS, WORKERS
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoding:
    """Tokenizing, watched and held up at will."""

    threads: list[str] = field(default_factory=list)  # the names of those that tokenized, each time
    may_end: threading.Event = field(default_factory=threading.Event)  # of long texts


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    encoding = Encoding()
    encoding.may_end.set()
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoding.threads.append(threading.current_thread().name)
        if len(text) > INLINE_CHARS:
            encoding.may_end.wait(30)  # longer than a client has patience
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    yield encoding
    encoding.may_end.set()


def test_short_texts_are_tokenized_at_once_and_long_ones_on_other_threads(server: Running, encoding: Encoding) -> None:
    server.client.post("/tokenize", json={"content": "a" * INLINE_CHARS})
    server.client.post("/tokenize", json={"content": "a" * (INLINE_CHARS + 1)})
    short, long = encoding.threads
    assert not short.startswith("headrace-worker") and long.startswith("headrace-worker")


def test_many_short_prompts_are_one_long_text(server: Running, encoding: Encoding) -> None:
    server.completion(prompt=["a" * 200] * 20, max_tokens=1)
    server.completion(prompt=["a"] * 32, max_tokens=1)
    assert len(encoding.threads) == 52
    assert all(name.startswith("headrace-worker") for name in encoding.threads)


def test_others_are_served_while_a_long_text_is_tokenized(server: Running, encoding: Encoding) -> None:
    encoding.may_end.clear()
    thread = threading.Thread(target=server.completion, kwargs={"prompt": "the " * 3000, "max_tokens": 1})
    thread.start()
    wait_for(lambda: encoding.threads)
    assert server.client.get("/health").status_code == 200
    encoding.may_end.set()
    thread.join()


def test_of_a_text_that_cannot_fit_only_the_beginning_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    with running() as server:
        assert server.completion(prompt="no " * 100_000).status_code == 400
        assert max(seen) < 20_000


@pytest.mark.parametrize("character", [" ", "x"])
def test_a_text_too_long_to_be_tokenized_is_refused_by_the_numbers_whatever_it_is(
    server: Running, character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = character * (MAX_TOKENIZED_CHARS + 1)
    monkeypatch.delattr(Tokenizer, "encode")
    for response in (server.completion(prompt=text), server.chat(text)):
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert f"{MAX_TOKENIZED_CHARS:,}" in error["message"]
    assert server.client.post("/tokenize", json={"content": text}).status_code == 400


def test_what_a_template_makes_too_long_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tokenizer, "encode")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    with running(chat_template=template, max_len=2**20) as server:
        error = server.chat("x" * (MAX_TOKENIZED_CHARS // 2 + 1)).json()["error"]
        assert error["code"] == "context_length_exceeded" and f"{MAX_TOKENIZED_CHARS + 2:,}" in error["message"]


def test_more_logprobs_than_an_answer_may_carry_are_refused_by_the_numbers(server: Running) -> None:
    scoring = {"prompt": [70] * 500, "echo": True, "max_tokens": 0, "logprobs": 64}
    assert server.completion(**scoring, n=2).status_code == 200
    for response, count in (
        (server.completion(**scoring, n=64), 64 * 500 * 65),
        (server.completion(prompt=[[70]] * 32, n=2, max_tokens=400, logprobs=60), 64 * 400 * 61),
        (server.chat(n=64, max_tokens=400, logprobs=True, top_logprobs=63), 64 * 400 * 64),
    ):
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "logprobs"
        assert f"{count:,}" in error["message"] and f"{MAX_SCORES:,}" in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_what_waits_for_a_thread_is_not_done_for_a_client_that_left(encoding: Encoding, path: str) -> None:
    text = "a" * (INLINE_CHARS + 1)
    body = json.dumps({"prompt": text}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    encoding.may_end.clear()
    with running() as server:
        clients = [socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) for _ in range(6 * WORKERS)]
        for client in clients:
            client.sendall(head + body)
        wait_for(lambda: len(encoding.threads) == WORKERS)
        for client in clients:
            client.close()
        wait_for(lambda: server.metric('headrace_http_responses_total{status="499"}') == len(clients))
        encoding.may_end.set()
        server.client.post("/tokenize", json={"prompt": text})
        assert len(encoding.threads) == WORKERS + 1  # those under way, and the last one's
