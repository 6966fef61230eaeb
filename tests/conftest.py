"""Fixtures that tests of several layers share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.model import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; pulled once, as `headrace serve` would."""
    return hub.pull(
        "smollm2-135m", hub.default_cache_dir(os.environ.get("HEADRACE_HOME"), os.environ.get("XDG_CACHE_HOME"))
    )
