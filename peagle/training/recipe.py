"""A training run in one TOML file: its target, its data and `TrainConfig`'s fields, flat.

Knows nothing about training. What a key may be is read from `TrainConfig`, so a recipe, the flags of `peagle train`
and the defaults cannot drift apart. Flags go before the file, the file before the defaults.

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

SETTINGS = get_type_hints(TrainConfig)
# What a run may change when it goes on: how long it is, what it prints, how it fits into memory.
FREE = {"steps", "minutes", "epochs", "log_every", "save_minutes", "measure_every", "measure_tokens", "chunk_rows"}
FREE |= {"checkpoint_layers", "shard_target"}


@dataclass(frozen=True)
class Recipe:
    data: tuple[str, ...]
    target: str = DEFAULT_TARGET
    train: TrainConfig = TrainConfig()

    def values(self) -> dict[str, Any]:
        """Flat, as a file has them; what is None is left out."""
        own = {"target": self.target, "data": list(self.data)}
        train = {f.name: getattr(self.train, f.name) for f in fields(TrainConfig)}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in train.items()}
        return {**own, **{name: value for name, value in listed.items() if value is not None}}

    def toml(self) -> str:
        # TOML's texts are JSON's, but for surrogate pairs and DEL
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in self.values().items()}
        return "".join(f"{name} = {text}\n" for name, text in texts.items()).replace("\x7f", "\\u007f")


def make_recipe(file: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """`flags` that were not given are None."""
    given = read_values(file) if file is not None else {}
    for name, value in flags.items():
        if value is not None and value != ():
            given[name] = parsed(name, value, f"--{name.replace('_', '-')}")
    data = tuple(given.pop("data", ()))
    target = given.pop("target", DEFAULT_TARGET)
    return Recipe(data, target, TrainConfig(**given))


def read_values(file: Path) -> dict[str, Any]:
    """The keys of a recipe, each of the kind its field has."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--recipe {file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"--recipe {file}: not valid TOML ({str(error).splitlines()[0]})") from None
    known = ["target", "data", *SETTINGS]
    given = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise UserError(f"{file}: unknown key {key!r}; the nearest is {near!r}")
        if name in given:
            raise UserError(f"{file}: {name!r} is there twice, with - and with _")
        given[name] = parsed(name, value, f"{file}: {key}")
    return given


def parsed(name: str, value: Any, asked: str) -> Any:
    """A value of a file or of the command line, which knows only text where a field has several kinds."""
    if name == "target":
        return _expect(value, str, asked, "text")
    if name == "data":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{asked} = {value!r}: must be a file or a list of files")
        return tuple(value)
    kinds = [kind for kind in _alternatives(SETTINGS[name]) if kind is not type(None)]
    if value == "auto" and "auto" in kinds:
        return value
    for kind in kinds:
        if get_origin(kind) is tuple:
            return _integers(value, asked)
        if kind is int and isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        if kind is float and type(value) is int:
            return float(value)
        if isinstance(kind, type) and type(value) is kind:
            return value
    if all(isinstance(kind, str) for kind in kinds):  # a choice; `TrainConfig` says which there are
        return _expect(value, str, asked, " or ".join(kinds))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise UserError(f"{asked} {value!r}: must be {' or '.join(names.get(k, repr(k)) for k in kinds)}")


def _alternatives(kind: Any) -> list[Any]:
    """int | Literal["auto"] | None -> [int, "auto", NoneType]"""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple or not get_args(kind):
        return [kind]
    return [part for inner in get_args(kind) for part in _alternatives(inner)]


def _integers(value: Any, asked: str) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(parts, (list, tuple)) or any(isinstance(p, (bool, float)) for p in parts):
            raise ValueError
        return tuple(int(p) for p in parts)
    except ValueError:
        raise UserError(f"{asked} {value!r}: must be whole numbers, by commas") from None


def _expect(value: Any, kind: type, asked: str, want: str) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"{asked} {value!r}: must be {want}")
    return value


def differences(before: Recipe, now: Recipe) -> list[str]:
    """What makes `now` another run than `before`, a line each."""
    old, new = before.values(), now.values()
    changed = [name for name in {**old, **new} if name not in FREE and old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}" for name in changed]
