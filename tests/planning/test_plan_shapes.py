"""What `peagle plan` counts of targets' shapes: weights against modules that transformers builds of the same config,
caches against the engine's, keys that rows read against the rule by which attention hides them."""

from __future__ import annotations

import copy
import json
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
from support import many
from test_families_more import GEMMA4_31B, LLAMA4_SCOUT, VARIANTS, written
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from peagle.checkpoints.target import read_target_config
from peagle.config import ChunkedAttention, PlanSettings, Window
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.loader import block_bytes
from peagle.errors import UserError
from peagle.kernels.attention.dense import first_visible_position
from peagle.planning.gpus import GPUS
from peagle.planning.plan import make_plan
from peagle.planning.roofline import Batch, Engine, Machine, head_seconds, layers_seconds, round_seconds
from peagle.planning.shapes import CONFIGS, target_shape

FREE = Engine("free", 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
READING = Machine(replace(GPUS["h200"], bandwidth=1.0, matrix_rate=1e99), FREE)  # its seconds are bytes
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "vocab_size": 99, "num_hidden_layers": 4, "num_experts_per_tok": 2}


def small(kind: str, **fields: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **fields))


MODELS: dict[str, Callable[[], Any]] = {
    **test_decoder.MODELS,
    **test_families.MODELS,
    **test_families_more.MODELS,
    "qwen3-moe-mixed": lambda: small("qwen3_moe", num_experts=6, moe_intermediate_size=32, mlp_only_layers=[1]),
    "mixtral": lambda: small("mixtral", num_local_experts=4),
}
PUBLISHED: dict[str, Any] = {**test_families.PUBLISHED, "gemma-4-31b": GEMMA4_31B, "llama-4-scout": LLAMA4_SCOUT}
REFUSED_HERE = ("qwen3-moe-mixed",)  # by the engine, not by a plan


def published(config: dict[str, Any]) -> Any:
    text = copy.deepcopy(config.get("text_config", config))  # transformers writes into what it is given
    text = {**text, "attn_temperature_tuning": bool(text.get("attn_temperature_tuning"))}  # a number in Llama 4's
    text.pop("quantization_config", None)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[text["model_type"]](**text))


def matrices(model: Any) -> int:
    """Elements of all that is read by products and lookups. Keys that are values too (Gemma 4) lie in both engines
    twice."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")}
    alone = [n for n in sizes if "k_proj" in n and n.replace("k_proj", "v_proj") not in sizes]
    return sum(sizes.values()) + sum(sizes[name] for name in alone)


@pytest.mark.parametrize("name", [*MODELS, *PUBLISHED])
def test_a_target_weighs_reads_and_caches_what_its_modules_do(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = MODELS[name]() if name in MODELS else published(PUBLISHED[name])
    if name in MODELS:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
    else:
        written(PUBLISHED[name], tmp_path)
    shape = target_shape(str(tmp_path), weight_bits=16)
    counted, table = matrices(model), model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shape.stored_bytes == 2 * counted and shape.tie_word_embeddings == tied
    # so many rows that they choose every expert, behind half a token each
    read = layers_seconds(READING, shape, Batch(1, 10**6, 0.5)) + head_seconds(READING, shape, 1)
    assert read == pytest.approx(2 * (counted - (0 if tied else table)) + shape.cached_bytes(1) / 2)
    if name not in REFUSED_HERE:
        cfg = read_target_config(tmp_path)
        assert shape.windows == cfg.windows
        assert shape.cached_bytes(5) == 5 * block_bytes(cfg, None, 2) / BLOCK_SIZE


def test_known_names_are_the_published_models(tmp_path: Path) -> None:
    for name in ("gpt-oss-20b", "qwen3-coder-30b-a3b", "gemma-4-31b"):
        assert target_shape(name) == replace(target_shape(str(written(PUBLISHED[name], tmp_path))), name=name)


@pytest.mark.parametrize("field", VARIANTS)
def test_variants_of_gemma4_are_refused(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma-4-31b"] | VARIANTS[field]))
    with pytest.raises(UserError, match=rf"config.json: .*\({field}\) cannot be planned yet"):
        target_shape(str(tmp_path))


def test_heads_that_are_fewer_than_gpus_are_cached_by_several() -> None:
    shape = target_shape("gemma-4-31b")
    wide, narrow = 10 * 2 * 512 * 2, 50 * 2 * 256 * 2  # bytes of a head of all layers, a token
    for parts, wide_heads, narrow_heads in ((1, 4, 16), (4, 4, 16), (8, 8, 16), (32, 32, 32)):
        assert shape.cached_bytes(1000, parts) == 1000 * (wide_heads * wide + narrow_heads * narrow)
    assert shape.cached_bytes(5000) == 5000 * 4 * wide + 1024 * 16 * narrow


def windows() -> st.SearchStrategy[Window]:
    sizes = st.integers(1, 20)
    return st.one_of(st.none(), sizes, st.builds(ChunkedAttention, sizes))


@many(200)
@given(windows(), st.integers(0, 70), st.integers(1, 70))
def test_rows_read_the_keys_that_their_window_shows(window: Window, first: int, span: int) -> None:
    """But for their own, of which the plan counts half or none."""
    shown = [row - max(first_visible_position(row, window), 0) + 1 for row in range(first, first + span)]
    said = Batch(1, 1, first + span / 2, span).seen(window)
    assert said <= sum(shown) / span + 1e-9 <= said + 0.5 + 2e-9


@pytest.mark.parametrize(("prompt", "output"), [(5, 9), (13, 40), (30, 4), (0, 16)])
def test_a_plan_with_chunks_is_the_mean_over_a_request(prompt: int, output: int, tmp_path: Path) -> None:
    """Which need not be what a round takes in its middle: there a chunk may just have begun."""
    target = test_families_more.llama4_fields()
    target |= {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    shape = target_shape(str(written(target, tmp_path)))
    assert ChunkedAttention(test_families_more.CHUNK) in shape.windows and None in shape.windows
    machine = Machine(GPUS["h200"], FREE)
    plan = make_plan(machine, shape, [], PlanSettings((3,), prompt_tokens=prompt, output_tokens=output))
    each = [round_seconds(machine, shape, None, 0, 3, row + 0.5) for row in range(prompt, prompt + output)]
    assert plan.rows[0].step_ms == pytest.approx(sum(each) / output * 1e3)
    middle = round_seconds(machine, shape, None, 0, 3, prompt + output / 2)
    assert (prompt, output) != (13, 40) or plan.rows[0].step_ms != pytest.approx(middle * 1e3)
