"""Prompts in, the target's own responses out, and packed batches made of them."""
