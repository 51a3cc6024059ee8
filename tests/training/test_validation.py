"""Acceptance during training against the reference's counts; training must not be affected."""

from __future__ import annotations

from dataclasses import replace

import pairs
import pytest
import torch

from peagle.config import LOOP_NGRAM_TOKENS, LOOP_REPEATED_SHARE, SamplingParams
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.training.validation import AcceptanceCounts, AcceptanceEvaluator, ValidationAcceptance

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = frozenset({ord(",")})  # the target says it now and then
TOKENS = 30


def reference_counts(
    target: Decoder, drafter: Drafter, prompts: list[list[int]], k: int, tokens: int = TOKENS
) -> ValidationAcceptance:
    params = SamplingParams(max_tokens=tokens)
    runs = [reference.generate(target, p, params, EOS, drafter, k) for p in prompts]

    def loops(run: reference.Generation) -> bool:
        token_ids = run.token_ids
        grams = [
            "-".join(map(str, token_ids[i : i + LOOP_NGRAM_TOKENS]))
            for i in range(len(token_ids) - LOOP_NGRAM_TOKENS + 1)
        ]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        return run.finish_reason == "length" and repeated > LOOP_REPEATED_SHARE * len(grams)

    def sums(some: list[reference.Generation]) -> AcceptanceCounts:
        return AcceptanceCounts(
            len(some),
            sum(r.num_drafts for r in some),
            tuple(sum(r.num_accepted_tokens_per_pos[i] for r in some) for i in range(k)),
        )

    total = sums(runs)
    without_loops = sums([r for r in runs if not loops(r)])
    return ValidationAcceptance(**vars(total), without_loops=without_loops)


@pytest.mark.parametrize(("name", "k"), [("p-eagle-4", 5), ("p-eagle-1-reduced", 3), ("eagle3-4-reduced", 3)])
def test_counts_equal_the_reference_as_the_drafter_changes(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pairs.load_pair(name)
    evaluator = AcceptanceEvaluator(target, EOS, pairs.prompts(4), TOKENS, k)
    first = evaluator.measure(drafter)
    assert first == reference_counts(target, drafter, pairs.prompts(4), k)
    assert 0 < first.num_accepted_tokens_per_pos[0] < first.num_drafts, "an untrained drafter would prove nothing"
    assert first.acceptance_length == pytest.approx(1 + sum(first.acceptance_rates))
    # as a step of training would: in place, the mask's hidden state too
    rng = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.4 * float(parameter.std(correction=0)))
    second = evaluator.measure(drafter)
    assert second == reference_counts(target, drafter, pairs.prompts(4), k) and second != first
    # fewer blocks than the prompts want: some wait, the counts stay
    with monkeypatch.context() as patch:
        patch.setattr("peagle.config.VALIDATION_KV_CACHE_BYTES", 1)
        patch.setattr("peagle.config.VALIDATION_NUM_SEQS", 3)
        assert AcceptanceEvaluator(target, EOS, pairs.prompts(4), TOKENS, k).measure(drafter) == second
    evaluator.close()
    assert evaluator.measure(drafter) == second


def test_looping_responses_are_counted_separately() -> None:
    """A target without its last layers loops on some prompts."""
    target, drafter = pairs.load_pair("p-eagle-1")
    for layer in target.layers[2:4]:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    got = AcceptanceEvaluator(target, EOS, pairs.prompts(6), 60, 3).measure(drafter)
    assert got == reference_counts(target, drafter, pairs.prompts(6), 3, 60)
    assert 0 < got.num_looping < got.num_responses
    assert got.without_loops.num_responses == got.num_responses - got.num_looping
    assert got.without_loops.acceptance_length != got.acceptance_length


def test_validation_does_not_affect_training() -> None:
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
    evaluator = AcceptanceEvaluator(target, EOS, pairs.prompts(2), 8, 3)
    threads = torch.get_num_threads()
    for _ in range(2):
        measured = evaluator.measure(drafter)
    assert torch.equal(torch.rand(3), expected)
    assert measured == reference_counts(target, trained, pairs.prompts(2), 3, 8), "the copy has the target's dtype"
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


def test_invalid_arguments_are_refused() -> None:
    target, _ = pairs.load_pair("p-eagle-1")
    with pytest.raises(UserError, match="between 1 and"):
        AcceptanceEvaluator(target, EOS, pairs.prompts(1), 8, 0)
    other = Drafter(replace(pairs.BASE, aux_layer_ids=(1, 2, 9))).share_weights(target)
    with pytest.raises(UserError, match="does not fit the target: aux_layer_ids contains layer 9, but"):
        AcceptanceEvaluator(target, EOS, pairs.prompts(1), 8, 3).measure(other)
