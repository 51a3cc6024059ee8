"""Target shapes for compare_vllm.py: published configurations with random weights and synthetic acceptance.

A target is its published config.json, a drafter the published head's shape: 4 layers for P-EAGLE, 1 for EAGLE-3, both
as wide as the target. Weights are random, so acceptance is synthetic: draft token i is accepted with the same
unconditional probability in both engines.

Random weights need care in mixture-of-experts models. With plain noise the rows of a deep model become similar and
choose the same experts: 8 rows of GPT-OSS then read 5 of 32 experts per layer where 8 different tokens read 21, and a
decode step looks three times cheaper than it is. `spread_weights` keeps rows different in both engines.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PUBLISHED = Path(__file__).resolve().parent / "published"

LLAMA_8B: Json = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 128254,
    "eos_token_id": 128255,
    "torch_dtype": "bfloat16",
}
TINY: Json = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Shape:
    """One target, and the acceptance that is drawn for its drafters."""

    name: str
    label: str
    mask_token_id: int
    scale: float  # acceptance of draft token i: exp(-(i / scale) ** exponent)
    exponent: float
    published_lengths: dict[int, float]  # acceptance length by K; the curve is shifted to meet these exactly
    gpu_gb: float  # per engine: weights, KV cache, activations
    tiny: Json  # fields of the toy version
    config: Json | None = None  # None: in published/
    rates: tuple[float, ...] | None = None  # acceptance of draft tokens 1, 2, ...; None: the curve above
    drafter_owns_tables: bool = True  # embeddings and LM head of its own, as the published heads have

    @property
    def published_config(self) -> Json:
        if self.config is not None:
            return self.config
        values: Json = json.loads((PUBLISHED / f"{self.name}.json").read_text())
        return values

    @property
    def drafter_mlp(self) -> int:
        """A dense MLP as wide as the experts that one token uses."""
        config = self.published_config
        width: int = config.get("moe_intermediate_size", config["intermediate_size"])
        return width * int(config.get("num_experts_per_tok", 1))

    def acceptance_rates(self, k: int) -> tuple[float, ...]:
        """Unconditional acceptance of draft tokens 1 to k."""
        if self.rates is not None:
            assert k <= len(self.rates)
            return self.rates[:k]
        scale = self.scale
        if k in self.published_lengths:
            low, high = 0.1, 100.0
            while high - low > 1e-9:
                scale = (low + high) / 2
                too_long = 1 + sum(self._curve(scale, k)) > self.published_lengths[k]
                low, high = (low, scale) if too_long else (scale, high)
        return self._curve(scale, k)

    def _curve(self, scale: float, k: int) -> tuple[float, ...]:
        return tuple(math.exp(-((i / scale) ** self.exponent)) for i in range(1, k + 1))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-8b",
            label="Llama-3.1-8B",
            mask_token_id=128253,
            scale=0.0,
            exponent=0.0,
            published_lengths={},
            gpu_gb=28,
            tiny=TINY | {"num_hidden_layers": 5, "intermediate_size": 160},
            config=LLAMA_8B,
            rates=(0.72, 0.52, 0.38, 0.28, 0.21, 0.16, 0.13),  # acceptance length 3.40 at K=7, 2.62 at K=3
            drafter_owns_tables=False,
        ),
        Shape(
            name="gpt-oss-20b",
            label="GPT-OSS-20B",
            mask_token_id=201020,
            scale=3.06,
            exponent=1.10,
            published_lengths={3: 2.75, 5: 3.01, 7: 3.30, 10: 3.46},  # MT-Bench
            gpu_gb=25,
            tiny=TINY
            | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2}
            | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 10}
            | {"num_hidden_layers": 20, "quantization_config": None},
        ),
        Shape(
            name="qwen3-coder-30b-a3b",
            label="Qwen3-Coder-30B-A3B",
            mask_token_id=151868,
            scale=7.82,
            exponent=1.42,
            published_lengths={4: 4.30, 10: 6.66, 18: 7.51},  # HumanEval
            gpu_gb=70,
            tiny=TINY
            | {"num_hidden_layers": 8, "intermediate_size": 96, "moe_intermediate_size": 32}
            | {"num_experts": 8, "num_experts_per_tok": 2},
        ),
    )
}
DRAFTER_LAYERS = {"p-eagle": 4, "eagle3": 1}


def write_checkpoints(
    name: str, tiny: bool, folder: Path, config: Json | None = None, mask_token_id: int | None = None
) -> dict[str, str]:
    """Writes the target and both drafters; returns folder paths by 'target', 'p-eagle' and 'eagle3'.

    `config` and `mask_token_id` replace values of the shape.
    """
    import torch

    from peagle.checkpoints.drafter import build_drafter_config, drafter_layout, plain_tensor_name
    from peagle.checkpoints.target import read_target_config
    from peagle.config import DrafterConfig, LayerConfig, RopeConfig

    head_rope = RopeConfig(theta=500000.0, rope_type="llama3", factor=8.0, original_max_positions=8192)
    shape = SHAPES[name]
    values = shape.published_config | (shape.tiny if tiny else {}) | (config or {})
    if tiny:
        values |= {"eos_token_id": values["vocab_size"] - 1}
        values = {key: value for key, value in values.items() if value is not None and key != "pad_token_id"}
    target_folder = folder / "target"
    _write_config(target_folder, values)
    (target_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": values["eos_token_id"]}))
    target = read_target_config(target_folder)
    layer = target.layer
    mlp = 160 if tiny else shape.drafter_mlp
    folders = {"target": str(target_folder)}
    for method, num_layers in DRAFTER_LAYERS.items():
        mask_id = target.vocab_size - 3 if tiny else mask_token_id or shape.mask_token_id
        cfg = DrafterConfig(
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            num_layers=num_layers,
            layer=LayerConfig(layer.hidden_size, mlp, layer.num_heads, layer.num_kv_heads, layer.head_dim, 1e-5),
            rope=head_rope if shape.drafter_owns_tables else target.rope,
            max_positions=target.max_positions,
            target_hidden_size=layer.hidden_size,
            aux_layer_ids=target.default_aux_layer_ids,
            mask_token_id=mask_id if method == "p-eagle" else None,
            own_embeddings=shape.drafter_owns_tables,
            own_head=shape.drafter_owns_tables,
        )
        shapes = {plain_tensor_name(n): slot.shape for n, slot in drafter_layout(cfg).items()}
        _write_empty_checkpoint(folder / method, build_drafter_config(cfg, torch.bfloat16), shapes)
        folders[method] = str(folder / method)
    return folders


def _write_config(folder: Path, config: Json) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_empty_checkpoint(folder: Path, config: Json, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file with a full header over a sparse body: loaders check names and shapes, not values."""
    _write_config(folder, config)
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# Standard deviation of a weight matrix, in units of 1 / sqrt(input width). A weak o_proj leaves each row dominated by
# its own token; a sharp drafter attention makes mask rows, which differ by position only, draft different tokens.
TARGET_SCALES = {"o_proj": 0.05}
DRAFTER_SCALES = {"qkv_proj": 5.0}
MXFP4_WEIGHTS = ("w13_weight", "w2_weight")
MXFP4_EXPONENT = 120  # uniform four-bit values times 2**-7 have a standard deviation of 0.023
EMBEDDINGS = ("embed_tokens.weight", "embedding.weight", "mask_hidden")


