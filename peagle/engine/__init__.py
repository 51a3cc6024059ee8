"""The embedded engine: continuous batching with a paged KV cache and speculative decoding, on a CPU or one GPU.

`LLM.step` in llm.py is the whole engine: schedule (scheduler.py), launch (model_runner.py, prefill.py), commit.
"""
