"""AWS's published heads: folders with their layout load, pass the validator and draft the expected tokens.

The oracle computes draft tokens from the file's tensors, with transformers' rotary embedding and none of peagle's
modules.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import forks
import pytest
import torch
from published_heads import (
    HEADS,
    LAYERS,
    AuxLayerIdsField,
    Head,
    full,
    head_tensors,
    small,
    write_full_head,
    write_head,
    write_target,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from peagle.checkpoints.drafter import find_tensor_problems, load_drafter, read_drafter_config
from peagle.checkpoints.files import SafetensorsFolder
from peagle.checkpoints.target import load_decoder
from peagle.checkpoints.validate import inspect_drafter
from peagle.config import SamplingParams
from peagle.engine.llm import LLM
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.speculative.reference import propose_draft_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(b"The quick brown fox")


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest) -> Head:
    return HEADS[request.param]


@pytest.fixture(scope="module")
def target_folder(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(head, tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder)


def expected_drafts(head: Head, aux_hidden_states: Tensor, tokens: list[int], k: int) -> list[int]:
    """Row p has the hidden state at p and the token at p + 1; k - 1 mask rows follow the newest token."""
    shape = small(head)
    w = {name: tensor.float() for name, tensor in head_tensors(shape).items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T

    ids = torch.tensor([*tokens[1:], *[shape.mask_id] * (k - 1)])
    hidden = torch.cat([aux_hidden_states, w["mask_hidden"][0].expand(k - 1, -1)]) @ w["fc.weight"].T
    embeds = w["embed_tokens.weight"][ids]
    config = LlamaConfig(
        head_dim=shape.head_dim,
        max_position_embeddings=512,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    )
    cos, sin = LlamaRotaryEmbedding(config)(hidden[None], torch.arange(len(ids))[None])
    for i in range(LAYERS):
        name = "midlayer" if i == 0 else f"layers.{i}"
        entering = norm(hidden, f"{name}.input_layernorm")
        if i == 0:
            both = (norm(embeds, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm"))
            entering = torch.cat(both, -1)
        q, k_, v = (
            dense(entering, f"{name}.self_attn.{part}_proj").view(1, len(ids), -1, shape.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        q, k_ = apply_rotary_pos_emb(q, k_, cos, sin)
        seen = F.scaled_dot_product_attention(q, k_, v, is_causal=True, enable_gqa=True)
        hidden = hidden + dense(seen[0].transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")
        normed = norm(hidden, f"{name}.post_attention_layernorm")
        gated = F.silu(dense(normed, f"{name}.mlp.gate_proj")) * dense(normed, f"{name}.mlp.up_proj")
        hidden = hidden + dense(gated, f"{name}.mlp.down_proj")
    logits = dense(norm(hidden, "norm"), "lm_head")
    return logits[-k:].argmax(-1).tolist()


@pytest.mark.parametrize("aux_hidden_states", ["top", "nested", "none"])
def test_draft_tokens_match_a_plain_computation(
    head: Head, aux_hidden_states: AuxLayerIdsField, target: Decoder, tmp_path: Path
) -> None:
    drafter = load_drafter(write_head(head, tmp_path / "head", aux_hidden_states), target)
    assert drafter.cfg.parallel and drafter.cfg.mask_token_id == small(head).mask_id
    assert drafter.cfg.aux_layer_ids == tuple(head.aux_layer_ids) and drafter.cfg.rope.rope_type == "llama3"
    with torch.inference_mode():
        _, aux_hidden_states = target(
            torch.tensor(PROMPT[:-1]), torch.arange(len(PROMPT) - 1), causal_attention, drafter.cfg.aux_layer_ids
        )
        assert aux_hidden_states is not None
        draft = propose_draft_tokens(
            drafter, PROMPT, aux_hidden_states, head.num_speculative_tokens, None, torch.Generator()
        )
    wanted = expected_drafts(head, aux_hidden_states, PROMPT, head.num_speculative_tokens)
    assert draft.token_ids == wanted and len(set(wanted)) > 1


def test_output_is_the_same_without_a_drafter(head: Head, target_folder: Path, tmp_path: Path) -> None:
    folder = write_head(head, tmp_path / "head")
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 64, "max_num_seqs": 2}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for drafter, k in ((folder, head.num_speculative_tokens), (None, 0)):
        llm = LLM(target_folder, drafter, k, **settings)  # type: ignore[arg-type]
        texts.append(llm.generate(PROMPT, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_the_validator_reports_only_missing_aux_layer_ids(head: Head, target_folder: Path, tmp_path: Path) -> None:
    for aux_hidden_states, found in (("top", 0), ("nested", 0), ("none", 1)):
        folder = write_head(head, tmp_path / aux_hidden_states, aux_hidden_states)  # type: ignore[arg-type]
        for version in ("0.16", "0.27", "0.32"):
            findings = inspect_drafter(folder, str(folder), target_folder, str(target_folder), version).findings
            assert len(findings) == found, findings
            assert all("eagle_aux_hidden_state_layer_ids" in finding for finding in findings)


def test_a_full_size_head_has_the_expected_tensors(head: Head, tmp_path: Path) -> None:
    folder = write_full_head(head, tmp_path / "head")
    cfg = read_drafter_config(folder)
    shapes = SafetensorsFolder(folder).shapes
    assert find_tensor_problems(cfg, shapes) == []
    assert cfg.mask_token_id == full(head).mask_id and not cfg.reduced_vocab and cfg.own_embeddings and cfg.own_head
    if head is HEADS["gpt-oss-20b"]:
        assert shapes["fc.weight"] == (2880, 8640) and cfg.mask_token_id == 201020


def test_serving_with_the_model_cards_command(tmp_path: Path) -> None:
    """vLLM's --speculative-config with the JSON of the model card, including its blanks."""
    head = HEADS["gpt-oss-20b"]
    target, folder = write_target(head, tmp_path / "target"), write_head(head, tmp_path / "head")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = ("--speculative-config", head.card(folder), "--max-model-len", "256", "--port", str(port))
    server = forks.Process("-m", "peagle", "serve", str(target), *given)
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        answer = _answered(request, server)
        assert answer["usage"]["completion_tokens"] == 4
        assert "p-eagle, K 7" in server.stderr()
    finally:
        server.end()


def _answered(request: urllib.request.Request, server: forks.Process) -> dict:
    answers: list[dict] = []

    def asked() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answers.append(json.loads(response.read()))
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    server.wait_until(asked)
    return answers[0]


def test_an_unknown_key_of_speculative_config_raises(tmp_path: Path) -> None:
    head = HEADS["gpt-oss-20b"]
    target, folder = write_target(head, tmp_path / "target"), write_head(head, tmp_path / "head")
    for edit, named in (('"quantization": "fp8", ', "quantization"), ("", "parallel_drafting")):
        text = head.card(folder).replace("{", "{" + edit)
        text = text if edit else text.replace("true", "false")
        run = forks.Process("-m", "peagle", "serve", str(target), "--speculative-config", text, "--port", "0")
        assert run.wait(60) == 2
        assert named in run.stderr() and len(run.stderr().strip().splitlines()) == 1
