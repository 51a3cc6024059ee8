"""Drafter folders in the layout of AWS's published P-EAGLE heads, at reduced sizes.

The published heads are a LlamaForCausalLMEagle3 with 4 layers and 3 auxiliary layers, `ptd_token_id` as the only name
of the mask token id, their own embeddings and full-vocabulary head, llama3 rope in `rope_scaling`, bfloat16, and layer
0 as `midlayer.`. The auxiliary layer ids are at the "top" of the config, "nested" in eagle_config, or in "none" of
them (then the default layers are meant, which are the same).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

AuxLayerIdsField = Literal["top", "nested", "none"]
LAYERS = 4
POSITIONS = 512
SCALE = 1 / 64  # of the published hidden sizes


@dataclass(frozen=True)
class Head:
    """A published head, with the sizes of its target."""

    width: int
    target_layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    num_speculative_tokens: int  # of the model card

    @property
    def aux_layer_ids(self) -> list[int]:
        return [2, self.target_layers // 2, self.target_layers - 3]

    def card(self, folder: Path | str) -> str:
        """The --speculative-config of the model card."""
        return (
            f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {self.num_speculative_tokens}, '
            '"parallel_drafting": true}'
        )


HEADS = {
    "gpt-oss-20b": Head(2880, 24, 201088, 64, 8, 64, 7),
    "gpt-oss-120b": Head(2880, 36, 201088, 64, 8, 64, 5),
    "qwen3-coder-30b": Head(2048, 48, 151936, 32, 4, 128, 10),
    "gemma-4-31b": Head(5376, 60, 262144, 32, 16, 256, 7),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a written folder."""

    width: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mask_id: int


def full(head: Head) -> Shape:
    """The published sizes. The mask token id is known for gpt-oss-20b and assumed at the same offset for others."""
    mask_id = head.vocab - (201088 - 201020)
    return Shape(head.width, 4 * head.width, head.vocab, head.heads, head.kv_heads, head.head_dim, mask_id)


def small(head: Head) -> Shape:
    """Reduced sizes: a quarter of the KV heads, and a vocabulary of bytes and some unused ids."""
    ratio = head.heads // head.kv_heads
    kv_heads = max(head.kv_heads // 4, 1)
    return Shape(int(head.width * SCALE) // 16 * 16, 96, 320, min(ratio, 4) * kv_heads, kv_heads, 16, 310)


def head_config(head: Head, shape: Shape, aux_ids_field: AuxLayerIdsField = "top") -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": shape.vocab,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": shape.kv_heads,
        "ptd_token_id": shape.mask_id,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    ids = "eagle_aux_hidden_state_layer_ids"
    if aux_ids_field == "top":
        config[ids] = head.aux_layer_ids
    elif aux_ids_field == "nested":
        config["eagle_config"] = {ids: head.aux_layer_ids, "use_aux_hidden_state": True}
    return config


def head_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    width, q, kv = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocab, width),
        "fc.weight": (width, 3 * width),
        "lm_head.weight": (shape.vocab, width),
        "mask_hidden": (1, 1, 3 * width),
        "norm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
    }
    for i in range(LAYERS):
        name, entering = ("midlayer", 2 * width) if i == 0 else (f"layers.{i}", width)
        shapes |= {
            f"{name}.input_layernorm.weight": (width,),
            f"{name}.post_attention_layernorm.weight": (width,),
            f"{name}.self_attn.q_proj.weight": (q, entering),
            f"{name}.self_attn.k_proj.weight": (kv, entering),
            f"{name}.self_attn.v_proj.weight": (kv, entering),
            f"{name}.self_attn.o_proj.weight": (width, q),
            f"{name}.mlp.gate_proj.weight": (shape.mlp, width),
            f"{name}.mlp.up_proj.weight": (shape.mlp, width),
            f"{name}.mlp.down_proj.weight": (width, shape.mlp),
        }
    return shapes


def head_tensors(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in head_shapes(shape).items():
        noise = torch.randn(size, generator=rng)
        made[name] = (1 + 0.1 * noise if "norm" in name else noise * size[-1] ** -0.5 * 2).to(torch.bfloat16)
    return made


def write_head(head: Head, folder: Path, aux_ids_field: AuxLayerIdsField = "top") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head_config(head, small(head), aux_ids_field), indent=2))
    save_file(head_tensors(small(head)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_full_head(head: Head, folder: Path) -> Path:
    """Writes the published sizes: a complete header, and gigabytes of zeros in a sparse file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head_config(head, full(head)), indent=2))
    header: dict[str, Any] = {}
    end = 0
    for name, size in head_shapes(full(head)).items():
        start, end = end, end + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_target(head: Head, folder: Path) -> Path:
    """Writes a Llama with the layers of the head's target and a byte-level tokenizer."""
    from engines import write_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = small(head)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=64,
        num_hidden_layers=head.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=POSITIONS,
        eos_token_id=300,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, shape.vocab)
    return folder
