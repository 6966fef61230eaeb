"""Models: what is in their files and what they compute.

Owns the table of architectures: a new one is a module with its forward function, a module with its names, and a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from headrace.model import llama, llama_files
from headrace.model.architecture import Architecture
from headrace.model.files import GenerationDefaults, GgufVocabulary, ModelFiles, TokenizerFile
from headrace.model.gguf_model import open_gguf
from headrace.model.hf import CONFIG, open_directory
from headrace.types import ModelError

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "GenerationDefaults",
    "GgufVocabulary",
    "ModelFiles",
    "TokenizerFile",
    "open_model",
]

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            forward=llama.forward,
            spec_from_config=llama_files.spec_from_config,
            spec_from_gguf=llama_files.spec_from_gguf,
            weights_from_config=llama_files.weights_from_config,
            weights_from_gguf=llama_files.weights_from_gguf,
        ),
    }
)


def open_model(path: Path) -> ModelFiles:
    """Open a GGUF file or a Hugging Face directory: headers are read and checked, weights stay on the disk.

    A directory that holds nothing but one GGUF file stands for that file.
    """
    if path.is_file():
        return open_gguf(path, ARCHITECTURES)
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such file or directory")
    if (path / CONFIG).exists():
        return open_directory(path, ARCHITECTURES)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_gguf(ggufs[0], ARCHITECTURES)
    raise ModelError(f"{path}: has no {CONFIG} and {len(ggufs)} GGUF files; name the file or a model's directory")
