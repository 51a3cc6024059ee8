"""Gemma 4 and Llama 4 against transformers: models whose layers differ, with the tests of the other families."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_heads
import pytest
import test_families
import torch
from engines import write_tokenizer
from support import set_config
from test_decoder import MIXED, SHAPE, randomised, refused, tokens_of
from test_families import assert_same, saved
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
)

from benchmarks.random_weights import random_weights
from peagle import LLM, SamplingParams
from peagle.checkpoints import families
from peagle.checkpoints.config_reader import ConfigReader
from peagle.checkpoints.drafter import find_fit_problems, read_drafter_config
from peagle.checkpoints.target import load_decoder, read_target_config
from peagle.config import AttentionTemperature, ChunkedAttention, RopeConfig, TrainConfig
from peagle.engine.kv_cache import block_bytes
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.transformers_model import TransformersDecoder
from peagle.training.drafter_init import init_from_target, new_drafter_config

CHUNK = 16


def gemma4_fields(**fields: Any) -> dict[str, Any]:
    """Like 31B: layers with full attention have wider heads and fewer key/value heads, whose keys are values too."""
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    shape = {"head_dim": 16, "sliding_window": 6, "layer_types": list(MIXED), "rope_parameters": ropes}
    shape |= {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "final_logit_softcapping": 5.0}
    return SHAPE | shape | fields


def with_scalars(text_model: Any) -> None:
    """Sets the layer scalars, which are buffers and therefore not randomised with the parameters."""
    for i, layer in enumerate(text_model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * (i % 4))


def gemma4(**fields: Any) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(Gemma4TextConfig(**gemma4_fields(**fields)))
    with_scalars(model.model)
    return model


def llama4_fields(**fields: Any) -> dict[str, Any]:
    """Like Scout, with attention chunks and query scaling that take effect in short sequences."""
    shape = {"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 5}
    shape |= {"attention_chunk_size": CHUNK, "floor_scale": 6, "attn_scale": 0.3, "no_rope_layers": [1, 0, 1, 1]}
    rope = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    return SHAPE | shape | {"rope_parameters": rope} | fields


def llama4(**fields: Any) -> Llama4ForCausalLM:
    return Llama4ForCausalLM(Llama4TextConfig(**llama4_fields(**fields)))


MODELS: dict[str, Callable[..., Any]] = {
    "gemma4": gemma4,
    "gemma4-own-values": lambda **more: gemma4(attention_k_eq_v=False, attention_bias=True, **more),
    "llama4": llama4,
    "llama4-mixed": lambda **more: llama4(
        interleave_moe_layer_step=2,  # as Maverick is
        num_experts_per_tok=2,
        attention_bias=True,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        **more,
    ),
}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in MODELS.items():
        monkeypatch.setitem(test_families.MODELS, name, make)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_aux_hidden_states(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    decoder = load_decoder(tmp_path)
    assert_same(model, decoder, tokens_of(97))


@pytest.mark.parametrize("name", ["gemma4", "llama4"])
def test_greedy_output(name: str, tmp_path: Path) -> None:
    test_families.test_greedy_output(name, tmp_path)


@pytest.mark.parametrize("name", ["gemma4", "llama4"])
def test_packed_documents(name: str, tmp_path: Path) -> None:
    test_families.test_packed_documents(name, tmp_path)


class RotatingAttention:
    """Attention that applies the rotary embedding itself, as the GPU kernel does."""

    rotates = True

    def __call__(self, layer: int, q: Any, k: Any, v: Any, window: Any, rope: Any = None) -> torch.Tensor:
        if rope is not None:
            q, k = rope.apply(q, k)
        return causal_attention(layer, q, k, v, window)


@pytest.mark.parametrize("name", ["gemma4", "llama4"])
@torch.inference_mode()
def test_attention_that_applies_the_rotary_embedding(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    decoder, tokens = load_decoder(tmp_path), tokens_of(97)
    want, got = (
        decoder(tokens, torch.arange(len(tokens)), attend)[0] for attend in (causal_attention, RotatingAttention())
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma4", "llama4"])
@torch.inference_mode()
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Close to fp32, except where a router's choice flips; softcapped logits are fp32."""
    saved(name, tmp_path)
    tokens = tokens_of(97)
    exact, rounded = (
        decoder.compute_logits(decoder(tokens, torch.arange(len(tokens)), causal_attention)[0])
        for decoder in (load_decoder(tmp_path), load_decoder(tmp_path, torch.bfloat16))
    )
    assert rounded.dtype == (torch.float32 if name == "gemma4" else torch.bfloat16)
    assert 0 < (rounded - exact).abs().median() < 0.05 * exact.std()


