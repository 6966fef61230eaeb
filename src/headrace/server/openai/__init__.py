"""The shapes of OpenAI's API: request bodies, answers, errors and the table of fields. No I/O."""
