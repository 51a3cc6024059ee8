"""Recipes, flags and defaults say the same: one list of settings, read three ways."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many
from typer.testing import CliRunner

import peagle.cli  # noqa: F401  the verbs
from peagle.cli.app import app
from peagle.config import OBJECTIVES, TrainConfig
from peagle.errors import UserError
from peagle.training.recipe import FREE, Recipe, differences, make_recipe

ROOT = Path(__file__).parents[2]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    sizes, numbers = st.integers(1, 10**6), st.floats(1e-12, 1e6)
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    settings: dict[str, Any] = {
        "method": draw(st.sampled_from(["p-eagle", "eagle3"])),
        "objective": draw(st.sampled_from(OBJECTIVES)),
        "init": draw(names),
        "aux_hidden_states": draw(st.none() | st.sets(st.integers(0, 99), min_size=1).map(lambda s: tuple(sorted(s)))),
        "chunk_rows": draw(st.just("auto") | sizes),
        "layers": draw(st.none() | sizes),
        "minutes": draw(st.none() | numbers),
        "lr": draw(numbers),
        "rate": draw(st.floats(1e-6, 1.0)),
        "fc_norm": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**60)),
        "cache": draw(st.none() | names),
    }
    return Recipe(tuple(draw(st.lists(names, max_size=3))), draw(names), TrainConfig(**settings))


@many(200)
@given(recipes())
def test_written_and_read_again(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    file = tmp_path_factory.getbasetemp() / "recipe.toml"
    file.write_text(recipe.toml(), encoding="utf-8")
    assert make_recipe(file, {}) == recipe
    assert differences(recipe, make_recipe(file, {})) == []
    # the same by flags, which are text where a setting has several kinds
    texts = {
        name: ",".join(map(str, value)) if name == "aux_layer_ids" else str(value) if name == "chunk_rows" else value
        for name, value in recipe.values().items()
    }
    assert make_recipe(None, texts) == recipe


def test_flags_go_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('data = "a.jsonl"\nlr = 1\nsave-minutes = 2\nmethod = "eagle3"\n')
    made = make_recipe(file, {"lr": 0.5, "steps": None, "data": (), "target": None})
    assert (made.data, made.train.lr, made.train.save_minutes, made.train.num_layers) == (("a.jsonl",), 0.5, 2.0, 1)
    assert made.train.steps is None and made.train.clip == TrainConfig().clip


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("learning_rate = 1e-3\n", "unknown key 'learning_rate'; the nearest is 'rate'"),
        ("batch_token = 8\n", "unknown key 'batch_token'; the nearest is 'batch_tokens'"),
        ("wieght_decay = 0\n", "unknown key 'wieght_decay'; the nearest is 'weight_decay'"),
        ("[train]\nlr = 1e-3\n", "unknown key 'train'"),
        ("lr = 'fast'\n", "lr 'fast': must be a number"),
        ("steps = 1.5\n", "steps 1.5: must be a whole number"),
        ("steps = true\n", "steps True: must be a whole number"),
        ("fc_norm = 1\n", "fc_norm 1: must be true or false"),
        ("aux_hidden_states = '2,x'\n", "aux_hidden_states '2,x': must be whole numbers, by commas"),
        ("aux_hidden_states = [1.5]\n", "must be whole numbers"),
        ("aux_hidden_states = [2, 2]\n", "must be different layers"),
        ("chunk_rows = 'many'\n", "chunk_rows 'many': must be a whole number or 'auto'"),
        ("method = 'eagle'\n", "--method eagle: must be p-eagle or eagle3"),
        ("method = 3\n", "must be p-eagle or eagle3"),
        ("data = [1]\n", "must be a file or a list of files"),
        ("rate = 0\n", "--rate 0.0: must be above 0 and at most 1"),
        ("max_length = 99999\n", "at most --batch-tokens"),
        ("lr = 1\nlr = 2\n", "not valid TOML"),
        ("save-minutes = 1\nsave_minutes = 2\n", "there twice"),
    ],
)
def test_wrong_recipes_are_named(tmp_path: Path, text: str, want: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        make_recipe(file, {})
    assert want in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        make_recipe(tmp_path / "none.toml", {})


def test_what_makes_another_run() -> None:
    """Each setting, changed alone: free ones do not, all others do and are named."""
    other = {"method": "eagle3", "objective": "ce", "decay": "linear", "dtype": "float32", "cache_dtype": "fp8"}
    other |= {
        "chunk_rows": 7,
        "aux_layer_ids": (1, 2),
        "max_length": 5,
        "batch_tokens": 8192,
        "rate": 0.25,
        "depth_decay": 0.25,
    }
    other |= {"optimizer": "muon"}
    before = Recipe(("d",))
    for f in fields(TrainConfig):
        value = other.get(f.name)
        if value is None:
            kind = str(f.type)
            value = (not f.default) if kind == "bool" else "x" if "str" in kind else (f.default or 0) / 2 + 0.4
            value = 7 if "int" in kind else value
        now = Recipe(("d",), before.target, TrainConfig(**{f.name: value}))
        found = differences(before, now)
        assert (found == []) == (f.name in FREE), f.name
        assert all(line.startswith(f"{f.name} was ") for line in found)
    assert differences(before, Recipe(("e",))) == ["data was ['d'], is ['e']"]


def test_recipes_that_come_with_it() -> None:
    found = sorted((ROOT / "recipes").glob("*.toml"))
    assert {f.name for f in found} >= {"smollm2-p-eagle.toml", "smollm2-eagle3.toml", "llama-3.1-8b-p-eagle.toml"}
    for file in found:
        made = make_recipe(file, {})
        assert made.train.method in file.stem or made.train.method == "eagle3"


def test_every_setting_is_a_flag_with_its_default() -> None:
    for verb in ("train", "fit"):
        said = "".join(CliRunner().invoke(app, [verb, "--help"]).output.split())  # lines break anywhere
        for f in fields(TrainConfig):
            assert f"--{f.name.replace('_', '-')}" in said, f.name
            assert "".join(f.metadata["help"].split()) in said
        assert f"[default:({TrainConfig().lr})]" in said and "Examples:" in said
