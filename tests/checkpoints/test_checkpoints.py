"""Drafter folders: round trips are bit-exact in every spelling, and every user error is one line."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import edit_config, edit_weights, set_config

from peagle.checkpoints.drafter import (
    average_drafters,
    convert_drafter,
    detect_format,
    drafter_tensors,
    load_drafter,
    load_unshared_drafter,
    read_drafter_config,
    save_drafter,
)
from peagle.checkpoints.files import INDEX, WEIGHTS, SafetensorsFolder, new_folder, read_json, write_weights
from peagle.checkpoints.target import load_decoder, load_target, read_target_config
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.reference import generate, propose_draft_tokens

MASK_NAMES = ("ptd_token_id", "pard_token", "mask_token_id")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for each generated example."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@cache
def shared_target() -> Decoder:
    return load_decoder(pairs.target_folder())


@pytest.fixture
def target() -> Decoder:
    return shared_target()


# Random drafters ------------------------------------------------------------------------------------------


@st.composite
def ropes(draw: st.DrawFn) -> RopeConfig:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    theta = draw(st.floats(2.0, 1e7))
    if kind == "default":
        return RopeConfig(theta)
    factor = draw(st.floats(1.0, 64.0))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    original = draw(st.integers(8, 10**6))
    if kind == "llama3":
        low = draw(st.floats(0.25, 4.0))
        high = low + draw(st.floats(0.25, 4.0))
        return RopeConfig(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    maybe = st.none() | st.floats(0.125, 3.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=draw(st.floats(8.0, 64.0)),
        beta_slow=draw(st.floats(0.25, 4.0)),
        attention_factor=draw(maybe),
        mscale=draw(maybe),
        mscale_all_dim=draw(maybe),
        truncate=draw(st.booleans()),
    )


@st.composite
def drafter_configs(draw: st.DrawFn, width: int = 24, vocab: int = 40, layers: int = 6) -> DrafterConfig:
    """Any drafter for a target of this hidden size, vocabulary and number of layers."""
    flag = st.booleans()
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    own_width = width if draw(flag) and width % heads == 0 else heads * draw(st.integers(3, 9))
    bias = draw(flag)
    layer = LayerConfig(
        hidden_size=own_width,
        intermediate_size=draw(st.integers(3, 20)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5, 3e-7])),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=draw(flag),
        qk_norm=draw(flag),
    )
    draft_vocab = draw(st.just(vocab) | st.integers(1, vocab))
    num_layers = draw(st.integers(1, 3))
    window = draw(st.integers(1, 50))
    windows = tuple(window if draw(flag) else None for _ in range(num_layers))
    aux_hidden_states = draw(st.sets(st.integers(0, layers), min_size=1, max_size=4))
    return DrafterConfig(
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        num_layers=num_layers,
        layer=layer,
        rope=draw(ropes()),
        max_positions=draw(st.integers(1, 10**6)),
        target_hidden_size=width,
        aux_layer_ids=tuple(sorted(aux_hidden_states)),
        mask_token_id=draw(st.none() | st.integers(0, vocab - 1)),
        fc_norm=draw(flag),
        norm_before_fc=draw(flag),
        norm_before_residual=draw(flag),
        norm_output=draw(flag),
        own_embeddings=own_width != width or draw(flag),
        own_head=own_width != width or draft_vocab != vocab or draw(flag),
        windows=windows if any(windows) else (),
    )


def random_bits(shape: torch.Size, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Random bits, including infinities, NaNs and negative zeros."""
    return torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=rng).view(dtype)[..., 0].clone()


def random_drafter(cfg: DrafterConfig, dtype: torch.dtype, seed: int = 0, bits: bool = True) -> Drafter:
    rng = torch.Generator().manual_seed(seed)
    drafter = Drafter(cfg)
    for parameter in drafter.parameters():
        plain = 0.2 * torch.randn(parameter.shape, generator=rng)
        parameter.data = random_bits(parameter.shape, dtype, rng) if bits else plain.to(dtype)
    if drafter.d2t is not None:
        ids = torch.randperm(cfg.vocab_size, generator=rng)[: cfg.draft_vocab_size].sort().values
        drafter.d2t.copy_(ids - torch.arange(cfg.draft_vocab_size))
    return drafter.requires_grad_(False)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert raw(a[name]) == raw(b[name]), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read with the safetensors package alone."""
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def expected_shapes(cfg: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the plain format, from its description instead of the module."""
    layer, width = cfg.layer, cfg.layer.hidden_size
    q, kv, inner = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    aux_hidden_states = len(cfg.aux_layer_ids) * cfg.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, aux_hidden_states), "norm.weight": (width,)}
    for i in range(cfg.num_layers):
        at, wide = ("midlayer", 2 * width) if i == 0 else (f"layers.{i}", width)
        linear = {"q_proj": (q, wide), "k_proj": (kv, wide), "v_proj": (kv, wide), "o_proj": (width, q)}
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        shapes |= {f"{at}.self_attn.{n}.weight": s for n, s in linear.items()}
        shapes |= {f"{at}.mlp.{n}.weight": s for n, s in mlp.items()}
        if layer.qkv_bias:
            shapes |= {f"{at}.self_attn.{n}.bias": s[:1] for n, s in linear.items()}
        if layer.mlp_bias:
            shapes |= {f"{at}.mlp.{n}.bias": s[:1] for n, s in mlp.items()}
        if layer.qk_norm:
            shapes |= {f"{at}.self_attn.{n}.weight": (layer.head_dim,) for n in ("q_norm", "k_norm")}
        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * (i == 0)
        shapes |= {f"{at}.{n}.weight": (width,) for n in norms}
    if cfg.norm_before_fc:
        shapes["input_norm.weight"] = (aux_hidden_states,)
    if cfg.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (cfg.target_hidden_size,) for i in range(len(cfg.aux_layer_ids))}
    if cfg.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, aux_hidden_states)
    if cfg.own_embeddings:
        shapes["embed_tokens.weight"] = (cfg.vocab_size, width)
    if cfg.own_head:
        shapes["lm_head.weight"] = (cfg.draft_vocab_size, width)
    if cfg.draft_vocab_size != cfg.vocab_size:
        shapes |= {"d2t": (cfg.draft_vocab_size,), "t2d": (cfg.vocab_size,)}
    return shapes


