"""The engine without HTTP: prefill and decode of batches of random prompts, beside their roofs.

Owns the passes and what is made of them. A row of figures is the median of its repeats.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.backend.threads import default_num_threads
from headrace.bench.steps import Driver, Step, cpu_backend, random_prompts
from headrace.bench.work import Work
from headrace.engine.config import MAX_KV_BYTES, MAX_STEP_TOKENS, EngineConfig
from headrace.engine.load import Loaded, load
from headrace.types import CapacityError, RequestError

ROOF_BYTES = 1 << 29  # of one reading pass: far above any L3
ROOF_PASSES = 5
MIN_OUTPUT_TOKENS = 4
SPARE_TOKENS = 32  # of KV, for each sequence: two blocks to grow by, or the scheduler lets no other in beside it


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine in one row."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch", self.batch, 1),
            ("prompt-tokens", self.prompt_tokens, 1),
            ("output-tokens", self.output_tokens, MIN_OUTPUT_TOKENS),
        ):
            if value < least:
                raise RequestError(f"--{name} is {value}; it must be at least {least}", name)

    @property
    def max_len(self) -> int:
        return self.prompt_tokens + self.output_tokens + 1


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one load; `headrace bench offline --help` says what each means."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    threads: int
    prefill_tokens_per_s: float
    prefill_flops_per_s: float
    gemm_flops_per_s: float
    decode_tokens_per_s: float
    decode_step_ms: float
    decode_bytes_per_s: float
    decode_flops_per_s: float
    read_bandwidth: float
    roof_share_decode: float
    roof_share_attention: float
    host_share: float
    attention_bytes_per_s: float
    phase_shares: dict[str, float]
    verify_cost: dict[str, float]
    start_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    """What one repeat gave."""

    prefill: list[Step]
    decode: list[Step]  # the steady ones
    verify_cost: dict[str, float]
    roof: list[float]  # the read bandwidth right before and right after the decode steps: it may change in between


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run measures: each load with each number of threads."""

    model: Path
    loads: Sequence[Load]
    threads: Sequence[int]  # empty: all that there are
    verify: Sequence[int]  # tokens of a sequence that are fed at once
    repeats: int
    isa: str | None = None
    max_step_tokens: int = EngineConfig().max_step_tokens
    packed_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RequestError(f"--repeats is {self.repeats}; it must be at least 1", "repeats")
        if any(count < 2 for count in self.verify):
            raise RequestError(f"--verify is {min(self.verify)}; it must be at least 2", "verify")

    def config(self, threads: int | None) -> EngineConfig:
        """With room for the largest load and little more."""
        max_len = max(load.max_len for load in self.loads)
        max_len += max(((count + 1) * _verify_steps(load) for count in self.verify for load in self.loads), default=0)
        batch = max(load.batch for load in self.loads)
        max_seqs = batch + -(-batch * SPARE_TOKENS // max_len)
        if max_seqs > MAX_STEP_TOKENS:
            raise RequestError(
                f"--batch {batch} is more than a step can have, {MAX_STEP_TOKENS} with some room", "batch"
            )
        if max_seqs > self.max_step_tokens:
            raise RequestError(
                f"--max-step-tokens is {self.max_step_tokens}; it must be at least {max_seqs} for --batch {batch}, "
                "with what makes sure that all of it runs at once",
                "max-step-tokens",
            )
        return EngineConfig(
            max_len=max_len,
            max_seqs=max_seqs,
            max_step_tokens=self.max_step_tokens,
            max_kv_bytes=MAX_KV_BYTES,  # which stands for all that these loads can use
            threads=threads,
            isa=self.isa,
            packed_dir=self.packed_dir,
        )


def measure(plan: Plan, on_loaded: Callable[[Loaded], None]) -> Iterator[Row]:
    """Rows as they come; one load of the model for each number of threads."""
    for threads in plan.threads or (default_num_threads(),):
        loaded = load(plan.model, plan.config(threads))
        try:
            on_loaded(loaded)
            for wanted in plan.loads:
                _warm_up(loaded, wanted)
                repeats = [_repeat(loaded, wanted, plan.verify, i) for i in range(plan.repeats)]
                yield _row(loaded, wanted, threads, repeats)
        finally:
            loaded.close()


def _warm_up(loaded: Loaded, wanted: Load) -> None:
    """A server's first request pays for memory that nothing has used yet; what is measured is the others."""
    prompts = random_prompts(loaded.files.spec.vocab_size, wanted.batch, wanted.prompt_tokens, f"{wanted} warm-up")
    Driver.of(loaded).run(prompts, max_tokens=2)


def _repeat(loaded: Loaded, wanted: Load, verify: Sequence[int], number: int) -> _Repeat:
    """Prompts from nothing to their first token; then, from the prefix cache, again and on to the end."""
    driver, vocab_size = Driver.of(loaded), loaded.files.spec.vocab_size
    prompts = random_prompts(vocab_size, wanted.batch, wanted.prompt_tokens, f"{wanted} {number}")
    prefill = driver.run(prompts, max_tokens=1)
    roof = cpu_backend(loaded).read_bandwidth(ROOF_BYTES, ROOF_PASSES)
    decode = [step for step in driver.run(prompts, max_tokens=wanted.output_tokens + 1) if step.is_steady]
    if not decode:
        raise CapacityError(f"{wanted.batch} sequences never decoded all at once: raise --output-tokens")
    roof += cpu_backend(loaded).read_bandwidth(ROOF_BYTES, ROOF_PASSES)
    costs = {str(count): _verify_cost(loaded, wanted, count, number) for count in verify}
    return _Repeat(prefill, decode, costs, roof)


def _verify_steps(wanted: Load) -> int:
    return max(wanted.output_tokens // 2, MIN_OUTPUT_TOKENS)


def _verify_cost(loaded: Loaded, wanted: Load, count: int, number: int) -> float:
    (prompt,) = random_prompts(loaded.files.spec.vocab_size, 1, wanted.prompt_tokens, f"verify {count} {number}")
    ones, many = Driver.of(loaded, lookahead=count - 1).verify(prompt, count, _verify_steps(wanted))
    return statistics.median(many) / statistics.median(ones)


# Figures ----------------------------------------------------------------------------------------------------------


def _row(loaded: Loaded, wanted: Load, threads: int, repeats: Sequence[_Repeat]) -> Row:
    work = Work.of(loaded)

    def median(of: Callable[[_Repeat], float]) -> float:
        return statistics.median(map(of, repeats))

    def bytes_per_s(it: _Repeat) -> float:
        weights = len(it.decode) * work.decode_weight_bytes(wanted.batch)
        return (weights + work.kv_bytes(sum(step.num_attended for step in it.decode))) / _seconds(it.decode)

    def flops_per_s(it: _Repeat) -> float:
        attended = sum(step.num_attended for step in it.decode)
        return work.decode_flops(wanted.batch * len(it.decode), attended) / _seconds(it.decode)

    def attention_bytes_per_s(it: _Repeat) -> float:
        return work.kv_bytes(sum(step.num_attended for step in it.decode)) / _core_seconds(it.decode, "attention")

    linear_flops = wanted.batch * work.linear_flops(wanted.prompt_tokens, 1)
    kinds = ("rows", "linear", "attention", "head")
    return Row(
        **dataclasses.asdict(wanted),
        threads=threads,
        prefill_tokens_per_s=median(lambda it: wanted.batch * wanted.prompt_tokens / _seconds(it.prefill)),
        prefill_flops_per_s=median(
            lambda it: wanted.batch * work.prefill_flops(wanted.prompt_tokens) / _seconds(it.prefill)
        ),
        gemm_flops_per_s=median(lambda it: linear_flops / _core_seconds(it.prefill, "linear")),
        decode_tokens_per_s=median(lambda it: wanted.batch * len(it.decode) / _seconds(it.decode)),
        decode_step_ms=1e3 * median(lambda it: statistics.median(step.seconds for step in it.decode)),
        decode_bytes_per_s=median(bytes_per_s),
        decode_flops_per_s=median(flops_per_s),
        read_bandwidth=statistics.median(speed for it in repeats for speed in it.roof),
        roof_share_decode=median(lambda it: bytes_per_s(it) / statistics.median(it.roof)),
        roof_share_attention=median(lambda it: attention_bytes_per_s(it) / statistics.median(it.roof)),
        host_share=median(lambda it: 1 - _share(it.decode, "total")),
        attention_bytes_per_s=median(attention_bytes_per_s),
        phase_shares={kind: statistics.median(_share(it.decode, kind) for it in repeats) for kind in kinds},
        verify_cost={
            count: statistics.median(it.verify_cost[count] for it in repeats) for count in repeats[0].verify_cost
        },
        start_s=sum(seconds for _, seconds in loaded.stages),
        rss_bytes=resident_bytes(),
    )


def _seconds(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps)


def _core_seconds(steps: Sequence[Step], kind: str) -> float:
    return sum(float(getattr(step.core, kind)) for step in steps)


def _share(steps: Sequence[Step], kind: str) -> float:
    return _core_seconds(steps, kind) / _seconds(steps)


def resident_bytes() -> int:
    """What this process holds in memory now, pages of mapped files included; 0 where /proc does not say."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
