"""Loading: from a model's files and a configuration to an engine that can run.

Owns the order of things: what will be taken is known and checked before any of it is taken. Knows every part by its
constructor and none by its inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from headrace.backend.packed import files_beside
from headrace.engine.config import MAX_LEN, EngineConfig, OrderKind
from headrace.engine.device import DEVICES
from headrace.engine.engine import Engine, monotonic_us
from headrace.engine.memory import EAGER_PART, Ledger
from headrace.engine.stream import CoreLender
from headrace.model import ModelFiles, open_model
from headrace.ops import Backend
from headrace.run.executor import LocalExecutor
from headrace.sched import FCFS, Priority, Scheduler, Static
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import CapacityError, Limits, SamplingParams

ORDERS: Mapping[OrderKind, type[FCFS] | type[Priority] | type[Static]] = MappingProxyType(
    {OrderKind.FCFS: FCFS, OrderKind.PRIORITY: Priority, OrderKind.STATIC: Static}
)


@dataclass(slots=True)
class Stopwatch:
    """The seconds that each part of the start took."""

    stages: list[tuple[str, float]] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.stages.append((name, now - self.since))
        self.since = now


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run, and what is to be told about it."""

    files: ModelFiles
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    engine: Engine
    backend: Backend
    limits: Limits
    ledger: Ledger
    device: str  # which kernels, how many threads
    lender: CoreLender | None  # the backend's threads, if no core is left beside theirs
    packed: Path | None  # the file that the weights are mapped from, or were written to
    stages: tuple[tuple[str, float], ...]
    close: Callable[[], None]  # end background work and threads of the backend

    def packed_beside(self) -> list[Path]:
        """Files of packed weights of this model's name that are not what it would map now."""
        return [] if self.packed is None else files_beside(self.packed)

    @property
    def defaults(self) -> SamplingParams:
        """What the model's authors recommend, where a request says nothing."""
        said = self.files.generation_defaults
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return SamplingParams(**{name: value for name in names if (value := getattr(said, name)) is not None})


def load(path: Path, config: EngineConfig, *, on_ledger: Callable[[ModelFiles, Ledger], None] | None = None) -> Loaded:
    """Open, check, take memory and pack. `on_ledger` hears what will be taken before it is.

    Raises ModelError for files that cannot be run, CapacityError for what does not fit.
    """
    watch = Stopwatch()
    files = open_model(path)
    watch.lap("open")
    tokenizer = Tokenizer.load(files.vocabulary, files.spec.vocab_size)
    template = None if files.chat_template is None else ChatTemplate(files.chat_template)
    watch.lap("tokenizer")
    max_len = _max_len(config, files)
    device = DEVICES[config.backend](files, config, max_len)
    if on_ledger is not None:
        on_ledger(files, device.ledger)
    device.ledger.check()
    watch.lap("plan")
    packed = device.load()
    watch.lap("weights")
    limits = Limits(
        max_seqs=config.max_seqs,
        max_step_tokens=config.max_step_tokens,
        max_len=max_len,
        block_size=device.block_size,
        num_blocks=device.num_blocks,
        num_eager=tuple(count // EAGER_PART for count in device.num_blocks),
        max_chunk_tokens=config.max_chunk_tokens,
    )
    scheduler = Scheduler(limits, device.groups, ORDERS[config.order](), has_prefix_cache=config.has_prefix_cache)
    engine = Engine(scheduler, LocalExecutor(device.backend, monotonic_us), monotonic_us)

    def close() -> None:
        engine.is_closed = True
        device.close()

    return Loaded(
        files=files,
        tokenizer=tokenizer,
        chat_template=template,
        engine=engine,
        backend=device.backend,
        limits=limits,
        ledger=device.ledger,
        device=device.name,
        packed=packed,
        lender=device.lender,
        stages=tuple(watch.stages),
        close=close,
    )


def _max_len(config: EngineConfig, files: ModelFiles) -> int:
    trained = files.spec.max_len
    if config.max_len is None:
        if trained > MAX_LEN:
            raise CapacityError(
                f"the model was made for {trained:,} tokens, sequences have at most {MAX_LEN:,}: give --max-len"
            )
        return trained
    if config.max_len > trained:
        raise CapacityError(f"max_len is {config.max_len:,}; the model was made for at most {trained:,} tokens")
    return config.max_len
