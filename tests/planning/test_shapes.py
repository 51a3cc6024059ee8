"""Shapes of targets and drafters: weights against real modules, KV cache against the engine's, and config errors."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_decoder
import test_families
import test_families_more
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import TARGET, drafter_folder, load_pair, target_folder
from support import many
from test_families_more import GEMMA4_31B, LLAMA4_SCOUT, VARIANTS, written
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from peagle.checkpoints.target import read_target_config
from peagle.config import (
    ChunkedAttention,
    DecoderConfig,
    DrafterConfig,
    ExpertsConfig,
    LayerConfig,
    PlanSettings,
    RopeConfig,
)
from peagle.engine.kv_cache import BLOCK_SIZE, block_bytes
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.planning.plan import build_plan
from peagle.planning.roofline import (
    GPUS,
    EngineSpec,
    ForwardBatch,
    Replica,
    decode_step_seconds,
    layers_seconds,
    lm_head_seconds,
)
from peagle.planning.shapes import (
    KNOWN_MODELS,
    ModelShape,
    expected_active_experts,
    load_drafter_shape,
    load_target_shape,
    parse_shape,
)

IDEAL = EngineSpec("ideal", 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
# 1 byte/s and free arithmetic: seconds equal the bytes read.
BYTE_COUNTER = Replica(replace(GPUS["h200"], memory_bandwidth=1.0, matrix_flops=1e99), IDEAL)
LLAMA_8B = load_target_shape("llama-3.1-8b")


MODELS: dict[str, Callable[[], Any]] = {
    **test_decoder.MODELS,
    **test_families.MODELS,
    **test_families_more.MODELS,
}
PUBLISHED: dict[str, Any] = {**test_families.PUBLISHED, "gemma-4-31b": GEMMA4_31B, "llama-4-scout": LLAMA4_SCOUT}


def published_model(config: dict[str, Any]) -> Any:
    text = copy.deepcopy(config.get("text_config", config))  # transformers modifies its input
    text = {**text, "attn_temperature_tuning": bool(text.get("attn_temperature_tuning"))}  # a number in Llama 4
    text.pop("quantization_config", None)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[text["model_type"]](**text))


def count_weights(model: Any) -> int:
    """Elements of all matrices. Keys shared with values (Gemma 4) count twice, as both engines store them twice."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")}
    shared = [n for n in sizes if "k_proj" in n and n.replace("k_proj", "v_proj") not in sizes]
    return sum(sizes.values()) + sum(sizes[name] for name in shared)


@pytest.mark.parametrize("name", [*MODELS, *PUBLISHED])
def test_target_weights_and_cache_match_its_modules(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = MODELS[name]() if name in MODELS else published_model(PUBLISHED[name])
    if name in MODELS:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
    else:
        written(PUBLISHED[name], tmp_path)
    shape = load_target_shape(str(tmp_path), weight_bits=16)
    num_weights, num_embeddings = count_weights(model), model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shape.total_weight_bytes == 2 * num_weights and shape.cfg.tie_word_embeddings == tied
    # so many rows that every expert is used, with half a token of context each
    read_bytes = layers_seconds(BYTE_COUNTER, shape, ForwardBatch(1, 10**6, 0.5))
    read_bytes += lm_head_seconds(BYTE_COUNTER, shape, 1)
    num_read = num_weights - (0 if tied else num_embeddings)
    assert read_bytes == pytest.approx(2 * num_read + shape.kv_cache_bytes(1) / 2)
    assert shape.kv_cache_bytes(5) == 5 * block_bytes(read_target_config(tmp_path), None, 2) / BLOCK_SIZE


def llama_config(cfg: DecoderConfig) -> dict[str, Any]:
    layer = cfg.layer
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "dtype": "float32",
    }


@many(12)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(3, 40), st.booleans())
def test_dense_target_weights_match_the_decoder(
    num_layers: int, num_kv_heads: int, groups: int, width: int, vocab_size: int, tied: bool
) -> None:
    num_heads = num_kv_heads * groups  # divides the hidden size, as transformers requires
    layer = LayerConfig(8 * width * num_heads, 48 * width, num_heads, num_kv_heads, 16)
    cfg = DecoderConfig("llama", vocab_size, num_layers, layer, RopeConfig(), 64, tied, (None,) * num_layers)
    with torch.device("meta"):
        model = Decoder(cfg)
    model.tie_weights()
    num_weights = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values() if p.dim() > 1)
    shape = parse_shape(llama_config(cfg), Path("config.json"), "x", None, None)
    # float32 weights, but embeddings and lm_head count as bf16
    num_vocab_weights = shape.num_lm_head_weights * (1 if tied else 2)
    assert shape.total_weight_bytes == 4 * (num_weights - num_vocab_weights) + 2 * num_vocab_weights


