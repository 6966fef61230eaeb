"""Packed weights on disk: mapped when they are this model's, and as if they were not there when they are not."""

from __future__ import annotations

import logging
import mmap
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, _core
from headrace.backend.packed import TRAILER, probes
from headrace.engine.config import BackendKind, EngineConfig
from headrace.engine.load import load
from headrace.tensor import FORMATS, Tensor, from_f32
from headrace.types import CapacityError, SamplingParams
from tiny import write_tiny_llama_gguf, write_tiny_llama_hf


def config(
    folder: Path, *, keeps: bool = False, isa: str | None = None, is_exact: bool = False, threads: int = 2
) -> EngineConfig:
    return EngineConfig(threads=threads, isa=isa, is_exact=is_exact, packed_dir=folder, is_packed_kept=keeps)


def loaded_from(model: Path, chosen: EngineConfig) -> Path | None:
    loaded = load(model, chosen)
    loaded.close()
    return loaded.packed


def answer(model: Path, chosen: EngineConfig) -> list[object]:
    with LLM(model, chosen) as llm:
        (result,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=12, temperature=0.0, logprobs=3))
        return [result.tokens, result.logprobs]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def packed(model: Path, folder: Path) -> Path:
    written = loaded_from(model, config(folder, keeps=True))
    assert written is not None
    return written


@pytest.mark.parametrize("stem", ["m" * 240, "模" * 80])  # as long as a file system lets the model's own name be
def test_a_model_of_a_long_name_in_any_script_is_packed_and_found_again(model: Path, tmp_path: Path, stem: str) -> None:
    named = model.rename(model.with_name(f"{stem}.gguf"))
    file = packed(named, tmp_path / "packed")
    assert loaded_from(named, config(tmp_path / "packed")) == file


def test_nothing_is_written_unasked(model: Path, tmp_path: Path) -> None:
    assert loaded_from(model, config(tmp_path / "packed")) is None
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_model_that_maps_its_weights_answers_as_the_one_that_packed_them(
    model: Path, tmp_path: Path, is_exact: bool
) -> None:
    folder = tmp_path / "packed"
    expected = answer(model, config(tmp_path / "none", is_exact=is_exact))
    assert answer(model, config(folder, keeps=True, is_exact=is_exact)) == expected
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    assert loaded_from(model, config(folder, is_exact=is_exact)) == file
    assert answer(model, config(folder, keeps=True, is_exact=is_exact)) == expected
    assert [file] == list(folder.iterdir())
    assert file.stat().st_mtime_ns == written


