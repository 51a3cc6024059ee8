"""The target decoder against transformers: logits, auxiliary hidden states and configs; every error is one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import edit_config, edit_weights, set_config
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import peagle
from peagle.checkpoints.families import FAMILIES
from peagle.checkpoints.target import eos_ids, load_decoder, load_target, read_target_config
from peagle.config import RopeConfig
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.layers import rope_frequencies

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}
LENGTH = 40
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MSCALES = {"mscale": 1.3, "mscale_all_dim": 0.7}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 123.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    "llama3": {**LLAMA3, "rope_theta": 500.0},
    "yarn": {**YARN, "rope_theta": 10000.0},
    "yarn-mscale": {**YARN, **MSCALES, "rope_theta": 300.0},
    "yarn-one-mscale": {**YARN, "mscale": 1.3, "rope_theta": 300.0},
    "yarn-factor": {**YARN, **MSCALES, "attention_factor": 0.6, "rope_theta": 300.0},
    "yarn-exact": {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5, "rope_theta": 70.0},
}


def llama(**fields: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | fields)))


def mistral(**fields: Any) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**(SHAPE | fields)))


def qwen2(**fields: Any) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**(SHAPE | fields)))


def qwen3(**fields: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**(SHAPE | fields)))


SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-all-heads": lambda: llama(num_key_value_heads=4, head_dim=20),
    "mistral": lambda: mistral(sliding_window=None),
    "mistral-sliding": lambda: mistral(sliding_window=7),
    "mistral-head": lambda: mistral(sliding_window=16, head_dim=32),
    "mistral-default-window": lambda: mistral(num_key_value_heads=8, num_attention_heads=8, head_dim=16),
    "qwen2": qwen2,
    "qwen2-tied": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-sliding": lambda: qwen2(**SLIDING),
    "qwen2-unused-window": lambda: qwen2(**SLIDING | {"use_sliding_window": False}),
    "qwen3-default-head": qwen3,
    "qwen3-head": lambda: qwen3(head_dim=20, attention_bias=True),
    "qwen3-sliding": lambda: qwen3(head_dim=12, use_sliding_window=True, sliding_window=9, layer_types=MIXED),
    **{f"llama-{name}": lambda rope=rope: llama(rope_parameters=dict(rope)) for name, rope in ROPES.items()},
}


def randomised(model: Any, seed: int = 0) -> Any:
    """Randomises all weights: initial norm weights of one and biases of zero would hide misplaced norms or biases."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            around = 0.0 if name.endswith("bias") else 1.0
            parameter.data = around + 0.4 * torch.randn(parameter.shape, generator=rng)
        else:
            std = model.config.initializer_range
            parameter.data = std * torch.randn(parameter.shape, generator=rng)
    model.tie_weights()
    model.config._attn_implementation = "eager"
    return model.eval()


def saved(name: str, folder: Path, **how: Any) -> Any:
    model = randomised(MODELS[name]())
    model.save_pretrained(folder, **how)
    return model


