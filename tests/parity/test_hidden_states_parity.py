"""Hidden states extracted by stock vLLM on the CPU equal those of the target here: layers, order, norm, tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import TEXT, target_folder

from peagle.checkpoints.target import load_decoder
from peagle.data.batches import ResponseDataset, pack
from peagle.training.hidden_states.online import OnlineHiddenStates, documents_in_order
from peagle.training.hidden_states.vllm import VllmHiddenStates

pytestmark = pytest.mark.vllm
AUX_LAYER_IDS = (1, 2, 4)
LONGEST = 90


def rows() -> ResponseDataset:
    """Rows of several lengths, one beyond the maximum."""
    lengths = [17, 40, 1, 100, 64]
    tokens = [np.frombuffer(TEXT[300 * i : 300 * i + n], np.uint8).astype(np.int32) for i, n in enumerate(lengths)]
    return ResponseDataset(
        token_T=np.concatenate(tokens),
        offset_E=np.cumsum([0, *lengths]),
        span_S2=np.array([(n // 2, n) for n in lengths], np.int32),
        span_offset_E=np.arange(len(lengths) + 1),
        row_ids=tuple(f"row-{i}" for i in range(len(lengths))),
        selected=np.arange(len(lengths)),
    )


def extract(prompts: list[list[int]], layers: tuple[int, ...], into: Path, patch: pytest.MonkeyPatch) -> None:
    from vllm import LLM, SamplingParams

    hf_config = {"eagle_aux_hidden_state_layer_ids": list(reversed(layers))}  # the order named means nothing
    llm = LLM(
        str(target_folder()),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=128,
        skip_tokenizer_init=True,
        seed=0,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(into)},
        },
    )
    # The connector needs pinned memory and CUDA events, which a CPU has not.
    empty_like = torch.empty_like

    def unpinned(x: torch.Tensor, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty_like(x, **options)

    patch.setattr(torch, "empty_like", unpinned)
    patch.setattr(torch.cuda.Event, "query", lambda self: True, raising=False)
    try:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        # what is finished in one step is written in the next
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_vllm_keeps_what_the_target_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, examples = load_decoder(target_folder()), rows()
    prompts = [row.token_ids.tolist() for row in documents_in_order(pack(examples, LONGEST))]
    assert [len(p) for p in prompts] == [17, 40, 1, 90, 64]
    with monkeypatch.context() as patch:
        extract(prompts, tuple(sorted({*AUX_LAYER_IDS, target.cfg.num_layers})), tmp_path, patch)
    source, online = (
        VllmHiddenStates(tmp_path, target, AUX_LAYER_IDS, LONGEST),
        OnlineHiddenStates(target, AUX_LAYER_IDS),
    )
    source.check(examples)
    for batch in pack(examples, 150, max_seq_len=LONGEST):
        theirs, ours = source.states(batch), online.states(batch)
        torch.testing.assert_close(theirs.hidden_ND, ours.hidden_ND, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs.aux_hidden_states_NX, ours.aux_hidden_states_NX, rtol=1e-4, atol=1e-4)
        assert (theirs.aux_hidden_states_NX.abs().amax(1) > 1).all(), "zeros would prove nothing"
