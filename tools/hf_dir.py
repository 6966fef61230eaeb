"""Writes the Hugging Face directory of the default model's GGUF, dequantized: for trying that path by hand.

python tools/hf_dir.py SmolLM2-135M-Instruct.Q4_1.gguf DIRECTORY [float32 | bfloat16]
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from oracle import check_is_smollm2, load_model, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    dtype = DTYPES[sys.argv[3] if len(sys.argv) > 3 else "bfloat16"]
    check_is_smollm2(source)
    loaded = load_model(source)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it says that the weights came from a GGUF, and bars them from being saved
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(dtype).save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)


if __name__ == "__main__":
    main()
