"""The memory ledger: the system's limits and the sum that must fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.backend.cgroups import SystemFiles
from headrace.engine.memory import DEFAULT_KV_BYTES, Ledger, available_bytes, kv_bytes_to_take
from headrace.types import CapacityError

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(tmp_path: Path, cgroup_line: str, available_kib: int = 8 * 1024 * 1024) -> SystemFiles:
    write(tmp_path / "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    write(tmp_path / "proc/self/cgroup", cgroup_line)
    return SystemFiles(tmp_path / "proc", tmp_path / "cg")


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path, "0::/\n", available_kib=4096)) == 4 * MIB


def test_a_version_2_group_limits_its_process(tmp_path: Path) -> None:
    files = system(tmp_path, "0::/service/headrace\n")
    write(tmp_path / "cg/service/headrace/memory.max", f"{500 * MIB}\n")
    write(tmp_path / "cg/service/headrace/memory.current", f"{200 * MIB}\n")
    assert available_bytes(files) == 300 * MIB


def test_a_group_above_limits_too(tmp_path: Path) -> None:
    files = system(tmp_path, "0::/service/headrace\n")
    write(tmp_path / "cg/service/headrace/memory.max", "max\n")
    write(tmp_path / "cg/service/headrace/memory.current", "0\n")
    write(tmp_path / "cg/service/memory.max", f"{100 * MIB}\n")
    write(tmp_path / "cg/service/memory.current", f"{40 * MIB}\n")
    assert available_bytes(files) == 60 * MIB


def test_file_pages_that_can_be_dropped_count_as_available(tmp_path: Path) -> None:
    files = system(tmp_path, "0::/a\n")
    write(tmp_path / "cg/a/memory.max", f"{100 * MIB}\n")
    write(tmp_path / "cg/a/memory.current", f"{90 * MIB}\n")
    write(tmp_path / "cg/a/memory.stat", f"anon 1\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n")
    assert available_bytes(files) == 60 * MIB


def test_a_version_1_group_limits_its_process(tmp_path: Path) -> None:
    files = system(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/box\n")
    write(tmp_path / "cg/memory/box/memory.limit_in_bytes", f"{64 * MIB}\n")
    write(tmp_path / "cg/memory/box/memory.usage_in_bytes", f"{4 * MIB}\n")
    assert available_bytes(files) == 60 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = system(tmp_path, "0::/a\n")
    write(tmp_path / "cg/a/memory.max", "10\n")
    write(tmp_path / "cg/a/memory.current", "20\n")
    assert available_bytes(files) == 0


def test_this_machine_has_memory_left() -> None:
    assert available_bytes() > 100 * MIB


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    ledger = Ledger(weights=300 * MIB, kv=200 * MIB, activations=10 * MIB, available=400 * MIB, margin=50 * MIB)
    with pytest.raises(
        CapacityError, match=r"needs 560\.0 MiB .*weights 300\.0 MiB.*400\.0 MiB are available.*--max-len"
    ):
        ledger.check()


def test_what_fits_to_the_byte_is_accepted() -> None:
    Ledger(weights=1, kv=2, activations=3, available=10, margin=4).check()


def test_the_pool_takes_what_is_asked_but_never_more_than_can_be_used() -> None:
    assert kv_bytes_to_take(100, most_useful=1000, available=10) == 100
    assert kv_bytes_to_take(5000, most_useful=1000, available=10) == 1000


@pytest.mark.parametrize(
    ("most_useful", "available", "expected"),
    [(10, 1000, 10), (10_000, 1000, 500), (10 * DEFAULT_KV_BYTES, 10 * DEFAULT_KV_BYTES, DEFAULT_KV_BYTES)],
)
def test_by_default_the_least_of_three_sizes_is_taken(most_useful: int, available: int, expected: int) -> None:
    assert kv_bytes_to_take(None, most_useful, available) == expected
