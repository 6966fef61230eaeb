"""Writes tests/golden/tokenizer_corpus.json: hard strings with the ids that two independent tokenizers give them.

    python tools/tokenizer_corpus.py SmolLM2-135M-Instruct.Q4_1.gguf smollm=URL gpt-2=URL llama-bpe=URL

Each URL is a llama.cpp server (the `xllamacpp` package has one) that has loaded the file, the latter two a copy of it
made by `gguf-new-metadata --pre-tokenizer NAME`, so that the other pre-tokenizers which headrace knows are checked
too, on SmolLM2's vocabulary.

The ids are transformers' with the pre-tokenizer set by hand (oracle.py says why). Where llama.cpp's differ they stand
beside, with the reason, and the file fails to be written if no reason is known.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
import urllib.request
from pathlib import Path
from typing import Any

import tokenizers
import transformers  # type: ignore[import-not-found]
from corpus_texts import HAND_WRITTEN
from oracle import SMOLLM2_SHA256, check_is_smollm2, load_tokenizer
from tokenizers import pre_tokenizers

ROOT = Path(__file__).parent.parent
SEED = 7
NUM_MIXTURES = 260

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

FRAGMENTS = (
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u200b", "\ufeff", "\x00", "\x1b[0m", "\x7f"),
    *(
        "a",
        "B",
        "the",
        " the",
        "Hello",
        "don't",
        "I'LL",
        "we've",
        "x's",
        "'d",
        "''",
        "`",
        "```",
        "naïve",
        "Straße",
        "ﬁ",
    ),
    *("0", "1", "42", "007", "3.14", "1,000", "1e-5", "½", "²", "Ⅷ", "٣", "५", "①", "万"),
    *(
        ".",
        ",",
        "...",
        "?!",
        "(",
        ")",
        "[]",
        "{",
        "}",
        "->",
        "==",
        "//",
        "#",
        "$",
        "%",
        "&",
        "\\",
        "|",
        "~",
        "^",
        "<",
        ">",
    ),
    *(
        "中",
        "文字",
        "日本",
        "ひら",
        "カナ",
        "한국",
        "привет",
        "Ελ",
        "שלום",
        "سلام",
        "नमस्ते",
        "ไทย",
        "ქართ",
        "ⲁ",
        "𐍈",
        "𝒳",
    ),
    *(
        "e\u0301",
        "a\u0308\u0323",
        "\u0301",
        "🙂",
        "👍🏽",
        "👨‍👩‍👧",
        "🇫🇷",
        "\ufe0f",
        "\u200d",
        "\u202e",
        "\u2028",
        "\ufffd",
        "\ue000",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "end|>", "<|", "|>", "im_end"),
)


def long_runs() -> list[str]:
    return [
        unit * count for unit in ("a", " ", "\n", "1", "=", "é", "🙂", "ab", " .", "\t") for count in (2, 7, 33, 130)
    ]


def one_of_each_category() -> list[str]:
    """Between two letters, with and without a space: a character of every Unicode category, low and high."""
    firsts: dict[str, list[str]] = {}
    for code in range(0x110000):
        kind = unicodedata.category(chr(code))
        if kind != "Cs" and len(firsts.setdefault(kind, [])) < 3:
            firsts[kind].append(chr(code))
    return [f"a{char}b {char}{char} 1{char}" for chars in firsts.values() for char in chars]


def mixtures() -> list[str]:
    draw = random.Random(SEED)
    return ["".join(draw.choices(FRAGMENTS, k=draw.randint(2, 12))) for _ in range(NUM_MIXTURES)]


def strings() -> list[str]:
    everything = [*HAND_WRITTEN, *FRAGMENTS, *long_runs(), *one_of_each_category(), *mixtures()]
    return list(dict.fromkeys(everything))


def splitters() -> dict[str, Any]:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama3 = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    return {
        "smollm": None,  # as oracle.py sets it
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": pre_tokenizers.Sequence([llama3, bytes_alone]),
    }


def by_transformers(path: Path, name: str, texts: list[str]) -> list[list[int]]:
    backend = load_tokenizer(path).backend_tokenizer
    if (splitter := splitters()[name]) is not None:
        backend.pre_tokenizer = splitter
    if name == "llama-bpe":
        backend.model.ignore_merges = True  # as llama.cpp does for this pre-tokenizer, and Llama 3's own file says
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def by_llama_cpp(url: str, texts: list[str]) -> list[list[int]]:
    return [post(f"{url}/tokenize", {"content": text, "add_special": False, "parse_special": True}) for text in texts]


def post(url: str, body: dict[str, Any]) -> list[int]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        ids: list[int] = json.load(answer)["tokens"]
    return ids


def reason(text: str) -> str | None:
    """Why llama.cpp may give other ids than transformers."""
    late = [f"U+{ord(char):04X}" for char in text if unicodedata.category(char) == "Cn"]
    if late:  # Python's own tables are older than either
        return f"{', '.join(late)}: assigned lately; a letter in transformers' Unicode tables, not yet in llama.cpp's"
    return None


def row(text: str, ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> dict[str, Any]:
    """A line of the file: the ids under `smollm`, those of other pre-tokenizers where they differ from these."""
    differing = {name: ids for name, ids in theirs.items() if ids != ours[name]}
    line: dict[str, Any] = {"text": text, "smollm": ours["smollm"]}
    line |= {name: ids for name, ids in ours.items() if ids != ours["smollm"]}
    if not differing:
        return line
    if (why := reason(text)) is None:
        raise SystemExit(f"{text!r}: transformers gives {ours}, llama.cpp {theirs}, for no known reason")
    return line | {"llama.cpp": differing, "reason": why}


def main() -> None:
    path, urls = Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:])
    check_is_smollm2(path)
    texts = strings()
    ours = {name: by_transformers(path, name, texts) for name in urls}
    theirs = {name: by_llama_cpp(url, texts) for name, url in urls.items()}
    rows = [
        row(text, {name: ours[name][i] for name in urls}, {name: theirs[name][i] for name in urls})
        for i, text in enumerate(texts)
    ]
    lines = ",\n".join(json.dumps(line, separators=(",", ":")) for line in rows)
    source = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}; checked with llama.cpp"
    output = ROOT / "tests" / "golden" / "tokenizer_corpus.json"
    output.write_text(f'{{"source": "{source}",\n"sha256": "{SMOLLM2_SHA256}",\n"strings": [\n{lines}\n]}}\n')
    print(f"{len(rows)} strings, {sum('reason' in line for line in rows)} with other ids in llama.cpp")


if __name__ == "__main__":
    main()