def spread_weights(model: Any, is_drafter: bool = False) -> None:
    """Sets weights in place, so captured CUDA graphs stay valid. Names are those that peagle and vLLM share."""
    import torch

    scales = DRAFTER_SCALES if is_drafter else TARGET_SCALES
    generator = torch.Generator(next(model.parameters()).device).manual_seed(int(is_drafter))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if parameter.element_size() == 1 or not parameter.is_floating_point():
                if last in MXFP4_WEIGHTS:
                    parameter.view(torch.uint8).random_(0, 256, generator=generator)
                elif last in [f"{weight}_scale" for weight in MXFP4_WEIGHTS]:
                    parameter.view(torch.uint8).fill_(MXFP4_EXPONENT)
            elif name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(EMBEDDINGS):
                parameter.normal_(0, 1, generator=generator)
            elif parameter.dim() < 2 or name.endswith("bias"):
                parameter.zero_()
            else:
                part = name.split(".")[-2] if "." in name else name
                std = scales.get(part, 1.0) * parameter.shape[-1] ** -0.5
                parameter.normal_(0, std, generator=generator)


def spread_packed_experts(model: Any) -> None:
    """The same for MXFP4 experts that vLLM keeps in tensors of triton_kernels, which are no parameters."""
    import torch

    with torch.inference_mode():
        for module in model.modules():
            for name in MXFP4_WEIGHTS:
                weight = getattr(module, name, None)
                if weight is None or isinstance(weight, torch.Tensor):
                    continue
                method = getattr(module.quant_method, "old_quant_method", module.quant_method)
                scale = getattr(method, name.replace("weight", "precision_config")).weight_scale
                weight.storage.data.view(torch.uint8).random_(0, 256)
                scale.storage.data.view(torch.uint8).fill_(MXFP4_EXPONENT)


class SpreadWorker:
    """Extension of vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any

    def spread(self) -> None:
        runner = self.model_runner
        # The drafter first: where it has no embeddings or head it shares the target's.
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if proposer is not None:
            spread_weights(proposer.model, is_drafter=True)
        spread_weights(runner.get_model())
        spread_packed_experts(runner.get_model())
