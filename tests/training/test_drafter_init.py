"""New drafters: choice of the mask token, and initial weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from torch import Tensor

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import load_decoder
from peagle.config import Method, TrainConfig
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.drafter import Drafter
from peagle.speculative.reference import propose_draft_tokens, run_target
from peagle.training.drafter_init import (
    choose_mask_id,
    config_from_folder,
    create_drafter,
    new_drafter_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Tokenizer:
    """A tokenizer with 150 tokens; the last ones are special."""

    chat_template, eos_token_id, bos_token_id, unk_token_id = "<|user|>{{ m }}", 140, None, None

    def __init__(self, special: dict[int, str], size: int = 150) -> None:
        self.size = size
        self.added_tokens_decoder = {i: Special(text) for i, text in special.items()}

    def get_vocab(self) -> dict[str, int]:
        ordinary = {f"w{i}": i for i in range(self.size) if i not in self.added_tokens_decoder}
        return ordinary | {str(t): i for i, t in self.added_tokens_decoder.items()}


class Special(str):
    special = True


def test_mask_tokens() -> None:
    cfg = pairs.TARGET
    data = torch.bincount(torch.tensor([1, 2, 147, 147]), minlength=pairs.VOCAB)
    special = {140: "<eos>", 145: "<|user|>", 146: "<repo>", 147: "<reserved_0>", 148: "<empty_output>", 149: "<file>"}

    def chosen(given: str, size: int, some: dict[int, str] = special, ends: Iterable[int] = (140,)) -> int:
        return choose_mask_id(given, cfg, Tokenizer(some, size), ends, data)  # type: ignore[arg-type]

    assert chosen("auto", 150) == 150  # a row of the table that no token has
    assert chosen("auto", 150, ends=(150, 151)) == 152  # a text may end with one that the tokenizer does not know
    assert chosen("auto", pairs.VOCAB, ends=(140, 148)) == 149  # or with one that is reserved by its name
    assert chosen("auto", 150, {**special, 151: "<a>", 152: "<b>"}) == 153  # 152 tokens, one id left out
    assert chosen("auto", pairs.VOCAB) == 148  # reserved by its name, and not in the data as 147 is
    assert chosen("auto", pairs.VOCAB, {k: v for k, v in special.items() if k != 148}) == 149
    assert chosen("<repo>", 150) == 146 and chosen("155", 150) == 155
    for given, why in {
        "<reserved_0>": "token 147 occurs 2 times",
        "2": "token 2 occurs 1 times",
        "140": "ends responses",
        "160": "not in the vocabulary",
        "<nothing>": "no such token",
    }.items():
        with pytest.raises(UserError, match=why):
            chosen(given, 150)
    with pytest.raises(UserError, match="every special token"):
        chosen("auto", pairs.VOCAB, {140: "<eos>", 145: "<|user|>", 147: "<reserved_0>"})
    with pytest.raises(UserError, match="give an id"):
        choose_mask_id("auto", cfg, None, (), data)


def test_init_from_a_folder(tmp_path: Path) -> None:
    """A P-EAGLE drafter is kept, an EAGLE-3 drafter becomes P-EAGLE; errors name the flag that does not fit."""
    target = load_decoder(pairs.target_folder())
    data = torch.zeros(pairs.VOCAB, dtype=torch.long)

    def made(name: str, **settings: Any) -> Drafter:
        cfg = TrainConfig(init=str(pairs.drafter_folder(name)), **settings)
        return create_drafter(cfg, target, None, (), data)

    for name, settings in (
        ("p-eagle-4-reduced", {}),
        ("eagle3-1", {"mask_token": "150"}),
        ("p-eagle-1-wide", {"method": "eagle3"}),
    ):
        there = load_drafter(pairs.drafter_folder(name), target).state_dict()
        drafter = made(name, **settings)
        own = drafter.state_dict()
        assert all(torch.equal(own[k], x) for k, x in there.items() if k in own)
        assert own.keys() ^ there.keys() <= {"mask_hidden"}
        assert drafter.cfg.parallel == (settings.get("method") != "eagle3")
        assert all(p.requires_grad for p in drafter.parameters())
    with pytest.raises(UserError, match="--num-layers 2: the drafter in .* has 4; give that or more"):
        made("p-eagle-4", num_layers=2)
    with pytest.raises(UserError, match="--intermediate-size 2: the drafter in .* has [0-9]+; give that or more"):
        made("p-eagle-4", intermediate_size=2)
    windowed = tmp_path / "windowed"
    shutil.copytree(pairs.drafter_folder("p-eagle-4"), windowed)
    values = json.loads((windowed / "config.json").read_text())
    types = ["full_attention", "sliding_attention"] * 2
    (windowed / "config.json").write_text(json.dumps({**values, "layer_types": types, "sliding_window": 8}))
    grown = config_from_folder(TrainConfig(init=str(windowed), num_layers=6), target.cfg)
    assert grown.windows == (None, 8, None, 8, None, None), "new layers have no window"
    with pytest.raises(UserError, match="--init .*nowhere: must be"):
        create_drafter(TrainConfig(init="nowhere"), target, None, (), data)
    wide = create_drafter(TrainConfig(init="random", mask_token="150", intermediate_size=96), target, None, (), data)
    assert all(layer.mlp.down_proj.weight.shape == (64, 96) for layer in wide.layers)
    with pytest.raises(UserError, match="--init target: mlp.gate_up_proj.weight has another shape .*use --init random"):
        create_drafter(TrainConfig(mask_token="150", intermediate_size=96), target, None, (), data)
    with pytest.raises(UserError, match="--aux-layer-ids 9"):
        new_drafter_config(TrainConfig(aux_layer_ids=(9,)), target.cfg)


@pytest.mark.parametrize(("name", "method"), [("p-eagle-4-reduced", "p-eagle"), ("eagle3-1", "eagle3")])
@pytest.mark.parametrize("wider", [0, 40])
def test_added_layers_and_columns_do_not_change_the_output(name: str, method: Method, wider: int) -> None:
    """More layers, wider MLPs, own embeddings and LM head: draft tokens and probabilities stay, bitwise unless the MLP
    is wider. All new weights get gradients from the second step on."""
    target = load_decoder(pairs.target_folder())
    data = torch.zeros(pairs.VOCAB, dtype=torch.long)
    small = load_drafter(pairs.drafter_folder(name), target)
    cfg = TrainConfig(
        init=str(pairs.drafter_folder(name)),
        num_layers=small.cfg.num_layers + 2,
        intermediate_size=small.cfg.layer.intermediate_size + wider,
        method=method,
        train_embeddings=True,
        train_lm_head=True,
    )
    grown = create_drafter(cfg, target, None, (), data)
    assert len(grown.layers) == grown.cfg.num_layers == small.cfg.num_layers + 2
    assert grown.embed_tokens is not None and grown.lm_head is not None
    tokens = list(range(3, 40, 3))
    _, aux_hidden_states = run_target(target, tokens[:-1], 1, small.cfg.aux_layer_ids)
    with torch.no_grad():
        was, now = (
            propose_draft_tokens(d, tokens, aux_hidden_states, 4, None, torch.Generator().manual_seed(0))
            for d in (small, grown)
        )
    assert was.token_ids == now.token_ids
    torch.testing.assert_close(now.probs_KV, was.probs_KV, rtol=1e-5 if wider else 0, atol=1e-7 if wider else 0)
    new = [p for layer in list(grown.layers)[small.cfg.num_layers :] for p in layer.parameters() if p.dim() > 1]
    for step in range(2):
        hidden = grown.combine_hidden_states(aux_hidden_states)
        output, _ = grown(torch.tensor(tokens[1:]), hidden, torch.arange(len(tokens) - 1), causal_attention)
        grads = torch.autograd.grad(grown.compute_logits(output).square().sum(), new)
        has_gradient = [bool(g.abs().sum() > 0) for g in grads]
        assert sum(has_gradient) == (len(new) if step else 4), "first only the output projections, then all"
        with torch.no_grad():
            for p, g in zip(new, grads, strict=True):
                p -= 1e-3 * g
    if wider:
        loss = grown.compute_logits(
            grown(torch.tensor(tokens[1:]), hidden, torch.arange(len(tokens) - 1), causal_attention)[0]
        )
        check_widened_mlp_learns(grown, small.cfg.layer.intermediate_size, loss.square().sum())


def check_widened_mlp_learns(grown: Drafter, before: int, loss: Tensor) -> None:
    """The new columns of down_proj get gradients at once."""
    mlp = grown.layers[0].mlp
    down = torch.autograd.grad(loss, mlp.down_proj.weight)[0][:, before:]
    assert bool((down.abs().sum(0) > 0).all()), "each new unit"
    gate, up = mlp.gate_up_proj.weight.detach().chunk(2)
    assert bool((gate[before:].abs().sum(1) > 0).all()) and bool((up[before:].abs().sum(1) > 0).all())


def test_init_from_target() -> None:
    skipped = 2  # layers of the target before its last three
    target = load_decoder(pairs.target_folder())
    data = torch.zeros(pairs.VOCAB, dtype=torch.long)
    cfg = TrainConfig(aux_layer_ids=(1, 2, 4), mask_token="150", num_layers=3)
    own, theirs = create_drafter(cfg, target, None, (), data).state_dict(), target.state_dict()
    copied = 0
    for name, tensor in theirs.items():
        number, _, part = name.removeprefix("layers.").partition(".")
        if name.startswith("layers.") and skipped <= int(number) < skipped + 3:
            if (same := own[f"layers.{int(number) - skipped}.{part}"]).shape == tensor.shape:
                assert torch.equal(same, tensor)
                copied += 1
    assert copied == 3 * 6 - 1
    wide, narrow = own["layers.0.self_attn.qkv_proj.weight"], theirs[f"layers.{skipped}.self_attn.qkv_proj.weight"]
    assert torch.equal(wide[:, :64], narrow) and torch.allclose(wide[:, 64:], 0.1 * narrow)
    assert torch.equal(own["layers.0.hidden_norm.weight"], theirs[f"layers.{skipped}.input_layernorm.weight"])
    assert torch.equal(own["norm.weight"], theirs["norm.weight"])
    with pytest.raises(UserError, match="--num-layers 6: the target has 5"):
        create_drafter(replace(cfg, num_layers=6), target, None, (), data)
