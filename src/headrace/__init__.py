"""headrace: an LLM inference server that knows its own physics."""
