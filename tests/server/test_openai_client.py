"""The official `openai` client, unchanged, against the server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from echoing import MODEL, Running, running

from headrace.server.auth import Access

MESSAGES = [{"role": "user", "content": "Count to three"}]
ANSWER = "user\nCount to three"  # the executor repeats the prompt, up to its <|im_end|>


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_of_the_client(server: Running) -> None:
    with client_of(server) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs.content[1].token == "u"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat_of_the_client(server: Running) -> None:
    with client_of(server) as client:
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options=options
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 1


def test_the_clients_stream_accumulator_puts_a_chat_together(server: Running) -> None:
    with (
        client_of(server) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream,
    ):
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_a_completion_of_the_client(server: Running) -> None:
    with client_of(server) as client:
        answer = client.completions.create(model=MODEL, prompt=["abc", "xyz"], max_tokens=3, temperature=0, logprobs=2)
        assert answer.choices[0].text == "abc" and answer.choices[1].finish_reason == "length"
        assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
        pieces = client.completions.create(model=MODEL, prompt="abc", max_tokens=6, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "abcabc"


def test_the_models_of_the_client(server: Running) -> None:
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == [MODEL, "alias"]
        assert client.models.retrieve("alias").owned_by == "headrace"


def test_errors_become_the_clients_exceptions(server: Running) -> None:
    with client_of(server) as client:
        with pytest.raises(openai.NotFoundError, match="no-such"):
            client.chat.completions.create(model="no-such", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
    with running(access=Access.of("127.0.0.1", "secret")) as locked:
        with client_of(locked) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="secret") as client:
            assert client.models.list().data


async def test_the_async_client_runs_many_at_once(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(i: int) -> str:
            text = ""
            stream = await client.completions.create(
                model=MODEL, prompt=f"number {i}.", max_tokens=30, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            return text

        answers = await asyncio.gather(*map(ask, range(20)))
        assert all(answer.startswith(f"number {i}.num") for i, answer in enumerate(answers))
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        assert whole.choices[0].message.content == ANSWER
