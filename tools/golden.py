"""Writes tests/golden/smollm2.json: what transformers says about the default model, in float32.

    python tools/golden.py SmolLM2-135M-Instruct.Q4_1.gguf

Per prompt: its token ids, the 20 most likely next tokens with their logprobs after some of its positions, and the 64
tokens that greedy decoding adds (end tokens are not stopped at), with their logprobs and the smallest margin between
the best and the second best logprob on the way: a prompt that comes closer to a tie than MIN_MARGIN is refused, since
which way a tie falls says nothing about an implementation.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from oracle import SMOLLM2_SHA256, check_is_smollm2, load_model, load_tokenizer

TOP = 20
NUM_GREEDY = 64
MIN_MARGIN = 0.01  # nat; the tolerance of the comparison is 0.001
ROOT = Path(__file__).parent.parent
TEXTS = ROOT / "tools" / "texts"

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    name: str
    content: str | list[Message]  # a text to complete, or a chat


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def prompts() -> list[Prompt]:
    texts = "\n".join((TEXTS / name).read_text() for name in ("prose.txt", "code.txt", "languages.txt"))
    return [
        Prompt("chat", [user("What is the capital of France?")]),
        Prompt(
            "chat with a system message and history",
            [
                {"role": "system", "content": "You are a patient teacher. Answer in one or two sentences."},
                user("Why is the sky blue?"),
                {"role": "assistant", "content": "Air scatters blue light more than red light."},
                user("And why is the sunset red?"),
            ],
        ),
        Prompt("chat in French", [user("Explique en quelques phrases comment fonctionne une écluse.")]),
        Prompt("chat with emoji", [user("Write a short poem about the sea 🌊 and a cat 🐈‍⬛. Use emoji!")]),
        Prompt("chat about code", [user("Write a Python function that returns the n-th Fibonacci number.")]),
        Prompt("chat with numbers", [user("A train covers 180 km in 2.5 hours. What is its average speed?")]),
        Prompt("completion of Python", 'def is_palindrome(text: str) -> bool:\n    """Whether text reads the same'),
        Prompt("completion of C", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
        Prompt("completion of JSON", '[{"city": "Paris", "country": "France"}, {"city": "Rome", "country": "'),
        Prompt("completion of prose", "The old lighthouse had not been lit since the winter of 1911, when"),
        Prompt("completion of Chinese", "北京是中国的首都,"),
        Prompt("completion of Russian", "Все люди рождаются свободными и равными в своем"),
        Prompt("completion of emoji", "🎉 Party list: 🎂 cake, 🎈 balloons, 🎁"),
        Prompt("completion of one token", "In"),
        Prompt("long text", texts + "\nIn short, the texts above are about"),
        Prompt("long chat", [user(f"Summarize this in two sentences:\n\n{texts}")]),
    ]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    text = prompt.content
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def positions(length: int) -> list[int]:
    """A few positions of a prompt, the last one among them."""
    return sorted({0, length // 4, length // 2, 3 * length // 4, length - 2, length - 1} & set(range(length)))


def figures(model: Any, prompt: Prompt, ids: list[int]) -> dict[str, Any]:
    state = model(torch.tensor([ids]), use_cache=True)
    logprobs = torch.log_softmax(state.logits[0], dim=-1)
    tops = {}
    for position in positions(len(ids)):
        best = torch.topk(logprobs[position], TOP)
        tops[position] = (best.indices.tolist(), [round(value, 5) for value in best.values.tolist()])
    greedy, greedy_logprobs, margin = decode_greedily(model, state, logprobs[-1])
    check_uncached(model, ids, greedy)
    return {
        "name": prompt.name,
        "prompt": prompt.content,
        "ids": ids,
        "positions": list(tops),
        "top_ids": [top[0] for top in tops.values()],
        "top_logprobs": [top[1] for top in tops.values()],
        "greedy": greedy,
        "greedy_logprobs": [round(value, 5) for value in greedy_logprobs],
        "min_margin": round(margin, 4),
    }


def decode_greedily(model: Any, state: Any, logprobs: Any) -> tuple[list[int], list[float], float]:
    tokens, values, margin = [], [], float("inf")
    while True:
        best = torch.topk(logprobs, 2)
        tokens.append(int(best.indices[0]))
        values.append(float(best.values[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
        if len(tokens) == NUM_GREEDY:
            return tokens, values, margin
        state = model(best.indices[:1].unsqueeze(0), cache=state.cache, use_cache=True)
        logprobs = torch.log_softmax(state.logits[0, -1], dim=-1)


def check_uncached(model: Any, ids: list[int], greedy: list[int]) -> None:
    """One pass over prompt and answer must choose the same tokens as decoding with a cache did."""
    logits = model(torch.tensor([ids + greedy[:-1]]), use_cache=False).logits[0, len(ids) - 1 :]
    if logits.argmax(dim=-1).tolist() != greedy:
        raise SystemExit("transformers chooses other tokens without its cache than with it")


def main() -> None:
    path = Path(sys.argv[1])
    check_is_smollm2(path)
    model, tokenizer = load_model(path), load_tokenizer(path)
    rows = []
    with torch.inference_mode():
        for prompt in prompts():
            rows.append(figures(model, prompt, encode(tokenizer, prompt)))
            print(f"{prompt.name}: {len(rows[-1]['ids'])} tokens, margin {rows[-1]['min_margin']}", file=sys.stderr)
            print(f"    {tokenizer.decode(rows[-1]['greedy'])!r}", file=sys.stderr)
    if ties := [row["name"] for row in rows if row["min_margin"] < MIN_MARGIN]:
        raise SystemExit(f"the greedy answers come within {MIN_MARGIN} nat of a tie; change the prompts: {ties}")
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention"
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    output = ROOT / "tests" / "golden" / "smollm2.json"
    output.write_text(f'{{"source": "{source}",\n"sha256": "{SMOLLM2_SHA256}",\n"prompts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
