"""How much work a step is: bytes that must be read, operations that must be done. By arithmetic alone.

Bytes are of what lies in memory, packed; operations are 2 per weight and row, however a kernel does them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace import _core
from headrace.bench.steps import cpu_backend
from headrace.engine.load import Loaded
from headrace.model.spec import ModelSpec
from headrace.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What steps of one loaded model cost."""

    spec: ModelSpec
    step_weight_bytes: int  # matrices that every step reads: all but an embedding that is not the head as well
    embedding_row_bytes: int
    kv_bytes_per_token: int  # of all layers, as stored

    @classmethod
    def of(cls, loaded: Loaded) -> Work:
        spec, backend = loaded.files.spec, cpu_backend(loaded)
        embedding = _packed_bytes(loaded.files.weights().embedding, backend.isa)
        return cls(
            spec=spec,
            step_weight_bytes=loaded.ledger.weights - (0 if spec.is_embedding_tied else embedding),
            embedding_row_bytes=embedding // spec.vocab_size,
            kv_bytes_per_token=sum(
                len(group.layers) * (group.key_bytes_per_token + group.value_bytes_per_token)
                for group in backend.kv_groups
            ),
        )

    def decode_weight_bytes(self, batch: int) -> int:
        """Of a step that feeds `batch` tokens: each matrix once, and the embedding's rows."""
        return self.step_weight_bytes + batch * self.embedding_row_bytes

    def kv_bytes(self, num_attended: int) -> int:
        """Keys and values of `num_attended` tokens."""
        return num_attended * self.kv_bytes_per_token

    def prefill_flops(self, prompt_tokens: int) -> int:
        """Of one prompt: its tokens through the layers, one row through what only logits need, causal attention."""
        attention = self._attention_flops(pairs=prompt_tokens * (prompt_tokens + 1) // 2)
        return self.linear_flops(prompt_tokens, 1) + self._head_flops(1) + attention

    def decode_flops(self, batch: int, num_attended: int) -> int:
        """Of steps that feed `batch` tokens in all, each through layers and head, to `num_attended` tokens in all."""
        return self.linear_flops(batch, batch) + self._head_flops(batch) + self._attention_flops(num_attended)

    def linear_flops(self, num_tokens: int, num_logit_rows: int) -> int:
        """Of the layers' matrices. Behind the last layer's attention come rows with logits alone (`model.llama`)."""
        spec = self.spec
        attended = spec.num_heads * spec.head_dim
        query_key_value = spec.hidden_size * (attended + 2 * spec.num_kv_heads * spec.head_dim)
        rest = spec.hidden_size * (attended + 3 * spec.intermediate_size)
        whole = num_tokens * (spec.num_layers * query_key_value + (spec.num_layers - 1) * rest)
        return 2 * (whole + num_logit_rows * rest)

    def _head_flops(self, num_rows: int) -> int:
        return 2 * num_rows * self.spec.vocab_size * self.spec.hidden_size

    def _attention_flops(self, pairs: int) -> int:
        return 4 * self.spec.num_layers * self.spec.num_heads * self.spec.head_dim * pairs


def _packed_bytes(matrix: Tensor, isa: str) -> int:
    rows, columns = matrix.shape
    return _core.Weight(isa, matrix.format.name, rows, columns).nbytes
