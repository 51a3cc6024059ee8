"""Model families beyond Llama against transformers: logits, auxiliary hidden states, greedy output of the engine and
of the reference, with and without a drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_decoder
import torch
from safetensors.torch import load_file, save_file
from support import edit_config, edit_weights, set_config
from test_decoder import MIXED, SHAPE, ours, randomised, refused, theirs, tokens_of
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.random_weights import random_weights
from peagle import LLM, SamplingParams
from peagle.checkpoints.target import Target, load_decoder, read_target_config
from peagle.config import DrafterConfig, RopeConfig
from peagle.engine.kv_cache import unpacking_bytes
from peagle.engine.loader import count_parameters
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.reference import generate
from peagle.training.hidden_states.online import DocumentAttention

K = 4
assert_same = partial(test_decoder.assert_same, atol=1e-4)  # residual streams here are larger than Llama's


def qwen3_moe(**fields: Any) -> Qwen3MoeForCausalLM:
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SHAPE | experts | fields)))


def gemma3(**fields: Any) -> Gemma3ForCausalLM:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    shape = {"head_dim": 16, "sliding_window": 6, "layer_types": MIXED, "rope_parameters": ropes}
    return Gemma3ForCausalLM(Gemma3TextConfig(**(SHAPE | shape | fields)))


def gpt_oss(**fields: Any) -> GptOssForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 5, "sliding_window": 6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    shape |= {"num_experts_per_tok": 2, "layer_types": MIXED, "rope_parameters": yarn | {"rope_theta": 150.0}}
    return GptOssForCausalLM(GptOssConfig(**(SHAPE | shape | {"swiglu_limit": 1.5} | fields)))


SHORT, LONG = [1.0 + 0.1 * i for i in range(6)], [2.0 + 0.7 * i for i in range(6)]


def phi3(**fields: Any) -> Phi3ForCausalLM:
    shape = {"hidden_size": 64, "max_position_embeddings": 256, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**(SHAPE | shape | fields)))


def phi4_mini(original: int = 32, **more: Any) -> Phi3ForCausalLM:
    """Rotates three quarters of a head, by factors that depend on the longest sequence."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": SHORT, "long_factor": LONG}
    rope |= {"original_max_position_embeddings": original, "partial_rotary_factor": 0.75}
    return phi3(original_max_position_embeddings=original, rope_parameters=rope, tie_word_embeddings=True, **more)


MODELS: dict[str, Callable[..., Any]] = {
    "qwen3-moe": lambda **more: qwen3_moe(norm_topk_prob=True, **more),
    "qwen3-moe-raw-weights": lambda **more: qwen3_moe(norm_topk_prob=False, attention_bias=True, **more),
    "gemma3": lambda **more: gemma3(query_pre_attn_scalar=16, **more),
    "gemma3-scaled": lambda **more: gemma3(query_pre_attn_scalar=24, attention_bias=True, **more),
    "gpt-oss": gpt_oss,
    "phi3": lambda **more: phi3(sliding_window=9, **more),
    "phi4-mini": phi4_mini,
}
# The variant of each family with the most features runs through the engine.
DECODED = ["qwen3-moe", "gemma3-scaled", "gpt-oss", "phi4-mini"]


