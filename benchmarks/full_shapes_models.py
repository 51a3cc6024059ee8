"""The two targets of `full_shapes.py`: what their makers publish of them, of their heads and of how far drafts hold.

A config.json is as published. Heads are described by what is public of them: 4 layers, the target's width and heads,
three tapped layers, tables of their own; their MLP's width is that of the experts a token goes to. Knows no engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Model:
    label: str
    config: Json  # as published
    eos: int
    mask_id: int
    head_mlp: int  # as wide as the experts a token goes to
    reach: float
    bend: float
    lengths: dict[int, float]  # published acceptance lengths by K
    drafting: tuple[str, ...]
    tok_s: dict[tuple[str, str], float]  # published on an H200, by drafting and concurrency
    tiny: Json  # fields of a toy of it
    cache_gb: float = 4.2

    def rates(self, k: int) -> tuple[float, ...]:
        """Of accepting draft i of k, unconditionally."""
        reach = self.reach
        if k in self.lengths:
            low, high = 0.1, 100.0
            while high - low > 1e-9:
                reach = (low + high) / 2
                low, high = (low, reach) if 1 + sum(self.curve(reach, k)) > self.lengths[k] else (reach, high)
        return self.curve(reach, k)

    def curve(self, reach: float, k: int) -> tuple[float, ...]:
        return tuple(math.exp(-((i / reach) ** self.bend)) for i in range(1, k + 1))


_TINY: Json = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320}
_TINY |= {"num_hidden_layers": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096}
MODELS = {
    "gpt-oss-20b": Model(
        label="GPT-OSS-20B",
        config={
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "pad_token_id": 199999,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 201088,
        },
        eos=200002,
        mask_id=201020,
        head_mlp=4 * 2880,
        reach=3.06,
        bend=1.10,
        lengths={3: 2.75, 5: 3.01, 7: 3.30, 10: 3.46},
        drafting=("p7", "none", "e3", "p3", "p5"),
        tok_s={("p7", "c1"): 533.0},
        tiny=_TINY
        | {"intermediate_size": 64, "num_local_experts": 4, "experts_per_token": 2, "sliding_window": 16}
        # so deep that vLLM keeps a drafter's four layers in one cache group, as it does for the real one
        | {"num_hidden_layers": 20, "layer_types": ["sliding_attention", "full_attention"] * 10}
        | {"quantization_config": None},
    ),
    "qwen3-coder-30b-a3b": Model(
        label="Qwen3-Coder-30B-A3B",
        config={
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "qkv_bias": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_qk_norm": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        eos=151645,
        mask_id=151936 - (201088 - 201020),  # its own is not known here; as far from the end as GPT-OSS's
        head_mlp=8 * 768,
        reach=7.82,
        bend=1.42,
        lengths={4: 4.30, 10: 6.66, 18: 7.51},
        drafting=("p7", "none", "e3", "p3", "p5", "p10"),
        tok_s={},
        tiny=_TINY | {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8},
    ),
}


def config_of(model: Model, tiny: bool) -> Json:
    values = model.config | (model.tiny if tiny else {})
    if tiny:
        values |= {"eos_token_id": values["vocab_size"] - 1}
        values = {name: value for name, value in values.items() if value is not None and name != "pad_token_id"}
    return values
