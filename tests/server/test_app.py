"""Routes, methods, keys and errors, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from echoing import MODEL, EchoingExecutor, Running, running
from starlette.routing import Route

from headrace.server.auth import OPEN_PATHS, Access

KEY = "sk-Ünusual key"


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(access=Access.of("127.0.0.1", KEY)) as found:
        yield found


def routes(server: Running) -> list[tuple[str, str]]:
    app = server.server.config.app
    found = []
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{name:path}", MODEL)
        found += [(method, path) for method in route.methods or ()]
    return found


def is_error(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return response.headers["content-type"] == "application/json" and bool(error["message"] and error["type"])


def test_the_models_are_listed_in_openais_shape(server: Running) -> None:
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [MODEL, "alias"]
    assert server.client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_an_unknown_model_is_404_and_named(server: Running) -> None:
    for response in (
        server.client.get("/v1/models/no-such"),
        server.completion(model="no-such", prompt="Hi"),
        server.chat(model="no-such"),
        server.client.post("/tokenize", json={"model": "no-such", "content": "x"}),
    ):
        assert response.status_code == 404 and "no-such" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "model_not_found"


def test_an_unknown_route_is_404_and_a_wrong_method_405_both_in_json(server: Running) -> None:
    assert server.client.get("/v1/no/such/route").status_code == 404
    assert is_error(server.client.get("/v1/no/such/route"))
    for method, path in (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("POST", "/v1/models")):
        response = server.client.request(method, path)
        assert response.status_code == 405 and is_error(response) and response.headers["allow"]


@pytest.mark.parametrize("path", ["embeddings", "responses", "rerank", "audio/speech", "images/generations"])
def test_routes_of_openais_that_are_not_served_are_404_and_say_what_is(server: Running, path: str) -> None:
    response = server.client.post(f"/v1/{path}", json={"input": "x"})
    error = response.json()["error"]
    assert response.status_code == 404 and is_error(response) and error["code"] == "not_found"  # others are retried
    assert f"/v1/{path}" in error["message"] and "/v1/chat/completions" in error["message"]


def test_a_preflight_is_answered_and_allows_nothing(server: Running) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    response = server.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 204
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_every_route_needs_the_key_unless_it_is_named_as_open(locked: Running) -> None:
    checked = 0
    for method, path in [*routes(locked), ("GET", "/no/such/route"), ("OPTIONS", "/v1/models"), ("GET", "/docs")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
            response = locked.client.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                checked += 1
    assert checked > 40


def test_the_key_opens_every_route(locked: Running) -> None:
    headers = {"Authorization": b"Bearer " + KEY.encode()}
    for method, path in routes(locked):
        assert locked.client.request(method, path, headers=headers).status_code != 401


def test_another_host_name_is_refused_on_every_route(server: Running) -> None:
    for method, path in routes(server):
        response = server.client.request(method, path, headers={"Host": "evil.example"})
        assert response.status_code == 403


def test_a_page_of_another_site_is_refused(server: Running) -> None:
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
        response = server.client.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == status


def test_request_ids_are_ours_and_a_clients_is_echoed_sanitized(server: Running) -> None:
    first, second = (server.client.get("/ping").headers["x-request-id"] for _ in range(2))
    assert first.startswith("req-") and first != second
    sent = {"x-request-id": b"mine-1 \t\xff"}
    assert server.client.get("/ping", headers=sent).headers["x-request-id"] == "mine-1 \\t\\xff"
    long = server.client.get("/ping", headers={"x-request-id": "a" * 5000}).headers["x-request-id"]
    assert len(long) < 200


def test_health_version_and_metrics_are_there(server: Running) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ping").status_code == 200
    assert server.client.get("/version").json() == {"version": "0.test"}
    metrics = server.client.get("/metrics")
    assert metrics.status_code == 200 and metrics.headers["content-type"].startswith("text/plain")


def test_an_unexpected_exception_is_a_500_that_tells_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise ValueError("secret path")

    monkeypatch.setattr(type(server.serving.tokenizer), "decode", explode)
    response = server.client.post("/detokenize", json={"tokens": [5]})
    assert response.status_code == 500 and is_error(response)
    assert "secret" not in response.text and "Traceback" not in response.text and ".py" not in response.text
    assert "secret path" in caplog.text  # the operator is told


def test_prompts_are_not_logged_and_control_characters_are_escaped(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.completion(prompt="the secret prompt", max_tokens=2)
    server.client.get("/%1b[31mred%0aline")
    assert "/v1/completions 200" in caplog.text
    assert "secret" not in caplog.text
    assert "\\x1b[31mred\\nline" in caplog.text and "\x1b" not in caplog.text


def test_a_request_that_breaks_the_engine_fails_alone() -> None:
    executor = EchoingExecutor(poison=300)
    with running(executor=executor) as server:
        bad = server.completion(prompt=[5, 300, 6], max_tokens=2)
        assert bad.status_code == 500 and is_error(bad)
        good = server.completion(prompt="Hi", max_tokens=2, temperature=0)
        assert good.status_code == 200 and good.json()["choices"][0]["text"] == "Hi"
        assert server.client.get("/health").status_code == 200
