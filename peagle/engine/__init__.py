"""The embedded engine: continuous batching with a paged KV cache and speculative decoding, on a CPU or one GPU.

Read in this order:

    llm.py             the public API; `LLM.step` is the whole engine: schedule, launch, commit
    request.py         requests, the work of a step, outputs
    scheduler.py       which requests run in the next step
    kv_cache.py        blocks of the KV cache, prefix caching, attention over the cache
    model_runner.py    the decode step: verify, accept, draft; step_output.py: what it hands on
    sampler.py         samples tokens and accepts draft tokens; logits_processors.py: penalties, grammars, logprobs
    proposer.py        runs the drafter
    prefill.py         prompt passes; prefill_inputs.py: their packed inputs
    device_state.py    request slots on the device
    cuda_graphs.py     captured decode steps and prefill passes
    loader.py          from settings to a model runner and a scheduler
    detokenizer.py     text and stop strings; grammar.py, grammar_matcher.py: constrained outputs

`peagle/speculative/reference.py` computes the same tokens in plain PyTorch and is the oracle of the tests.
"""
