"""The watchdog: what the operator is told while a step does not end.

Owns what is logged of a stall, once: the open requests and the stack of every thread. Refuses to mend anything: clients
wait or leave, and /health says 503, so that whoever restarts processes can.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import tempfile

from headrace.server.admission import Admission
from headrace.server.limits import WATCH_S
from headrace.server.serving import Serving

log = logging.getLogger(__name__)


async def watch(serving: Serving, admission: Admission) -> None:
    """Look at the engine now and then, for as long as the server runs."""
    was_ailing = False
    while True:
        await asyncio.sleep(WATCH_S)
        try:
            ailment = serving.ailment(admission.oldest_us)
            has_changed = (ailment is not None) is not was_ailing
            was_ailing = ailment is not None
            if has_changed:
                _report(ailment, list(admission.request_ids))
        except Exception:  # without a file descriptor or room on the disk, say: the next stall is still to be told of
            log.exception("the watchdog could not say all that it saw")


def _report(ailment: str | None, request_ids: list[int]) -> None:
    if ailment is None:
        log.warning("the engine goes on")
        return
    log.error("%s; open requests: %s", ailment, request_ids)
    log.error("where every thread is:\n%s", stacks())  # apart from the first, as it may fail


def stacks() -> str:
    """Where every thread is, those in native code included: faulthandler needs no lock to look."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
