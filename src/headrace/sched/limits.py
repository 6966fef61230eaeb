"""What can run at all: limits that make sense, and requests that fit into them.

Knows numbers only. Refuses to know who runs now: what is refused here could not run on an idle machine either.
"""

from __future__ import annotations

from headrace.types import CapacityError, KVGroup, KVKind, Limits, Rejection, Request


def check_limits(limits: Limits, groups: tuple[KVGroup, ...]) -> None:
    """Raise CapacityError if nothing could ever run within `limits`."""
    for name in ("max_seqs", "max_step_tokens", "max_len", "block_size"):
        if (value := getattr(limits, name)) < 1:
            raise CapacityError(f"{name} is {value}; it must be at least 1")
    if limits.lookahead < 0:
        raise CapacityError(f"lookahead is {limits.lookahead}; it must be at least 0")
    if limits.max_chunk_tokens is not None and limits.max_chunk_tokens < 1:
        raise CapacityError(f"max_chunk_tokens is {limits.max_chunk_tokens}; it must be at least 1")
    if not 1 <= len(groups) == len(limits.num_blocks):
        raise CapacityError(f"num_blocks has {len(limits.num_blocks)} entries for {len(groups)} KV groups, at least 1")
    if limits.num_eager is not None and len(limits.num_eager) != len(groups):
        raise CapacityError(f"num_eager has {len(limits.num_eager)} entries for {len(groups)} KV groups")
    if min(limits.num_blocks) < 1:
        raise CapacityError(f"num_blocks is {limits.num_blocks}; every group needs at least 1")
    if any(group.kind is KVKind.WINDOW and group.window < 1 for group in groups):
        raise CapacityError("a window group's window must be at least 1 token")


def reject(request: Request, limits: Limits, max_total: int) -> Rejection | None:
    """Why `request` could never run, or None. `max_total`: tokens that a sequence can have within all limits."""
    num_prompt = len(request.prompt)
    if num_prompt == 0:
        return Rejection("prompt has no tokens; it must have at least 1", "prompt", "invalid_value")
    num_needed = num_prompt if request.params.max_tokens == 0 else num_prompt + 1
    if num_needed <= max_total:
        return None
    asked = f"prompt has {num_prompt:,} tokens, which with an answer are at least {num_needed:,}"
    if num_needed > limits.max_len:
        message = f"{asked}; at most {limits.max_len:,} are allowed: shorten the prompt or raise max_len"
    else:
        message = (
            f"{asked}; the KV cache, {' + '.join(map(str, limits.num_blocks))} blocks of {limits.block_size} tokens, "
            f"holds {max_total:,}: shorten the prompt or give the KV cache more memory"
        )
    return Rejection(message, "prompt")
