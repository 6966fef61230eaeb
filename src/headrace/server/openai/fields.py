"""Every field of every body, objects inside it included, and what headrace does with it.

A field is applied; or accepted because its value changes nothing here; or a hint, accepted and reported as ignored; or
refused by name. `null` is the same as leaving a field out. A field in no table is unknown: reported, or refused where
the server is told to. Sources: OpenAI's API reference, vLLM's `entrypoints/openai` protocol, and for the text routes
llama.cpp's server, in 2026.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass


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
    inside: Mapping[str, Field] | None = None  # APPLIED: the fields of the object, or of the objects in the list

    def takes(self, value: object) -> bool:
        """Whether a field that is accepted with some values may have this one; 1 is not true."""
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values)

    @property
    def allowed(self) -> str:
        """Those values, in words."""
        return " or ".join(json.dumps(value) for value in self.values)


Table = Mapping[str, Field]

_APPLIED = Field(Use.APPLIED)


def _applied(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, _APPLIED)


def _refused(reason: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(Use.REFUSED, reason=reason))


def _accepted(*values: object) -> Field:
    return Field(Use.ACCEPTED, values=values)


def _any(kind: type) -> Field:
    return Field(Use.ACCEPTED, kind=kind)


def _hint(kind: type | None = None) -> Field:
    return Field(Use.HINT, kind=kind)


def _object(inside: Table) -> Field:
    return Field(Use.APPLIED, inside=inside)


_NO_SAMPLER = "this sampler does not exist here; temperature, top_p, top_k, min_p and the penalties do"
_NO_TEMPLATES = "a template never comes from a request; start the server with --chat-template FILE"

# Objects inside bodies ----------------------------------------------------------------------------------------

STREAM_OPTIONS_FIELDS: Table = {
    **_applied("include_usage"),
    "include_obfuscation": _accepted(False),  # padding against traffic analysis
    "continuous_usage_stats": _accepted(False),  # vLLM's usage in every chunk
}
PART_FIELDS: Table = _applied("type", "text")
CALL_FIELDS: Table = {
    **_applied("id", "type"),
    "function": _object(_applied("name", "arguments")),
    "index": _any(int),  # of a chunk of a stream: the list has the order
}
MESSAGE_FIELDS: Table = {
    **_applied("role", "name", "tool_call_id"),
    "content": _object(PART_FIELDS),
    "tool_calls": _object(CALL_FIELDS),
    "refusal": _hint(str),
    "reasoning_content": _hint(str),
    "reasoning": _hint(str),
    "annotations": _hint(),
    **_refused("use tool_calls", "function_call"),
    **_refused("only text goes in and out", "audio"),
}
TOOL_FIELDS: Table = {
    **_applied("type"),
    "function": _object(_applied("name", "description", "parameters", "strict")),
}

# Bodies that generate -----------------------------------------------------------------------------------------

_SHARED: Table = {
    **_applied("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed"),
    **_applied("stop", "stream", "temperature", "top_p"),
    "stream_options": _object(STREAM_OPTIONS_FIELDS),
    # vLLM's
    **_applied("top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    **_applied("min_tokens", "skip_special_tokens", "cache_salt", "priority"),
    "user": _any(str),
    "metadata": _any(dict),
    "spaces_between_special_tokens": _any(bool),  # byte-level tokenizers put none
    "use_beam_search": _accepted(False),
    "length_penalty": _accepted(1),
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
    # llama.cpp's, as far as they change the answer
    **_refused("output is not constrained in this version", "grammar", "json_schema"),
    **_refused("use max_tokens", "n_predict"),
    **_refused("use logprobs", "n_probs"),
    **_refused("use repetition_penalty, which looks at the whole text", "repeat_penalty", "repeat_last_n"),
    **_refused("a prompt is never cut in silence", "n_keep"),
    **_refused("an answer ends by its tokens and stop strings", "n_indent", "t_max_predict_ms"),
    **_refused(_NO_SAMPLER, "mirostat", "mirostat_tau", "mirostat_eta", "typical_p", "tfs_z", "top_n_sigma"),
    **_refused(_NO_SAMPLER, "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    **_refused(_NO_SAMPLER, "dry_sequence_breakers", "xtc_probability", "xtc_threshold"),
    **_refused(_NO_SAMPLER, "dynatemp_range", "dynatemp_exponent", "min_keep", "samplers"),
    **_refused("adapters are not supported", "lora"),
}

COMPLETION_FIELDS: Table = {
    **_SHARED,
    **_applied("prompt", "best_of", "echo", "parse_special", "add_special_tokens"),
    **_refused("the models served here do not fill in the middle", "suffix"),
    **_refused("prompts are text or token ids", "prompt_embeds"),
    "response_format": _accepted({"type": "text"}),
}

CHAT_FIELDS: Table = {
    **_SHARED,
    **_applied("max_completion_tokens", "top_logprobs", "tool_choice"),
    "messages": _object(MESSAGE_FIELDS),
    "response_format": _object(_applied("type")),
    "tools": _object(TOOL_FIELDS),
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
    "reasoning_effort": _hint(str),
    "verbosity": _hint(str),
    **_refused("use tools", "functions"),
    **_refused("only text goes in and out", "audio", "mm_processor_kwargs", "media_io_kwargs"),
    **_refused(_NO_TEMPLATES, "chat_template"),
    **_refused("it is not supported", "documents", "prediction", "web_search_options", "thinking_token_budget"),
    **_refused("it is not supported", "moderation"),
}

# Bodies of the text routes ------------------------------------------------------------------------------------

TEMPLATE_FIELDS: Table = {
    **_applied("model", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    "messages": _object(MESSAGE_FIELDS),
    "tools": _accepted([]),
    **_refused(_NO_TEMPLATES, "chat_template"),
    **_refused("only text goes in", "mm_processor_kwargs"),
    **_refused("it is not supported", "documents"),
}
TOKENIZE_FIELDS: Table = {
    **TEMPLATE_FIELDS,
    **_applied("content", "prompt", "add_special", "add_special_tokens", "parse_special"),
    "with_pieces": _accepted(False),
    "return_token_strs": _accepted(False),
}
DETOKENIZE_FIELDS: Table = _applied("model", "tokens")
