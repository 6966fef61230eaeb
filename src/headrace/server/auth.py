"""Who may ask: the API key, the Host header and the Origin header, checked before any route is looked up.

Default-deny: every path needs the key unless it is in `OPEN_PATHS`, so a route that is added later is covered. Refuses
to know what routes there are.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.server.openai.errors import Refusal, printable
from headrace.server.wire import send_refusal
from headrace.types import RequestError

OPEN_PATHS = frozenset({"/health", "/ping"})  # probes of load balancers carry no key, and learn one bit
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
ANY_HOST = "*"


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must show. RequestError for a key that is none, or that no header could carry."""

    api_key: str | None
    hosts: frozenset[str]  # names and addresses that the Host header may have, lower case, without port
    allows_addresses: bool = False  # bound to every address: any literal one is ours; names are not (DNS rebinding)

    def __post_init__(self) -> None:
        check_key(self.api_key)
        if "" in self.hosts:  # what a request without a Host header would show
            raise RequestError("a host is empty; name an address, 0.0.0.0 for all of IPv4 or :: for all", "host")

    @classmethod
    def of(cls, bound_host: str, api_key: str | None, allowed_hosts: Sequence[str] = ()) -> Access:
        """The rules of a server bound to `bound_host`, with further names from the operator."""
        hosts = LOOPBACK_HOSTS | {_host_name(host) for host in (bound_host, *allowed_hosts)}
        return cls(api_key, hosts, _is_wildcard(bound_host))

    def allows_host(self, host: str | None) -> bool:
        """Whether a Host header, or the host of an Origin, is one of ours."""
        if ANY_HOST in self.hosts:
            return True
        name = _host_name(host or "")
        return name in self.hosts or (self.allows_addresses and _is_address(name))

    def allows_key(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the key; how long that takes tells nothing."""
        if self.api_key is None:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        shown = key.strip(" ").encode("latin-1", "replace")  # headers are decoded as latin-1, whatever the client meant
        return scheme.lower() == "bearer" and hmac.compare_digest(shown, self.api_key.encode())

    def refusal(self, path: str, headers: Headers) -> Refusal | None:
        """Why a request may not go on, or None."""
        host, origin = headers.get("host"), headers.get("origin")
        if not self.allows_host(host):
            message = f"the Host header is {printable(host or 'missing')!r}, which this server does not answer to"
            return Refusal(403, f"{message}; allow it with --allowed-host", None, "host_not_allowed")
        if origin is not None and not self.allows_host(_origin_host(origin)):
            return Refusal(403, "requests from other sites' pages are refused", None, "origin_not_allowed")
        if path not in OPEN_PATHS and not self.allows_key(headers.get("authorization")):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            return Refusal(401, message, None, "invalid_api_key", {"www-authenticate": "Bearer"})
        return None


class Guard:
    """ASGI: lets a request through to `app` if `access` does."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self.access.refusal(scope["path"], Headers(scope=scope))
            if refusal is not None:
                await send_refusal(send, refusal)
                return
        await self.app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    name = _host_name(host)
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def check_key(api_key: str | None) -> None:
    """Raise RequestError for a key that would open the server to everybody, or to nobody. None is no key."""
    if api_key is not None and (not api_key or api_key != api_key.strip() or not api_key.isprintable()):
        raise RequestError(
            "the API key must be at least one printable character, without white space around it; "
            "leave it out for no key",
            "api_key",
        )


def _origin_host(origin: str) -> str:
    """The host of an Origin header; empty for `null` and for what is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """A Host header without its port and brackets, lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified
