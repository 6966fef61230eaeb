"""The server that most tests here talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from echoing import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found
