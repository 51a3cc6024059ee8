"""Acceptance while training against the reference's own counts, that nobody notices being measured, and the card."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pairs
import pytest
import torch

from peagle.config import LOOP_NGRAM_TOKENS, LOOP_REPEATED_SHARE, MeasureSettings, SamplingParams
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.training.card import AcceptanceRow, ModelCard, card_text, write_card
from peagle.training.validation import AcceptanceCounts, AcceptanceEvaluator, ValidationAcceptance

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = frozenset({ord(",")})  # the target says it now and then
TOKENS = 30


def asked(count: int) -> list[list[int]]:
    return pairs.prompts(count)


def truth(
    target: Decoder, drafter: Drafter, prompts: list[list[int]], k: int, tokens: int = TOKENS
) -> ValidationAcceptance:
    params = SamplingParams(max_tokens=tokens)
    runs = [reference.generate(target, p, params, EOS, drafter, k) for p in prompts]

    def loops(run: reference.Generation) -> bool:
        said = run.token_ids
        grams = ["-".join(map(str, said[i : i + LOOP_NGRAM_TOKENS])) for i in range(len(said) - LOOP_NGRAM_TOKENS + 1)]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        return run.finish_reason == "length" and repeated > LOOP_REPEATED_SHARE * len(grams)

    def sums(some: list[reference.Generation]) -> AcceptanceCounts:
        return AcceptanceCounts(
            len(some),
            sum(len(r.token_ids) for r in some),
            sum(r.num_drafts for r in some),
            tuple(sum(r.num_accepted_tokens_per_pos[i] for r in some) for i in range(k)),
        )

    whole = sums(runs)
    calm = sums([r for r in runs if not loops(r)])
    return ValidationAcceptance(whole.answers, whole.tokens, whole.rounds, whole.accepted, calm)


@pytest.mark.parametrize(("name", "k"), [("p-eagle-4", 5), ("p-eagle-1-reduced", 3), ("eagle3-4-reduced", 3)])
def test_counts_are_the_references_as_the_drafter_changes(name: str, k: int) -> None:
    target, drafter = pairs.load_pair(name)
    measurer = AcceptanceEvaluator(target, EOS, asked(4), TOKENS, k)
    first = measurer.measure(drafter)
    assert first == truth(target, drafter, asked(4), k)
    assert 0 < first.accepted[0] < first.rounds, "an untrained drafter would prove nothing"
    assert first.length == pytest.approx(1 + sum(first.per_position))
    # as a step of training would: in place, the mask's hidden state too
    rng = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.4 * float(parameter.std(correction=0)))
    second = measurer.measure(drafter)
    assert second == truth(target, drafter, asked(4), k) and second != first
    # fewer blocks than the prompts want: some wait, the counts stay
    small = AcceptanceEvaluator(target, EOS, asked(4), TOKENS, k, MeasureSettings(cache_bytes=1, max_num_seqs=3))
    assert small.measure(drafter) == second
    measurer.close()
    assert measurer.measure(drafter) == second


def test_loops_are_counted_apart() -> None:
    """A target that has lost its last layers repeats itself on some prompts."""
    target, drafter = pairs.load_pair("p-eagle-1")
    for layer in target.layers[2:4]:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    got = AcceptanceEvaluator(target, EOS, asked(6), 60, 3).measure(drafter)
    assert got == truth(target, drafter, asked(6), 3, 60)
    assert 0 < got.looping < got.answers
    assert got.without_loops.answers == got.answers - got.looping and got.without_loops.length != got.length


def test_training_does_not_notice() -> None:
    target, trained = pairs.load_pair("p-eagle-1-wide")
    drafter = Drafter(trained.cfg).share_weights(target)
    drafter.load_state_dict(trained.state_dict())
    drafter.double().train()
    for i, parameter in enumerate(drafter.parameters()):
        parameter.grad = torch.full_like(parameter, float(i))
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    measurer = AcceptanceEvaluator(target, EOS, asked(2), 8, 3)
    threads = torch.get_num_threads()
    for _ in range(2):
        measured = measurer.measure(drafter)
    assert torch.equal(torch.rand(3), expected)
    assert measured == truth(target, trained, asked(2), 3, 8), "the copy has the target's dtype"
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert drafter.training and all(p.requires_grad for p in drafter.parameters())
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float64 for name, p in drafter.named_parameters())
    assert all((p.grad == i).all() for i, p in enumerate(drafter.parameters()) if p.grad is not None)
    # what the engine left in the target is fit for a pass that is differentiated
    tokens, positions = torch.arange(5), torch.arange(5)
    with torch.no_grad():
        hidden, _ = target(tokens, positions, lambda layer, q, k, v, window: q, (1,))
    assert not hidden.is_inference()


def test_what_cannot_be_measured_is_refused() -> None:
    target, _ = pairs.load_pair("p-eagle-1")
    with pytest.raises(UserError, match="no prompts to measure acceptance on"):
        AcceptanceEvaluator(target, EOS, [], 8, 3)
    with pytest.raises(UserError, match="between 1 and"):
        AcceptanceEvaluator(target, EOS, asked(1), 8, 0)
    other = Drafter(replace(pairs.BASE, aux_layer_ids=(1, 2, 9))).share_weights(target)
    with pytest.raises(UserError, match="does not fit the target: aux_layer_ids contains layer 9, but"):
        AcceptanceEvaluator(target, EOS, asked(1), 8, 3).measure(other)


# The card

CARD = ModelCard(
    name="little-drafter",
    target="owner/little model's",
    cfg=pairs.RECIPES["p-eagle-4-reduced"].cfg,
    parameters=1234567,
    draft_tokens=6,
    data=(("conversations", "1,000"), ("tokens", "0.5 million")),
    training=(("steps", "700"),),
    command="peagle train --data a.jsonl \\\n  --out DIR",
    versions=(("peagle", "0.1.0"), ("torch", "2.11")),
    acceptance=(
        AcceptanceRow("MT-Bench", 80, 5, 2.345, (0.7, 0.4, 0.2, 0.04, 0.005), 2.1, 7),
        AcceptanceRow("a|b", 4, 2, 1.5, (0.5, 0.0)),
    ),
)


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n\n")[1].split("\n\n## ")[0]


def test_card_says_everything(tmp_path: Path) -> None:
    text = card_text(CARD)
    assert text == card_text(replace(CARD))
    assert text.startswith(
        "---\nlibrary_name: peagle\ntags:\n- speculative-decoding\n- p-eagle\n---\n\n# little-drafter\n"
    )
    assert "vocabulary: 28 of the target's 160 tokens" in text and "mask token: id 150" in text
    assert section(text, "Acceptance").splitlines()[2:] == [
        "| prompts | answers | K | tokens a round | without looping answers (so many) | accepted, by position |",
        "|---|---|---|---|---|---|",
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
def test_card_says_how_to_serve(name: str) -> None:
    cfg = pairs.RECIPES[name].cfg
    text = card_text(replace(CARD, cfg=cfg, target="owner/model", acceptance=()))
    assert "\nbase_model: owner/model\n" in text and section(text, "Acceptance") == "Not measured."
    lines = [shlex.split(line) for line in section(text, "Use").splitlines() if line.startswith("    ")]
    ours, theirs = lines
    assert ours == ["peagle", "generate", "Why is the sky blue?", *"--target owner/model --drafter DIR -k 6".split()]
    assert theirs[:-1] == ["vllm", "serve", "owner/model", "--speculative-config"]
    config = {"method": "eagle3", "model": "DIR", "num_speculative_tokens": 6}
    assert json.loads(theirs[-1]) == ({**config, "parallel_drafting": True} if cfg.parallel else config)
