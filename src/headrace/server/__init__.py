"""The HTTP server: OpenAI's API over the engine. Owns requests and answers as bytes; knows nothing of models."""