def tokens_of(vocab: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def theirs(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the residual stream entering each layer and leaving the last one."""
    last: list[torch.Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        last.append(out[0] if isinstance(out, tuple) else out)

    handle = model.model.layers[-1].register_forward_hook(keep)
    out = model(tokens[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    layers = len(model.model.layers)
    return out.logits[0], [h[0] for h in out.hidden_states[:layers]] + [last[0].view(len(tokens), -1)]


@torch.inference_mode()
def ours(model: Decoder, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    aux_layer_ids = tuple(range(model.cfg.num_layers + 1))
    hidden, aux_hidden_states = model(tokens, torch.arange(len(tokens)), causal_attention, aux_layer_ids)
    assert aux_hidden_states is not None
    return model.compute_logits(hidden), list(aux_hidden_states.chunk(len(aux_layer_ids), -1))


def assert_same(model: Any, decoder: Decoder, tokens: torch.Tensor, atol: float = 1e-5) -> None:
    want, want_taps = theirs(model, tokens)
    got, got_taps = ours(decoder, tokens)
    assert want.std() > 0.1, "logits so flat that nothing would show"
    assert (got - want).abs().max() < 1e-4
    for k, (mine, other) in enumerate(zip(got_taps, want_taps, strict=True)):
        torch.testing.assert_close(mine, other, atol=atol, rtol=1e-5, msg=lambda m, k=k: f"aux hidden state {k}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_aux_hidden_states(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def test_windows_are_read_and_matter(tmp_path: Path) -> None:
    expected = {
        "mistral": (None,) * 4,
        "mistral-sliding": (7,) * 4,
        "mistral-default-window": (4096,) * 4,
        "qwen2-sliding": (None, None, 9, 9),
        "qwen2-unused-window": (None,) * 4,
        "qwen3-sliding": (9, None, None, 9),
    }
    for name, windows in expected.items():
        saved(name, tmp_path / name)
        assert read_target_config(tmp_path / name).windows == windows, name
    decoder = load_decoder(tmp_path / "mistral-sliding")
    tokens = tokens_of(97)
    slid, _ = ours(decoder, tokens)
    decoder.cfg = replace(decoder.cfg, windows=(None,) * 4)
    whole, _ = ours(decoder, tokens)
    assert torch.equal(slid[:7], whole[:7]) and (slid[8:] - whole[8:]).abs().max() > 0.01


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_old_spelling_of_rope(name: str, key: str, tmp_path: Path) -> None:
    model = saved(f"llama-{name}", tmp_path)

    def older(values: dict[str, Any]) -> None:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        rope[key] = rope.pop("rope_type")
        values["rope_scaling"] = None if rope[key] == "default" else rope

    edit_config(tmp_path, older)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn-mscale"])
def test_both_spellings_side_by_side(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)

    def both(values: dict[str, Any]) -> None:
        values["rope_theta"] = values["rope_parameters"]["rope_theta"]
        values["rope_scaling"] = {k: v for k, v in values["rope_parameters"].items() if k != "rope_theta"}

    edit_config(tmp_path, both)
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rope_frequencies_of_every_kind(data: st.DataObject) -> None:
    """The angles equal those of transformers for any parameters."""
    head_dim = 2 * data.draw(st.integers(1, 64))
    theta = data.draw(st.floats(1.5, 1e7))
    kind = data.draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    fields: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        fields["factor"] = data.draw(st.floats(1, 64))
    if kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = data.draw(st.integers(1, 10**5))
    if kind == "llama3":
        low = fields["low_freq_factor"] = data.draw(st.floats(0.5, 4))
        fields["high_freq_factor"] = low + data.draw(st.one_of(st.just(0.0), st.floats(0.1, 4)))
    optional: dict[str, Any] = {}
    if kind == "yarn":
        slow = data.draw(st.floats(0.1, 8))
        fields |= {"beta_slow": slow, "beta_fast": slow + data.draw(st.floats(0, 60))}
        fields["truncate"] = data.draw(st.booleans())
        chosen = data.draw(st.sets(st.sampled_from(["attention_factor", "mscale", "mscale_all_dim"])))
        optional = {name: data.draw(st.floats(0.1, 3)) for name in sorted(chosen)}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters={**fields, **optional}
    )
    if kind == "default":
        want = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        scale = 1.0
    else:
        want, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    names = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}
    rope = RopeConfig(**{names.get(k, k): v for k, v in (fields | optional).items()})
    got, got_scale = rope_frequencies(rope, head_dim)
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-12)
    assert math.isclose(got_scale, scale, rel_tol=1e-6)


def test_one_yarn_mscale_alone_changes_nothing() -> None:
    rope = RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=128)
    _, plain = rope_frequencies(rope, 16)
    assert plain == pytest.approx(0.1 * math.log(4) + 1)
    for name in MSCALES:
        assert rope_frequencies(replace(rope, **{name: 2.0}), 16)[1] == plain


def test_large_positions(tmp_path: Path) -> None:
    """Rows may start at any position; angles stay fp32 in a bf16 model."""
    model = saved("llama-yarn", tmp_path)
    decoder = load_decoder(tmp_path)
    tokens, positions = tokens_of(97), torch.arange(LENGTH) + 400
    with torch.inference_mode():
        want = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        hidden, aux_hidden_states = decoder(tokens, positions, causal_attention)
        assert aux_hidden_states is None
        assert (decoder.compute_logits(hidden) - want).abs().max() < 1e-4
    cast = decoder.to(torch.bfloat16)
    assert cast.rope.freq.dtype == torch.float32
    assert torch.equal(cast.rope.freq, load_decoder(tmp_path).rope.freq)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-head", "llama-tied"])
def test_sharded_folder(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


@pytest.mark.parametrize("name", ["llama", "llama-all-heads", "mistral-default-window", "qwen2", "qwen3-default-head"])
def test_missing_fields_have_the_family_defaults(name: str, tmp_path: Path) -> None:
    """Writers save only what differs from the class's defaults; the defaults differ by family."""
    model = saved(name, tmp_path)
    whole = read_target_config(tmp_path)
    defaults = type(model.config)().to_dict()
    left_out = []

    def diff(values: dict[str, Any]) -> None:
        for field in list(values):
            if field not in ("architectures", "model_type") and values[field] == defaults.get(field):
                left_out.append(field)
                del values[field]
        values.pop("layer_types", None)

    edit_config(tmp_path, diff)
    assert "hidden_act" in left_out
    assert "sliding_window" in left_out or name != "mistral-default-window"
    assert ("head_dim" in left_out) == (name == "qwen3-default-head")
    assert read_target_config(tmp_path) == whole
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def test_missing_key_value_heads(tmp_path: Path) -> None:
    for name, heads in {"llama-all-heads": 4, "mistral-default-window": 8}.items():
        saved(name, tmp_path / name)
        edit_config(tmp_path / name, lambda values: values.pop("num_key_value_heads"))
        assert read_target_config(tmp_path / name).layer.num_kv_heads == heads


@pytest.mark.parametrize("name", ["llama-biases", "mistral-sliding", "qwen2", "qwen3-head", "llama-tied"])
def test_bf16(name: str, tmp_path: Path) -> None:
    randomised(MODELS[name]()).to(torch.bfloat16).save_pretrained(tmp_path)

    def reloaded(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()

    model = reloaded(torch.bfloat16)
    decoder = load_decoder(tmp_path, torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    want, _ = theirs(model, tokens_of(97))
    got, _ = ours(decoder, tokens_of(97))
    assert got.dtype == torch.bfloat16
    spread = want.float().std()
    assert (got.float() - want.float()).abs().mean() < 0.05 * spread
    # the weights are equal, so in fp32 the two agree closely
    assert_same(reloaded(torch.float32), load_decoder(tmp_path), tokens_of(97))


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    saved("llama-tied", tmp_path)
    decoder = load_decoder(tmp_path)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(97, 48)}))
    assert load_decoder(tmp_path).lm_head.weight.abs().max() > 0  # a copy in the file is ignored


def test_real_smollm2(smollm2: Path) -> None:
    folder = smollm2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = peagle.load_tokenizer(folder)
    text = (
        "The water cycle describes how water moves around the Earth: heat from the sun makes it evaporate, "
        "the vapour cools and condenses into clouds, and rain carries it back to the sea."
    )
    tokens = torch.tensor(tokenizer(text)["input_ids"])[:40]
    target = load_target(folder)
    assert target.model.cfg.tie_word_embeddings and target.model.cfg.default_aux_layer_ids == (2, 15, 27)
    want, want_taps = theirs(model, tokens)
    got, got_taps = ours(target.model, tokens)
    assert len(tokens) > 30 and (got - want).abs().max() < 1e-4
    for mine, other in zip(got_taps, want_taps, strict=True):
        # its residual stream reaches the thousands, where fp32 is coarser than 1e-5
        scale = max(1.0, float(other.abs().max()))
        assert (mine - other).abs().max() < 1e-5 * scale


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_decoder(folder)
    line = str(caught.value)
    assert "\n" not in line
    for word in (str(folder), *words):
        assert word in line, line


@pytest.mark.parametrize("named", [["BarForCausalLM"], "FooForCausalLM", [["x"]], [{}], {"a": 1}, 7])
def test_unknown_architecture(named: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    set_config(tmp_path, architectures=named)
    first = named[0] if isinstance(named, list) else named
    refused(tmp_path, repr(first), *FAMILIES)


@pytest.mark.parametrize("named", [None, []])
def test_no_architecture(named: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    set_config(tmp_path, architectures=named)
    refused(tmp_path, "none named", *FAMILIES)


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "activation-type": ({"hidden_act": 3}, "hidden_act"),
    "odd-head": ({"head_dim": 7}, "head_dim"),
    "negative": ({"intermediate_size": -1}, "intermediate_size"),
    "zero": ({"hidden_size": 0}, ""),
    "no-heads": ({"num_attention_heads": 0}, ""),
    "text": ({"vocab_size": "97"}, "vocab_size"),
    "null": ({"vocab_size": None}, "vocab_size"),
    "endless-layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "wide": ({"intermediate_size": 2**31 - 1}, "intermediate_size"),
    "wider": ({"hidden_size": 10**30, "num_attention_heads": 1}, "hidden_size"),
    "eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    "eps-nan": ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    "rope-type": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    "rope-list": ({"rope_parameters": [1]}, ""),
    "rope-theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": -3.0}}, "rope_theta"),
    "rope-nan": ({"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta"),
    "rope-huge": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta"),
    "linear-factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "factor"),
    "linear-none": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    "yarn-theta": ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta"),
    "yarn-beta": ({"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 0.0}}, "beta_fast"),
    "yarn-original": (
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": -4}},
        "original_max_position_embeddings",
    ),
    "llama3-falling": ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.9, "rope_theta": 1e4}}, "freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "tied": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_config_field(case: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    fields, word = BAD_FIELDS[case]
    set_config(tmp_path, **fields)
    refused(tmp_path, word)


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": -4}, "sliding_window"),
        ({"sliding_window": "x"}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, ""),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "linear_attention"),
        ({"layer_types": [["full_attention"]] * 4}, ""),
        ({"layer_types": "full_attention"}, ""),
    ],
)
def test_bad_windows(fields: dict[str, Any], word: str, tmp_path: Path) -> None:
    saved("mistral-sliding", tmp_path)
    set_config(tmp_path, **fields)
    refused(tmp_path, word)


