"""Which engines are compared, and how each is started: this project's own and those of a folder's peers.toml.

docs/benchmarks.md describes the file. Knows commands and names, starts nothing.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.workloads import LOADS, Load

DRIVER = Path(__file__).with_name("openvino_driver.py")
OURS = "headrace"
DEFAULT_SHAPE, DEFAULT_FORMAT = "smollm2-135m", "q4_1"


class PeersError(Exception):
    """peers.toml says something that cannot be."""


class Kind(StrEnum):
    SERVER = "server"  # speaks OpenAI's API on {port}
    OPENVINO = "openvino"  # in process: its wheel has no server


@dataclass(frozen=True, slots=True)
class Engine:
    family: str  # llama.cpp, OpenVINO, vLLM, headrace
    shape: str  # of the model: smollm2-135m, llama3.2-1b, llama3-8b
    format: str  # of its weights: q4_0, q4_1, q8_0, int8, bf16
    path: str  # the model's file or folder
    command: tuple[str, ...]  # with {path}, {port}, {threads}, {clients}, {context}, {driver} to fill in
    kind: Kind = Kind.SERVER
    isa: str = ""  # set where the engine was held to an instruction set
    served_name: str = "model"  # what requests call the model
    environment: Mapping[str, str] = field(default_factory=dict)
    only: frozenset[str] = frozenset(LOADS)  # loads it can or should be asked
    prepare: tuple[str, ...] = ()  # run once before the passes: its last line of output is the file that starts read
    reads: str = ""  # that file, once it is there

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.family, self.format, self.isa)))

    def arguments(self, port: int, threads: int, load: Load) -> list[str]:
        """The command for a load; {context} is what all clients' sequences need together."""
        values = {
            "path": self.path,
            "port": str(port),
            "threads": str(threads),
            "clients": str(load.clients),
            "driver": str(DRIVER),
            "context": str(load.clients * load.max_sequence_tokens),
        }
        return [argument.format_map(values) for argument in self.command]

    @property
    def restarts(self) -> bool:
        """Whether its command depends on the load, so that one process cannot serve all."""
        return any("{clients}" in argument or "{context}" in argument for argument in self.command)


def headrace(shape: str, weights: str, path: str, isa: str = "") -> Engine:
    serve = (
        sys.executable,
        "-m",
        "headrace",
        "serve",
        "--model",
        "{path}",
        "--port",
        "{port}",
        "--threads",
        "{threads}",
    )
    command = (*serve, "--served-model-name", "model", *(("--isa", isa) if isa else ()))
    pack = (sys.executable, "-m", "headrace", "pack", path, *(("--isa", isa) if isa else ()))
    return Engine(OURS, shape, weights, path, command, isa=isa, prepare=() if shape == DEFAULT_SHAPE else pack)


def read_engines(folder: Path | None, model: str) -> list[Engine]:
    """This project with its default model, then what the folder's peers.toml adds: its files for us, and the peers."""
    engines = [headrace(DEFAULT_SHAPE, DEFAULT_FORMAT, model)]
    if folder is None:
        return engines
    file = folder / "peers.toml"
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PeersError(f"cannot read {file}: {error}; docs/benchmarks.md describes it") from error
    if unknown := tables.keys() - {"headrace", "peer"}:
        raise PeersError(f"{file}: unknown tables {sorted(unknown)}; it has [[headrace]] and [[peer]]")
    for entry in tables.get("headrace", []):
        fields = _strings(file, entry, required=("shape", "format", "path"), optional=("isa",))
        path = _placed(folder, fields["path"])
        engines.append(headrace(fields["shape"], fields["format"], path, fields.get("isa", "")))
    engines += [_peer(file, entry) for entry in tables.get("peer", [])]
    return engines


def _peer(file: Path, entry: Mapping[str, object]) -> Engine:
    plain = {key: value for key, value in entry.items() if key not in {"command", "loads", "environment"}}
    needed, possible = ("family", "shape", "format", "path"), ("kind", "isa", "served_name")
    fields = _strings(file, plain, required=needed, optional=possible)
    command, loads = entry.get("command"), entry.get("loads", list(LOADS))
    environment, kind = entry.get("environment", {}), fields.get("kind", Kind.SERVER)
    if not isinstance(command, list) or not command:
        raise PeersError(f"{file}: {fields['family']} needs a command, a list of strings; it has {command!r}")
    if not isinstance(loads, list) or not set(loads) <= set(LOADS):
        raise PeersError(f"{file}: {fields['family']} has loads {loads}; there are {', '.join(LOADS)}")
    if not isinstance(environment, dict):
        raise PeersError(f"{file}: the environment of {fields['family']} is a table of strings, not {environment!r}")
    if kind not in list(Kind):
        raise PeersError(f"{file}: {fields['family']} is of kind {kind!r}; there are {', '.join(Kind)}")
    return Engine(
        fields["family"],
        fields["shape"],
        fields["format"],
        _placed(file.parent, fields["path"]),
        tuple(_placed(file.parent, str(argument)) for argument in command),
        kind=Kind(kind),
        isa=fields.get("isa", ""),
        served_name=fields.get("served_name", "model"),
        environment={key: _placed(file.parent, str(value)) for key, value in environment.items()},
        only=frozenset(map(str, loads)),
    )


def _strings(
    file: Path, entry: Mapping[str, object], required: Sequence[str], optional: Sequence[str]
) -> dict[str, str]:
    wrong = entry.keys() - {*required, *optional} or {key for key in required if key not in entry}
    if wrong or not all(isinstance(value, str) for value in entry.values()):
        raise PeersError(
            f"{file}: an entry has {dict(entry)}; it needs the strings {', '.join(required)} and may have "
            f"{', '.join(optional)}"
        )
    return {key: str(value) for key, value in entry.items()}


def _placed(folder: Path, text: str) -> str:
    """{here} is the folder of peers.toml; the other braces are filled in for each start."""
    return text.replace("{here}", str(folder.resolve()))
