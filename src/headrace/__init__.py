"""headrace: an LLM inference server for CPUs that knows its own physics."""

from headrace.engine.config import EngineConfig
from headrace.engine.llm import LLM
from headrace.types import Request, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "Request", "SamplingParams"]
