"""The model card of a trained drafter."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pairs
import pytest
import runs

from peagle.training.card import format_card
from peagle.training.recipe import TrainingInputs, load_training_inputs
from peagle.training.resume import TrainingState
from peagle.training.validation import AcceptanceCounts, ValidationAcceptance

REGULAR = AcceptanceCounts(73, 100, (60, 30, 15, 4, 1))
ACCEPTANCE = (
    ValidationAcceptance(80, 200, (140, 80, 40, 8, 2), without_loops=REGULAR),
    ValidationAcceptance(4, 10, (5, 0), without_loops=AcceptanceCounts(0, 0, (0, 0))),
)


def inputs_for(home: Path, target: str) -> TrainingInputs:
    inputs = load_training_inputs(runs.recipe(home, num_depths=6, validation_size=4))
    return replace(inputs, recipe=replace(inputs.recipe, target=target))


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n\n")[1].split("\n\n## ")[0]


def test_card_contains_everything(tmp_path: Path) -> None:
    drafter = pairs.load_pair("p-eagle-4-reduced")[1]
    state = TrainingState(step=700, tokens=123_456, seconds=90)
    inputs = inputs_for(tmp_path, "owner/little model's")
    text = format_card(inputs, "little-drafter", drafter, state, ACCEPTANCE)
    assert text.startswith(
        "---\nlibrary_name: peagle\ntags:\n- speculative-decoding\n- p-eagle\n---\n\n# little-drafter\n"
    )
    assert "vocabulary: 28 of the target's 160 tokens" in text and "mask token: id 150" in text
    assert section(text, "Acceptance").splitlines()[-2:] == [
        "| 80 | 5 | 2.35 | 2.10 (7) | 0.70 0.40 0.20 0.04 0.01 |",
        "| 4 | 2 | 1.50 |  | 0.50 0.00 |",
    ]
    assert "- conversations: 44\n- tokens: " in section(text, "Data") and "responses.jsonl" in section(text, "Data")
    training = section(text, "Training")
    assert training.startswith("- steps: 700 of 96 tokens per GPU\n- tokens seen: 123,456\n- minutes: 1.5\n")
    assert "\n- torch: " in section(text, "Versions")


@pytest.mark.parametrize("name", ["p-eagle-4-reduced", "eagle3-1"])
def test_card_contains_commands(name: str, tmp_path: Path) -> None:
    drafter = pairs.load_pair(name)[1]
    text = format_card(inputs_for(tmp_path, "owner/model"), "drafter", drafter, TrainingState(), ())
    assert "\nbase_model: owner/model\n---\n" in text and section(text, "Acceptance") == "Not measured."
    lines = [shlex.split(line) for line in section(text, "Use").splitlines() if line.startswith("    ")]
    ours, theirs = lines
    assert ours == ["peagle", "generate", "Why is the sky blue?", *"--target owner/model --drafter DIR -k 6".split()]
    assert theirs[:-1] == ["vllm", "serve", "owner/model", "--speculative-config"]
    config = {"method": "eagle3", "model": "DIR", "num_speculative_tokens": 6}
    assert json.loads(theirs[-1]) == ({**config, "parallel_drafting": True} if drafter.cfg.parallel else config)
