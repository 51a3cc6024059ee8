"""The model card of a trained drafter: README.md in its folder.

Knows nothing about training or measuring; everything it says is given to it, so the same card is the same text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.checkpoints.validate import build_speculative_config
from peagle.config import DrafterConfig
from peagle.errors import UserError

FILE = "README.md"
Facts = tuple[tuple[str, str], ...]  # what is stated, and its value


@dataclass(frozen=True)
class AcceptanceRow:
    """A line of the acceptance table."""

    prompts: str
    answers: int
    draft_tokens: int
    length: float
    per_position: tuple[float, ...]
    length_without_loops: float | None = None
    looping: int = 0


@dataclass(frozen=True)
class ModelCard:
    name: str
    target: str  # as it is named on a command line: a hub id, a folder, a built-in name
    cfg: DrafterConfig
    parameters: int
    draft_tokens: int  # it was trained for
    data: Facts
    training: Facts
    command: str
    versions: Facts
    acceptance: tuple[AcceptanceRow, ...]
    how_measured: str = "Greedy."
    raw: bool = False  # its target continues prompts as they are


def write_card(card: ModelCard, folder: Path) -> None:
    """Takes the place of a card that is there as a whole, or not at all."""
    unfinished = folder / f".{FILE}.unfinished"
    try:
        unfinished.write_text(card_text(card), encoding="utf-8")
        os.replace(unfinished, folder / FILE)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{folder / FILE}: cannot be written ({error.strerror})") from None


def card_text(card: ModelCard) -> str:
    sections = [
        _front(card),
        f"# {card.name}\n\n{_what(card)}",
        f"## Acceptance\n\n{_acceptance(card)}",
        f"## Use\n\n{_use(card)}",
        f"## Data\n\n{_facts(card.data)}",
        f"## Training\n\n{_facts(card.training)}\n\n{_code(card.command)}",
        f"## Versions\n\n{_facts(card.versions)}",
    ]
    return "\n\n".join(sections) + "\n"


def _kind(cfg: DrafterConfig) -> str:
    return "P-EAGLE" if cfg.parallel else "EAGLE-3"


def _front(card: ModelCard) -> str:
    lines = ["library_name: peagle", "tags:", "- speculative-decoding", f"- {_kind(card.cfg).lower()}"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", card.target) and not card.target.startswith("."):  # a hub id
        lines.append(f"base_model: {card.target}")
    return "\n".join(["---", *lines, "---"])


def _what(card: ModelCard) -> str:
    cfg = card.cfg
    how = "all its drafts in one pass" if cfg.parallel else "one draft a pass"
    text = (
        f"{_kind(cfg)} drafter for `{card.target}`: it guesses the target's next tokens, {how}, and the target "
        "checks them, so the text is the target's own.\n\n"
    )
    vocabulary = f"{cfg.draft_vocab_size:,} of the target's {cfg.vocab_size:,} tokens"
    shape: Facts = (
        ("layers", str(cfg.num_layers)),
        ("parameters", f"{card.parameters:,}"),
        ("draft tokens it was trained for", str(card.draft_tokens)),
        ("aux_hidden_states layers of the target", ", ".join(map(str, cfg.aux_layer_ids))),
        ("embeddings", "its own" if cfg.own_embeddings else "the target's"),
        ("head", "its own" if cfg.own_head else "the target's"),
        ("vocabulary", vocabulary if cfg.reduced_vocab else f"the target's {cfg.vocab_size:,} tokens"),
    )
    if cfg.mask_token_id is not None:
        shape += (("mask token", f"id {cfg.mask_token_id}"),)
    return text + _facts(shape)


def _acceptance(card: ModelCard) -> str:
    if not card.acceptance:
        return "Not measured."
    rows = [
        (
            m.prompts,
            str(m.answers),
            str(m.draft_tokens),
            f"{m.length:.2f}",
            f"{m.length_without_loops:.2f} ({m.looping})" if m.length_without_loops is not None else "",
            " ".join(f"{share:.2f}" for share in m.per_position),
        )
        for m in card.acceptance
    ]
    heads = ("prompts", "answers", "K", "tokens a round", "without looping answers (so many)", "accepted, by position")
    return (
        f"{card.how_measured} Tokens a round count the target's own; the shares are of rounds in which draft 1, 2, .. "
        f"K was accepted.\n\n{_table(heads, rows)}"
    )


def _use(card: ModelCard) -> str:
    target = shlex.quote(card.target)
    settings = json.dumps(build_speculative_config("DIR", card.draft_tokens, card.cfg.parallel))
    asked = '"The sky is" --raw' if card.raw else '"Why is the sky blue?"'
    ours = f"peagle generate {asked} --target {target} --drafter DIR -k {card.draft_tokens}"
    return (
        f"`DIR` is this folder. With peagle:\n\n{_code(ours)}\n\n"
        f"With vLLM:\n\n{_code(f'vllm serve {target} --speculative-config {shlex.quote(settings)}')}"
    )


def _facts(facts: Facts) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts) if facts else "Not stated."


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *(line(row) for row in rows)])
