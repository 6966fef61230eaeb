"""Loading: what is refused before anything is taken."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import _core
from headrace.engine.config import BackendKind, EngineConfig
from headrace.engine.load import load
from headrace.engine.memory import Ledger
from headrace.model import ModelFiles
from headrace.tensor import Bytes, Tensor
from headrace.types import CapacityError, Request, SamplingParams
from tiny import TinyShape, write_tiny_llama_gguf


@pytest.mark.parametrize("kind", BackendKind)
def test_no_matrix_is_copied_or_decoded_before_its_memory_is_known_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: BackendKind
) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    read: list[Tensor] = []
    as_it_is = Tensor.data

    def data(self: Tensor) -> Bytes:
        read.append(self)
        return as_it_is.__get__(self)

    monkeypatch.setattr(Tensor, "data", property(data))

    def on_ledger(files: ModelFiles, ledger: Ledger) -> None:
        assert all(len(tensor.shape) == 1 for tensor in read)  # norms: a few rows

    config = EngineConfig(threads=1, backend=kind)
    load(tmp_path / "tiny.gguf", config, on_ledger=on_ledger).close()
    assert any(tensor.row_order is not None for tensor in read)


def test_a_model_made_for_more_tokens_than_can_be_counted_asks_for_a_limit(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf", shape=replace(TinyShape(), max_len=1 << 25))
    with pytest.raises(CapacityError, match="at most 16,777,216: give --max-len"):
        load(tmp_path / "tiny.gguf", EngineConfig(threads=1))
    load(tmp_path / "tiny.gguf", EngineConfig(threads=1, max_len=64)).close()


def test_threads_that_the_system_does_not_give_are_named_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(num_threads: int) -> _core.ThreadPool:
        raise RuntimeError(f"the system gave 3 of {num_threads} threads: Resource temporarily unavailable")

    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(_core, "ThreadPool", few)
    with pytest.raises(CapacityError, match=r"gave 3 of 8 threads: Resource .*; lower --threads, or raise the limit"):
        load(tmp_path / "tiny.gguf", EngineConfig(threads=8))


def test_a_model_that_was_closed_takes_no_request(tmp_path: Path) -> None:
    loaded = load(write_tiny_llama_gguf(tmp_path / "tiny.gguf"), EngineConfig(threads=1))
    loaded.close()
    rejection = loaded.engine.add(Request(1, array("i", [3, 4]), SamplingParams(), seed=0))
    assert rejection is not None and "the engine is closed" in rejection.message
