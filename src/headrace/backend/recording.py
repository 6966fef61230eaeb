"""A forward pass as a list of operations over values of symbolic size, recorded once.

Owns the recorder (an `Ops` that computes nothing) and the peephole that fuses. Refuses to know how an operation is
computed, which each one leaves to the core's Program, and where values live (layout.py).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from headrace import _core
from headrace.ops import F32, AttentionShape, Rotary
from headrace.types import InvariantError

Prepared = _core.Weight | F32  # a matrix, or a vector of f32


class RowKind(enum.Enum):
    TOKENS = "tokens"  # the T tokens fed
    LOGITS = "logits"  # the R rows that get logits


@dataclass(frozen=True, slots=True)
class Value:
    """An activation [rows, width] f32, of as many rows as the step has of `kind`."""

    id: int
    width: int
    kind: RowKind

    @property
    def is_rows(self) -> bool:
        return self.kind is RowKind.LOGITS


@dataclass(frozen=True, slots=True)
class Places:
    """Where the recorded values and the layers' keys and values are: what a program must know of memory."""

    offsets: Mapping[Value, int]  # floats from the arena's start
    kv: _core.KvCache

    def __call__(self, value: Value) -> int:
        return self.offsets[value]

    def find(self, value: Value) -> int | None:
        """None for a value that is computed where it is read."""
        return self.offsets.get(value)


class Operation(Protocol):
    """A recorded operation: reads and writes values; `reads_late` in its own phase, `reads` in the rows' before it."""

    @property
    def reads(self) -> tuple[Value, ...]: ...
    @property
    def reads_late(self) -> tuple[Value, ...]: ...
    @property
    def writes(self) -> tuple[Value, ...]: ...
    @property
    def is_rowwise(self) -> bool: ...
    @property
    def replaceable(self) -> tuple[Value, ...]:
        """Values whose floats a result of the same shape may take over: read at the very place that is written."""

    def replay(self, program: _core.Program, at: Places) -> None: ...