def saved(name: str, folder: Path, **more: Any) -> Any:
    model = randomised(MODELS[name](**more))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_aux_hidden_states(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def random_drafter(target: Decoder) -> Drafter:
    cfg = target.cfg
    layers = cfg.num_layers
    shape = DrafterConfig(
        vocab_size=cfg.vocab_size,
        draft_vocab_size=cfg.vocab_size,
        num_layers=2,
        layer=cfg.layer.as_llama,
        rope=cfg.rope.as_llama,
        max_positions=cfg.max_positions,
        target_hidden_size=cfg.layer.hidden_size,
        aux_layer_ids=(1, layers // 2, layers),
        mask_token_id=cfg.vocab_size - 1,
    )
    torch.manual_seed(1)
    drafter = random_weights(Drafter, shape, torch.float32, torch.device("cpu"))
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1 and name != "mask_hidden":
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter.share_weights(target)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy output of transformers without a cache, and the smallest margin of a choice."""
    tokens, least = list(prompt), float("inf")
    for _ in range(count):
        best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        least = min(least, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], least


@pytest.mark.parametrize("name", DECODED)
def test_greedy_output(name: str, tmp_path: Path) -> None:
    """The vocabulary is so small that a random drafter is sometimes right; prompts and outputs exceed the windows."""
    model = saved(name, tmp_path, vocab_size=23, **({"original": 128} if name == "phi4-mini" else {}))
    target = Target(tmp_path, load_decoder(tmp_path), frozenset())
    for rope in target.model.ropes:
        rope.set_max_model_len(128)
    drafter = random_drafter(target.model)
    prompts = [tokens_of(23, length).tolist() for length in (3, 14, 37)]
    count = 40
    want = [greedy(model, prompt, count) for prompt in prompts]
    assert min(least for _, least in want) > 1e-4, "a near-tie: choose another seed"
    params = SamplingParams(max_tokens=count, temperature=0.0)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128}
    settings |= {"tokenizer": False, "prefill_chunk_tokens": 16, "max_num_seqs": 4}
    plain = LLM(target, None, 0, **settings).generate(prompts, params)
    drafted = LLM(target, drafter, K, **settings).generate(prompts, params)
    accepted = 0
    for i, prompt in enumerate(prompts):
        text = want[i][0]
        assert plain[i].outputs[0].token_ids == text
        made = generate(target.model, prompt, params, frozenset(), drafter, K, 128)
        got = drafted[i].outputs[0]
        assert made.token_ids == text and got.token_ids == text
        assert got.num_accepted_tokens_per_pos == made.num_accepted_tokens_per_pos
        accepted += sum(made.num_accepted_tokens_per_pos)
    assert accepted > 0, "a drafter that is never right shows nothing"


@pytest.mark.parametrize("name", DECODED)
@torch.inference_mode()
def test_packed_documents(name: str, tmp_path: Path) -> None:
    """Training's packing: several documents in one pass do not see each other."""
    saved(name, tmp_path)
    model = load_decoder(tmp_path)
    lengths, aux_layer_ids = (21, 1, 18), (0, 2, 4)
    tokens = tokens_of(97)
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    hidden, aux_hidden_states = model(
        tokens, torch.arange(len(tokens)) - starts, DocumentAttention(starts), aux_layer_ids
    )
    want = [model(part, torch.arange(len(part)), causal_attention, aux_layer_ids) for part in tokens.split(lengths)]
    torch.testing.assert_close(hidden, torch.cat([w[0] for w in want]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        aux_hidden_states, torch.cat([w[1] for w in want if w[1] is not None]), atol=1e-4, rtol=1e-4
    )


def test_longrope_depends_on_max_model_len(tmp_path: Path) -> None:
    """transformers decides per pass, which a KV cache does not allow; here it is set once, as in vLLM."""
    model = saved("phi4-mini", tmp_path)
    decoder = load_decoder(tmp_path)
    long, short = tokens_of(97, 40), tokens_of(97, 32)
    assert_same(model, decoder, long)
    assert (ours(decoder, short)[0] - theirs(model, short)[0]).abs().max() > 0.1
    decoder.rope.set_max_model_len(32)
    assert_same(model, decoder, short)
    decoder.rope.build_cos_sin_cache(64, torch.float32)
    assert_same(model, decoder, short)
    decoder.rope.set_max_model_len(33)
    assert_same(model, decoder, long)
    prompt, params = short[:20].tolist(), SamplingParams(max_tokens=10, temperature=0.0)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "tokenizer": False}
    engine = LLM(tmp_path, None, 0, max_model_len=32, max_num_seqs=1, **settings)
    assert engine.generate([prompt], params)[0].outputs[0].token_ids == greedy(model, prompt, 10)[0]


def test_fp8(tmp_path: Path) -> None:
    """Blocks of 16 by 8, which do not divide all widths, as 128 by 128 do not in published models."""
    model = saved("qwen3-moe", tmp_path)
    gen = torch.Generator().manual_seed(6)
    tensors = load_file(tmp_path / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if weight.dim() != 2 or "embed" in name or "lm_head" in name or ".gate." in name:
            continue
        small = (weight * 8).to(torch.float8_e4m3fn)
        rows, columns = weight.shape
        scale = 0.1 + 0.1 * torch.rand(-(-rows // 16), -(-columns // 8), generator=gen)
        packed |= {name: small, f"{name}_scale_inv": scale}
        for r in range(rows):
            for block in range(len(scale[0])):
                at = slice(8 * block, 8 * block + 8)
                weight[r, at] = small[r, at].float() * scale[r // 16, block]
    assert len(packed) == 2 * 4 * (4 + 3 * 7)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    want = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    edit_weights(tmp_path, lambda tensors: tensors.update(packed))
    how = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    set_config(tmp_path, quantization_config=how)
    assert_same(want, load_decoder(tmp_path), tokens_of(97))
    set_config(tmp_path, quantization_config={"quant_method": "fp8"})
    refused(tmp_path, "weight_block_size")


def four_bits(nibble: int) -> float:
    """Decodes E2M1: a sign, two bits of exponent with bias 1, one of fraction, and subnormals."""
    sign, exponent, fraction = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
    return sign * (fraction * 0.5 if exponent == 0 else (1 + fraction * 0.5) * 2.0 ** (exponent - 1))


def saved_mxfp4(folder: Path) -> Any:
    """Writes experts as GPT-OSS is published: two numbers per byte, one exponent per 32 along the input."""
    model = saved("gpt-oss", folder)
    gen = torch.Generator().manual_seed(5)
    values = torch.tensor([[four_bits(byte & 15), four_bits(byte >> 4)] for byte in range(256)])
    packed: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)  # [E, in, out]
            count, width, height = weight.shape
            blocks = torch.randint(256, (count, height, width // 32, 16), generator=gen, dtype=torch.uint8)
            scales = torch.randint(121, 126, (count, height, width // 32), generator=gen, dtype=torch.uint8)
            numbers = values[blocks.long()].flatten(-2) * 2.0 ** (scales[..., None].float() - 127)
            weight.data = numbers.flatten(-2).mT.contiguous()
            key = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if f"{name}_blocks" in packed:
                del tensors[name]
        tensors |= packed

    edit_weights(folder, pack)
    set_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def test_mxfp4(tmp_path: Path) -> None:
    model = saved_mxfp4(tmp_path)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))
    set_config(tmp_path, quantization_config={"quant_method": "awq"})
    refused(tmp_path, "awq", "mxfp4")


def expert_bytes(model: Decoder) -> int:
    named = model.named_parameters()
    return sum(p.nbytes for name, p in named if ".mlp." in name and "router" not in name and "bias" not in name)


@torch.inference_mode()
def test_mxfp4_that_stays_packed(tmp_path: Path) -> None:
    """The same numbers in padded rows of 128 columns and 16 exponents; random weights have the same shapes; tensors
    that
    the checkpoint stores unpacked stay unpacked."""
    saved_mxfp4(tmp_path)
    plain, kept = load_decoder(tmp_path), load_decoder(tmp_path, keep_mxfp4=True)
    tokens = tokens_of(97)
    (want, want_taps), (got, aux_layer_ids) = ours(plain, tokens), ours(kept, tokens)
    assert torch.equal(want, got) and torch.equal(torch.stack(want_taps), torch.stack(aux_layer_ids))
    numbers, rows = 4 * 5 * (2 * 32 * 64 + 64 * 32), 4 * 5 * (2 * 32 + 64)
    assert expert_bytes(plain) == 4 * numbers and expert_bytes(kept) == (128 // 2 + 16) * rows
    assert count_parameters(plain) - numbers == count_parameters(kept) - (128 + 16) * rows

    cfg = read_target_config(tmp_path, keep_mxfp4=True)
    assert cfg == kept.cfg and unpacking_bytes(cfg) == 2 * 5 * 2 * 32 * 64 * 2 and unpacking_bytes(plain.cfg) == 0
    noise = random_weights(Decoder, cfg, torch.float32, torch.device("cpu"))
    assert expert_bytes(noise) == expert_bytes(kept)
    weights = noise.layers[0].mlp.weights().gate_up_EXD  # type: ignore[operator]
    assert weights[0].float().std() == pytest.approx(0.02, rel=0.3)
    padded = replace(weights, columns=128)  # including the padding
    assert not padded[0][:, weights.columns :].any() and torch.equal(padded[0][:, : weights.columns], weights[0])
    assert ours(noise, tokens)[0].isfinite().all()

    plainly = tmp_path / "plain"
    saved("gpt-oss", plainly)
    assert load_decoder(plainly, keep_mxfp4=True).cfg == read_target_config(plainly, keep_mxfp4=True) == plain.cfg
    set_config(plainly, quantization_config={"quant_method": "mxfp4"})
    assert load_decoder(plainly, keep_mxfp4=True).cfg == plain.cfg


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_gemma3(prefix: str, tmp_path: Path) -> None:
    """The language model of a multimodal checkpoint, as published and as transformers writes it."""
    model = saved("gemma3", tmp_path)

    def wrap(values: dict[str, Any]) -> None:
        text = {name: values.pop(name) for name in list(values)}
        values |= {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors[prefix.replace("language_model", "vision_tower") + "x.weight"] = torch.zeros(3, 3)
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(3)

    edit_config(tmp_path, wrap)
    edit_weights(tmp_path, rename)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def test_mixed_layers_raise(tmp_path: Path) -> None:
    saved("qwen3-moe", tmp_path)
    set_config(tmp_path, mlp_only_layers=[1])
    refused(tmp_path, "mlp_only_layers")


# Published configs, with fields that transformers fills in; parameter counts are derived from them too.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN3_CODER_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PUBLISHED = {"gpt-oss-20b": GPT_OSS_20B, "qwen3-coder-30b-a3b": QWEN3_CODER_30B, "gemma-3-4b": GEMMA3_4B}
COUNTED = {"gpt-oss-20b": 20.91e9, "qwen3-coder-30b-a3b": 30.53e9, "gemma-3-4b": 3.88e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    cfg = read_target_config(tmp_path)
    with torch.device("meta"):
        model = Decoder(cfg)
    counted = sum(p.numel() for p in model.parameters())
    assert abs(counted / COUNTED[name] - 1) < 0.002
    if name == "gpt-oss-20b":
        assert cfg.windows == (128, None) * 12 and cfg.layer.experts is not None
        assert cfg.layer.experts.clamp == (1.702, 7.0) and not cfg.rope.truncate and cfg.rope.theta == 150000
    if name == "gemma-3-4b":
        assert cfg.local_rope == RopeConfig(theta=10000.0) and cfg.rope == RopeConfig(1e6, "linear", 8.0)
        assert cfg.windows[4:7] == (1024, None, 1024)
