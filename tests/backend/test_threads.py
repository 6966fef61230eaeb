"""Threads: how many, and a pool that sleeps when idle and survives forks and closing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.backend.cgroups import SystemFiles
from headrace.backend.threads import cpu_quotas, default_num_threads
from headrace.tensor import FORMATS, from_f32


def fake_system(root: Path, membership: str, files: dict[str, str]) -> SystemFiles:
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    return SystemFiles(proc, cgroup)


def test_the_quota_of_a_cgroup_v2_and_of_those_above_it_count(tmp_path: Path) -> None:
    files = {"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}
    assert list(cpu_quotas(fake_system(tmp_path, "0::/a/b\n", files))) == [1.5]


def test_the_quota_of_a_cgroup_v1_counts(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}
    membership = "5:memory:/job\n4:cpu,cpuacct:/job\n"
    assert list(cpu_quotas(fake_system(tmp_path, membership, files))) == [3.0]


@pytest.mark.parametrize("quota", ["-1", "", "rubbish"])
def test_no_quota_is_no_limit(tmp_path: Path, quota: str) -> None:
    files = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"}
    system = fake_system(tmp_path, "4:cpu:/\n", files)
    assert not list(cpu_quotas(system))
    assert default_num_threads(system) == len(os.sched_getaffinity(0))


def test_a_quota_below_one_processor_leaves_one_thread(tmp_path: Path) -> None:
    assert default_num_threads(fake_system(tmp_path, "0::/\n", {"cpu.max": "20000 100000"})) == 1


def test_affinity_limits_the_threads(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert default_num_threads(fake_system(tmp_path, "", {})) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def packed_by(pool: _core.ThreadPool, values: np.ndarray) -> np.ndarray:
    """`values`, through the one kind of work that a pool does without a program."""
    tensor = from_f32(values, FORMATS["f32"])
    weight = _core.Weight(_core.available_isas()[0], "f32", *values.shape)
    weight.pack(pool, tensor.data)
    return weight.to_f32()


VALUES = np.random.default_rng(0).standard_normal((1000, 40)).astype(np.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_tile_is_computed_once_whatever_the_number_of_threads(num_threads: int) -> None:
    pool = _core.ThreadPool(num_threads)
    for _ in range(20):
        np.testing.assert_array_equal(packed_by(pool, VALUES), VALUES)
    pool.close()


def test_an_idle_pool_uses_no_cpu() -> None:
    pool = _core.ThreadPool(4)
    packed_by(pool, VALUES)
    time.sleep(0.01)  # past the spinning
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.01
    pool.close()


def test_the_callers_denormals_are_its_own_again_after_a_run() -> None:
    pool = _core.ThreadPool(2)
    packed_by(pool, VALUES)
    assert np.float32(1e-40) * np.float32(0.5) != 0
    pool.close()


def test_a_closed_pool_refuses_work_and_can_be_closed_again() -> None:
    pool = _core.ThreadPool(2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        packed_by(pool, VALUES)


def test_a_forked_child_is_told_that_it_has_no_pool_and_can_end() -> None:
    pool = _core.ThreadPool(2)
    packed_by(pool, VALUES)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            packed_by(pool, VALUES)
        except ValueError as error:
            status = 0 if "another process" in str(error) else 2
        finally:
            pool.close()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    np.testing.assert_array_equal(packed_by(pool, VALUES), VALUES)
    pool.close()


def test_a_forked_child_can_drop_a_pool_whose_threads_sleep() -> None:
    pool = _core.ThreadPool(2)
    time.sleep(0.2)  # they sleep after a millisecond
    child = os.fork()
    if child == 0:
        del pool
        os._exit(0)
    end = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pool.close()
    assert ended == (child, 0)


@pytest.mark.parametrize("num_threads", [0, -1, 2000])
def test_an_absurd_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        _core.ThreadPool(num_threads)


FEW_THREADS = """
import resource
from headrace import _core
(size,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
limit = size * 1024 + (64 << 20)  # room for the stacks of some threads, not of all
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    _core.ThreadPool(_core.MAX_THREADS)
except RuntimeError as error:
    print(error)
"""


def test_a_pool_that_does_not_get_its_threads_ends_those_it_got_and_says_how_many() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=30, check=True)
    assert f" of {_core.MAX_THREADS} threads: " in done.stdout
    assert done.stderr == ""


def test_a_pool_computes_the_same_while_its_core_is_lent_and_taken_back() -> None:
    pool, data = _core.ThreadPool(3), np.arange(1 << 22, dtype=np.uint8)
    expected, is_over = _core.digest(pool, data), threading.Event()

    def lend() -> None:
        while not is_over.is_set():
            pool.lend_core()
            time.sleep(0.0001)
            pool.take_core_back()

    other = threading.Thread(target=lend)
    other.start()
    try:
        assert {_core.digest(pool, data) for _ in range(500)} == {expected}
    finally:
        is_over.set()
        other.join()


LENDING_S = 0.005  # for which a core is lent at most


def tiles_of_last_thread(pool: _core.ThreadPool, num_tiles: int) -> tuple[int, float]:
    """How many of the tiles it computed, and how long all took."""
    began = time.monotonic()
    threads = pool.tile_threads(num_tiles, 20)
    return threads.count(pool.num_threads - 1), time.monotonic() - began


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_worker_whose_core_is_lent_takes_no_tiles_until_it_is_taken_back(num_threads: int) -> None:
    pool = _core.ThreadPool(num_threads)
    for _ in range(100):  # on a busy machine the time may be over before the tiles are
        pool.lend_core()
        count, seconds = tiles_of_last_thread(pool, 20)
        if seconds < LENDING_S:
            break
    assert count == 0
    pool.take_core_back()
    assert any(tiles_of_last_thread(pool, 1000)[0] for _ in range(20))


def test_a_core_that_is_never_taken_back_is_lent_for_a_while_only() -> None:
    pool = _core.ThreadPool(2)
    for _ in range(20):
        pool.lend_core()
        count, seconds = tiles_of_last_thread(pool, 2000)
        if count:
            break
    assert count
    assert seconds > LENDING_S
    pool.lend_core()
    pool.close()


def test_a_pool_of_one_thread_has_no_core_to_lend() -> None:
    pool = _core.ThreadPool(1)
    pool.lend_core()
    assert pool.tile_threads(3, 0) == [0, 0, 0]


def test_a_worker_whose_core_was_lent_sleeps_again_once_the_time_is_over() -> None:
    pool = _core.ThreadPool(2)
    pool.lend_core()
    pool.tile_threads(100, 20)
    time.sleep(0.1)  # far more than it is lent for
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    pool.close()