@dataclass(frozen=True, slots=True)
class RowOperation:
    """Row r of `writes` follows from row r of `reads` alone."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    call: Callable[[_core.Program, Places], None]
    is_elementwise: bool = False
    is_inlined: bool = False  # by the core, into a linear or head that is all that reads it
    reads_late: tuple[Value, ...] = ()
    is_rowwise: bool = True

    @property
    def replaceable(self) -> tuple[Value, ...]:
        return self.reads if self.is_elementwise else ()

    def replay(self, program: _core.Program, at: Places) -> None:
        self.call(program, at)


@dataclass(frozen=True, slots=True)
class Add:
    x: Value
    y: Value
    out: Value
    is_rowwise: bool = True
    reads_late: tuple[Value, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.x, self.y)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    @property
    def replaceable(self) -> tuple[Value, ...]:
        return self.reads

    def replay(self, program: _core.Program, at: Places) -> None:
        program.add(at(self.out), at(self.x), at(self.y), self.out.width, self.out.is_rows)


@dataclass(frozen=True, slots=True)
class Linear:
    x: Value
    weights: tuple[_core.Weight, ...]
    writes: tuple[Value, ...]
    addend: Value | None = None  # joins the first product
    source: RowOperation | None = None  # of x, if nothing else reads it
    is_rowwise: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.x,) if self.source is None else self.source.reads

    @property
    def reads_late(self) -> tuple[Value, ...]:
        return () if self.addend is None else (self.addend,)

    @property
    def replaceable(self) -> tuple[Value, ...]:
        return self.reads_late

    def replay(self, program: _core.Program, at: Places) -> None:
        addend = None if self.addend is None else at(self.addend)
        if self.source is not None:
            self.source.replay(program, at)
        program.linear([at(out) for out in self.writes], at.find(self.x), list(self.weights), addend, self.x.is_rows)


@dataclass(frozen=True, slots=True)
class Head:
    x: Value
    weight: _core.Weight
    source: RowOperation | None = None  # of x, if nothing else reads it
    is_rowwise: bool = True
    writes: tuple[Value, ...] = ()
    reads_late: tuple[Value, ...] = ()
    replaceable: tuple[Value, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.x,) if self.source is None else self.source.reads

    def replay(self, program: _core.Program, at: Places) -> None:
        if self.source is not None:
            self.source.replay(program, at)
        program.head(at.find(self.x), self.weight)


@dataclass(frozen=True, slots=True)
class Attention:
    q: Value
    k: Value
    v: Value
    out: Value
    shape: AttentionShape
    is_rowwise: bool = False
    replaceable: tuple[Value, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.k, self.v)

    @property
    def reads_late(self) -> tuple[Value, ...]:
        return (self.q,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def replay(self, program: _core.Program, at: Places) -> None:
        it, q, k, v = self.shape, at(self.q), at(self.k), at(self.v)
        program.attention(at(self.out), q, k, v, at.kv, group=0, layer=it.layer, num_heads=it.num_heads, scale=it.scale)


@dataclass(slots=True)
class Recorder:
    """Ops whose values are symbols."""

    operations: list[Operation] = field(default_factory=list)
    num_values: int = 0

    def _new(self, width: int, kind: RowKind) -> Value:
        self.num_values += 1
        return Value(self.num_values - 1, width, kind)

    def embed(self, table: Prepared) -> Value:
        matrix = as_matrix(table)
        out = self._new(matrix.columns, RowKind.TOKENS)
        self.operations.append(RowOperation((), (out,), lambda program, at: program.embed(at(out), matrix)))
        return out

    def rms_norm(self, x: Value, weight: Prepared, eps: float) -> Value:
        out, scale = self._new(x.width, x.kind), as_vector(weight)

        def call(program: _core.Program, at: Places) -> None:
            program.rms_norm(at.find(out), at(x), scale, eps, x.is_rows)

        self.operations.append(RowOperation((x,), (out,), call, is_inlined=True))
        return out

    def linear(self, x: Value, weights: Sequence[Prepared]) -> tuple[Value, ...]:
        matrices = tuple(as_matrix(weight) for weight in weights)
        outs = tuple(self._new(matrix.rows, x.kind) for matrix in matrices)
        self.operations.append(Linear(x, matrices, outs))
        return outs

    def rotate(self, q: Value, k: Value, rotary: Rotary, shape: AttentionShape) -> tuple[Value, Value]:
        frequencies = np.array(rotary.frequencies, np.float64)

        def rotated(x: Value) -> Value:
            out = self._new(x.width, x.kind)

            def call(program: _core.Program, at: Places) -> None:
                program.rotate(at(out), at(x), x.width, shape.head_dim, frequencies, rotary.magnitude)

            self.operations.append(RowOperation((x,), (out,), call, is_elementwise=True))
            return out

        return rotated(q), rotated(k)

    def attention(self, q: Value, k: Value, v: Value, shape: AttentionShape) -> Value:
        out = self._new(q.width, q.kind)
        self.operations.append(Attention(q, k, v, out, shape))
        return out

    def silu_mul(self, gate: Value, up: Value) -> Value:
        out = self._new(gate.width, gate.kind)

        def call(program: _core.Program, at: Places) -> None:
            program.silu_mul(at.find(out), at(gate), at(up), out.width, out.is_rows)

        self.operations.append(RowOperation((gate, up), (out,), call, is_elementwise=True, is_inlined=True))
        return out

    def add(self, x: Value, y: Value) -> Value:
        out = self._new(x.width, x.kind)
        self.operations.append(Add(x, y, out))
        return out

    def select_rows(self, x: Value) -> Value:
        out = self._new(x.width, RowKind.LOGITS)
        self.operations.append(
            RowOperation((x,), (out,), lambda program, at: program.select_rows(at(out), at(x), x.width))
        )
        return out

    def head(self, x: Value, weight: Prepared) -> None:
        self.operations.append(Head(x, as_matrix(weight)))


def as_matrix(weight: Prepared) -> _core.Weight:
    if not isinstance(weight, _core.Weight):
        raise InvariantError(f"a vector of {weight.size} was given where a matrix is needed")
    return weight


def as_vector(weight: Prepared) -> F32:
    if isinstance(weight, _core.Weight):
        raise InvariantError(f"a matrix [{weight.rows}, {weight.columns}] was given where a vector is needed")
    return weight


def fuse(operations: Sequence[Operation]) -> list[Operation]:
    """Let a linear add the residual itself where nothing else wants its product, and let it or the head compute its
    input where it quantizes it if nothing else reads that: a pass over memory less for each.

    No bit changes: the kernel completes the sum over k before the addend joins.
    """
    uses = Counter(value for operation in operations for value in (*operation.reads, *operation.reads_late))
    fused: list[Operation] = []
    for operation in operations:
        before = fused[-1] if fused else None
        if (
            isinstance(before, Linear)
            and isinstance(operation, Add)
            and before.writes == (operation.y,)
            and uses[operation.y] == 1
        ):
            fused[-1] = replace(before, writes=operation.writes, addend=operation.x)
        elif (
            isinstance(before, RowOperation)
            and before.is_inlined
            and isinstance(operation, (Linear, Head))
            and before.writes == (operation.x,)
            and uses[operation.x] == 1
        ):
            fused[-1] = replace(operation, source=before)
        else:
            fused.append(operation)
    return fused
