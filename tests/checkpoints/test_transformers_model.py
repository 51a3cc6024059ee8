"""Targets that run through Hugging Face transformers: equal logits, auxiliary states and outputs, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_decoder
import test_families
import torch
from support import set_config
from test_decoder import MIXED, SHAPE, randomised, refused, tokens_of
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from peagle.checkpoints.target import load_decoder, read_target_config
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.transformers_model import TransformersDecoder

pytestmark = pytest.mark.filterwarnings("ignore:.*runs through transformers")


def olmo3(**fields: Any) -> Any:
    """Norms behind attention and MLP, norms over all heads of queries and keys at once, windows in some layers."""
    return Olmo3ForCausalLM(Olmo3Config(**(SHAPE | {"sliding_window": 6, "layer_types": MIXED} | fields)))


def starcoder2(**fields: Any) -> Any:
    """Norms with biases, an MLP without a gate, a window everywhere."""
    return Starcoder2ForCausalLM(Starcoder2Config(**(SHAPE | {"sliding_window": 7, "norm_epsilon": 1e-5} | fields)))


def gpt_neox(**fields: Any) -> Any:
    """Heads turned in part, attention and MLP side by side, and other names for everything."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**(SHAPE | {"num_key_value_heads": SHAPE["num_attention_heads"]} | fields)))


def saved(model: Any, folder: Path) -> Any:
    model = randomised(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("make", [olmo3, starcoder2])
def test_logits_and_taps(make: Callable[..., Any], tmp_path: Path) -> None:
    model = saved(make(), tmp_path)
    decoder = load_decoder(tmp_path)
    assert isinstance(decoder, TransformersDecoder)
    test_decoder.assert_same(model, decoder, tokens_of(97), 1e-4)


@torch.inference_mode()
def test_other_names(tmp_path: Path) -> None:
    model = saved(gpt_neox(), tmp_path)
    tokens = tokens_of(97)
    decoder = load_decoder(tmp_path)
    hidden, aux_hidden_states = decoder(tokens, torch.arange(len(tokens)), causal_attention, (0, 2))
    want = model(tokens[None], output_hidden_states=True)
    torch.testing.assert_close(decoder.compute_logits(hidden), want.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        aux_hidden_states, torch.cat([want.hidden_states[k][0] for k in (0, 2)], -1), atol=1e-4, rtol=1e-4
    )
    assert decoder.norm.weight.shape == (48,) and decoder.embed_tokens.weight.shape == (97, 48)


def test_heads_that_the_config_does_not_name(tmp_path: Path) -> None:
    """This family knows no such field and has all heads for keys: pages would be too small."""
    saved(gpt_neox(num_key_value_heads=2), tmp_path)
    refused(tmp_path, "other heads than its config says")


def test_greedy_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine's pages, with drafts and without, and through the reference: the same test as of our own."""
    monkeypatch.setitem(test_families.MODELS, "olmo3", olmo3)
    test_families.test_greedy_output("olmo3", tmp_path)


def test_packed_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_families.MODELS, "olmo3", olmo3)
    test_families.test_packed_documents("olmo3", tmp_path)


SMALL = {"vocab_size": 97, "hidden_size": 48}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "scores that are capped": (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE)), "softcapping"),
    "logits that are scaled": (lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)), "its head"),
    "layers without attention": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2)),
        "conv",
    ),
    "positions in the scores": (lambda: BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=4)), "bloom"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_handed_over(why: str, tmp_path: Path) -> None:
    make, word = REFUSED[why]
    saved(make(), tmp_path)
    set_config(tmp_path, max_position_embeddings=512)
    refused(tmp_path, word)


def test_a_window_that_is_only_in_the_mask(tmp_path: Path) -> None:
    """A short text does not show it, so the config and what layers ask for must agree."""
    saved(starcoder2(sliding_window=400), tmp_path)
    assert read_target_config(tmp_path).windows == (400,) * 4
    set_config(tmp_path, layer_types=["full_attention"] * 4)
    with pytest.raises(UserError, match="attention windows of its layers differ"):
        load_decoder(tmp_path)


def test_a_model_that_transformers_itself_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the version at hand is named as one, whatever it raises."""
    saved(olmo3(), tmp_path)

    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'shape'\nand more")

    monkeypatch.setattr(Olmo3ForCausalLM, "forward", broken)
    refused(tmp_path, "olmo3 model cannot run", "transformers itself fails: 'NoneType' object has no", "--engine vllm")
