"""`peagle serve`: OpenAI's HTTP API in front of the engine."""
