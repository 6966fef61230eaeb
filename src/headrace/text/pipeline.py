"""The steps that a tokenizer.json puts around its model, and which of them are allowed.

Owns how much longer those steps may make a text. Refuses to know the vocabulary. The library runs any number of any of
its steps, and ends the process where the memory does not suffice.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers

from headrace.types import ModelError

MAX_STEPS = 16  # of a kind; the vocabularies known have fewer than eight

# Left out are those of WordPiece and Unigram vocabularies (BertNormalizer, Precompiled, …).
NORMALIZERS = frozenset({"NFC", "NFKC", "Prepend", "Replace"})
PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
# Each may make a text longer (NFKC makes 18 characters of U+FDFA, ByteLevel two bytes of one), so a dozen in a row,
# or with a Replace in between that gives the next one its food, would make gigabytes of a short text.
ONLY_ONCE = frozenset({"NFC", "NFKC", "Prepend", "ByteLevel", "Metaspace"})


def check_pipeline(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ModelError, naming the step, for one that is not supported or that could make a text much longer."""
    _check_steps(path, "normalizer", steps_of(tokenizer.normalizer), NORMALIZERS)
    _check_steps(path, "pre_tokenizer", steps_of(tokenizer.pre_tokenizer), PRE_TOKENIZERS)


def steps_of(component: Any) -> list[dict[str, Any]]:
    """The fields of a normalizer, pre-tokenizer or decoder, one entry a step, sequences within sequences opened."""
    if component is None:
        return []
    return _opened(json.loads(component.__getstate__()))


def _opened(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    (inner,) = (value for name, value in state.items() if name != "type")  # each component has its own name for it
    return [step for part in inner for step in _opened(part)]


def _check_steps(path: Path, component: str, steps: list[dict[str, Any]], allowed: frozenset[str]) -> None:
    if len(steps) > MAX_STEPS:
        raise ModelError(f"{path}: the {component} has {len(steps)} steps; at most {MAX_STEPS} are allowed")
    for kind, count in Counter(step["type"] for step in steps).items():
        if kind not in allowed:
            raise ModelError(f"{path}: the {component} has a {kind}; supported are {', '.join(sorted(allowed))}")
        if count > 1 and kind in ONLY_ONCE:
            raise ModelError(f"{path}: the {component} has {count} steps {kind}; one is allowed")
    for step in steps:
        if (reason := _growth(step)) is not None:
            raise ModelError(f"{path}: the {component}'s {step['type']} {reason}")


def _growth(step: dict[str, Any]) -> str | None:
    """Why a text could grow with each such step."""
    if step["type"] == "Prepend" and len(step["prepend"]) > 1:
        return f"puts {len(step['prepend']):,} characters before a text; at most one is allowed"
    if step["type"] != "Replace":
        return None
    if "String" not in step["pattern"]:
        return "has a regular expression; only strings are supported"
    before, after = len(step["pattern"]["String"]), len(step["content"])
    return f"makes {after:,} characters of {before:,}; it may not make a text longer" if after > before else None
