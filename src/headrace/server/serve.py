"""Runs the application: sockets, signals, and an end that lets answers finish.

Owns the process's life from bind to exit. SIGTERM and SIGINT: /health says not ready and new work is refused; what is
under way has the grace time; then the rest is told why it ends. A second signal ends at once, but for the step under
way, which has to end by itself. A further signal waits for nothing: the process exits with 128 plus its number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from headrace.server.admission import Admission
from headrace.server.auth import check_key, is_loopback
from headrace.server.limits import GRACE_S, KEEP_ALIVE_S
from headrace.server.protocol import LimitedProtocol
from headrace.types import CapacityError, RequestError

log = logging.getLogger(__name__)

POLL_S = 0.05
TAIL_S = 2.0  # for the last bytes to leave once every answer has ended


def check_reach(host: str, api_key: str | None) -> None:
    """Raise RequestError for an address that others reach without a key, and for what is no address or no key."""
    check_key(api_key)
    if not host.strip():
        raise RequestError("--host is empty; name an address, 0.0.0.0 for all of IPv4 or :: for all", "host")
    if api_key is None and not is_loopback(host):
        raise RequestError(
            f"--host {host} lets other machines in, so an API key is needed: give --api-key KEY, or serve on 127.0.0.1",
            "host",
        )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model is loaded; CapacityError says what to do if the port is not free."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        raise CapacityError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --host and --port"
        ) from None
    return sock


class HttpServer(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown."""

    def __init__(self, app: Starlette, admission: Admission, grace_s: float = GRACE_S) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                loop="none",  # serve() makes it
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(TAIL_S)),
            )
        )
        self._admission = admission
        self._grace_s = grace_s
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal, between two instructions of the event loop's thread."""
        if self.should_exit:  # and yet the process is here: a step, or something else, does not end
            log.error("%s while ending; the process exits without waiting", signal.Signals(sig).name)
            os._exit(128 + sig)
        if self._admission.is_draining or not self.started:
            self.should_exit = True
            return
        log.info(
            "%s: finishing %d answers, at most %g s", signal.Signals(sig).name, self._admission.num_open, self._grace_s
        )
        self._admission.drain()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's heartbeat, ten times a second."""
        if self._admission.is_draining and self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drained())
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        if not await self._until_empty(self._grace_s):
            cause = "second signal" if self.should_exit else "the grace time is over"
            log.warning("%s; cutting off %d answers", cause, self._admission.num_open)
            self._admission.end_all()
            await self._until_empty(TAIL_S)
        self.should_exit = True

    async def _until_empty(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while self._admission.num_open and loop.time() < end and not self.should_exit:
            await asyncio.sleep(POLL_S)
        return not self._admission.num_open


def serve(app: Starlette, admission: Admission, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until a signal ends it. `on_ready` is called once requests are taken."""
    server = HttpServer(app, admission)

    async def main() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started and not task.done():
            await asyncio.sleep(POLL_S)
        if server.started:
            on_ready()
        await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
