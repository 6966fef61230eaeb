"""What a step costs by arithmetic, against the same counted matrix by matrix."""

from __future__ import annotations

import pytest

from headrace import _core
from headrace.bench.work import Work
from headrace.engine.config import EngineConfig
from headrace.engine.load import Loaded, load
from headrace.model.gguf import read_gguf
from tiny import TinyShape, write_tiny_llama_gguf


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("work") / "tiny.gguf"
    write_tiny_llama_gguf(path, shape=TinyShape(is_embedding_tied=request.param), fmt="q8_0")
    loaded = load(path, EngineConfig(threads=1))
    request.addfinalizer(loaded.close)
    return loaded


def matrices(loaded: Loaded) -> dict[str, tuple[int, int]]:
    stored = read_gguf(loaded.files.path).tensors
    return {name: (t.shape[0], t.shape[1]) for name, t in stored.items() if len(t.shape) == 2}


def packed(shape: tuple[int, int]) -> int:
    return _core.Weight(_core.available_isas()[0], "q8_0", *shape).nbytes


def test_a_decode_step_reads_every_matrix_once_and_of_an_embedding_the_rows_alone(loaded: Loaded) -> None:
    work, found = Work.of(loaded), matrices(loaded)
    embedding = found.pop("token_embd.weight")
    head = found.pop("output.weight", embedding)
    expected = sum(map(packed, found.values())) + packed(head)
    assert work.decode_weight_bytes(0) == expected
    assert work.decode_weight_bytes(3) - expected == 3 * (packed(embedding) // embedding[0])


def test_a_prompts_operations_are_those_of_its_matrices_and_of_causal_attention(loaded: Loaded) -> None:
    found = matrices(loaded)
    head = found.get("output.weight", found["token_embd.weight"])
    spec = loaded.files.spec
    last = f"blk.{spec.num_layers - 1}."
    only_for_logits = [last + name + ".weight" for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    layers = sum(
        (1 if name in only_for_logits else 5) * rows * columns
        for name, (rows, columns) in found.items()
        if name.startswith("blk.")
    )
    attention = sum(  # every query head: a score and a weighted sum with each token up to its own
        2 * 2 * spec.head_dim * (position + 1) for position in range(5) for _ in range(spec.num_layers * spec.num_heads)
    )
    assert Work.of(loaded).prefill_flops(5) == 2 * (layers + head[0] * head[1]) + attention


def test_a_decode_steps_operations_have_the_head_for_every_token(loaded: Loaded) -> None:
    work, spec = Work.of(loaded), loaded.files.spec
    one_token = work.prefill_flops(1)
    assert work.decode_flops(1, 1) == one_token
    assert work.decode_flops(3, 3) == 3 * one_token
    assert work.decode_flops(1, 8) - one_token == 7 * 4 * spec.head_dim * spec.num_layers * spec.num_heads


def test_keys_and_values_count_as_they_are_stored(loaded: Loaded) -> None:
    spec = loaded.files.spec
    bf16 = 2
    assert Work.of(loaded).kv_bytes(7) == 7 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * bf16
