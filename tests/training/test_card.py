"""The model card of a trained drafter."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pairs
import pytest

from peagle.errors import UserError
from peagle.training.card import CardAcceptance, ModelCard, format_card, write_card

CARD = ModelCard(
    name="little-drafter",
    target="owner/little model's",
    cfg=pairs.RECIPES["p-eagle-4-reduced"].cfg,
    num_parameters=1234567,
    num_speculative_tokens=6,
    data=(("conversations", "1,000"), ("tokens", "0.5 million")),
    training=(("steps", "700"),),
    command="peagle train --data a.jsonl \\\n  --out DIR",
    versions=(("peagle", "0.1.0"), ("torch", "2.11")),
    acceptance=(
        CardAcceptance("MT-Bench", 80, 5, 2.345, (0.7, 0.4, 0.2, 0.04, 0.005), 2.1, 7),
        CardAcceptance("a|b", 4, 2, 1.5, (0.5, 0.0)),
    ),
)


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n\n")[1].split("\n\n## ")[0]


def test_card_contains_everything(tmp_path: Path) -> None:
    text = format_card(CARD)
    assert text == format_card(replace(CARD))
    assert text.startswith(
        "---\nlibrary_name: peagle\ntags:\n- speculative-decoding\n- p-eagle\n---\n\n# little-drafter\n"
    )
    assert "vocabulary: 28 of the target's 160 tokens" in text and "mask token: id 150" in text
    assert section(text, "Acceptance").splitlines()[-2:] == [
        "| MT-Bench | 80 | 5 | 2.35 | 2.10 (7) | 0.70 0.40 0.20 0.04 0.01 |",
        "| a\\|b | 4 | 2 | 1.50 |  | 0.50 0.00 |",
    ]
    assert section(text, "Data") == "- conversations: 1,000\n- tokens: 0.5 million"
    assert section(text, "Training") == "- steps: 700\n\n    peagle train --data a.jsonl \\\n      --out DIR"
    assert section(text, "Versions") == "- peagle: 0.1.0\n- torch: 2.11\n"
    write_card(CARD, tmp_path)
    write_card(CARD, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == text
    with pytest.raises(UserError, match="cannot be written"):
        write_card(CARD, tmp_path / "absent")


@pytest.mark.parametrize("name", ["p-eagle-4-reduced", "eagle3-1"])
def test_card_contains_commands(name: str) -> None:
    cfg = pairs.RECIPES[name].cfg
    text = format_card(replace(CARD, cfg=cfg, target="owner/model", acceptance=()))
    assert "\nbase_model: owner/model\n" in text and section(text, "Acceptance") == "Not measured."
    lines = [shlex.split(line) for line in section(text, "Use").splitlines() if line.startswith("    ")]
    ours, theirs = lines
    assert ours == ["peagle", "generate", "Why is the sky blue?", *"--target owner/model --drafter DIR -k 6".split()]
    assert theirs[:-1] == ["vllm", "serve", "owner/model", "--speculative-config"]
    config = {"method": "eagle3", "model": "DIR", "num_speculative_tokens": 6}
    assert json.loads(theirs[-1]) == ({**config, "parallel_drafting": True} if cfg.parallel else config)
