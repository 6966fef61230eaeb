"""Writes tests/golden/smollm2_kl.npz: next-token distributions of transformers (float32) over some 3,400 positions.

    python tools/kl_reference.py SmolLM2-135M-Instruct.Q4_1.gguf [--study]
    python tools/kl_reference.py SmolLM2-135M-Instruct.Q4_1.gguf --bf16 [--study]

The second form reads the tokens that the first one wrote, and writes smollm2_bf16_kl.npz: the same for the first
NUM_BF16_TEXTS texts and the model whose matrices are rounded to bf16.

The text is mixed: prose, code and ten languages (tools/texts), and answers that the model itself sampled. Stored
are, per position, the TOP most likely next tokens with their logprobs, and the mass of all others in one bucket. With
p the reference's and q our distribution over those TOP + 1 outcomes, sum(p log(p/q)) is a *lower bound* of the KL
divergence over the whole vocabulary, since merging outcomes never adds to it (the data-processing inequality; Cover
and Thomas, Elements of Information Theory, section 2.8). `--study` measures how much is lost for the perturbation that
the fast path makes (activations in 8 bits with one scale per 32 inputs, keys and values in bf16): of a mean KL of
0.004062 nat over the whole vocabulary, TOP = 32 keeps 0.798, 64 would keep 0.852 and 16 0.727. For the perturbation of
BF16 weights (activations in bf16), TOP = 32 keeps 0.831 of 0.000156. So a limit on the whole KL is to be multiplied by
these factors before the bucketed one is compared with it.

Arrays: tokens [N] u16, all texts after one another; offsets [texts + 1] i32 into them (each text is fed from position
0); top_ids [N, TOP] u16, best first; top_logprobs [N, TOP] u16, in steps of -1/LOGPROB_STEPS nat; rest [N] f32, the
bucket's mass. Row i is the distribution of the token after tokens[i].
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from oracle import check_is_smollm2, load_model, load_tokenizer
from transformers.models.llama import modeling_llama  # type: ignore[import-not-found]

TOP = 32
LOGPROB_STEPS = 2048  # rounding is at most 0.00025 nat, without bias; 16 bits reach down to -32 nat
NUM_SAMPLED = 240
SEED = 20240314
NUM_BF16_TEXTS = 10  # over 3,000 positions
GROUP = 32  # inputs that share a scale of 8-bit activations
ROOT = Path(__file__).parent.parent
TEXTS = ROOT / "tools" / "texts"

QUESTIONS = (
    "What should I see in Lisbon in two days?",
    "Explain the difference between a list and a tuple in Python, with an example.",
    "Write the beginning of a detective story that is set in a library.",
    "Wie koche ich ein weiches Ei?",
    "My neighbour plays loud music at night. Write a polite note to them.",
    "What is 17 times 23? Show the steps.",
    "How does a heat pump work?",
    "Summarise the causes of the First World War.",
    "Write a SQL query that finds customers without orders.",
    "Give me a recipe for lentil soup.",
    "What is the difference between weather and climate?",
    "Write a short dialogue between a cat and a dog.",
    "How do I reverse a linked list in C?",
    "Explain photosynthesis to a child.",
    "Draft an e-mail asking for a day off.",
    "What are the planets of the solar system, in order?",
    "Rewrite politely: 'Send me the report now.'",
    "List five tips for better sleep.",
    "What does the word 'ephemeral' mean? Use it in a sentence.",
    "Write a haiku about autumn and explain it.",
    "How can I remove a red wine stain?",
    "Compare trains and aeroplanes for a journey of 600 km.",
    "Write a bash command that counts the lines of all text files.",
    "Who was Marie Curie?",
    "Plan a week of exercise for a beginner.",
    "What is inflation and who is hurt by it?",
    "Translate 'good morning, how are you?' into French, Spanish and German.",
    "Describe a walk through a forest after rain.",
    "Solve 3x + 7 = 22 and explain each step.",
    "Give pros and cons of working from home.",
)

Logits = Any  # a torch.Tensor [tokens, vocabulary]


def sample_answer(model: Any, ids: list[int]) -> list[int]:
    """The prompt and an answer drawn at temperature 1."""
    generator = torch.Generator().manual_seed(SEED + len(ids))
    tokens = list(ids)
    state = model(torch.tensor([ids]), use_cache=True)
    for _ in range(NUM_SAMPLED):
        token = torch.multinomial(torch.softmax(state.logits[0, -1], dim=-1), 1, generator=generator)
        tokens.append(int(token))
        state = model(token.unsqueeze(0), cache=state.cache, use_cache=True)
    return tokens


def texts(model: Any, tokenizer: Any) -> list[list[int]]:
    written = [tokenizer.encode(path.read_text(), add_special_tokens=False) for path in sorted(TEXTS.glob("*.txt"))]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    return written + [sample_answer(model, tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]


def log_probabilities(model: Any, ids: list[int]) -> Logits:
    return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), dim=-1)


def write(path: Path, tokens: list[list[int]], rows: list[Logits]) -> None:
    logprobs = torch.cat([torch.topk(row, TOP).values for row in rows])
    ids = torch.cat([torch.topk(row, TOP).indices for row in rows])
    fixed = torch.clamp(torch.round(-logprobs * LOGPROB_STEPS), max=2**16 - 1)
    np.savez_compressed(
        path,
        tokens=np.concatenate([np.array(text, np.uint16) for text in tokens]),
        offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int32),
        top_ids=ids.numpy().astype(np.uint16),
        top_logprobs=fixed.numpy().astype(np.uint16),
        rest=(1 - logprobs.exp().sum(dim=-1)).clamp(min=0).numpy().astype(np.float32),
    )


def bucketed_kl(reference: Logits, ours: Logits, top: int) -> Logits:
    """KL per position over the reference's `top` outcomes and the rest as one: [tokens]."""
    best = torch.topk(reference, top)
    p, q = best.values, ours.gather(1, best.indices)
    kl = (p.exp() * (p - q)).sum(dim=-1)
    p_rest, q_rest = (1 - values.exp().sum(dim=-1) for values in (p, q))
    kl += torch.where(p_rest > 0, p_rest * (p_rest.clamp(min=1e-30) / q_rest.clamp(min=1e-30)).log(), 0.0)
    return kl


