"""Writes the model card of a trained drafter: README.md in its folder. The text depends only on the `ModelCard`."""

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

CARD_FILE = "README.md"
Facts = tuple[tuple[str, str], ...]  # (name, value)


@dataclass(frozen=True)
class CardAcceptance:
    """One row of the acceptance table."""

    prompts: str
    num_responses: int
    num_speculative_tokens: int
    acceptance_length: float
    acceptance_rates: tuple[float, ...]
    acceptance_length_without_loops: float | None = None
    num_looping: int = 0


@dataclass(frozen=True)
class ModelCard:
    name: str
    target: str  # as on the command line: a Hugging Face id, a folder, or a built-in name
    cfg: DrafterConfig
    num_parameters: int
    num_speculative_tokens: int  # trained
    data: Facts
    training: Facts
    command: str
    versions: Facts
    acceptance: tuple[CardAcceptance, ...]
    method: str = "Greedy."  # how acceptance was measured
    raw: bool = False


def write_card(card: ModelCard, folder: Path) -> None:
    """Replaces the card atomically."""
    unfinished = folder / f".{CARD_FILE}.unfinished"
    try:
        unfinished.write_text(format_card(card), encoding="utf-8")
        os.replace(unfinished, folder / CARD_FILE)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{folder / CARD_FILE}: cannot be written ({error.strerror})") from None


def format_card(card: ModelCard) -> str:
    sections = [
        _format_front_matter(card),
        f"# {card.name}\n\n{_format_summary(card)}",
        f"## Acceptance\n\n{_format_acceptance(card)}",
        f"## Use\n\n{_format_usage(card)}",
        f"## Data\n\n{_format_facts(card.data)}",
        f"## Training\n\n{_format_facts(card.training)}\n\n{_format_code(card.command)}",
        f"## Versions\n\n{_format_facts(card.versions)}",
    ]
    return "\n\n".join(sections) + "\n"


def _method_name(cfg: DrafterConfig) -> str:
    return "P-EAGLE" if cfg.parallel else "EAGLE-3"


def _format_front_matter(card: ModelCard) -> str:
    lines = ["library_name: peagle", "tags:", "- speculative-decoding", f"- {_method_name(card.cfg).lower()}"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", card.target) and not card.target.startswith("."):  # a Hugging Face id
        lines.append(f"base_model: {card.target}")
    return "\n".join(["---", *lines, "---"])


def _format_summary(card: ModelCard) -> str:
    cfg = card.cfg
    passes = "all draft tokens in one pass" if cfg.parallel else "one draft token per pass"
    text = (
        f"{_method_name(cfg)} drafter for `{card.target}`: it drafts the target's next tokens, {passes}, and the "
        "target verifies them, so the output is the target's.\n\n"
    )
    reduced = f"{cfg.draft_vocab_size:,} of the target's {cfg.vocab_size:,} tokens"
    facts: Facts = (
        ("layers", str(cfg.num_layers)),
        ("parameters", f"{card.num_parameters:,}"),
        ("trained draft tokens (K)", str(card.num_speculative_tokens)),
        ("auxiliary hidden state layers", ", ".join(map(str, cfg.aux_layer_ids))),
        ("embeddings", "own" if cfg.own_embeddings else "the target's"),
        ("LM head", "own" if cfg.own_head else "the target's"),
        ("vocabulary", reduced if cfg.reduced_vocab else f"the target's {cfg.vocab_size:,} tokens"),
    )
    if cfg.mask_token_id is not None:
        facts += (("mask token", f"id {cfg.mask_token_id}"),)
    return text + _format_facts(facts)


def _format_acceptance(card: ModelCard) -> str:
    if not card.acceptance:
        return "Not measured."
    rows = [
        (
            row.prompts,
            str(row.num_responses),
            str(row.num_speculative_tokens),
            f"{row.acceptance_length:.2f}",
            f"{row.acceptance_length_without_loops:.2f} ({row.num_looping})"
            if row.acceptance_length_without_loops is not None
            else "",
            " ".join(f"{rate:.2f}" for rate in row.acceptance_rates),
        )
        for row in card.acceptance
    ]
    heads = ("prompts", "responses", "K", "acceptance length", "without loops (number)", "accepted, by position")
    return (
        f"{card.method} The acceptance length counts the bonus token; rates are shares of decode steps in which draft "
        f"token 1, 2, .. K was accepted.\n\n{_format_table(heads, rows)}"
    )


def _format_usage(card: ModelCard) -> str:
    target = shlex.quote(card.target)
    config = json.dumps(build_speculative_config("DIR", card.num_speculative_tokens, card.cfg.parallel))
    prompt = '"The sky is" --raw' if card.raw else '"Why is the sky blue?"'
    generate = f"peagle generate {prompt} --target {target} --drafter DIR -k {card.num_speculative_tokens}"
    serve = f"vllm serve {target} --speculative-config {shlex.quote(config)}"
    return f"`DIR` is this folder. With peagle:\n\n{_format_code(generate)}\n\nWith vLLM:\n\n{_format_code(serve)}"


def _format_facts(facts: Facts) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts) if facts else "Not stated."


def _format_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *(line(row) for row in rows)])
