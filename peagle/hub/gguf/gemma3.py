"""Converts the GGUF of a Gemma 3 text model to a Hugging Face folder. The caller checks the file's hash."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.hub.gguf.llama import CONTROL, USER_DEFINED, read_gguf, save_weights, write_json

if TYPE_CHECKING:
    import torch

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
NORMAL = 1  # llama.cpp's type of ordinary tokens
# Not in the file, since equal in all Gemma 3 models: every sixth layer has full attention; the others use this theta.
FULL_ATTENTION_EVERY, LOCAL_THETA = 6, 10000.0
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

Shape = tuple[int, ...]


def convert_gemma3(gguf: Path, out: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Writes the folder `out`, like `convert_smollm2`."""
    try:
        meta, tensors = read_gguf(gguf, "gemma3", "default", "Gemma 3")
        config = _config(meta)
        tokenizer_json, tokenizer_config = _tokenizer(meta)
        weights = _weights(tensors, config, on_progress)
    except UserError:
        raise
    except Exception as err:  # the gguf package raises various types
        why = " ".join(f"{type(err).__name__}: {err}".split())[:200]
        raise UserError(f"'{gguf}' is not a readable Gemma 3 GGUF ({why}); fetch the file again") from err

    out.mkdir(parents=True, exist_ok=True)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", ids)
    write_json(out / "tokenizer_config.json", tokenizer_config)
    special = {key: tokenizer_config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    write_json(out / "special_tokens_map.json", special)
    (out / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    save_weights(weights, out / "model.safetensors")
    shutil.copymode(out / "config.json", out / "model.safetensors")


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = int(meta["gemma3.block_count"]), int(meta["gemma3.attention.key_length"])
    theta = float(meta["gemma3.rope.freq_base"])
    kinds = ["sliding_attention" if (i + 1) % FULL_ATTENTION_EVERY else "full_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": int(meta["gemma3.embedding_length"]),
        "intermediate_size": int(meta["gemma3.feed_forward_length"]),
        "layer_types": kinds,
        "max_position_embeddings": int(meta["gemma3.context_length"]),
        "num_attention_heads": int(meta["gemma3.attention.head_count"]),
        "num_hidden_layers": layers,
        "num_key_value_heads": int(meta["gemma3.attention.head_count_kv"]),
        "query_pre_attn_scalar": head_dim,
        # Stored as float32, see gguf_import.
        "rms_norm_eps": float(f"{meta['gemma3.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
        },
        # Older readers look at these.
        "rope_theta": theta,
        "rope_local_base_freq": LOCAL_THETA,
        "sliding_window": int(meta["gemma3.attention.sliding_window"]),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def merges_of(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; a list of merges says the same in order.

    With pieces a, b, ab (score -1), abb (score -2): "a b" before "ab b", and no other way to make either.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind != NORMAL:
            continue
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                found.append((-score, left, right, (token[:at], token[at:])))
    return [pair for *_, pair in sorted(found)]


def _tokenizer(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(kinds):
        raise ValueError(f"{len(vocab)} different tokens and {len(kinds)} token types for {len(tokens)} ids")

    def named(role: str) -> str:
        return tokens[int(meta[f"tokenizer.ggml.{role}_token_id"])]

    merges = merges_of(tokens, meta["tokenizer.ggml.scores"], kinds)
    bos, bos_id = named("bos"), int(meta["tokenizer.ggml.bos_token_id"])
    model = models.BPE(vocab=vocab, merges=merges, unk_token=named("unknown"), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    # The model was trained on texts that begin with it, and speaks nonsense without.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=kind == CONTROL) for t, kind in marked])
    assert tokenizer.get_vocab_size() == len(tokens), "every marker already has an id"
    return tokenizer.to_str(), {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": bos,
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["gemma3.context_length"]),
    }


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[str, Shape]]:
    """GGUF name -> Hugging Face name and shape."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    block: dict[str, tuple[str, Shape]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (q_rows, hidden)),
        "attn_k": ("self_attn.k_proj", (kv_rows, hidden)),
        "attn_v": ("self_attn.v_proj", (kv_rows, hidden)),
        "attn_q_norm": ("self_attn.q_norm", (head_dim,)),
        "attn_k_norm": ("self_attn.k_norm", (head_dim,)),
        "attn_output": ("self_attn.o_proj", (hidden, q_rows)),
        "post_attention_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_norm": ("pre_feedforward_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
        "post_ffw_norm": ("post_feedforward_layernorm", (hidden,)),
    }
    names: dict[str, tuple[str, Shape]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    for layer in range(config["num_hidden_layers"]):
        for ours, (theirs, shape) in block.items():
            names[f"blk.{layer}.{ours}.weight"] = (f"model.layers.{layer}.{theirs}.weight", shape)
    return names


def _weights(
    tensors: Mapping[str, Any], config: Mapping[str, Any], on_progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    from peagle.hub.gguf.llama import convert_tensors

    def changed(ours: str, weight: torch.Tensor) -> torch.Tensor:
        # llama.cpp stores norm weights, Hugging Face norm weights minus 1
        return weight - 1 if ours.endswith("norm.weight") else weight

    return convert_tensors(tensors, _expected(config), changed, on_progress)
