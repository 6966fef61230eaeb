"""Records on disk, a JSON line each, so that tables can be printed again and passes of several runs pooled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench.verdicts import Record


def append(file: Path, record: Record) -> None:
    with file.open("ab") as stream:
        stream.write(msgspec.json.encode(record) + b"\n")


def read(files: Iterable[Path]) -> list[Record]:
    """All files' records; passes of different files stay different passes."""
    records: list[Record] = []
    for file in files:
        first = max((record.number for record in records), default=-1) + 1
        for line in file.read_bytes().splitlines():
            record = msgspec.json.decode(line, type=Record)
            records.append(dataclasses.replace(record, number=first + record.number))
    return records
