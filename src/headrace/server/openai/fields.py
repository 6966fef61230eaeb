"""Every field of OpenAI's and vLLM's completions and chat APIs, and what headrace does with it.

A field is applied; or accepted because its value changes nothing here; or a hint, accepted and reported as ignored; or
refused by name. `null` is the same as leaving a field out. A field in neither table is unknown: reported, or refused
where the server is told to. Sources: OpenAI's API reference, and vLLM's `entrypoints/openai` protocol, in 2026.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

_KINDS: Mapping[type, str] = {str: "string", bool: "boolean", dict: "object"}


class Use(enum.Enum):
    APPLIED = "applied"
    ACCEPTED = "accepted"  # the values named here change nothing; every other value is refused
    HINT = "hint"  # asks for something that this server has no setting for; reported in x-ignored-fields
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    use: Use
    kind: type | None = None  # ACCEPTED, HINT: any value of this type
    values: tuple[object, ...] = ()  # ACCEPTED: these values
    reason: str = ""  # REFUSED: why, or what to do instead

    def takes(self, value: object) -> bool:
        """Whether an accepted field may have this value; 1 is not true."""
        if self.kind is not None:
            return isinstance(value, self.kind) and (self.kind is bool) == isinstance(value, bool)
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values)

    @property
    def allowed(self) -> str:
        """What an accepted field may be, in words."""
        if self.kind is not None:
            return f"a value of the type {_KINDS[self.kind]}"
        return " or ".join(json.dumps(value) for value in self.values)


_APPLIED = Field(Use.APPLIED)


def _applied(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, _APPLIED)


def _refused(reason: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(Use.REFUSED, reason=reason))


def _accepted(*values: object) -> Field:
    return Field(Use.ACCEPTED, values=values)


def _any(kind: type) -> Field:
    return Field(Use.ACCEPTED, kind=kind)


_SHARED: dict[str, Field] = {
    **_applied("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed"),
    **_applied("stop", "stream", "stream_options", "temperature", "top_p"),
    # vLLM's
    **_applied("top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    **_applied("min_tokens", "skip_special_tokens", "cache_salt"),
    "user": _any(str),
    "metadata": _any(dict),
    "spaces_between_special_tokens": _any(bool),  # byte-level tokenizers put none
    "use_beam_search": _accepted(False),
    "length_penalty": _accepted(1),
    "priority": _accepted(0),
    "return_tokens_as_token_ids": _accepted(False),
    "return_token_ids": _accepted(False),
    **_refused("output is not constrained in this version", "structured_outputs", "guided_json", "guided_regex"),
    **_refused("output is not constrained in this version", "guided_choice", "guided_grammar", "structural_tag"),
    **_refused("output is not constrained in this version", "guided_decoding_backend", "guided_whitespace_pattern"),
    **_refused("output is not constrained in this version", "allowed_token_ids", "bad_words"),
    **_refused("a prompt is never cut in silence", "truncate_prompt_tokens"),
    **_refused("ask for echo with logprobs on /v1/completions", "prompt_logprobs"),
    **_refused("no code comes from a request", "logits_processors"),
    **_refused("request ids are made by the server; x-request-id is echoed", "request_id"),
    **_refused("it is not supported", "kv_transfer_params", "vllm_xargs"),
}

COMPLETION_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_applied("prompt", "best_of", "echo", "parse_special", "add_special_tokens"),
    **_refused("the models served here do not fill in the middle", "suffix"),
    **_refused("prompts are text or token ids", "prompt_embeds"),
    "response_format": _accepted({"type": "text"}),
}

CHAT_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_applied("messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice"),
    **_applied("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "best_of"),
    "store": _accepted(False),
    "service_tier": _accepted("auto", "default"),
    "parallel_tool_calls": _any(bool),  # without tools there is nothing to do in parallel
    "function_call": _accepted("none"),
    "modalities": _accepted(["text"]),
    "safety_identifier": _any(str),
    "prompt_cache_key": _any(str),  # prefixes are found by their tokens
    "prompt_cache_retention": _accepted("in-memory", "in_memory"),
    "include_reasoning": _any(bool),
    "echo": _accepted(False),
    "add_special_tokens": _accepted(False),  # the template writes them all
    "reasoning_effort": Field(Use.HINT, kind=str),
    "verbosity": Field(Use.HINT, kind=str),
    **_refused("use tools", "functions"),
    **_refused("only text goes in and out", "audio", "mm_processor_kwargs", "media_io_kwargs"),
    **_refused("a template never comes from a request; start the server with --chat-template FILE", "chat_template"),
    **_refused("it is not supported", "documents", "prediction", "web_search_options", "thinking_token_budget"),
    **_refused("it is not supported", "moderation"),
}
