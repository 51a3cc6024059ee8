"""Every finding of the validator, provoked: a sound folder with one thing broken gives just that line."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import EOS_ID, RECIPES, drafter_folder, target_folder
from support import edit_config, edit_weights, set_config

from peagle.checkpoints.drafter import convert_drafter
from peagle.checkpoints.validate import inspect_drafter
from peagle.hub.resolve import DEFAULT_DRAFTER, EAGLE3_DRAFTER, resolve_drafter

Tensors = dict[str, torch.Tensor]


def findings(folder: Path, vllm: str = "0.32", target: Path | None = None) -> list[str]:
    target = target or target_folder()
    return inspect_drafter(folder, str(folder), target, str(target), vllm).findings


def broken(
    tmp_path: Path,
    name: str,
    config: Callable[[dict[str, Any]], None] = lambda values: None,
    tensors: Callable[[Tensors], None] = lambda values: None,
) -> Path:
    folder = tmp_path / f"broken-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(drafter_folder(name), folder)
    edit_config(folder, config)
    edit_weights(folder, tensors)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_sound_folders_have_no_findings(name: str) -> None:
    assert findings(drafter_folder(name)) == []


def test_the_serve_line_survives_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder"
    shutil.copytree(drafter_folder("p-eagle-1"), folder)
    words = shlex.split(inspect_drafter(folder, str(folder)).serve)
    assert words[:4] == ["vllm", "serve", "TARGET", "--speculative-config"]
    assert json.loads(words[4])["model"] == str(folder)


def test_a_bad_config_hides_no_bad_numbers(tmp_path: Path) -> None:
    folder = broken(
        tmp_path,
        "p-eagle-1",
        config=lambda values: values.update(ptd_token_id=3),
        tensors=lambda w: w["norm.weight"].fill_(float("nan")),
    )
    first, second = findings(folder)
    assert (
        first.startswith("mask token ids disagree") and second == "tensor 'norm.weight' holds 64 NaN or infinite values"
    )


@pytest.mark.parametrize("name", [DEFAULT_DRAFTER, EAGLE3_DRAFTER])
def test_shipped_drafters_are_sound(name: str, smollm2: Path) -> None:
    folder = resolve_drafter(name)
    report = inspect_drafter(folder, name, smollm2, "smollm2-135m")
    assert report.findings == []
    assert report.facts["mask token id"] == ("16" if name == DEFAULT_DRAFTER else "none")
    assert str(folder) in report.serve and str(smollm2) in report.serve, "vLLM does not know our names"


TENSOR_CASES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no fc": ("p-eagle-1", lambda w: w.pop("fc.weight"), "tensor 'fc.weight' is missing"),
    "no layer": (
        "p-eagle-4",
        lambda w: w.pop("layers.2.mlp.up_proj.weight"),
        "tensor 'layers.2.mlp.up_proj.weight' is missing",
    ),
    "unknown": (
        "p-eagle-1",
        lambda w: w.update({"model.norm.weight": torch.ones(64)}),
        "tensor 'model.norm.weight' is not known here",
    ),
    "shape": (
        "eagle3-1",
        lambda w: w.update({"norm.weight": torch.ones(65)}),
        "tensor 'norm.weight' has shape [65], expected [64]",
    ),
    "nan": (
        "eagle3-1",
        lambda w: w["norm.weight"].__setitem__(3, float("nan")),
        "tensor 'norm.weight' holds 1 NaN or infinite values",
    ),
    "zeros": ("p-eagle-1", lambda w: w["fc.weight"].zero_(), "tensor 'fc.weight' is all zeros"),
    "no head": (
        "p-eagle-1-reduced",
        lambda w: w.pop("lm_head.weight"),
        "tensor 'lm_head.weight' is missing: the target's head does not fit this drafter",
    ),
    "d2t range": (
        "eagle3-1-reduced",
        lambda w: w["d2t"].__setitem__(27, 500),
        "d2t points outside the vocabulary (ids 10 to 527)",
    ),
    "t2d": ("eagle3-1-reduced", lambda w: w["t2d"].zero_(), "t2d does not match d2t"),
    "d2t moves": (
        "eagle3-1",
        lambda w: w.update({"d2t": torch.ones(160, dtype=torch.long)}),
        "d2t is not zero, but the draft vocabulary is not reduced",
    ),
    "d2t full": (
        "eagle3-1",
        lambda w: w.update({"d2t": torch.zeros(160, dtype=torch.long)}),
        "d2t in a full-vocabulary drafter: vLLM 0.30 and newer reject it",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors(case: str, tmp_path: Path) -> None:
    name, change, finding = TENSOR_CASES[case]
    assert findings(broken(tmp_path, name, tensors=change)) == [finding]


AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONFIG_CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unsorted": (
        "p-eagle-1",
        {AUX_LAYER_IDS: [4, 1, 2]},
        "0.32",
        f"{AUX_LAYER_IDS} [4, 1, 2] is not sorted: vLLM concatenates in ascending order anyway",
    ),
    "range": (
        "p-eagle-1",
        {AUX_LAYER_IDS: [1, 2, 9]},
        "0.32",
        "aux_layer_ids contains layer 9, but the target has 5 layers",
    ),
    "repeated": (
        "p-eagle-1",
        {AUX_LAYER_IDS: [1, 1, 2]},
        "0.32",
        f"{AUX_LAYER_IDS} is [1, 1, 2], expected distinct layers from 0 up",
    ),
    "uncounted": (
        "p-eagle-1-wide",
        {"num_aux_hidden_states": None},
        "0.32",
        "4 aux_layer_ids without num_aux_hidden_states: vLLM assumes 3",
    ),
    "miscounted": (
        "p-eagle-1",
        {"num_aux_hidden_states": 4},
        "0.32",
        "num_aux_hidden_states is 4, but there are 3 aux_layer_ids",
    ),
    "null width": (
        "p-eagle-1",
        {"target_hidden_size": None},
        "0.32",
        "target_hidden_size is null: vLLM fails; omit the field or give the number",
    ),
    "short": (
        "p-eagle-1",
        {"max_position_embeddings": 100},
        "0.32",
        "max_position_embeddings is 100, the target's 256: vLLM stops drafting at that length without a warning",
    ),
    "vocabulary": (
        "eagle3-1-reduced",
        {"vocab_size": 200},
        "0.32",
        "vocab_size is 200, but the target's is 160",
    ),
    "mask ids": (
        "p-eagle-1",
        {"pard_token": 3},
        "0.32",
        "mask token ids disagree: {'ptd_token_id': 150, 'pard_token': 3, 'mask_token_id': 150}",
    ),
    "newer mask id name": (
        "p-eagle-1",
        {"pard_token": None, "ptd_token_id": None},
        "0.26",
        "mask token id only as mask_token_id: vLLM 0.26 reads pard_token or ptd_token_id",
    ),
    "eos as mask": (
        "p-eagle-1",
        dict.fromkeys(("ptd_token_id", "pard_token", "mask_token_id"), EOS_ID),
        "0.32",
        f"mask token id {EOS_ID} is an EOS id: use a reserved id that never occurs in text",
    ),
    "architecture": (
        "p-eagle-1",
        {"architectures": ["LlamaForCausalLM"]},
        "0.32",
        "architectures ['LlamaForCausalLM']: vLLM expects LlamaForCausalLMEagle3",
    ),
    "rope": (
        "p-eagle-1",
        {"rope_theta": 5.0},
        "0.32",
        "rope_theta is 5.0, but 10000.0 in rope_parameters: readers differ in which they use",
    ),
    "parallel too early": ("p-eagle-1", {}, "0.15", "parallel drafting needs vLLM 0.16 or newer, not 0.15"),
    "fc_norm too early": ("p-eagle-4-reduced", {}, "0.21", "fc_norm needs vLLM 0.22 or newer, not 0.21"),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_config(case: str, tmp_path: Path) -> None:
    name, change, vllm, finding = CONFIG_CASES[case]
    assert finding in findings(broken(tmp_path, name, config=lambda values: values.update(change)), vllm)


def test_one_name_of_the_mask_id_is_enough_where_it_is_read(tmp_path: Path) -> None:
    """The released heads give ptd_token_id alone, which every version reads."""
    for only, versions in (("ptd_token_id", ("0.16", "0.26", "0.32")), ("mask_token_id", ("0.28", "0.32"))):
        others = dict.fromkeys({"ptd_token_id", "pard_token", "mask_token_id"} - {only})
        folder = broken(tmp_path, "p-eagle-1", config=lambda values, others=others: values.update(others))
        assert [findings(folder, version) for version in versions] == [[]] * len(versions)


def test_full_vocabulary_map_was_fine_before_030(tmp_path: Path) -> None:
    folder = broken(tmp_path, "eagle3-1", tensors=lambda w: w.update({"d2t": torch.zeros(160, dtype=torch.long)}))
    assert findings(folder, "0.28") == []


def test_mask_id_that_the_tokenizer_emits(tmp_path: Path, smollm2: Path) -> None:
    """On SmolLM2's real tokenizer: an ordinary token, a chat token, a reserved one."""
    for mask_id, wanted in ((500, "is an ordinary token"), (1, "is the BOS, EOS or padding token"), (16, None)):
        folder = tmp_path / str(mask_id)
        shutil.copytree(resolve_drafter("smollm2-135m-p-eagle"), folder)
        set_config(folder, **dict.fromkeys(("ptd_token_id", "pard_token", "mask_token_id"), mask_id))
        found = findings(folder, target=smollm2)
        assert found == [] if wanted is None else len(found) == 1 and wanted in found[0]


def test_speculators_fields(tmp_path: Path) -> None:
    out = tmp_path / "speculators"
    convert_drafter(drafter_folder("p-eagle-4-reduced"), out, "speculators", target_folder(), "target", 5)
    assert findings(out) == []
    assert "a peagle drafter in the speculators format needs vLLM 0.22 or newer, not 0.21" in findings(out, "0.21")
    edit_config(out, lambda values: values.pop("norm_before_residual"))
    edit_config(out, lambda values: values["transformer_layer_config"].pop("fc_norm"))
    assert findings(out) == [
        "norm_before_residual is missing: vLLM and speculators have different defaults",
        "fc_norm is outside transformer_layer_config: vLLM ignores it for a peagle drafter",
    ]