def test_layer_types_need_a_window(tmp_path: Path) -> None:
    """As in Qwen's config class, the window is ignored unless `use_sliding_window` is set."""
    saved("qwen3-sliding", tmp_path)
    set_config(tmp_path, use_sliding_window=False)
    assert read_target_config(tmp_path).windows == (None,) * 4


def test_bad_tensors(tmp_path: Path) -> None:
    cases: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
        "missing": (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        "missing head": (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        "unknown": (
            lambda t: t.update({"model.layers.0.extra": torch.ones(2)}),
            "'model.layers.0.extra' is not known",
        ),
        "bias not in the config": (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            "'model.layers.0.self_attn.q_proj.bias' is not known",
        ),
        "misshapen": (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(48, 48)}),
            "'model.layers.1.self_attn.k_proj.weight' has shape [48, 48], expected [24, 48]",
        ),
        "scalar": (lambda t: t.update({"model.norm.weight": torch.tensor(1.0)}), "has shape [], expected [48]"),
        "no prefix": (
            lambda t: t.update({"norm.weight": t.pop("model.norm.weight")}),
            "'model.norm.weight' is missing",
        ),
        "integers": (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int64)}),
            "'model.norm.weight'",
        ),
        "integer rows": (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(24, 48, dtype=torch.int8)}),
            "'model.layers.1.self_attn.k_proj.weight'",
        ),
        "eight bits": (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "'lm_head.weight'",
        ),
    }
    for name, (edit, words) in cases.items():
        folder = tmp_path / name
        saved("llama", folder)
        edit_weights(folder, edit)
        refused(folder, words)


