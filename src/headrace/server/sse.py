"""Server-sent events: one JSON object each, and OpenAI's last one."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One event. JSON has no raw line ends, so one `data:` line holds it."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