def test_each_instruction_set_and_each_form_of_the_weights_has_its_own_file(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    isas = _core.available_isas()
    files = {loaded_from(model, config(folder, keeps=True, isa=isa)) for isa in isas}
    files.add(loaded_from(model, config(folder, keeps=True, is_exact=True)))
    assert len(files) == len(isas) + 1


def test_weights_of_a_model_that_has_changed_since_are_not_used(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    file = packed(model, folder)
    status = model.stat()
    os.utime(model, (status.st_atime, status.st_mtime - 5))
    assert loaded_from(model, config(folder)) is None
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert loaded_from(model, config(folder)) == file


def test_weights_of_another_model_of_the_same_name_shape_and_age_are_not_used(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    packed(model, folder)
    status = model.stat()
    write_tiny_llama_gguf(model, seed=1)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert model.stat().st_size == status.st_size
    assert loaded_from(model, config(folder)) is None


DAMAGES = {
    "a bit of the weights": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "the last of the weights": lambda data: data[: -TRAILER.size - 1] + b"\x55" + data[-TRAILER.size :],
    "its digest": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "its key": lambda data: data[: 8 - TRAILER.size] + bytes(32) + data[40 - TRAILER.size :],
    "its length": lambda data: data[:4096] + data[-TRAILER.size :],
    "its end": lambda data: data[:-1],
    "all but some bytes": lambda data: data[:20],
    "everything": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_lost_something_is_told_of_and_the_weights_are_packed_anew(
    model: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packed"
    expected = answer(model, config(folder, keeps=True))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    with caplog.at_level(logging.WARNING):
        assert answer(model, config(folder)) == expected
    assert f"{file} is not used, the weights are packed anew" in caplog.text
    assert loaded_from(model, config(folder, keeps=True)) == file
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_named_and_nothing_half_is_left(model: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file")
    with pytest.raises(CapacityError, match=r"packed/tiny-\w+\.packed cannot be written: \w+"):
        loaded_from(model, config(tmp_path / "packed", keeps=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "tiny.gguf"]


def test_a_disk_that_fills_up_is_named_and_nothing_half_is_left(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "pack", "--threads", "1", "--cache-dir", str(tmp_path), str(model)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert done.returncode == 2
    assert re.fullmatch(r"headrace: \S+\.packed cannot be written: File too large\n", done.stderr)
    assert list((tmp_path / "packed").iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away(model: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "other-0123.part").write_bytes(b"half")
    file = packed(model, tmp_path / "packed")
    assert list((tmp_path / "packed").iterdir()) == [file]


def test_processes_that_pack_at_once_leave_one_whole_file(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "pack", "--threads", "1", "--cache-dir", str(tmp_path), str(model)]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = {process.communicate()[0] for process in together}
    assert [process.returncode for process in together] == [0, 0, 0]
    (file,) = (tmp_path / "packed").iterdir()
    assert told == {f"{file}\n"}
    assert loaded_from(model, config(tmp_path / "packed")) == file


def test_what_only_its_owner_may_read_is_packed_for_its_owner(model: Path, tmp_path: Path) -> None:
    model.chmod(0o600)
    assert packed(model, tmp_path / "packed").stat().st_mode & 0o777 == 0o600
    model.chmod(0o644)
    umask = os.umask(0o022)
    os.umask(umask)
    (tmp_path / "again").mkdir()
    assert packed(model, tmp_path / "again").stat().st_mode & 0o777 == 0o644 & ~umask


def put_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [os.mkfifo, put_directory])
def test_what_is_no_file_is_passed_by(model: Path, tmp_path: Path, put: Callable[[Path], None]) -> None:
    file = packed(model, tmp_path / "packed")
    file.unlink()
    put(file)
    assert loaded_from(model, config(tmp_path / "packed")) is None


def test_a_system_without_huge_pages_maps_small_ones(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(mmap.mmap):
        def madvise(self, option: int, *where: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            super().madvise(option, *where)

    file = packed(model, tmp_path / "packed")
    monkeypatch.setattr(mmap, "mmap", Small)
    assert loaded_from(model, config(tmp_path / "packed")) == file


def test_a_directory_of_shards_is_one_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_llama_hf(model)
    expected = answer(model, config(tmp_path / "none"))
    file = packed(model, tmp_path / "packed")
    (model / "README.md").write_text("read me")
    assert loaded_from(model, config(tmp_path / "packed")) == file
    assert answer(model, config(tmp_path / "packed")) == expected


def test_weights_serve_any_number_of_threads(model: Path, tmp_path: Path) -> None:
    file = loaded_from(model, config(tmp_path / "packed", keeps=True, threads=1))
    assert file is not None
    assert loaded_from(model, config(tmp_path / "packed", threads=3)) == file


def test_programs_find_what_was_packed(model: Path, tmp_path: Path) -> None:
    file = packed(model, tmp_path / "packed")
    for chosen in (None, EngineConfig(threads=1)):
        with LLM(model, chosen, cache_dir=tmp_path) as llm:
            assert llm.loaded.packed == file
    with LLM(model, EngineConfig(packed_dir=tmp_path / "none"), cache_dir=tmp_path) as llm:
        assert llm.loaded.packed is None


def test_a_model_that_was_never_packed_is_not_searched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(*_: object) -> list[bytes]:
        raise AssertionError("its matrices were read")

    monkeypatch.setattr(Tensor, "samples", samples)
    assert loaded_from(model, config(tmp_path / "packed")) is None
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "other-0123.packed").write_bytes(b"")
    assert loaded_from(model, config(tmp_path / "packed")) is None


@pytest.mark.parametrize("fields", [{}, {"packed_dir": Path("packed"), "backend": BackendKind.REFERENCE}])
def test_weights_that_nobody_can_keep_are_not_asked_for(fields: dict[str, Any]) -> None:
    with pytest.raises(CapacityError, match="can be kept by the CPU backend alone, and in a folder"):
        EngineConfig(is_packed_kept=True, **fields)


def test_the_probes_of_a_mixed_file_come_in_one_order_in_every_process() -> None:
    pool, names = _core.ThreadPool(1), ("q8_0", "f16", "q4_1", "bf16", "q4_0")  # decoded to f32 for exact weights
    values = np.zeros((16, 32), np.float32)
    parts = [(_core.Weight("scalar", "f32", 16, 32), from_f32(values, FORMATS[name])) for name in names]
    _, *decoded = probes("scalar", parts, pool)
    each = {name: list(probes("scalar", [part], pool))[1] for name, part in zip(names, parts, strict=True)}
    assert decoded == [each[name] for name in sorted(names)]


# The digest -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 3 << 20), st.data())
def test_a_digest_changes_with_any_byte_and_with_no_number_of_threads(size: int, data: st.DataObject) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    pools = [_core.ThreadPool(count) for count in (1, 3)]
    digests = {_core.digest(pool, content) for pool in pools}
    assert len(digests) == 1
    if size > 0:
        content[data.draw(st.integers(0, size - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
        assert _core.digest(pools[0], content) not in digests
    assert _core.digest(pools[0], np.append(content, np.uint8(0))) not in digests


@pytest.mark.parametrize("bit", [0, 31, 62, 63])
@pytest.mark.parametrize("distance", [8, 64, 128, 4096])
def test_a_digest_changes_with_a_bit_of_two_words(bit: int, distance: int) -> None:
    pool, words = _core.ThreadPool(1), np.zeros(1 << 16, np.uint64)
    whole = _core.digest(pool, words.view(np.uint8))
    words[[1000, 1000 + distance // 8]] ^= np.uint64(1 << bit)
    assert _core.digest(pool, words.view(np.uint8)) != whole


def test_a_digest_changes_when_parts_change_places() -> None:
    pool, size = _core.ThreadPool(2), 1 << 20
    content = np.random.default_rng(0).integers(0, 256, 4 * size, dtype=np.uint8)
    whole = _core.digest(pool, content)
    for at, length in ((0, 8), (64, 64), (size, size)):
        swapped = content.copy()
        swapped[at : at + length], swapped[at + length : at + 2 * length] = (
            content[at + length : at + 2 * length],
            content[at : at + length],
        )
        assert _core.digest(pool, swapped) != whole


# The core's border ----------------------------------------------------------------------------------------------


def test_a_block_that_does_not_fit_the_weights_is_refused() -> None:
    weights = [_core.Weight("scalar", "f32", 8, 32) for _ in range(2)]
    size = _core.place_together([_core.Weight("scalar", "f32", 8, 32) for _ in range(2)]).size
    block = np.zeros(size + 128, np.uint8)
    start = -block.ctypes.data % 64
    with pytest.raises(ValueError, match=f"take {size} bytes, not {size - 1}"):
        _core.place_packed(weights, block[start : start + size - 1])
    with pytest.raises(ValueError, match="a multiple of 64"):
        _core.place_packed(weights, block[start + 1 : start + 1 + size])
    _core.place_packed(weights, block[start : start + size])
    with pytest.raises(ValueError, match="its memory already"):
        _core.place_packed(weights, block[start : start + size])


def test_mapped_weights_hold_on_to_their_block_and_let_it_go_with_the_last_of_them() -> None:
    class Block(np.ndarray):  # a kind of array that tells when it goes
        gone = 0

        def __del__(self) -> None:
            Block.gone += 1

    source = [_core.Weight("scalar", "f32", 8, 32) for _ in range(2)]
    view, pool = _core.place_together(source), _core.ThreadPool(1)
    for i, weight in enumerate(source):
        weight.pack(pool, np.full(8 * 32, i + 1, np.float32).view(np.uint8))
    space = np.zeros(view.size + 64, np.uint8)
    start = -space.ctypes.data % 64
    space[start : start + view.size] = view
    weights = [_core.Weight("scalar", "f32", 8, 32) for _ in range(2)]
    _core.place_packed(weights, space[start : start + view.size].view(Block))
    before = Block.gone
    first = weights.pop(0)
    del weights
    assert first.to_f32().tolist() == np.full((8, 32), 1.0).tolist()
    assert Block.gone == before
    del first
    assert Block.gone == before + 1