def seeing_gemma4(**fields: Any) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8}
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    text = gemma4_fields(use_bidirectional_attention="vision", **fields)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, audio_config=sound))
    with_scalars(model.model.language_model)
    return model


def seeing_llama4() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16, "image_size": 28}
    return Llama4ForConditionalGeneration(Llama4Config(text_config=llama4_fields(), vision_config=vision))


@pytest.mark.filterwarnings("ignore:.*runs through transformers")
@pytest.mark.parametrize("make", [seeing_gemma4, seeing_llama4, lambda: seeing_gemma4(**ALL_VARIANTS)])
@torch.inference_mode()
def test_text_part(make: Callable[[], Any], tmp_path: Path) -> None:
    """The language model of multimodal checkpoints, as transformers writes them."""
    model = make()
    model.config.initializer_range = SHAPE["initializer_range"]
    randomised(model).save_pretrained(tmp_path)
    if "Llama4" in type(model).__name__:
        text = json.loads((tmp_path / "config.json").read_text())["text_config"]
        set_config(tmp_path, text_config=text | {"attn_temperature_tuning": 4})
    tokens = tokens_of(97)
    want = model(input_ids=tokens[None], use_cache=False).logits[0]
    decoder = load_decoder(tmp_path)
    got = decoder.compute_logits(decoder(tokens, torch.arange(len(tokens)), causal_attention)[0])
    assert want.std() > 0.1 and (got - want).abs().max() < 1e-4