def test_several_problems_are_counted(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit_weights(tmp_path, lambda t: [t.pop(name) for name in list(t)[:3]])
    refused(tmp_path, "and 2 more")


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((6,), 9.0)}))
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def test_nan_in_another_tokens_embedding(tmp_path: Path) -> None:
    """A NaN row of the embeddings does not affect sequences without that token."""
    saved("llama", tmp_path)
    clean, _ = ours(load_decoder(tmp_path), torch.arange(10))
    edit_weights(tmp_path, lambda t: t["model.embed_tokens.weight"][50].fill_(math.nan))
    spoilt = load_decoder(tmp_path)
    assert torch.equal(ours(spoilt, torch.arange(10))[0], clean)
    assert ours(spoilt, torch.tensor([50]))[0].isnan().all()


def test_mlp_bias_is_read_for_llama_only(tmp_path: Path) -> None:
    model = saved("qwen2", tmp_path)
    set_config(tmp_path, mlp_bias=True, attention_bias=False)  # fields its class does not have
    assert_same(model, load_decoder(tmp_path), tokens_of(97))


def test_eos_token_ids(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for value, want in [(5, {5}), ([5, 7], {5, 7}), (None, set())]:
        set_config(tmp_path, eos_token_id=value)
        assert eos_ids(tmp_path) == want
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert load_target(tmp_path).eos_ids == {9}
    for bad in ("x", [1, "x"], -1, True, {"a": 1}, [[1]]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UserError, match="eos_token_id"):
            eos_ids(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(UserError, match="tokenizer") as caught:
        peagle.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
