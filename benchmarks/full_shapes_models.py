"""The two targets of `full_shapes.py`: what their makers publish of them, of their heads and of how far drafts hold.

Their config.json, as published, lies in `published/`. Heads are described by what is public of them: 4 layers, the
target's width and heads, three auxiliary layers, tables of their own; their MLP's width is that of the experts a token
goes to. Knows no engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PUBLISHED = Path(__file__).resolve().parent / "published"


@dataclass(frozen=True)
class Model:
    name: str
    label: str
    mask_id: int
    reach: float
    bend: float
    lengths: dict[int, float]  # published acceptance lengths by K
    drafting: tuple[str, ...]
    tok_s: dict[tuple[str, str], float]  # published on an H200, by drafting and concurrency
    tiny: Json  # fields of a toy of it
    cache_gb: float = 4.2

    @cached_property
    def config(self) -> Json:
        """As published."""
        values: Json = json.loads((PUBLISHED / f"{self.name}.json").read_text())
        return values

    @property
    def head_mlp(self) -> int:
        """As wide as the experts a token goes to."""
        width: int = self.config.get("moe_intermediate_size", self.config["intermediate_size"])
        return width * int(self.config["num_experts_per_tok"])

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
_MODELS = (
    Model(
        name="gpt-oss-20b",
        label="GPT-OSS-20B",
        mask_id=201020,
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
    Model(
        name="qwen3-coder-30b-a3b",
        label="Qwen3-Coder-30B-A3B",
        mask_id=151936 - (201088 - 201020),  # its own is not known here; as far from the end as GPT-OSS's
        reach=7.82,
        bend=1.42,
        lengths={4: 4.30, 10: 6.66, 18: 7.51},
        drafting=("p7", "none", "e3", "p3", "p5", "p10"),
        tok_s={},
        tiny=_TINY | {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8},
    ),
)
MODELS = {model.name: model for model in _MODELS}


def config_of(model: Model, tiny: bool) -> Json:
    values = model.config | (model.tiny if tiny else {})
    if tiny:
        values |= {"eos_token_id": values["vocab_size"] - 1}
        values = {name: value for name, value in values.items() if value is not None and name != "pad_token_id"}
    return values