VARIANTS: dict[str, dict[str, Any]] = {
    "hidden_size_per_layer_input": {"hidden_size_per_layer_input": 8},  # E2B, E4B
    "num_kv_shared_layers": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "enable_moe_block": {  # 26B-A4B
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
ALL_VARIANTS = {name: value for fields in VARIANTS.values() for name, value in fields.items()}


@pytest.mark.parametrize("field", VARIANTS)
def test_variants_of_gemma4_run_through_transformers(field: str, tmp_path: Path) -> None:
    """A warning says why; their embeddings and lm_head can be loaded alone, for hidden states from vLLM."""
    model = randomised(gemma4(**VARIANTS[field]))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="runs through transformers"):
        decoder = load_decoder(tmp_path)
    assert isinstance(decoder, TransformersDecoder)
    assert_same(model, decoder, tokens_of(97))
    tables = load_decoder(tmp_path, skip_layers=True)
    assert torch.equal(tables.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(tables.norm.weight, model.model.norm.weight)
    set_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    refused(tmp_path, "quantized")


@pytest.mark.filterwarnings("ignore:.*runs through transformers")
def test_greedy_output_of_a_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants in one model, with and without speculation: layers that share keys, and two head widths."""
    monkeypatch.setitem(test_families.MODELS, "gemma4-all", lambda **more: gemma4(**ALL_VARIANTS, **more))
    test_families.test_greedy_output("gemma4-all", tmp_path)


def test_unsupported_configs_raise(tmp_path: Path) -> None:
    own = {"2": {"head_dim": 32}, "3": {"head_dim": 32}}
    for wrong, words in (
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"per_layer_config": own | {"1": {"head_dim": 64}}}, "layers of one type"),
        ({"per_layer_config": own | {"1": {"sliding_window": 3}}}, "sliding_window"),
    ):
        broken = tmp_path / "broken"
        saved("gemma4", broken)
        set_config(broken, **wrong)
        refused(broken, words)
    chunks = tmp_path / "chunks"
    saved("llama4", chunks)
    set_config(chunks, layer_types=["sliding_attention"] * 4)
    refused(chunks, "sliding_attention")
    set_config(chunks, layer_types=["chunked_attention"] * 4, attention_chunk_size=None)
    refused(chunks, "attention_chunk_size")


# The published configs, reduced to the fields that matter.
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
}
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


def written(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_gemma4_31b(tmp_path: Path) -> None:
    cfg = read_target_config(written(GEMMA4_31B, tmp_path))
    with torch.device("meta"):
        ours = Decoder(cfg)
        theirs = Gemma4ForCausalLM(Gemma4TextConfig(**copy.deepcopy(GEMMA4_31B["text_config"])))  # type: ignore[arg-type]
    counted = sum(p.numel() for p in ours.parameters())
    twice = 10 * 4 * 512 * 5376  # key weights that are also value weights
    assert counted == sum(p.numel() for p in theirs.parameters()) + twice + 60
    assert abs(counted / 30.7e9 - 1) < 0.005
    wide = [i for i, layer in enumerate(cfg.layers) if (layer.head_dim, layer.num_kv_heads) == (512, 4)]
    assert (
        wide == list(range(5, 60, 6)) and cfg.windows[4:7] == (1024, None, 1024) and cfg.final_logit_softcapping == 30.0
    )
    assert cfg.rope == RopeConfig(1e6, "proportional", partial_rotary_factor=0.25) and cfg.local_rope == RopeConfig(
        theta=1e4
    )
    assert block_bytes(cfg, None, 2) == 16 * 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    # other transformers releases leave the published fields unchanged
    raw = ConfigReader(GEMMA4_31B["text_config"], tmp_path)  # type: ignore[arg-type]
    assert families.read_gemma4_layers(raw, families.read_gemma4_layer(raw)) == cfg.layers


def test_the_published_head_of_gemma4_31b(tmp_path: Path) -> None:
    """Fits the target; a new drafter has the same layers, without the target's QK norms."""
    cfg, head = read_target_config(written(GEMMA4_31B, tmp_path)), published_heads.HEADS["gemma-4-31b"]
    published = read_drafter_config(published_heads.write_full_head(head, tmp_path / "head"), cfg)
    assert find_fit_problems(published, cfg) == [] and published.aux_layer_ids == cfg.default_aux_layer_ids == (
        2,
        30,
        57,
    )
    made = new_drafter_config(TrainConfig(), cfg)
    assert made.layer.head_dim == published.layer.head_dim and made.layer.num_kv_heads == published.layer.num_kv_heads
    assert not made.layer.qk_norm and made.layer == made.layer.as_llama and made.rope == RopeConfig(theta=1e6)


def test_llama4_scout(tmp_path: Path) -> None:
    cfg = read_target_config(written(LLAMA4_SCOUT, tmp_path))
    with torch.device("meta"):
        ours = Decoder(cfg)
        theirs = Llama4ForCausalLM(
            Llama4TextConfig(**LLAMA4_SCOUT["text_config"] | {"attn_temperature_tuning": True})  # type: ignore[operator]
        )
    counted = sum(p.numel() for p in ours.parameters())
    assert counted == sum(p.numel() for p in theirs.parameters()) + 36 * 2 * 128
    assert cfg.windows == (*[ChunkedAttention(8192)] * 3, None) * 12
    assert [layer.use_rope for layer in cfg.layers] == [True, True, True, False] * 12
    assert (
        cfg.attention_temperature == AttentionTemperature(8192, 0.1)
        and cfg.rope.rope_type == "llama3"
        and cfg.max_positions == 1 << 20
    )
    assert new_drafter_config(TrainConfig(), cfg).layer.intermediate_size == 2 * 8192


def test_a_drafter_like_the_published_one_drafts_for_gemma4(tmp_path: Path) -> None:
    """Three auxiliary layers of 60: the output is the target's own, and the KV cache has the planned size."""
    head = published_heads.HEADS["gemma-4-31b"]
    shape, folder = published_heads.small(head), tmp_path / "target"
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    more = {"vocab_size": shape.vocab, "hidden_size": shape.width, "num_hidden_layers": 60, "layer_types": kinds}
    randomised(gemma4(**more, max_position_embeddings=published_heads.POSITIONS)).save_pretrained(folder)
    write_tokenizer(folder, shape.vocab)
    drafter = published_heads.write_head(head, tmp_path / "head")
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 64}
    params = SamplingParams(max_tokens=16, temperature=0.0)
    plain = LLM(folder, None, 0, **settings).generate(["The quick brown fox"], params)
    drafting = LLM(folder, drafter, 7, **settings)
    drafted = drafting.generate(["The quick brown fox"], params)
    assert plain[0].outputs[0].token_ids == drafted[0].outputs[0].token_ids
    runner = drafting.model_runner
    assert runner.drafter is not None
    planned = len(runner.kv_cache.keys[0]) * block_bytes(runner.target.cfg, runner.drafter.cfg, 4)
    assert runner.kv_cache.nbytes + runner.proposer.kv_cache.nbytes == planned


@pytest.mark.parametrize("name", ["gemma4", "llama4"])
@torch.inference_mode()
def test_random_weights(name: str, tmp_path: Path) -> None:
    """For benchmarks: finite logits that differ between rows."""
    saved(name, tmp_path)
    torch.manual_seed(0)
    noise = random_weights(Decoder, read_target_config(tmp_path), torch.float32, torch.device("cpu"))
    logits = noise.compute_logits(noise(tokens_of(97), torch.arange(40), causal_attention)[0])
    assert logits.isfinite().all() and logits.std(0).min() > 1e-3


def test_target_layers_that_cannot_initialize_a_drafter(tmp_path: Path) -> None:
    saved("gemma4", tmp_path)
    target = load_decoder(tmp_path)
    drafter = Drafter(replace(new_drafter_config(TrainConfig(num_layers=1), target.cfg), mask_token_id=7))
    with pytest.raises(UserError, match="--init target: .* use --init random"):
        init_from_target(drafter, target)
