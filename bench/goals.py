"""What is to be reached: each row's load, whom it is compared with, and by how much. Data, and whom a row is about.

The ratios and bounds are those agreed on for this machine class (2 cores with AVX-512, VNNI and BF16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bench.engines import OURS, Engine

SMALL, MEDIUM, BIG = "smollm2-135m", "llama3.2-1b", "llama3-8b"
PARITY = 0.97
CAP = 0.92  # of the read bandwidth: no ratio asks for more
EIGHT_BITS = frozenset({"q8_0", "int8"})


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose figure: our engine with these weights, held to an instruction set or not."""

    shape: str = SMALL
    format: str = "q4_1"
    isa: str = ""

    def __call__(self, engine: Engine) -> bool:
        return engine.family == OURS and (engine.shape, engine.format, engine.isa) == (
            self.shape,
            self.format,
            self.isa,
        )


@dataclass(frozen=True, slots=True)
class Rivals:
    """Peers that a row is compared with: the best of those that serve the shape, and what else is given."""

    shape: str = SMALL
    family: str = ""  # "" for every one
    formats: frozenset[str] = frozenset()  # empty for every one
    isa: str = ""

    def __call__(self, engine: Engine) -> bool:
        return (
            engine.family != OURS
            and engine.shape == self.shape
            and engine.isa == self.isa
            and self.family in {"", engine.family}
            and (not self.formats or engine.format in self.formats)
        )


@dataclass(frozen=True, slots=True)
class Goal:
    title: str
    load: str
    metric: str  # a field of Figures
    floor: float  # times the best rival
    stretch: float | None = None
    ours: Subject = Subject()
    rivals: Rivals | Subject = Rivals()
    rival_load: str = ""  # where it is not the same one
    is_lower_better: bool = False
    is_capped: bool = False  # a decode speed that memory bounds
    stretch_of_roof: float | None = None  # instead of a ratio: of what the read bandwidth allows


@dataclass(frozen=True, slots=True)
class Offline:
    """One run of `headrace bench offline`."""

    batch: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 64
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        flags = " ".join(["", *self.flags])
        return f"offline batch {self.batch}, {self.prompt_tokens} in, {self.output_tokens} out{flags}"

    @property
    def arguments(self) -> list[str]:
        shape = {"batch": self.batch, "prompt-tokens": self.prompt_tokens, "output-tokens": self.output_tokens}
        return [part for key, value in shape.items() for part in (f"--{key}", str(value))] + list(self.flags)


DECODE, PREFILL, OUTPUT = "decode_tokens_per_s", "prefill_tokens_per_s", "output_tokens_per_s"


def _llama(shape: str, weights: str, isa: str = "") -> Rivals:
    return Rivals(shape, "llama.cpp", frozenset({weights}), isa)


Q8, BF16, AVX2 = Subject(format="q8_0"), Subject(format="bf16"), Subject(isa="avx2")
MEDIUM_Q4, BIG_Q4 = Subject(MEDIUM, "q4_0"), Subject(BIG, "q4_0")
SAME_FILE, SAME_BF16 = _llama(SMALL, "q4_1"), _llama(SMALL, "bf16")
SAME_FILE_AVX2, AVX2_ANY = _llama(SMALL, "q4_1", "avx2"), Rivals(family="llama.cpp", isa="avx2")
MEDIUM_LLAMA, BIG_LLAMA = _llama(MEDIUM, "q4_0"), _llama(BIG, "q4_0")

FULL = Offline(64, 128, 128)
GOALS: tuple[Goal, ...] = (
    Goal("Q4_1 decode, one stream", "conc1", DECODE, 2.0, is_capped=True, stretch_of_roof=0.95),
    Goal("Q4_1 decode, llama.cpp on the same file", "conc1", DECODE, 2.4, rivals=SAME_FILE, is_capped=True),
    Goal("Q4_1 decode after 2,048 tokens", "single2048", DECODE, 2.3, 2.8, is_capped=True),
    Goal("Q8_0 decode, one stream", "conc1", DECODE, 1.7, 1.9, Q8, Rivals(formats=EIGHT_BITS), is_capped=True),
    Goal("BF16 decode, llama.cpp on the same file", "conc1", DECODE, 1.05, None, BF16, SAME_BF16, is_capped=True),
    Goal("prefill 512", "single512", PREFILL, 1.3, 1.6),
    Goal("prefill 512, llama.cpp on the same file", "single512", PREFILL, 8.0, rivals=SAME_FILE),
    Goal("prefill 2,048", "single2048", PREFILL, 1.2, 1.5),
    Goal("4 clients", "conc4", OUTPUT, 2.5, 3.0),
    Goal("16 clients", "conc16", OUTPUT, 2.0, 2.5),
    Goal("64 clients", "conc64", OUTPUT, 1.7, 2.2),
    Goal("64 clients, p99 ITL", "conc64", "itl_p99_ms", 1 / 4, 1 / 8, is_lower_better=True),
    Goal("shared prefix, warm", "shared_warm", OUTPUT, 3.0, 4.0),
    Goal("shared prefix, cold", "shared_cold", OUTPUT, 3.0, 4.0),
    Goal("64 streams over HTTP, of those without", "burst64", OUTPUT, 0.9, rivals=Subject(), rival_load=FULL.name),
    Goal("1B Q4_0 decode", "large", DECODE, PARITY, 1.08, MEDIUM_Q4, MEDIUM_LLAMA, is_capped=True),
    Goal("1B Q4_0 prefill", "large", PREFILL, 1.9, 2.5, MEDIUM_Q4, MEDIUM_LLAMA),
    Goal("8B Q4_0 decode", "large", DECODE, PARITY, None, BIG_Q4, BIG_LLAMA, is_capped=True),
    Goal("8B Q4_0 prefill", "large", PREFILL, 1.9, 2.5, BIG_Q4, BIG_LLAMA),
    Goal("AVX2 decode, llama.cpp on the same file", "conc1", DECODE, 1.5, None, AVX2, SAME_FILE_AVX2, is_capped=True),
    Goal("AVX2 decode, llama.cpp's best", "conc1", DECODE, 1.5, None, AVX2, AVX2_ANY, is_capped=True),
    Goal("AVX2 prefill 512, llama.cpp on the same file", "single512", PREFILL, 1.5, None, AVX2, SAME_FILE_AVX2),
    Goal("AVX2 prefill 512, llama.cpp's best", "single512", PREFILL, 1.5, None, AVX2, AVX2_ANY),
)


