"""Deploys stock vLLM with a drafter: files that start it, and SageMaker endpoints."""
