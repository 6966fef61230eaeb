"""The load client: streamed /v1/completions over HTTP/1.1, greedy, end tokens ignored.

It runs on the cores that the servers compute on, so it does little for each event: parsers in C for HTTP and for JSON.
Token counts are the server's own (`usage`), so engines that put several tokens into an event are counted right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import httptools
import msgspec
import uvloop

from bench.figures import Answer, Figures, summarize
from bench.workloads import Load, prompts

LOAD_TIMEOUT_S = 900.0


class LoadError(Exception):
    """A server answered a request otherwise than with a whole stream."""


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


DECODER = msgspec.json.Decoder(Event)


class CompletionStream(asyncio.Protocol):
    """One request on a connection of its own: when each piece of output arrived, and how many tokens there were."""

    def __init__(self, request: bytes, done: asyncio.Future[Answer]) -> None:
        self.request, self.done = request, done
        self.parser = httptools.HttpResponseParser(self)
        self.sent, self.arrivals, self.pending = 0.0, list[float](), b""
        self.usage = Usage()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(self.request)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"{type(error).__name__}: {error.__context__ or error}")

    def on_body(self, body: bytes) -> None:
        if self.parser.get_status_code() != 200:
            self.fail(f"HTTP {self.parser.get_status_code()}: {body[:300]!r}")
            return
        now = time.perf_counter()
        *lines, self.pending = (self.pending + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line[:12]:
                self.on_event(DECODER.decode(line[5:]), now)

    def on_event(self, event: Event, now: float) -> None:
        if event.error is not None:
            self.fail(f"the stream carries an error: {event.error}")
        self.usage = event.usage or self.usage
        # An empty piece can be a token (half a character), unless it only says why the answer ended.
        if event.choices and (event.choices[0].text or not event.choices[0].finish_reason):
            self.arrivals.append(now)

    def on_message_complete(self) -> None:
        if not self.done.done():
            num_output = self.usage.completion_tokens or len(self.arrivals)
            self.done.set_result(Answer(self.sent, tuple(self.arrivals), self.usage.prompt_tokens, num_output))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"the connection ended before the answer did ({error})")

    def fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(LoadError(reason))


def request_bytes(port: int, model: str, prompt: str, output_tokens: int) -> bytes:
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def complete(port: int, model: str, prompt: str, output_tokens: int) -> Answer:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()
    request = request_bytes(port, model, prompt, output_tokens)
    transport, _ = await loop.create_connection(lambda: CompletionStream(request, done), "127.0.0.1", port)
    try:
        return await done
    finally:
        transport.close()


async def closed_loop(port: int, model: str, load: Load, waiting: Iterator[str]) -> list[Answer]:
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await complete(port, model, prompt, load.output_tokens))

    async with asyncio.timeout(LOAD_TIMEOUT_S):
        clients = [asyncio.create_task(client()) for _ in range(load.clients)]
        try:
            await asyncio.gather(*clients)
        finally:
            for it in clients:
                it.cancel()
    return answers


def run_load(port: int, model: str, name: str, load: Load, seed: int) -> Figures:
    """Raises `LoadError` when any request fails: a figure of the others would flatter the engine."""
    texts = iter(list(prompts(name, load, seed)))
    began, cpu = time.perf_counter(), time.process_time()
    try:
        answers = uvloop.run(closed_loop(port, model, load, texts))
    except (LoadError, OSError, TimeoutError, msgspec.DecodeError) as failure:
        raise LoadError(f"{name}: {failure}") from failure
    wall_s = time.perf_counter() - began
    try:
        return summarize(answers, wall_s, (time.process_time() - cpu) / wall_s)
    except ValueError as error:
        raise LoadError(f"{name}: {error}") from error
