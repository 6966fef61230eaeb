"""ModelSpec: the numbers that define a model's shape, whatever file they came from.

Owns the spec and what follows from it by arithmetic (rotary frequencies, parameter and KV sizes). Reading it from a
GGUF file or a config.json is `gguf.py`'s and `hf.py`'s work.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from headrace.types import ModelError


class RopeScaling(enum.Enum):
    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and how it is stretched past the trained context.

    Pairs are (i, i + dim/2), as in Hugging Face; readers bring other layouts into this one. `dim` may be less than
    head_dim (partial rotary): the rest of the head passes unrotated.
    """

    dim: int
    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole pairs at the ends of the blend
    attention_factor: float | None = None  # yarn; None: the paper's 0.1 ln(factor) + 1
    factors: tuple[float, ...] = ()  # per pair, dividing its frequency before any scaling; empty: none

    def frequencies(self) -> tuple[float, ...]:
        """Angle per position of each pair: [dim/2], radians. Sources: Su et al. 2021; Llama 3.1's and YaRN's rules."""
        plain = tuple(self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2))
        if self.factors:
            plain = tuple(freq / factor for freq, factor in zip(plain, self.factors, strict=True))
        match self.scaling:
            case RopeScaling.NONE:
                return plain
            case RopeScaling.LINEAR:
                return tuple(freq / self.factor for freq in plain)
            case RopeScaling.LLAMA3:
                return tuple(self._llama3(freq) for freq in plain)
            case RopeScaling.YARN:
                return self._yarn(plain)

    def magnitude(self) -> float:
        """What cosines and sines are multiplied by: 1 but for yarn (Peng et al. 2023, section 3.4)."""
        if self.scaling is not RopeScaling.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor)

    @property
    def stretched_len(self) -> int:
        """The context that yarn stretches the trained one to; configs often still name the trained one. Else 0."""
        return int(self.original_max_len * self.factor) if self.scaling is RopeScaling.YARN else 0

    def check(self, source: str, head_dim: int) -> None:
        """Raise ModelError where the numbers contradict each other; each alone was checked when it was read."""
        if self.dim % 2 or not 2 <= self.dim <= head_dim:
            raise ModelError(
                f"{source}: rotary dimension is {self.dim}; it must be even, from 2 to head_dim ({head_dim})"
            )
        if self.factors and len(self.factors) != self.dim // 2:
            raise ModelError(f"{source}: {len(self.factors)} rotary factors for {self.dim // 2} pairs")
        if self.scaling is RopeScaling.LLAMA3 and self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ModelError(f"{source}: low_freq_factor is {low}; it must be below high_freq_factor ({high})")
        if self.scaling is RopeScaling.YARN and self.beta_slow > self.beta_fast:
            raise ModelError(f"{source}: beta_slow {self.beta_slow} is above beta_fast {self.beta_fast}")

    def _llama3(self, freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < self.original_max_len / self.high_freq_factor:
            return freq
        if wavelength > self.original_max_len / self.low_freq_factor:
            return freq / self.factor
        smooth = (self.original_max_len / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - smooth) * freq / self.factor + smooth * freq

    def _yarn(self, plain: tuple[float, ...]) -> tuple[float, ...]:
        def pair_that_turns(rotations: float) -> float:
            """The (fractional) pair that makes `rotations` turns over the trained context."""
            return self.dim * math.log(self.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.dim - 1.0)
        span = max(high - low, 0.001)

        def blend(i: int, freq: float) -> float:
            ramp = min(max((i - low) / span, 0.0), 1.0)  # 0: keep (turns often), 1: interpolate
            return freq * (1 - ramp) + freq / self.factor * ramp

        return tuple(blend(i, freq) for i, freq in enumerate(plain))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Temperature correction of a context stretched by `factor` (Peng et al. 2023, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer's shape. Sizes are named as in Hugging Face configs."""

    architecture: str  # a key of model.ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int  # the context the model was trained or stretched for
    norm_eps: float
    rope: RopeSpec
    is_embedding_tied: bool

    def check(self, source: str) -> None:
        """Raise ModelError where the numbers contradict each other; each alone was checked when it was read."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{source}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        self.rope.check(source, self.head_dim)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied embedding counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_embedding_tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value
