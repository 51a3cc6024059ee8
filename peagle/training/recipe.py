"""Recipes: the target, the data and the fields of `TrainConfig` of a run in one flat TOML file.

Keys and types come from `TrainConfig`, so recipes, flags of `peagle train` and defaults cannot differ. Flags override
the file, the file overrides the defaults.

    target = "smollm2-135m"
    data = ["responses.jsonl"]
    method = "p-eagle"
    lr = 1e-3
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from peagle.config import TrainConfig
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

FIELD_TYPES = get_type_hints(TrainConfig)
TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
# Fields that may differ when a run resumes: its length, its output, and how it uses memory.
RESUMABLE = {"steps", "minutes", "epochs", "log_every", "save_minutes", "validation_every", "validation_tokens"}
RESUMABLE |= {"chunk_size", "activation_checkpointing", "shard_target"}
# Keys of peagle 0.1 recipes and their replacements.
RENAMED = {
    "layers": "num_layers",
    "mlp_width": "intermediate_size",
    "taps": "aux_layer_ids",
    "own_embeddings": "train_embeddings",
    "own_head": "train_lm_head",
    "draft_vocab": "draft_vocab_size",
    "depths": "num_depths",
    "rate": "down_sample_ratio",
    "max_length": "max_seq_len",
    "accumulate": "gradient_accumulation_steps",
    "warmup": "warmup_steps",
    "decay": "lr_schedule",
    "clip": "max_grad_norm",
    "chunk_rows": "chunk_size",
    "graphs": "cuda_graphs",
    "checkpoint_layers": "activation_checkpointing",
    "cache": "hidden_states_cache",
    "cache_dtype": "hidden_states_dtype",
    "vllm_states": "vllm_hidden_states",
    "held_out": "validation_size",
    "measure_every": "validation_every",
    "measure_tokens": "validation_tokens",
    "by_reach": "loss_weighting",
    "by_start": "loss_weighting",
    "by_value": "loss_weighting",
    "sharpen": "loss_weighting",
}


@dataclass(frozen=True)
class Recipe:
    data: tuple[str, ...]
    target: str = DEFAULT_TARGET
    train: TrainConfig = TrainConfig()

    def values(self) -> dict[str, Any]:
        """The flat keys of a file, without those that are None."""
        train = {f.name: getattr(self.train, f.name) for f in fields(TrainConfig)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in train.items()}
        set_values = {name: value for name, value in lists.items() if value is not None}
        return {"target": self.target, "data": list(self.data), **set_values}

    def toml(self) -> str:
        # TOML strings are JSON strings, except for surrogate pairs and DEL
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in self.values().items()}
        return "".join(f"{name} = {text}\n" for name, text in texts.items()).replace("\x7f", "\\u007f")


def make_recipe(file: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """Merges a recipe file with flags; flags that were not given are None."""
    given = read_recipe_values(file) if file is not None else {}
    for name, value in flags.items():
        if value is not None and value != ():
            given[name] = parse_value(name, value, f"--{name.replace('_', '-')}")
    data = tuple(given.pop("data", ()))
    target = given.pop("target", DEFAULT_TARGET)
    return Recipe(data, target, TrainConfig(**given))


def read_recipe_values(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--recipe {file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"--recipe {file}: not valid TOML ({str(error).splitlines()[0]})") from None
    known = ["target", "data", *FIELD_TYPES]
    given = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name in RENAMED:
            raise UserError(f"{file}: {key!r} was replaced by {RENAMED[name]!r}")
        if name not in known:
            closest = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise UserError(f"{file}: unknown key {key!r}; the closest key is {closest!r}")
        if name in given:
            raise UserError(f"{file}: {name!r} is given twice, with - and with _")
        given[name] = parse_value(name, value, f"{file}: {key}")
    return given


def parse_value(name: str, value: Any, source: str) -> Any:
    """Parses a value of a file or of a flag, which is text for fields with several types."""
    if name == "target":
        return _require_type(value, str, source, "text")
    if name == "data":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{source} = {value!r}: must be a file or a list of files")
        return tuple(value)
    kinds = [kind for kind in _alternatives(FIELD_TYPES[name]) if kind is not type(None)]
    if value == "auto" and "auto" in kinds:
        return value
    for kind in kinds:
        if get_origin(kind) is tuple:
            return _parse_integers(value, source)
        if kind is int and isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        if kind is float and type(value) is int:
            return float(value)
        if isinstance(kind, type) and type(value) is kind:
            return value
    if all(isinstance(kind, str) for kind in kinds):  # `TrainConfig` checks the choice
        return _require_type(value, str, source, " or ".join(kinds))
    raise UserError(f"{source} {value!r}: must be {' or '.join(TYPE_NAMES.get(k, repr(k)) for k in kinds)}")


def _alternatives(kind: Any) -> list[Any]:
    """int | Literal["auto"] | None -> [int, "auto", NoneType]"""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple or not get_args(kind):
        return [kind]
    return [part for inner in get_args(kind) for part in _alternatives(inner)]


def _parse_integers(value: Any, source: str) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(parts, (list, tuple)) or any(isinstance(p, (bool, float)) for p in parts):
            raise ValueError
        return tuple(int(p) for p in parts)
    except ValueError:
        raise UserError(f"{source} {value!r}: must be integers, comma-separated") from None


def _require_type(value: Any, kind: type, source: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"{source} {value!r}: must be {expected}")
    return value


def recipe_differences(before: Recipe, now: Recipe) -> list[str]:
    """The fields in which `now` differs from `before` so that it cannot resume that run."""
    old, new = before.values(), now.values()
    changed = [name for name in {**old, **new} if name not in RESUMABLE and old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}" for name in changed]
