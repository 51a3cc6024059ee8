"""Recipes: the target, the data and the fields of `TrainConfig` of a run in one flat TOML file; and what a run reads.

Keys and types come from `TrainConfig`, so recipes, flags of `peagle train` and defaults cannot differ. Flags override
the file, the file overrides the defaults.

    target = "smollm2-135m"
    data = ["responses.jsonl"]
    method = "p-eagle"
    lr = 1e-3
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from peagle.checkpoints.target import eos_ids, has_tokenizer, read_target_config
from peagle.config import DecoderConfig, TrainConfig
from peagle.data.batches import ResponseDataset, load_responses
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_target
from peagle.training.optimizer import Schedule

FIELD_TYPES = {"target": str, "data": tuple[str, ...], **get_type_hints(TrainConfig)}
TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
# Fields that may differ when a run resumes: its length, its output, and how it uses memory.
RESUMABLE = {"steps", "minutes", "epochs", "log_every", "save_minutes", "validation_every", "validation_tokens"}
RESUMABLE |= {"chunk_size", "activation_checkpointing", "shard_target"}


@dataclass(frozen=True)
class Recipe:
    data: tuple[str, ...]
    target: str = DEFAULT_TARGET
    train: TrainConfig = TrainConfig()

    def values(self) -> dict[str, Any]:
        """The flat keys of a file, without those that are None."""
        given = {name: value for name, value in vars(self.train).items() if value is not None}
        lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
        return {"target": self.target, "data": list(self.data), **given, **lists}

    def changes(self, now: Self) -> list[str]:
        """The fields in which `now` differs so that it cannot resume a run of this recipe."""
        old, new = self.values(), now.values()
        changed = [name for name in {**old, **new} if name not in RESUMABLE and old.get(name) != new.get(name)]
        return [f"{name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}" for name in changed]

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
    given = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in FIELD_TYPES:
            closest = difflib.get_close_matches(name, FIELD_TYPES, 1, 0.0)[0]
            raise UserError(f"{file}: unknown key {key!r}; the closest key is {closest!r}")
        given[name] = parse_value(name, value, f"{file}: {key}")
    return given


def parse_value(name: str, value: Any, source: str) -> Any:
    """Parses a value of a file or of a flag, which is text for fields with several types."""
    if name == "data":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{source} = {value!r}: must be a file or a list of files")
        return tuple(value)
    kinds = [kind for kind in _alternatives(FIELD_TYPES[name]) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is tuple:
            return _parse_integers(value, source)
        if kind is int and isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind or value == kind:
            return value
    raise UserError(f"{source} {value!r}: must be {' or '.join(TYPE_NAMES.get(k, k) for k in kinds)}")


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


@dataclass(frozen=True)
class TrainingInputs:
    """Everything a run reads before it loads a model."""

    recipe: Recipe
    target_folder: Path
    target: DecoderConfig
    chat: ChatFormat | None
    train_set: ResponseDataset
    validation_set: ResponseDataset
    token_counts_V: Tensor  # occurrences of each token in all files, prompts included
    eos_ids: frozenset[int]

    @property
    def response_share(self) -> float:
        """Of the tokens of the files."""
        spans = self.train_set.span_S2
        return float((spans[:, 1] - spans[:, 0]).sum() / max(len(self.train_set.token_T), 1))

    def schedule(self, num_gpus: int) -> Schedule:
        cfg = self.recipe.train
        step_tokens = cfg.batch_tokens * cfg.gradient_accumulation_steps * num_gpus
        return Schedule(cfg, self.train_set.num_tokens / step_tokens)

    def validation_prompts(self) -> list[list[int]]:
        """The distinct first prompts of the validation conversations."""
        cfg = self.recipe.train
        max_prompt_tokens = min(self.target.max_positions - cfg.validation_tokens, cfg.max_seq_len)
        prompts = {e.token_ids[: e.spans[0][0]] for e in self.validation_set}
        return [list(p) for p in sorted(prompts) if 0 < len(p) <= max_prompt_tokens]


def load_training_inputs(recipe: Recipe) -> TrainingInputs:
    cfg = recipe.train
    if not recipe.data:
        raise UserError("data: name files of responses, as `peagle data` writes them")
    if cfg.hidden_states_cache is not None and cfg.shard_target:
        raise UserError(
            f"--hidden-states-cache {cfg.hidden_states_cache}: one process fills the cache and cannot run a target "
            "sharded with --shard-target; remove one of them, or use --vllm-hidden-states"
        )
    folder = resolve_target(recipe.target)
    target = read_target_config(folder, cfg.target_head_only)
    template = Path(cfg.chat_template) if cfg.chat_template is not None else None
    chat = load_chat_format(folder, template, cfg.raw) if has_tokenizer(folder) else None
    dataset = load_responses(recipe.data, chat, target.vocab_size)
    train_set, validation_set = dataset.split_validation(min(cfg.validation_size, len(dataset) // 5), cfg.seed)
    counts_V = torch.from_numpy(np.bincount(dataset.token_T, minlength=target.vocab_size))
    return TrainingInputs(recipe, folder, target, chat, train_set, validation_set, counts_V, eos_ids(folder))


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]