def save_shards(source: Path, out: Path) -> None:
    """Copies a drafter, with its weights in three files and an index."""
    out.mkdir()
    shutil.copy(source / "config.json", out)
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(stored(source).items()):
        shards[i % 3][name] = tensor
    files = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))


# Write and read back --------------------------------------------------------------------------------------


def check_round_trip(drafter: Drafter, into: Path) -> None:
    cfg = drafter.cfg
    save_drafter(drafter, into / "one")
    assert read_drafter_config(into / "one") == cfg
    on_disk = stored(into / "one")
    assert {n: tuple(t.shape) for n, t in on_disk.items()} == expected_shapes(cfg)
    loaded = load_unshared_drafter(into / "one", cfg, dtype=None)
    assert_same_tensors(dict(loaded.state_dict()), dict(drafter.state_dict()))
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    if drafter.d2t is not None:
        reached = [i + int(offset) for i, offset in enumerate(on_disk["d2t"])]
        assert on_disk["t2d"].dtype == torch.bool
        assert on_disk["t2d"].nonzero()[:, 0].tolist() == sorted(reached)

    save_drafter(loaded, into / "two")
    names = sorted(p.name for p in (into / "one").iterdir())
    assert names == ["config.json", WEIGHTS] == sorted(p.name for p in (into / "two").iterdir())
    for name in names:
        assert (into / "one" / name).read_bytes() == (into / "two" / name).read_bytes()

    save_shards(into / "one", into / "shards")
    assert read_drafter_config(into / "shards") == cfg
    again = load_unshared_drafter(into / "shards", cfg, dtype=None)
    assert_same_tensors(dict(again.state_dict()), dict(drafter.state_dict()))
    save_drafter(again, into / "three")
    assert (into / "three" / WEIGHTS).read_bytes() == (into / "one" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", pairs.RECIPES)
def test_trained_drafters_round_trip(name: str, tmp_path: Path) -> None:
    cfg = read_drafter_config(pairs.drafter_folder(name))
    assert cfg == pairs.RECIPES[name].cfg
    drafter = load_unshared_drafter(pairs.drafter_folder(name), cfg, dtype=None)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    check_round_trip(drafter, tmp_path)
    for file in ("config.json", WEIGHTS):
        assert (tmp_path / "one" / file).read_bytes() == (pairs.drafter_folder(name) / file).read_bytes()


@SLOW
@given(drafter_configs(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_any_drafter_round_trips(cfg: DrafterConfig, dtype: torch.dtype, seed: int) -> None:
    with scratch() as folder:
        check_round_trip(random_drafter(cfg, dtype, seed), folder)


@SLOW
@given(drafter_configs(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_loading_casts_floating_point_tensors(cfg: DrafterConfig, dtype: torch.dtype, wanted: torch.dtype) -> None:
    drafter = random_drafter(cfg, dtype)
    with scratch() as folder:
        save_drafter(drafter, folder / "d")
        loaded = load_unshared_drafter(folder / "d", cfg, wanted)
    for name, tensor in drafter.state_dict().items():
        want = tensor if name == "d2t" else tensor.to(wanted)
        assert torch.equal(loaded.state_dict()[name].nan_to_num(7), want.nan_to_num(7)), name


def copy_drafter(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(pairs.drafter_folder(name), folder / name))


def rename_prefix(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


@pytest.mark.parametrize("name", ["p-eagle-4-reduced", "eagle3-1"])
def test_layer_zero_under_both_names(name: str, tmp_path: Path) -> None:
    cfg = read_drafter_config(pairs.drafter_folder(name))
    want = dict(load_unshared_drafter(pairs.drafter_folder(name), cfg, None).state_dict())
    folder = copy_drafter(name, tmp_path)
    edit_weights(folder, lambda t: rename_prefix(t, "midlayer.", "layers.0."))
    assert any(n.startswith("layers.0.") for n in stored(folder))
    assert read_drafter_config(folder) == cfg
    assert_same_tensors(dict(load_unshared_drafter(folder, cfg, None).state_dict()), want)


def test_layer_zero_under_mixed_and_duplicate_names(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    edit_weights(folder, lambda t: rename_prefix(t, "midlayer.mlp", "layers.0.mlp"))
    load_drafter(folder, target)
    edit_weights(folder, lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"].clone()}))
    assert_rejected(folder, target, "hidden_norm.weight", "twice")


@pytest.mark.parametrize("only", MASK_NAMES)
def test_mask_token_id_under_each_name(only: str, tmp_path: Path) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    edit_config(folder, lambda values: [values.pop(n) for n in MASK_NAMES if n != only])
    assert read_drafter_config(folder) == pairs.RECIPES["p-eagle-1"].cfg
    edit_config(folder, lambda values: values.update(dict.fromkeys(MASK_NAMES) | {only: pairs.MASK_ID}))
    assert read_drafter_config(folder) == pairs.RECIPES["p-eagle-1"].cfg  # null counts as missing


def test_d2t_of_a_full_vocabulary(tmp_path: Path, target: Decoder) -> None:
    """Some writers add a d2t of zeros. Any other would be ignored silently, so it is an error."""
    folder = copy_drafter("eagle3-1", tmp_path)
    edit_weights(folder, lambda t: t.update({"d2t": torch.zeros(pairs.VOCAB, dtype=torch.long)}))
    assert load_drafter(folder, target).d2t is None
    edit_weights(folder, lambda t: t["d2t"].__setitem__(3, 1))
    assert_rejected(folder, target, "d2t")


@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192)])
def test_mask_hidden_with_fewer_dimensions(shape: tuple[int, ...], tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    before = load_drafter(folder, target).mask_hidden
    edit_weights(folder, lambda t: t.update({"mask_hidden": t["mask_hidden"].reshape(shape)}))
    after = load_drafter(folder, target).mask_hidden
    assert before is not None and after is not None and torch.equal(before, after)


def test_d2t_may_be_int32(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1-reduced", tmp_path)
    want = load_drafter(folder, target).d2t
    edit_weights(folder, lambda t: t.update({"d2t": t["d2t"].to(torch.int32)}))
    got = load_drafter(folder, target).d2t
    assert want is not None and got is not None and got.dtype == torch.long and torch.equal(got, want)


def test_t2d_is_computed_from_d2t(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1-reduced", tmp_path)
    want = stored(folder)["t2d"]
    edit_weights(folder, lambda t: t.pop("t2d"))
    assert torch.equal(drafter_tensors(load_drafter(folder, target))["t2d"], want)


def test_aux_layer_ids_are_sorted(tmp_path: Path) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    name = "eagle_aux_hidden_state_layer_ids"
    set_config(folder, **{name: [4, 1, 2]})
    assert read_drafter_config(folder).aux_layer_ids == (1, 2, 4)  # the target returns hidden states in layer order
    edit_config(folder, lambda values: values.update({"eagle_config": {name: values.pop(name)}}))
    assert read_drafter_config(folder).aux_layer_ids == (1, 2, 4)


# The layout of published drafters ------------------------------------------------------------


def published_drafter(folder: Path, **changes: Any) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """A target, and a drafter in the layout of the published 4-layer ones, with a tenth of the hidden size."""
    decoder = DecoderConfig(
        family="llama",
        vocab_size=211,
        num_layers=24,
        layer=LayerConfig(48, 32, num_heads=4, num_kv_heads=2, head_dim=16),
        rope=RopeConfig(theta=150000.0),
        max_positions=4096,
        tie_word_embeddings=False,
        windows=(None,) * 24,
    )
    target = Decoder(decoder).requires_grad_(False).eval()
    pairs.initialise(target, seed=0, scale=0.1)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 199998,
        "draft_vocab_size": 211,
        "eos_token_id": 200002,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "pretraining_tp": 1,
        "ptd_token_id": 207,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "use_cache": True,
        "vocab_size": 211,
    }
    rng = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        return (0.2 * torch.randn(*shape, generator=rng)).to(torch.bfloat16)

    tensors = {
        "embed_tokens.weight": weight(211, 48),
        "lm_head.weight": weight(211, 48),
        "fc.weight": weight(48, 144),
        "mask_hidden": weight(1, 1, 144),
        "norm.weight": 1 + weight(48),
        "midlayer.hidden_norm.weight": 1 + weight(48),
    }
    for at in ("midlayer", "layers.1", "layers.2", "layers.3"):
        wide = 96 if at == "midlayer" else 48
        tensors |= {
            f"{at}.input_layernorm.weight": 1 + weight(48),
            f"{at}.post_attention_layernorm.weight": 1 + weight(48),
            f"{at}.self_attn.q_proj.weight": weight(48, wide),
            f"{at}.self_attn.k_proj.weight": weight(16, wide),
            f"{at}.self_attn.v_proj.weight": weight(16, wide),
            f"{at}.self_attn.o_proj.weight": weight(48, 48),
            f"{at}.mlp.gate_proj.weight": weight(64, 48),
            f"{at}.mlp.up_proj.weight": weight(64, 48),
            f"{at}.mlp.down_proj.weight": weight(48, 64),
        }
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values | changes))
    return target, tensors


@torch.inference_mode()
def test_published_layout_proposes_draft_tokens(tmp_path: Path) -> None:
    target, tensors = published_drafter(tmp_path / "head")
    drafter = load_drafter(tmp_path / "head", target)
    cfg = drafter.cfg
    assert cfg.aux_layer_ids == (2, 12, 21) and cfg.mask_token_id == 207 and cfg.num_layers == 4
    assert cfg.own_embeddings and cfg.own_head and not cfg.reduced_vocab
    assert cfg.rope == RopeConfig(500000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    assert torch.equal(drafter.layers[0].self_attn.qkv_proj.weight[48:64], tensors["midlayer.self_attn.k_proj.weight"])
    assert torch.equal(drafter.layers[3].mlp.gate_up_proj.weight[64:], tensors["layers.3.mlp.up_proj.weight"])
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    _, aux_hidden_states = target(torch.tensor(tokens[:-1]), torch.arange(7), causal_attention, cfg.aux_layer_ids)
    assert aux_hidden_states is not None
    draft = propose_draft_tokens(
        drafter, tokens, aux_hidden_states, 7, SamplingParams(), torch.Generator().manual_seed(0)
    )
    assert len(draft.token_ids) == 7 and draft.probs_KV.shape == (7, 211)
    out = generate(target, tokens, SamplingParams(max_tokens=12), drafter=drafter, num_speculative_tokens=5)
    assert out.token_ids == generate(target, tokens, SamplingParams(max_tokens=12)).token_ids
    save_drafter(load_unshared_drafter(tmp_path / "head", cfg, None), tmp_path / "again")
    assert_same_tensors(stored(tmp_path / "again"), tensors)
    assert read_drafter_config(tmp_path / "again") == cfg


def test_published_layout_with_aux_layer_ids(tmp_path: Path) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 11, 20], "use_aux_hidden_state": True}
    target, _ = published_drafter(tmp_path / "head", eagle_config=nested)
    assert load_drafter(tmp_path / "head", target).cfg.aux_layer_ids == (1, 11, 20)
    assert read_drafter_config(tmp_path / "head").aux_layer_ids == (1, 11, 20)


def test_default_aux_layer_ids_need_a_target(tmp_path: Path) -> None:
    published_drafter(tmp_path / "head")
    with pytest.raises(UserError, match="--target"):
        read_drafter_config(tmp_path / "head")


# Plain and speculators ------------------------------------------------------------------------------------


def convert_both_ways(source: Path, into: Path, target_folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    out = convert_drafter(source, into / "spec", "speculators", target_folder, "org/target", 5)
    assert detect_format(into / "spec") == "speculators"
    back = convert_drafter(into / "spec", into / "plain", "plain", target_folder, "org/target", 5)
    assert detect_format(into / "plain") == "plain"
    return out, back


def check_conversion(source: Path, into: Path, target: Decoder, target_folder: Path) -> None:
    cfg = read_drafter_config(source, target.cfg)
    out, back = convert_both_ways(source, into, target_folder)
    owned = {"embed_tokens.weight": cfg.own_embeddings, "lm_head.weight": cfg.own_head}
    shared = {name for name, own in owned.items() if not own}
    assert out.keys() == back.keys() == shared
    spec = stored(into / "spec")
    assert not any(name.startswith("midlayer.") for name in spec)
    assert {"embed_tokens.weight", "lm_head.weight"} <= spec.keys()
    theirs = stored(target_folder)
    for name in shared:
        own_name = "model.embed_tokens.weight" if name.startswith("embed") else name
        assert torch.equal(spec[name], theirs[own_name].to(spec["fc.weight"].dtype))
    values = json.loads((into / "spec" / "config.json").read_text())
    assert values["speculators_model_type"] == ("peagle" if cfg.parallel else "eagle3")
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    whole = replace(cfg, own_embeddings=True, own_head=True)
    assert read_drafter_config(into / "spec") == whole
    load_drafter(into / "spec", target)
    assert read_drafter_config(into / "plain") == cfg
    assert_same_tensors(stored(into / "plain"), stored(source))


@pytest.mark.parametrize("name", pairs.RECIPES)
def test_trained_drafters_convert(name: str, tmp_path: Path, target: Decoder) -> None:
    check_conversion(pairs.drafter_folder(name), tmp_path, target, pairs.target_folder())
    for file in ("config.json", WEIGHTS):
        assert (tmp_path / "plain" / file).read_bytes() == (pairs.drafter_folder(name) / file).read_bytes()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drafter_configs(width=64, vocab=pairs.VOCAB, layers=3),
    st.sampled_from(DTYPES),
    st.lists(st.floats(0.1, 9.0), min_size=2, max_size=4),
)
def test_average_of_drafters(cfg: DrafterConfig, dtype: torch.dtype, shares: list[float]) -> None:
    with scratch() as folder:
        sources = [folder / str(i) for i in range(len(shares))]
        first = random_drafter(cfg, dtype, bits=False)
        for i, source in enumerate(sources):
            drafter = random_drafter(cfg, dtype, seed=i, bits=False)
            if drafter.d2t is not None and first.d2t is not None:
                drafter.d2t.copy_(first.d2t)
            save_drafter(drafter, source)
        set_config(sources[1], trained_draft_tokens=5)
        average_drafters(sources, folder / "out", shares)
        assert read_drafter_config(folder / "out") == cfg
        assert read_json(folder / "out" / "config.json")["trained_draft_tokens"] == 5
        every, found = [stored(source) for source in sources], stored(folder / "out")
        assert found.keys() == every[0].keys()
        for name, tensor in found.items():
            assert tensor.dtype == every[0][name].dtype
            if not tensor.is_floating_point():
                assert torch.equal(tensor, every[0][name])
                continue
            wanted = sum(share * own[name].double() for share, own in zip(shares, every, strict=True)) / sum(shares)
            torch.testing.assert_close(tensor, wanted.to(dtype), rtol=0, atol=0)


def test_drafters_of_other_shapes_are_not_averaged(tmp_path: Path) -> None:
    folder = pairs.drafter_folder
    for other, why in (("p-eagle-4", "num_layers is 4 instead of 1"), ("eagle3-1", "mask_token_id is None instead of")):
        with pytest.raises(UserError, match=why):
            average_drafters([folder("p-eagle-1"), folder(other)], tmp_path / "out", [1, 1])
    moved = shutil.copytree(folder("p-eagle-1-reduced"), tmp_path / "moved")
    edit_weights(moved, lambda tensors: tensors["d2t"].add_(1))
    with pytest.raises(UserError, match="draft vocabularies differ"):
        average_drafters([folder("p-eagle-1-reduced"), moved], tmp_path / "out", [1, 1])
    assert not (tmp_path / "out").exists()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drafter_configs(width=64, vocab=pairs.VOCAB, layers=5), st.sampled_from(DTYPES))
def test_any_drafter_converts(cfg: DrafterConfig, dtype: torch.dtype) -> None:
    target = shared_target()
    with scratch() as folder:
        save_drafter(random_drafter(cfg, dtype), folder / "source")
        if cfg.fc_norm and cfg.norm_before_fc:  # speculators does not support both together
            with pytest.raises(UserError, match="fc_norm"):
                convert_both_ways(folder / "source", folder, pairs.target_folder())
            return
        check_conversion(folder / "source", folder, target, pairs.target_folder())


def test_converted_drafters_generate_the_same_tokens(tmp_path: Path, target: Decoder) -> None:
    for name in ("p-eagle-4", "eagle3-1-reduced"):
        convert_both_ways(pairs.drafter_folder(name), tmp_path / name, pairs.target_folder())
        params = SamplingParams(max_tokens=20)
        runs = [
            generate(
                target, pairs.prompts(1)[0], params, drafter=load_drafter(folder, target), num_speculative_tokens=4
            )
            for folder in (pairs.drafter_folder(name), tmp_path / name / "spec", tmp_path / name / "plain")
        ]
        assert runs[0].steps == runs[1].steps == runs[2].steps


def test_tied_target_provides_its_embeddings_as_head(tmp_path: Path) -> None:
    tied = Path(shutil.copytree(pairs.target_folder(), tmp_path / "tied"))
    edit_weights(tied, lambda t: t.pop("lm_head.weight"))
    set_config(tied, tie_word_embeddings=True)
    out, back = convert_both_ways(pairs.drafter_folder("p-eagle-1"), tmp_path, tied)
    spec = stored(tmp_path / "spec")
    assert torch.equal(spec["lm_head.weight"], spec["embed_tokens.weight"])
    assert out.keys() == back.keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert_same_tensors(stored(tmp_path / "plain"), stored(pairs.drafter_folder("p-eagle-1")))


def test_target_without_a_head(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pairs.target_folder(), tmp_path / "broken"))
    edit_weights(broken, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(UserError, match="'lm_head.weight' is missing"):
        convert_both_ways(pairs.drafter_folder("p-eagle-1"), tmp_path, broken)
    assert not (tmp_path / "spec").exists()


def test_speculators_defaults(tmp_path: Path) -> None:
    """A missing norm_before_residual has vLLM's default; unknown types are rejected by name."""
    for name, want in {"eagle3-1": True, "p-eagle-1": False}.items():
        convert_both_ways(pairs.drafter_folder(name), tmp_path / name, pairs.target_folder())
        spec = tmp_path / name / "spec"
        edit_config(spec, lambda values: values.pop("norm_before_residual"))
        assert read_drafter_config(spec).norm_before_residual is want
        set_config(spec, speculators_model_type="medusa")
        with pytest.raises(UserError, match="'medusa'.*peagle, eagle3"):
            read_drafter_config(spec)
        set_config(spec, speculators_model_type="eagle3", transformer_layer_config=[1])
        with pytest.raises(UserError, match="transformer_layer_config"):
            read_drafter_config(spec)


# Errors -------------------------------------------------------------------------------------------------


def assert_rejected(folder: Path, target: Decoder, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target)
    line = str(caught.value)
    assert "\n" not in line
    for word in (str(folder), *words):
        assert word in line, line


@contextmanager
def may_be_rejected() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        assert "\n" not in str(error)


Tensors = dict[str, torch.Tensor]
BAD_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no fc": (lambda t: t.pop("fc.weight"), "'fc.weight' is missing"),
    "no norm": (lambda t: t.pop("norm.weight"), "'norm.weight' is missing"),
    "fc of two aux_hidden_states": (
        lambda t: t.update({"fc.weight": t["fc.weight"][:, :128].clone()}),
        "'fc.weight' has shape [64, 128], expected [64, 192]",
    ),
    "flat fc": (lambda t: t.update({"fc.weight": t["fc.weight"].flatten()}), "'fc.weight' has shape [12288]"),
    "narrow q": (
        lambda t: t.update({"midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.q_proj.weight"][:, :64].clone()}),
        "q_proj.weight' has shape [128, 64], expected [128, 128]",
    ),
    "unknown": (lambda t: t.update({"extra.weight": torch.ones(3)}), "'extra.weight' is not known"),
    "a layer too many": (
        lambda t: t.update({"layers.1.input_layernorm.weight": torch.ones(64)}),
        "'layers.1.input_layernorm.weight' is not known",
    ),
    "model. prefix": (lambda t: rename_prefix(t, "", "model."), "mask_hidden"),
    "model. before all but the mask": (
        lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t) if n != "mask_hidden"],
        "is missing",
    ),
    "no mask_hidden": (lambda t: t.pop("mask_hidden"), "mask_hidden"),
    "narrow mask_hidden": (
        lambda t: t.update({"mask_hidden": t["mask_hidden"][..., :64].clone()}),
        "'mask_hidden' has shape [1, 1, 64], expected [1, 1, 192]",
    ),
    "two mask_hiddens": (lambda t: t.update({"mask_hidden": t["mask_hidden"].repeat(1, 2, 1)}), "'mask_hidden'"),
    "own embeddings of another size": (
        lambda t: t.update({"embed_tokens.weight": torch.ones(150, 64)}),
        "'embed_tokens.weight' has shape [150, 64], expected [160, 64]",
    ),
    "own head of another size": (
        lambda t: t.update({"lm_head.weight": torch.ones(28, 64)}),
        "'lm_head.weight' has shape [28, 64], expected [160, 64]",
    ),
    "integers": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int32)}), "'fc.weight'"),
    "eight bits": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e5m2)}), "'fc.weight'"),
    "nothing at all": (lambda t: t.clear(), ""),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(case: str, tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    edit, words = BAD_TENSORS[case]
    edit_weights(folder, edit)
    assert_rejected(folder, target, words)


BAD_D2T: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop("d2t"), "'d2t' is missing"),
    "short": (lambda t: t.update({"d2t": t["d2t"][:-1].clone()}), "'d2t' has shape [27], expected [28]"),
    "negative": (lambda t: t["d2t"][0].fill_(-1), "d2t"),
    "beyond": (lambda t: t["d2t"][-1].fill_(pairs.VOCAB), "d2t"),
    "floats": (lambda t: t.update({"d2t": t["d2t"].float()}), "'d2t'"),
    "two to one": (lambda t: t["d2t"][1].fill_(int(t["d2t"][0]) - 1), "d2t"),
    "no head": (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
}


