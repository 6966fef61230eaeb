"""The watchdog: what the operator is told while a step does not end.

Owns one log entry per stall, with the stack of every thread. Refuses to mend anything: clients wait or leave, and
/health says 503, so that whoever restarts processes can.
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
        ailment = serving.ailment(admission.oldest_us)
        if ailment is not None and not was_ailing:
            log.error("%s; open requests: %s\n%s", ailment, list(admission.request_ids), stacks())
        elif ailment is None and was_ailing:
            log.warning("the engine goes on")
        was_ailing = ailment is not None


def stacks() -> str:
    """Where every thread is, those in native code included: faulthandler needs no lock to look."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
