"""Fields of Hugging Face files that headrace does not act on, so that all the others can be refused or told.

Owns the tables of them. Sources: transformers' PretrainedConfig and GenerationConfig (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Of config.json, whatever the architecture: notes, training, classification heads, how transformers runs a model.
HARMLESS_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",  # code of the repository's own, which is never run
        "bos_token_id",
        "chunk_size_feed_forward",
        "debug",
        "dtype",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "is_decoder",
        "max_sequence_length",
        "neftune_noise_alpha",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attention",
    }
)

# Of config.json: fields that would change the arithmetic, and the value at which they do not.
NEUTRAL_CONFIG: Mapping[str, object] = MappingProxyType(
    {
        "add_cross_attention": False,
        "bias": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "tie_encoder_decoder": False,
        "use_sliding_window": False,
    }
)

# Of generation_config.json: notes, and how transformers generates and what it returns.
HARMLESS_GENERATION = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "low_memory",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "return_legacy_cache",
        "transformers_version",
        "use_cache",
    }
)

# How the authors would like answers to be drawn, and the value that asks for nothing. Old files have such wishes in
# config.json too. Those that are not honoured are named in the log: they are not part of the model.
NEUTRAL_WISHES: Mapping[str, object] = MappingProxyType(
    {
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "diversity_penalty": 0.0,
        "do_sample": False,
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "exponential_decay_length_penalty": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_return_sequences": 1,
        "remove_invalid_values": False,
        "renormalize_logits": False,
        "repetition_penalty": 1.0,
        "suppress_tokens": None,
        "temperature": 1.0,
        "token_healing": False,
        "top_k": 50,
        "top_p": 1.0,
        "typical_p": 1.0,
    }
)
