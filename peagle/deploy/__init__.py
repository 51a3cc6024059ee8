"""vLLM with a drafter on machines elsewhere: the files that start it, SageMaker, and what goes wrong where."""
