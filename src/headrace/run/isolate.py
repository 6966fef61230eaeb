"""What to do when a step fails: run its slices one by one, so that only the guilty request ends.

Possible because a plan is complete and its slices never read what another slice of the same plan writes: each slice
alone is a valid plan, and running one again writes the same keys and values to the same slots.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass

from headrace.run.executor import Executor
from headrace.types import FAILED_TOKEN, Slice, StepPlan, StepResult, TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The step's result put together from its slices; a failed slice has no tokens in it."""

    result: StepResult
    failed: tuple[int, ...]  # request ids


def run_isolated(executor: Executor, plan: StepPlan) -> Outcome:
    tokens, offsets, failed = array("i"), array("i", [0]), []
    logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    elapsed_us = 0
    for part in plan.slices():
        try:
            result = executor.run(_alone(plan.step, part))
        except Exception:
            log.exception("request %d fails by itself too", part.request.id)
            failed.append(part.request.id)
            tokens.extend([FAILED_TOKEN] if -1 in part.targets else [])
            logprobs.append(None)
            prompt_logprobs.append(None)
        else:
            tokens.extend(result.tokens)
            logprobs.append(result.logprobs[0])
            prompt_logprobs.append(result.prompt_logprobs[0])
            elapsed_us += result.elapsed_us
        offsets.append(len(tokens))
    return Outcome(
        StepResult(plan.step, tokens, offsets, tuple(logprobs), tuple(prompt_logprobs), elapsed_us), tuple(failed)
    )


def _alone(step: int, part: Slice) -> StepPlan:
    """The plan that feeds this slice and no other."""
    return StepPlan(
        step=step,
        requests=(part.request,),
        tokens=part.tokens,
        token_offsets=array("i", [0, len(part.tokens)]),
        starts=array("i", [part.start]),
        num_drafts=array("i", [part.num_drafts]),
        row_offsets=array("i", [0, part.num_logits]),
        targets=part.targets,
        block_offsets=tuple(array("i", [0, len(ids)]) for ids in part.blocks),
        blocks=part.blocks,
        histories=(part.history,),
    )
