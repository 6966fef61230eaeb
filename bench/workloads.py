"""What is asked of every engine: named loads, and prompts of random common words.

Pure: the same load, seed and number give the same prompt, and no two prompts of a run begin alike, so that a prefix
cache answers only what the load means it to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

# Common words, of one token each in most vocabularies.
WORDS = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: each of `clients` sends its next request when its last one has ended."""

    clients: int
    requests: int
    prompt_tokens: int  # each request's own
    output_tokens: int
    shared_tokens: int = 0  # before the own ones, the same in all requests
    max_sequence_tokens: int = 512  # room that an engine with fixed slots is to give each client

    @property
    def key(self) -> tuple[int, int]:
        """Loads of one key can be served by a process that was started for any of them."""
        return self.clients, self.max_sequence_tokens


# In the order in which a server meets them: the shared prefix is cold the first time only.
LOADS: Mapping[str, Load] = MappingProxyType(
    {
        "conc1": Load(1, 3, 128, 128, max_sequence_tokens=4096),
        "single512": Load(1, 3, 512, 128, max_sequence_tokens=4096),
        "single2048": Load(1, 3, 2048, 128, max_sequence_tokens=4096),
        "conc4": Load(4, 8, 128, 128),
        "conc16": Load(16, 32, 128, 128),
        "conc64": Load(64, 96, 128, 128),
        "burst64": Load(64, 64, 128, 128),
        "shared_cold": Load(8, 32, 32, 32, shared_tokens=1024, max_sequence_tokens=1536),
        "shared_warm": Load(8, 32, 32, 32, shared_tokens=1024, max_sequence_tokens=1536),
        "large": Load(1, 2, 512, 32, max_sequence_tokens=4096),
    }
)
WARM_UP = Load(1, 1, 64, 16)


def prompts(name: str, load: Load, seed: int) -> Iterator[str]:
    """The load's prompts; the number at the front keeps each from being another's prefix."""
    prefix = ""
    if load.shared_tokens:
        prefix = _words(random.Random(f"shared {seed}"), load.shared_tokens) + " and "
    for index in range(load.requests):
        yield prefix + _words(random.Random(f"{name} {seed} {index}"), load.prompt_tokens)


def _words(rng: random.Random, num_tokens: int) -> str:
    number = f"{rng.randrange(10**6):06d}"  # a token a digit
    return " ".join([number, *rng.choices(WORDS, k=max(1, num_tokens - len(number)))])