def round_matrices(model: Any) -> None:
    """Make it the model that a BF16 file of it would hold."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16().float()


def round_to_8_bits(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    groups = args[0].unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (((groups / scale).round() * scale).flatten(-2), *args[1:])


def round_to_bf16(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].bfloat16().float(), *args[1:])


def perturb(model: Any, round_input: Any) -> None:
    """Make `model` compute roughly as the fast path does."""

    def rotate(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        query, key = plain_rotate(*args, **kwargs)
        return query, key.bfloat16().float()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_input)
        if name.endswith("v_proj"):
            module.register_forward_hook(lambda _module, _args, value: value.bfloat16().float())
    plain_rotate = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = rotate


def study(tokens: list[list[int]], rows: list[Logits], model: Any, round_input: Any) -> None:
    """Print the whole KL beside the bucketed ones, and how often the best token agrees, by the reference's margin."""
    perturb(model, round_input)
    columns: dict[str, list[Logits]] = {"whole": [], "16": [], "32": [], "64": [], "agrees": [], "margin": []}
    for ids, reference in zip(tokens, rows, strict=True):
        ours = log_probabilities(model, ids)
        columns["whole"].append((reference.exp() * (reference - ours)).sum(dim=-1))
        for top in ("16", "32", "64"):
            columns[top].append(bucketed_kl(reference, ours, int(top)))
        columns["agrees"].append((reference.argmax(dim=-1) == ours.argmax(dim=-1)).double())
        best = torch.topk(reference, 2).values
        columns["margin"].append(best[:, 0] - best[:, 1])
    whole = {name: torch.cat(values) for name, values in columns.items()}
    for name in ("whole", "16", "32", "64"):
        print(
            f"mean KL, {name}: {whole[name].mean():.6f} nat ({whole[name].mean() / whole['whole'].mean():.4f} of whole)"
        )
    for margin in (0.0, 0.1, 0.3):
        chosen = whole["margin"] >= margin
        print(f"top-1 agreement, margin >= {margin}: {whole['agrees'][chosen].mean():.4f} of {int(chosen.sum())}")


def main() -> None:
    path, is_bf16 = Path(sys.argv[1]), "--bf16" in sys.argv[2:]
    check_is_smollm2(path)
    model, tokenizer = load_model(path), load_tokenizer(path)
    golden = ROOT / "tests" / "golden"
    with torch.inference_mode():
        if is_bf16:
            round_matrices(model)
            written = np.load(golden / "smollm2_kl.npz")
            bounds = written["offsets"][: NUM_BF16_TEXTS + 1].tolist()
            tokens = [written["tokens"][a:b].tolist() for a, b in itertools.pairwise(bounds)]
        else:
            tokens = texts(model, tokenizer)
        rows = [log_probabilities(model, ids) for ids in tokens]
        write(golden / ("smollm2_bf16_kl.npz" if is_bf16 else "smollm2_kl.npz"), tokens, rows)
        print(f"{sum(map(len, tokens))} positions in {len(tokens)} texts")
        if "--study" in sys.argv[2:]:
            study(tokens, rows, model, round_to_bf16 if is_bf16 else round_to_8_bits)


if __name__ == "__main__":
    main()
