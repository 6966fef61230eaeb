"""The application: which route goes where, what wraps them all, and how exceptions become answers.

Owns the composition. Everything it composes can be had and tested alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.admission import Admission
from headrace.server.auth import Access, Guard
from headrace.server.boundary import Boundary
from headrace.server.buffer import BodyBuffer
from headrace.server.endpoints import OpenAIEndpoints
from headrace.server.generate import Generator
from headrace.server.metrics import MetricsPage, RequestMetrics
from headrace.server.openai.errors import printable, refusal_of, refusal_of_status
from headrace.server.prompts import Prompts
from headrace.server.serving import Serving
from headrace.server.status import StatusEndpoints
from headrace.server.text_endpoints import TextEndpoints
from headrace.server.watchdog import watch
from headrace.server.wire import HttpError, refusal_response
from headrace.server.workers import Workers
from headrace.types import CapacityError, RequestError


def build_app(serving: Serving, access: Access, admission: Admission | None = None) -> Starlette:
    """The server as an ASGI application. Its lifespan starts and stops the engine's thread."""
    admission = Admission() if admission is None else admission
    metrics = RequestMetrics()
    workers = Workers()
    prompts = Prompts(serving, workers)
    openai = OpenAIEndpoints(serving, Generator(serving, prompts, admission, metrics), workers)
    text = TextEndpoints(serving, prompts, workers)
    status = StatusEndpoints(serving, admission, MetricsPage(serving.model, metrics, serving.gauges))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        serving.engine.start()
        watching = asyncio.ensure_future(watch(serving, admission))
        yield
        watching.cancel()
        await serving.engine.stop()
        workers.stop()

    return Starlette(
        routes=[
            Route("/v1/models", openai.models),
            Route("/v1/models/{name:path}", openai.model),
            Route("/v1/completions", openai.completions, methods=["POST"]),
            Route("/v1/chat/completions", openai.chat, methods=["POST"]),
            Route("/tokenize", text.tokenize, methods=["POST"]),
            Route("/detokenize", text.detokenize, methods=["POST"]),
            Route("/apply-template", text.apply_template, methods=["POST"]),
            Route("/health", status.health),
            Route("/ping", status.health),
            Route("/version", status.version),
            Route("/metrics", status.metrics),
        ],
        middleware=[
            Middleware(Boundary, responses=metrics.responses),
            Middleware(Guard, access=access),
            Middleware(BodyBuffer),
        ],
        exception_handlers={
            HTTPException: _on_framework_error,
            HttpError: _on_wire_error,
            RequestError: _on_refusal,
            CapacityError: _on_refusal,
        },
        lifespan=lifespan,
    )


async def _on_framework_error(http: Request, error: Exception) -> Response:
    """The router's own: an unknown route, or a wrong method, which for OPTIONS is a question and no mistake."""
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    if http.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=headers)
    message = f"{printable(http.method)} {printable(http.url.path)}: {HTTPStatus(error.status_code).phrase.lower()}"
    if error.status_code == 404:
        routes = ", ".join(route.path for route in http.app.routes if "{" not in route.path)
        message += f"; this server has {routes}"
    refusal = refusal_of_status(error.status_code, message)
    return refusal_response(dataclasses.replace(refusal, headers=headers))


async def _on_wire_error(http: Request, error: Exception) -> Response:
    if not isinstance(error, HttpError):
        raise error
    return refusal_response(error.refusal)


async def _on_refusal(http: Request, error: Exception) -> Response:
    return refusal_response(refusal_of(error))