# What the engine streams for a token of each capped load: measured without HTTP, at the same lengths.
STREAMED_IN: Mapping[str, Offline] = MappingProxyType(
    {"conc1": Offline(1, 128, 128), "single2048": Offline(1, 2048, 128), "large": Offline(1, 512, 32)}
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that needs no peer."""

    title: str
    source: Offline | str  # or a load's name; START for the start
    metric: str
    bound: float
    is_upper: bool = False
    ours: Subject = Subject()
    unit: float = 1.0  # what the table divides by


START = "start"
TERA = 1e12
LONG, AT_4096 = Offline(1, 2048, 8), Offline(1, 4096, 16)
VERIFY_4, VERIFY_8 = Offline(flags=("--verify", "4")), Offline(flags=("--verify", "8"))
LIMITS: tuple[Limit, ...] = (
    Limit("prefill 512, Q4_1, TOP/s", Offline(), "prefill_flops_per_s", 1.15e12, unit=TERA),
    Limit("prefill 512, Q8_0, TOP/s", Offline(), "prefill_flops_per_s", 1.15e12, ours=Q8, unit=TERA),
    Limit("prefill 512, BF16, TFLOP/s", Offline(), "prefill_flops_per_s", 0.9e12, ours=BF16, unit=TERA),
    Limit("prefill 2,048, Q4_1, TOP/s", LONG, "prefill_flops_per_s", 0.95e12, unit=TERA),
    Limit("prefill 2,048, Q8_0, TOP/s", LONG, "prefill_flops_per_s", 0.95e12, ours=Q8, unit=TERA),
    Limit("prefill 2,048, BF16, TFLOP/s", LONG, "prefill_flops_per_s", 0.75e12, ours=BF16, unit=TERA),
    Limit("decode's share of the roof, SmolLM2", STREAMED_IN["conc1"], "roof_share_decode", 0.9),
    Limit("decode's share of the roof, 1B", STREAMED_IN["large"], "roof_share_decode", 0.9, ours=MEDIUM_Q4),
    Limit("decode's share of the roof, 8B", STREAMED_IN["large"], "roof_share_decode", 0.9, ours=BIG_Q4),
    Limit("matrices alone in prefill 512, Q4_1, TOP/s", Offline(), "gemm_flops_per_s", 1.3e12, unit=TERA),
    Limit("matrices alone in prefill 512, Q8_0, TOP/s", Offline(), "gemm_flops_per_s", 1.3e12, ours=Q8, unit=TERA),
    Limit("4 tokens of one sequence, Q4_1, in steps of one", VERIFY_4, "verify_cost.4", 1.35, is_upper=True),
    Limit("8 tokens of one sequence, Q8_0, in steps of one", VERIFY_8, "verify_cost.8", 1.3, is_upper=True, ours=Q8),
    Limit("attention's share of the roof, 4,096 tokens", AT_4096, "roof_share_attention", 0.8),
    Limit("host's share of a step, batch 1", Offline(), "host_share", 0.05, is_upper=True),
    Limit("host's share of a step, batch 64", FULL, "host_share", 0.05, is_upper=True),
    Limit("command to first token, s", START, "start_s", 1.0, is_upper=True),
    Limit("command to first token, 8B, s", START, "start_s", 5.0, is_upper=True, ours=BIG_Q4),
)


def loads_of(engine: Engine, goals: tuple[Goal, ...] = GOALS) -> frozenset[str]:
    """The loads that some row wants of this engine."""
    return engine.only & {goal.load for goal in goals if goal.ours(engine) or goal.rivals(engine)}


def offline_runs_of(engine: Engine, goals: tuple[Goal, ...] = GOALS) -> list[Offline]:
    """The runs without HTTP that rows and limits want of it: for all goals those of the limits too."""
    streamed = [STREAMED_IN[goal.load] for goal in goals if goal.is_capped and goal.ours(engine)]
    rivals = [FULL for goal in goals if goal.rival_load == FULL.name and goal.ours(engine)]
    limits = [limit.source for limit in LIMITS if limit.ours(engine) and isinstance(limit.source, Offline)]
    return list(dict.fromkeys([*streamed, *rivals, *(limits if goals == GOALS else [])]))
