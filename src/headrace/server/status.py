"""The routes that say how the server is: health, version, metrics. Owns no numbers; asks those who do."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.admission import Admission
from headrace.server.metrics import MetricsPage
from headrace.server.openai.errors import Refusal
from headrace.server.serving import Serving
from headrace.server.wire import json_response, refusal_response

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """Handlers of /health, /ping, /version and /metrics."""

    serving: Serving
    admission: Admission
    page: MetricsPage

    async def health(self, http: Request) -> Response:
        """200 if a request sent now would be answered: the engine makes progress or is idle, and nobody ends it."""
        if self.admission.is_draining:
            return refusal_response(Refusal(503, "the server is shutting down", None, "draining"))
        ailment = self.serving.ailment(self.admission.oldest_us)
        if ailment is not None:
            return refusal_response(Refusal(503, ailment, None, "unhealthy"))
        return json_response({"status": "ok"})

    async def version(self, http: Request) -> Response:
        return json_response({"version": self.serving.version})

    async def metrics(self, http: Request) -> Response:
        return Response(self.page.render(), headers={"content-type": TEXT_FORMAT})