@pytest.mark.parametrize("case", BAD_D2T)
def test_bad_reduced_vocabulary(case: str, tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1-reduced", tmp_path)
    edit, words = BAD_D2T[case]
    edit_weights(folder, edit)
    assert_rejected(folder, target, words)


def test_other_width_needs_own_tables(tmp_path: Path, target: Decoder) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        folder = copy_drafter("p-eagle-1-wide", tmp_path / name)
        edit_weights(folder, lambda t, name=name: t.pop(name))
        assert_rejected(folder, target, repr(name), "missing")


def test_mixed_dtypes_in_one_product(tmp_path: Path, target: Decoder) -> None:
    """Kept as stored, q and k of two dtypes cannot share a tensor; cast to one, they can."""
    folder = copy_drafter("p-eagle-1", tmp_path)
    name = "midlayer.self_attn.k_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name].float()}))
    load_drafter(folder, target)
    with pytest.raises(UserError, match="k_proj.weight' has another dtype"):
        load_unshared_drafter(folder, read_drafter_config(folder), None)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "mask ids disagree": ({"pard_token": 7}, "disagree"),
    "mask ids of two types": ({"pard_token": "150"}, "disagree"),
    "no mask id": (dict.fromkeys(MASK_NAMES), "mask_hidden"),
    "mask id outside": (dict.fromkeys(MASK_NAMES, 160), "160"),
    "mask id negative": (dict.fromkeys(MASK_NAMES, -1), "-1"),
    "mask id true": (dict.fromkeys(MASK_NAMES, True), "True"),
    "another width": ({"target_hidden_size": 32}, "target_hidden_size is 32"),
    "another vocabulary": ({"vocab_size": 159}, "vocab_size is 159"),
    "layer id too large": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "aux_layer_ids contains layer 6"),
    "repeated layer id": ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "eagle_aux_hidden_state_layer_ids"),
    "negative layer id": ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, "eagle_aux_hidden_state_layer_ids"),
    "layer id as text": ({"eagle_aux_hidden_state_layer_ids": [1, "2", 4]}, "eagle_aux_hidden_state_layer_ids"),
    "layer id as a boolean": ({"eagle_aux_hidden_state_layer_ids": [True, 2, 4]}, "eagle_aux_hidden_state_layer_ids"),
    "one layer id, not a list": ({"eagle_aux_hidden_state_layer_ids": 2}, "eagle_aux_hidden_state_layer_ids"),
    "two aux_hidden_states": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "expected [1, 1, 128]"),
    "no aux_hidden_states anywhere": (
        {
            "eagle_aux_hidden_state_layer_ids": [],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": []},
            "norm_before_fc": True,
        },
        "input_norm.weight",  # the target's three default aux_hidden_states, then
    ),
    "EAGLE-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
    "another model": ({"model_type": "gemma"}, "'gemma'"),
    "no model": ({"model_type": ["llama"]}, "['llama']"),
    "larger draft vocabulary": ({"draft_vocab_size": 161}, "161"),
    "layers": ({"num_hidden_layers": 2}, "layers.1."),
    "endless layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "negative": ({"intermediate_size": -160}, "intermediate_size"),
    "null": ({"vocab_size": None}, "vocab_size"),
    "text": ({"hidden_size": "64"}, "hidden_size"),
    "a window of none": ({"sliding_window": 0, "layer_types": ["sliding_attention"]}, "sliding_window"),
    "layer types": ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, ""),
    "qk norms": ({"model_type": "qwen3"}, "q_norm"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("p-eagle-1", tmp_path)
    fields, words = BAD_CONFIGS[case]
    set_config(folder, **fields)
    assert_rejected(folder, target, words)


def test_mask_id_without_mask_hidden(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1", tmp_path)
    set_config(folder, ptd_token_id=3)
    assert_rejected(folder, target, "mask_hidden", "ptd_token_id")


def test_another_target(tmp_path: Path) -> None:
    small = replace(pairs.TARGET, num_layers=3, windows=(None,) * 3)
    assert_rejected(pairs.drafter_folder("p-eagle-1"), Decoder(small), "aux_layer_ids contains layer 4", "3 layers")
    wide = replace(pairs.TARGET, layer=replace(pairs.TARGET.layer, hidden_size=72), vocab_size=170)
    assert_rejected(
        pairs.drafter_folder("p-eagle-1"), Decoder(wide), "target_hidden_size is 64", "72", "vocab_size is 160", "170"
    )


def assert_files_rejected(folder: Path, target: Decoder, *words: str) -> None:
    assert_rejected(folder, target, *words)
    with pytest.raises(UserError):
        SafetensorsFolder(folder)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_safetensors(data: st.DataObject) -> None:
    """Truncated files are rejected in one line; a changed header is rejected or still readable."""
    whole = (pairs.drafter_folder("eagle3-1") / WEIGHTS).read_bytes()
    target = shared_target()
    with scratch() as folder:
        shutil.copy(pairs.drafter_folder("eagle3-1") / "config.json", folder)
        cut = data.draw(st.integers(0, 3000) | st.integers(0, len(whole) - 1))
        (folder / WEIGHTS).write_bytes(whole[:cut])
        assert_rejected(folder, target, "safetensors")
        start = data.draw(st.integers(0, 2000))
        noise = data.draw(st.binary(min_size=1, max_size=12))
        (folder / WEIGHTS).write_bytes(whole[:start] + noise + whole[start + len(noise) :])
        with may_be_rejected():
            load_drafter(folder, target)


def test_garbage_files(tmp_path: Path, target: Decoder) -> None:
    for i, junk in enumerate([b"", b"\0" * 8, b"PK\x03\x04 zip", b"\xff" * 64, pickle.dumps({"fc.weight": 1})]):
        folder = copy_drafter("eagle3-1", tmp_path / str(i))
        (folder / WEIGHTS).write_bytes(junk)
        assert_files_rejected(folder, target, WEIGHTS)
    folder = copy_drafter("eagle3-1", tmp_path / "folder")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert_files_rejected(folder, target, "safetensors")


BAD_JSON = {
    "list": b"[1, 2]",
    "null": b"null",
    "text": b'"config"',
    "cut": b'{"vocab_size": 1',
    "empty": b"",
    "latin-1": b'{"a": "\xe9"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json(case: str, tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1", tmp_path)
    (folder / "config.json").write_bytes(BAD_JSON[case])
    assert_rejected(folder, target, "config.json")
    with pytest.raises(UserError):
        read_json(folder / "config.json")
    with pytest.raises(UserError):
        read_target_config(folder)


def test_absent_folders_and_files(tmp_path: Path, target: Decoder) -> None:
    assert_rejected(tmp_path / "nowhere", target, "no such folder")
    (tmp_path / "empty").mkdir()
    assert_rejected(tmp_path / "empty", target, "no config.json")
    folder = copy_drafter("eagle3-1", tmp_path)
    (folder / WEIGHTS).unlink()
    assert_rejected(folder, target, "no .safetensors file")
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "x.json")
    assert_rejected(folder / "config.json", target, "no such folder")


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_opened(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1", tmp_path)
    (folder / WEIGHTS).unlink()
    mark = tmp_path / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    assert_rejected(folder, target, "pytorch_model.bin", "pickle")
    with pytest.raises(UserError, match="pickle"):
        SafetensorsFolder(folder)
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()  # the trap works


def test_bad_index(tmp_path: Path, target: Decoder) -> None:
    outside = tmp_path / "x.safetensors"
    save_file({"fc.weight": torch.ones(2)}, outside)
    save_shards(pairs.drafter_folder("eagle3-1"), tmp_path / "d")
    folder = tmp_path / "d"
    good = json.loads((folder / INDEX).read_text())["weight_map"]
    files = ["../x.safetensors", str(outside), "sub/x.safetensors", "..", ".", "", "\0", "\ud800"]
    files += ["no\nsuch", "a" * 5000]
    cases: list[Any] = [good | {"fc.weight": file} for file in files]
    cases += [good | {"fc.weight": 3}, [1], None, "x"]
    for case in cases:
        (folder / INDEX).write_text(json.dumps({"weight_map": case}))
        assert_rejected(folder, target)
    (folder / INDEX).write_text("[]")
    assert_rejected(folder, target, INDEX)
    (folder / INDEX).write_text(json.dumps({"weight_map": good}))
    load_drafter(folder, target)
    next(folder.glob("model-00002*")).unlink()
    assert_rejected(folder, target, "model-00002")


def test_one_tensor_in_two_files(tmp_path: Path, target: Decoder) -> None:
    folder = copy_drafter("eagle3-1", tmp_path)
    save_file({"fc.weight": torch.ones(64, 192)}, folder / "more.safetensors")
    assert_rejected(folder, target, "'fc.weight'", "more.safetensors")


# Arbitrary values in one field ----------------------------------------------------------------------------

TRICKY = [None, True, False, 0, -1, 1, 2, 3, 1024, 2**24, 2**31, 2**63, 10**400, 0.0, -0.5, 1e-320, 1e308]
TRICKY += [math.nan, math.inf, -math.inf, "", "64", "llama", "a\nb", "\ud800", [], {}, [[]], [None], {"a": {}}]
json_values = st.sampled_from(TRICKY) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MORE_FIELDS = ["eagle_config", "sliding_window", "use_sliding_window", "layer_types", "rope_scaling", "auto_map"]
MORE_FIELDS += ["partial_rotary_factor", "quantization_config", "attn_implementation", "id2label", "num_labels"]
ROPE_VALUES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "linear": {"factor": 2.0},
    "default": {},
}


def mutations(values: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Sets one field of a config, at any level, to any value."""
    values = json.loads(json.dumps(values))
    places = [values]
    for section in ("rope_parameters", "transformer_layer_config", "eagle_config"):
        places += [place[section] for place in list(places) if isinstance(place.get(section), dict)]
    place = data.draw(st.sampled_from(places))
    names = sorted(place) + (MORE_FIELDS if place is values else ["type", "attention_factor", "truncate"])
    place[data.draw(st.sampled_from(names))] = data.draw(json_values)
    return values


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.data())
def test_any_value_in_a_plain_config(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["p-eagle-1", "eagle3-1-reduced"]))
    values = json.loads((pairs.drafter_folder(name) / "config.json").read_text())
    kind = data.draw(st.sampled_from(sorted(ROPE_VALUES)))
    values["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4, **ROPE_VALUES[kind]}
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    if data.draw(st.booleans()):
        values["eagle_aux_hidden_state_layer_ids"] = None
    check_any_config(pairs.drafter_folder(name), mutations(values, data))


@FUZZ
@given(data=st.data())
def test_any_value_in_a_speculators_config(data: st.DataObject, spec_folder: Path) -> None:
    values = json.loads((spec_folder / "config.json").read_text())
    check_any_config(spec_folder, mutations(values, data))


@pytest.fixture(scope="module")
def spec_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "spec"
    convert_drafter(pairs.drafter_folder("p-eagle-1"), out, "speculators", pairs.target_folder(), "org/target", 5)
    return out


def check_any_config(source: Path, values: dict[str, Any]) -> None:
    """Loads and proposes draft tokens, or is rejected in one line."""
    target = shared_target()
    with scratch() as folder:
        (folder / WEIGHTS).symlink_to(source / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(values))
        with may_be_rejected():
            drafter = load_drafter(folder, target)
            with torch.inference_mode():
                aux_hidden_states = torch.ones(3, drafter.cfg.aux_hidden_size)
                propose_draft_tokens(drafter, [1, 2, 3, 4], aux_hidden_states, 2, SamplingParams(), torch.Generator())


@FUZZ
@given(st.data())
def test_any_value_in_a_target_config(data: st.DataObject) -> None:
    source = pairs.target_folder()
    values = json.loads((source / "config.json").read_text())
    kind = data.draw(st.sampled_from(sorted(ROPE_VALUES)))
    values["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4, **ROPE_VALUES[kind]}
    family = data.draw(st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3"]))
    values["architectures"] = [f"{family}ForCausalLM"]
    values = mutations(values, data)
    with scratch() as folder:
        (folder / WEIGHTS).symlink_to(source / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(values))
        with may_be_rejected():
            load_decoder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_target_with_a_bad_weight_is_rejected(value: float, tmp_path: Path) -> None:
    shutil.copytree(pairs.target_folder(), tmp_path / "target")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path / "target", lambda tensors: tensors[name][3].fill_(value))
    with pytest.raises(UserError, match="layers.1.mlp.gate_up_proj.weight holds values that are NaN or infinite"):
        load_target(tmp_path / "target")


# Writing --------------------------------------------------------------------------------------------------


def test_write_folder_keeps_existing_files(tmp_path: Path, target: Decoder) -> None:
    drafter = load_drafter(pairs.drafter_folder("eagle3-1"), target)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder in (taken, tmp_path / "file"):
        with pytest.raises(UserError, match="exists already") as caught:
            save_drafter(drafter, folder)
        assert "\n" not in str(caught.value)
    assert (taken / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    (tmp_path / "empty").mkdir()
    save_drafter(drafter, tmp_path / "empty")
    save_drafter(drafter, tmp_path / "some" / "where" / "new")
    assert read_drafter_config(tmp_path / "empty") == read_drafter_config(tmp_path / "some" / "where" / "new")
    with pytest.raises(UserError, match="cannot be written"):
        save_drafter(drafter, tmp_path / "file" / "below")


def test_write_into_the_current_folder(tmp_path: Path, target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_drafter(pairs.drafter_folder("eagle3-1"), target)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_drafter(drafter, Path("."))
    assert read_drafter_config(tmp_path / "here") == drafter.cfg
    monkeypatch.chdir(tmp_path)
    save_drafter(drafter, Path("named"))
    assert read_drafter_config(tmp_path / "named") == drafter.cfg


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("x"), OSError(28, "No space")])
@pytest.mark.parametrize("there", [False, True])
def test_failed_write_leaves_nothing(error: BaseException, there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    if there:
        folder.mkdir()
    wanted = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted) as caught, new_folder(folder) as into:
        (into / "config.json").write_text("{}")
        (into / "sub").mkdir()
        assert not folder.exists() or not any(folder.iterdir())
        raise error
    if isinstance(error, OSError):
        assert str(caught.value) == f"{folder}: cannot be written (No space)"
    assert list(tmp_path.iterdir()) == ([folder] if there else [])
    assert not there or not any(folder.iterdir())


def test_error_of_the_safetensors_writer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), new_folder(tmp_path / "out") as into:
        (into / WEIGHTS).mkdir()  # in the way of the file
        write_weights({"a": torch.ones(2)}, into)
    assert not any(tmp_path.iterdir())


def test_files_are_readable_by_everyone(tmp_path: Path, target: Decoder) -> None:
    save_drafter(load_drafter(pairs.drafter_folder("eagle3-1"), target), tmp_path / "d")
    for file in (tmp_path / "d").glob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o644
