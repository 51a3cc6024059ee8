"""Converts a SmolLM2 GGUF (a Llama with tied embeddings and a byte-level tokenizer) to a Hugging Face folder.

The caller checks the file's hash.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError

if TYPE_CHECKING:
    import torch

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# llama.cpp's types of tokens that the tokenizer must not split.
CONTROL, USER_DEFINED = 3, 4

Shape = tuple[int, ...]


def convert_smollm2(gguf: Path, out: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Writes the folder `out` with bf16 weights, for AutoModelForCausalLM and AutoTokenizer.

    `on_progress(done, total)` counts converted weights. A damaged or different file raises a UserError, a write error
    an OSError.
    """
    try:
        meta, tensors = read_gguf(gguf, "llama", "smollm", "SmolLM2")
        config = _config(meta)
        tokenizer_json, tokenizer_config = _tokenizer(meta)
        weights = _weights(tensors, config, on_progress)
    except UserError:
        raise
    # The gguf package does not validate its input, so a damaged file raises various types.
    except Exception as err:
        why = " ".join(f"{type(err).__name__}: {err}".split())[:200]
        raise UserError(f"'{gguf}' is not a readable SmolLM2 GGUF ({why}); fetch the file again") from err

    out.mkdir(parents=True, exist_ok=True)
    template = tokenizer_config.pop("chat_template")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    special = {key: tokenizer_config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", ids)
    write_json(out / "tokenizer_config.json", tokenizer_config)
    write_json(out / "special_tokens_map.json", special)
    (out / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    save_weights(weights, out / "model.safetensors")
    # safetensors makes files readable by the owner only.
    shutil.copymode(out / "config.json", out / "model.safetensors")


def unpermute_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rotary pairs: adjacent rows (0, 1), (2, 3), ... in GGUF, half a head apart in Hugging Face."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def read_gguf(path: Path, arch: str, tokenizer: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns metadata and tensors; the file must have this architecture and pre-tokenizer."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        # Slicing a memmap for every vocabulary entry is three times slower than slicing an array. And past the end of
        # a damaged file, the package's reader returns empty values instead of an error.
        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = np.asarray(mapped)

        def _get(self, offset: int, *args: Any, **kwargs: Any) -> Any:
            if offset >= len(self._array):
                raise EOFError("the file ends early")
            return super()._get(offset, *args, **kwargs)

    # Checked here, since the reader's error for an empty file is not clear.
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"'{path}' is not a GGUF file; give the GGUF of {name}")
    reader = Reader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    found = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre")
    if found != (arch, tokenizer):
        raise UserError(f"'{path}' is a {found[0]!r} model with a {found[1]!r} tokenizer; only {name} is supported")
    return meta, {tensor.name: tensor for tensor in reader.tensors}


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = int(meta["llama.embedding_length"]), int(meta["llama.attention.head_count"])
    rope_theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        # Rounds the stored float32 9.9999997e-06 to 1e-05.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        # Older readers use the first, newer ones the second.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def _tokenizer(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(kinds) == meta["llama.vocab_size"]:
        raise ValueError(f"{len(vocab)} tokens and {len(kinds)} token types for {meta['llama.vocab_size']} ids")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "smollm" in GGUF terms: every digit is its own token, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    for token, kind in marked:
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    assert tokenizer.get_vocab_size() == len(tokens), "every marker already has an id"

    def named(role: str) -> str:
        return tokens[int(meta[f"tokenizer.ggml.{role}_token_id"])]

    return tokenizer.to_str(), {
        # The generic class uses tokenizer.json unchanged; a specific one would rebuild the pre-tokenizer and lose the
        # digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "chat_template": meta["tokenizer.chat_template"],
    }


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[str, Shape, int]]:
    """GGUF name -> Hugging Face name, shape, and the number of heads to reorder rotary pairs in (0: none)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    block: dict[str, tuple[str, Shape, int]] = {
        "attn_norm": ("input_layernorm", (hidden,), 0),
        "attn_q": ("self_attn.q_proj", (q_rows, hidden), heads),
        "attn_k": ("self_attn.k_proj", (kv_rows, hidden), kv_heads),
        "attn_v": ("self_attn.v_proj", (kv_rows, hidden), 0),
        "attn_output": ("self_attn.o_proj", (hidden, q_rows), 0),
        "ffn_norm": ("post_attention_layernorm", (hidden,), 0),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), 0),
        "ffn_up": ("mlp.up_proj", (inner, hidden), 0),
        "ffn_down": ("mlp.down_proj", (hidden, inner), 0),
    }
    names: dict[str, tuple[str, Shape, int]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden), 0),
        "output_norm.weight": ("model.norm.weight", (hidden,), 0),
    }
    for layer in range(config["num_hidden_layers"]):
        for ours, (theirs, shape, unpermute) in block.items():
            names[f"blk.{layer}.{ours}.weight"] = (f"model.layers.{layer}.{theirs}.weight", shape, unpermute)
    return names


def _weights(
    tensors: Mapping[str, Any], config: Mapping[str, Any], on_progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    expected = _expected(config)
    heads = {ours: unpermute for ours, (_, _, unpermute) in expected.items()}

    def changed(ours: str, weight: torch.Tensor) -> torch.Tensor:
        return unpermute_rotary(weight, heads[ours]) if heads[ours] else weight

    named = {ours: (theirs, shape) for ours, (theirs, shape, _) in expected.items()}
    return convert_tensors(tensors, named, changed, on_progress)


def convert_tensors(
    tensors: Mapping[str, Any],
    expected: Mapping[str, tuple[str, Shape]],
    changed: Callable[[str, torch.Tensor], torch.Tensor],
    on_progress: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    """Returns all `expected` tensors (GGUF name -> Hugging Face name and shape), `changed` and in bf16."""
    if odd := sorted(expected.keys() ^ tensors.keys()):
        raise ValueError(f"{len(odd)} tensors missing or unknown, such as {odd[0]}")
    total, done = sum(int(tensor.n_elements) for tensor in tensors.values()), 0
    weights: dict[str, torch.Tensor] = {}
    for ours, (theirs, shape) in expected.items():
        weight = changed(ours, dequantize_tensor(tensors[ours], shape))
        weights[theirs] = weight.bfloat16().contiguous()
        done += weight.numel()
        on_progress(done, total)
    return weights


def dequantize_tensor(tensor: Any, shape: Shape) -> torch.Tensor:
    import torch
    from gguf.quants import dequantize

    # A copy, since F32 tensors are read-only views of the file.
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if tuple(weight.shape) != shape:
        raise ValueError(f"{tensor.name} has shape {tuple(weight.shape)}, not {shape}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"{tensor.name} has values that are not finite")
    return weight


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as err:  # for example a full disk
        raise OSError(str(err)) from err


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