@pytest.mark.parametrize("name", ["p-eagle-4", "eagle3-1"])
def test_drafter_weights_match_its_modules(name: str) -> None:
    drafter = load_pair(name)[1]
    shape = load_drafter_shape(str(drafter_folder(name)), load_target_shape(str(target_folder())))
    assert shape.method == ("p-eagle" if drafter.cfg.parallel else "eagle3")
    own = {n: p for n, p in drafter.named_parameters() if p.dim() > 1 and n != "mask_hidden"}
    num_weights = sum(p.numel() for n, p in own.items() if "embed_tokens" not in n and "lm_head" not in n)
    assert shape.total_weight_bytes == 2 * num_weights


def test_default_drafter_weights_match_the_module() -> None:
    cfg = DrafterConfig(160, 160, 3, TARGET.layer, RopeConfig(), 64, 64, (1, 2, 4), mask_token_id=3)
    with torch.device("meta"):
        model = Drafter(cfg)
    num_weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    shape = load_drafter_shape("p-eagle:3", load_target_shape(str(target_folder())))
    assert shape.total_weight_bytes == 2 * num_weights


def test_known_models_have_the_size_of_their_checkpoints() -> None:
    """Sizes of the safetensors files on Hugging Face, in GB."""
    sizes = {"llama-3.1-8b": 16.06, "llama-3.1-70b": 141.1, "qwen3-8b": 16.38, "qwen3-32b": 65.5}
    sizes |= {"qwen3-coder-30b-a3b": 61.1, "gpt-oss-20b": 13.76, "gpt-oss-120b": 65.25, "smollm2-135m": 0.269}
    for name, gigabytes in sizes.items():
        assert load_target_shape(name).total_weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005), name
    drafter = load_drafter_shape("p-eagle", load_target_shape("gpt-oss-120b"))
    vocab_bytes = 2 * drafter.body.num_lm_head_weights * 2
    assert (drafter.total_weight_bytes + vocab_bytes) / 2 / 1e9 == pytest.approx(1.7, rel=0.02)  # 1.7 billion weights


def test_known_models_equal_the_published_configs(tmp_path: Path) -> None:
    for name in ("gpt-oss-20b", "qwen3-coder-30b-a3b", "gemma-4-31b"):
        known, published = load_target_shape(name), load_target_shape(str(written(PUBLISHED[name], tmp_path)))
        assert known.layers == published.layers and known.cfg.windows == published.cfg.windows
        assert known.total_weight_bytes == published.total_weight_bytes


@pytest.mark.parametrize(
    ("num_experts", "num_active", "num_rows"), [(32, 4, 1), (32, 4, 8), (8, 2, 3), (128, 8, 64), (4, 4, 2)]
)
def test_active_experts_match_random_routing(num_experts: int, num_active: int, num_rows: int) -> None:
    rng = random.Random(0)
    samples = [
        len({e for _ in range(num_rows) for e in rng.sample(range(num_experts), num_active)}) for _ in range(2000)
    ]
    experts = ExpertsConfig(num_experts, num_active, 1)
    assert expected_active_experts(experts, num_rows) == pytest.approx(sum(samples) / len(samples), rel=0.02)


@pytest.mark.parametrize("field", VARIANTS)
def test_unsupported_gemma4_variants_are_refused(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["gemma-4-31b"] | VARIANTS[field]))
    with pytest.raises(
        UserError, match="config.json: a gemma4_text model that runs through transformers cannot be planned yet"
    ):
        load_target_shape(str(tmp_path))


