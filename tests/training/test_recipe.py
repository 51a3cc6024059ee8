"""Recipes, flags and defaults of `TrainConfig` agree."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.cli import build_command
from peagle.config import OBJECTIVES, TrainConfig
from peagle.errors import UserError
from peagle.training.recipe import RESUMABLE, Recipe, make_recipe

ROOT = Path(__file__).parents[2]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    sizes, numbers = st.integers(1, 10**6), st.floats(1e-12, 1e6)
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    settings: dict[str, Any] = {
        "method": draw(st.sampled_from(["p-eagle", "eagle3"])),
        "objective": draw(st.sampled_from(OBJECTIVES)),
        "init": draw(names),
        "aux_layer_ids": draw(st.none() | st.sets(st.integers(0, 99), min_size=1).map(lambda s: tuple(sorted(s)))),
        "chunk_size": draw(st.just("auto") | sizes),
        "num_layers": draw(st.none() | sizes),
        "minutes": draw(st.none() | numbers),
        "lr": draw(numbers),
        "down_sample_ratio": draw(st.floats(1e-6, 1.0)),
        "fc_norm": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**60)),
        "hidden_states_cache": draw(st.none() | names),
    }
    return Recipe(tuple(draw(st.lists(names, max_size=3))), draw(names), TrainConfig(**settings))


@many(200)
@given(recipes())
def test_written_and_read_again(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    file = tmp_path_factory.getbasetemp() / "recipe.toml"
    file.write_text(recipe.toml(), encoding="utf-8")
    assert make_recipe(file, {}) == recipe
    assert recipe.changes(make_recipe(file, {})) == []
    # the same by flags, which are text where a setting has several kinds
    texts = {
        name: ",".join(map(str, value)) if name == "aux_layer_ids" else str(value) if name == "chunk_size" else value
        for name, value in recipe.values().items()
    }
    assert make_recipe(None, texts) == recipe


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('data = "a.jsonl"\nlr = 1\nsave-minutes = 2\nmethod = "eagle3"\n')
    made = make_recipe(file, {"lr": 0.5, "steps": None, "data": (), "target": None})
    assert (made.data, made.train.lr, made.train.save_minutes) == (("a.jsonl",), 0.5, 2.0)
    assert (made.train.method, made.train.num_depths) == ("eagle3", 4)
    assert made.train.steps is None and made.train.max_grad_norm == TrainConfig().max_grad_norm


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("learning_rate = 1e-3\n", "unknown key 'learning_rate'; the closest key is "),
        ("batch_token = 8\n", "unknown key 'batch_token'; the closest key is 'batch_tokens'"),
        ("wieght_decay = 0\n", "unknown key 'wieght_decay'; the closest key is 'weight_decay'"),
        ("[train]\nlr = 1e-3\n", "unknown key 'train'"),
        ("lr = 'fast'\n", "lr 'fast': must be a number"),
        ("steps = 1.5\n", "steps 1.5: must be an integer"),
        ("steps = true\n", "steps True: must be an integer"),
        ("fc_norm = 1\n", "fc_norm 1: must be true or false"),
        ("aux_layer_ids = '2,x'\n", "aux_layer_ids '2,x': must be integers"),
        ("aux_layer_ids = [1.5]\n", "must be integers"),
        ("aux_layer_ids = [2, 2]\n", "must be distinct"),
        ("chunk_size = 'many'\n", "chunk_size 'many': must be an integer or auto"),
        ("method = 'eagle'\n", "method 'eagle': must be p-eagle or eagle3"),
        ("method = 3\n", "must be p-eagle or eagle3"),
        ("data = [1]\n", "must be a file or a list of files"),
        ("down_sample_ratio = 0\n", "--down-sample-ratio 0.0: must be above 0 and at most 1"),
        ("max_seq_len = 99999\n", "at most --batch-tokens"),
        ("lr = 1\nlr = 2\n", "not valid TOML"),
    ],
)
def test_errors_name_key_and_problem(tmp_path: Path, text: str, want: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        make_recipe(file, {})
    assert want in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        make_recipe(tmp_path / "none.toml", {})


def test_fields_that_a_resumed_run_must_keep() -> None:
    """Changes each field alone."""
    other = {
        "method": "eagle3",
        "objective": "ce",
        "lr_schedule": "linear",
        "dtype": "float32",
        "hidden_states_dtype": "fp8",
    }
    other |= {
        "chunk_size": 7,
        "aux_layer_ids": (1, 2),
        "max_seq_len": 5,
        "batch_tokens": 8192,
        "down_sample_ratio": 0.25,
        "depth_decay": 0.25,
    }
    other |= {"optimizer": "muon", "loss_weighting": "uniform"}
    before = Recipe(("d",))
    for f in fields(TrainConfig):
        value = other.get(f.name)
        if value is None:
            kind = str(f.type)
            value = (not f.default) if kind == "bool" else "x" if "str" in kind else (f.default or 0) / 2 + 0.4
            value = 7 if "int" in kind else value
        now = Recipe(("d",), before.target, TrainConfig(**{f.name: value}))
        found = before.changes(now)
        assert (found == []) == (f.name in RESUMABLE), f.name
        assert all(line.startswith(f"{f.name} was ") for line in found[:1])  # the method changes num_depths too
    assert before.changes(Recipe(("e",))) == ["data was ['d'], is ['e']"]


def test_shipped_recipes() -> None:
    found = sorted((ROOT / "recipes").glob("*.toml"))
    assert {f.name for f in found} >= {"smollm2-p-eagle.toml", "smollm2-eagle3.toml", "llama-3.1-8b-p-eagle.toml"}
    for file in found:
        made = make_recipe(file, {})
        assert made.train.method in file.stem or made.train.method == "eagle3"


def test_every_field_is_a_flag() -> None:
    for verb in ("train", "fit"):
        flags = {flag for parameter in build_command().commands[verb].params for flag in parameter.opts}
        assert flags >= {f"--{f.name.replace('_', '-')}" for f in fields(TrainConfig)}
