"""`peagle serve`: the engine behind OpenAI's API. Sees the engine and what is below it."""