def test_gpus_beyond_the_kv_heads_store_copies() -> None:
    shape = load_target_shape("gemma-4-31b")
    full_bytes, sliding_bytes = 10 * 2 * 512 * 2, 50 * 2 * 256 * 2  # per KV head and token, of all layers of a kind
    for size, num_full, num_sliding in ((1, 4, 16), (4, 4, 16), (8, 8, 16), (32, 32, 32)):
        assert shape.kv_cache_bytes(1000, size) == 1000 * (num_full * full_bytes + num_sliding * sliding_bytes)
    assert shape.kv_cache_bytes(5000) == 5000 * 4 * full_bytes + 1024 * 16 * sliding_bytes


@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(5, 9), (13, 40), (30, 4), (0, 16)])
def test_chunked_attention_is_averaged_over_a_request(
    num_prompt_tokens: int, num_output_tokens: int, tmp_path: Path
) -> None:
    """The average differs from the middle of a request, where a chunk may just have begun."""
    config = test_families_more.llama4_fields()
    config |= {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    shape = load_target_shape(str(written(config, tmp_path)))
    assert ChunkedAttention(test_families_more.CHUNK) in shape.cfg.windows and None in shape.cfg.windows
    replica = Replica(GPUS["h200"], IDEAL)
    settings = PlanSettings((3,), num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
    (row,) = build_plan(replica, shape, [], settings).rows
    positions = range(num_prompt_tokens, num_prompt_tokens + num_output_tokens)
    steps = [decode_step_seconds(replica, shape, None, 0, 3, position + 0.5) for position in positions]
    assert row.step_ms == pytest.approx(sum(steps) / num_output_tokens * 1e3)
    middle = decode_step_seconds(replica, shape, None, 0, 3, num_prompt_tokens + num_output_tokens / 2)
    assert num_prompt_tokens != 13 or row.step_ms != pytest.approx(middle * 1e3)


INVALID_CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "not valid JSON"),
    ("[]", "expected a JSON object"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "cannot be planned"),
    ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}, "cannot be planned"),
    ({"architectures": ["NovelForCausalLM"]}, "architecture 'NovelForCausalLM' is not supported"),
    ({"layer_types": ["mamba"] * 32, "sliding_window": 128}, "layer type"),
    ({"quantization_config": {"quant_method": "novel"}}, "--weight-bits"),
    ({"dtype": "float5"}, "dtype 'float5'"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID_CONFIGS)
def test_invalid_configs_are_refused(changes: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    text = changes if isinstance(changes, str) else json.dumps(KNOWN_MODELS["llama-3.1-8b"] | changes)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        load_target_shape(str(tmp_path))
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


def test_quantized_and_nested_configs_are_read(tmp_path: Path) -> None:
    def load(**changes: Any) -> ModelShape:
        (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["llama-3.1-8b"] | changes))
        return load_target_shape(str(tmp_path))

    assert load(quantization_config={"quant_method": "fp8"}).bytes_per_weight == 1
    assert load(quantization_config={"quant_method": "awq", "bits": 4}).bytes_per_weight == 0.5
    groups = {"config_groups": {"g": {"weights": {"num_bits": 8}}}, "quant_method": "compressed-tensors"}
    assert load(quantization_config=groups).bytes_per_weight == 1
    text_config = KNOWN_MODELS["gemma-4-31b"] | {"dtype": "float32"}
    nested = {"text_config": text_config, "architectures": ["Gemma4ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    expected = load_target_shape("gemma-4-31b")
    shape = load_target_shape(str(tmp_path))
    assert shape == replace(expected, name=str(tmp_path), bytes_per_weight=4.0, bytes_per_expert_weight=4.0)
    windows = load_target_shape("gpt-oss-20b").cfg.windows
    assert windows.count(128) == windows.count(None) == 12


def test_wrong_names_and_widths_are_refused() -> None:
    with pytest.raises(UserError, match="--target lama-3.1-8b: .*did you mean llama-3.1-8b"):
        load_target_shape("lama-3.1-8b")
    with pytest.raises(UserError, match="is a drafter; pass it as --drafter"):
        load_target_shape(str(drafter_folder("p-eagle-4")))
    with pytest.raises(UserError, match="target_hidden_size is 64, llama-3.1-8b has hidden_size 4096"):
        load_drafter_shape(str(drafter_folder("p-eagle-4")), LLAMA_8B)
    with pytest.raises(UserError, match="--drafter p-eagle:x: .*number of layers"):
        load_drafter_shape("p-eagle:x", LLAMA_8B)
