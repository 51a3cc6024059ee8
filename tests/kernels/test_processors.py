"""Logits processors and logprobs of request slots: against the reference, and the Triton kernels against torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many
from torch import Tensor
from triton_interpreter import launching_triton, patch_interpreter, run_in_interpreter

from peagle.config import Grammar, SamplingParams
from peagle.kernels import step
from peagle.kernels.sampling import masks as masks_module
from peagle.kernels.sampling import processors as processors_module
from peagle.kernels.sampling import sample
from peagle.kernels.sampling.masks import TokenMasks
from peagle.kernels.sampling.processors import LogitsProcessors, ProcessedRows
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.step import SlotState, commit_state
from peagle.speculative import reference

TOKEN = st.integers(0, 8)
EOS = frozenset({4, 99})  # 99 lies beyond the vocabulary
MASKED = Grammar("regex", "a")  # its masks are given


def allocate(num_slots: int, vocab_size: int, k: int) -> LogitsProcessors:
    return LogitsProcessors.allocate(num_slots, vocab_size, k, torch.device("cpu"))


@many(200)
@given(
    st.integers(0, 2**32),
    st.lists(TOKEN, min_size=1, max_size=5),
    st.lists(TOKEN, max_size=6),
    st.lists(TOKEN, max_size=5),
    st.fixed_dictionaries(
        {
            "min_tokens": st.integers(0, 9),
            "stop_token_ids": st.lists(TOKEN, max_size=2),
            "logit_bias": st.dictionaries(TOKEN, st.floats(-9, 9), max_size=3),
            "presence_penalty": st.sampled_from([0.0, -1.0, 1.5]),
            "frequency_penalty": st.sampled_from([0.0, -1.0, 1.5]),
            "repetition_penalty": st.sampled_from([1.0, 0.5, 2.0]),
            "allowed_token_ids": st.none() | st.lists(TOKEN, min_size=1, max_size=5),
            "bad_words_token_ids": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
        }
    ),
)
def test_a_row_is_processed_as_if_its_draft_tokens_were_output(
    seed: int, prompt: list[int], output: list[int], draft_token_ids: list[int], options: dict[str, Any]
) -> None:
    params = SamplingParams(**options)
    raw = torch.randn(len(draft_token_ids) + 1, 9, generator=torch.Generator().manual_seed(seed))
    processors = allocate(3, 9, 5)
    processors.set_slot(1, SamplingParams(logit_bias={2: 5.0}, presence_penalty=2.0), [1, 2], [3, 3], EOS)  # replaced
    known = len(output) // 2  # as after a preemption
    processors.set_slot(1, params, prompt, output[:known], EOS)
    for token in output[known:]:  # one decode step each
        processors.count_torch(torch.tensor([1]), torch.tensor([[token, -1]]), torch.tensor([0]))
    positions = len(prompt) + len(output) + torch.arange(len(raw))
    token_ids_Q = torch.tensor([output[-1] if output else 0, *draft_token_ids])
    processors.masks.prepare(processors.flags_S, torch.tensor([1]), token_ids_Q[None], awaits=False)
    rows = processors.process_torch(raw, 1, token_ids_Q, positions)
    for j, row in enumerate(rows):
        want = reference.process_logits(raw[j], params, prompt, output + draft_token_ids[:j], EOS)
        torch.testing.assert_close(row.double(), want, rtol=1e-5, atol=1e-5)


def test_masks_leave_only_allowed_tokens() -> None:
    processors = allocate(2, 70, 3)
    processors.set_slot(0, SamplingParams(grammar=MASKED), [1], [], EOS)
    allowed = torch.rand(2, 72, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = (allowed.view(2, 9, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    processors.masks.set_grammar_masks([0], bits[None])
    rows = processors.process_torch(torch.zeros(2, 70), 0, torch.tensor([0, 5]), torch.tensor([1, 2]))
    assert torch.equal(rows == 0, allowed[:, :70])


def test_a_slot_without_processors_is_not_touched() -> None:
    processors = allocate(2, 9, 1)
    processors.set_slot(0, SamplingParams(presence_penalty=1.0, logprobs=2), [1], [2], EOS)
    assert processors.flags_S.tolist() == [1 | 3 << 5, 0, 0]
    processors.set_slot(0, SamplingParams(), [1], [2], EOS)
    assert processors.flags_S.tolist() == [0, 0, 0]
    raw, rows = torch.randn(2, 9), ProcessedRows(processors, torch.tensor([0, -1]), torch.zeros(2, 1).long())
    assert list(rows.process_torch(raw, raw)) == []


# Triton kernels against the torch versions

ALL = SamplingParams(
    max_tokens=100,
    min_tokens=9,
    stop_token_ids=[3],
    logit_bias={1: -3.0, 2: 4.5, 65: 100.0},
    presence_penalty=0.7,
    frequency_penalty=-0.3,
    repetition_penalty=1.7,
    grammar=MASKED,
    logprobs=5,
)
KINDS = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.5, logprobs=0),
    SamplingParams(frequency_penalty=-0.5, repetition_penalty=0.4),
    SamplingParams(max_tokens=100, min_tokens=12, stop_token_ids=[7, 8]),
    SamplingParams(logit_bias={5: 3.0, 40: -100.0}, logprobs=20),
    SamplingParams(grammar=MASKED),
    ALL,
    replace(ALL, grammar=None, logprobs=None),
    SamplingParams(allowed_token_ids=[3, 5, 64]),
    SamplingParams(bad_words_token_ids=[[3], [2, 4], [0, 1, 5], [9, 9, 9, 9, 9, 9, 9, 2]]),
    replace(ALL, bad_words_token_ids=[[1], [5, 2]]),
]


def make_case(seed: int, vocab_size: int, k: int) -> tuple[LogitsProcessors, list[Tensor]]:
    """Slots with all kinds of processors; slots, tokens, logits, float params, int params and positions of a step."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    processors, starts = allocate(len(KINDS), vocab_size, k), []
    for slot, params in enumerate(KINDS):
        prompt, output = ([rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))] for _ in range(2))
        processors.set_slot(slot, params, prompt, output, EOS)
        starts.append(len(prompt) + len(output))
    processors.masks.allowed_SNW.random_(-(2**31), 2**31, generator=generator)
    processors.masks.tail_SL.random_(0, 6, generator=generator)
    slots = [*rng.sample(range(len(KINDS)), len(KINDS)), -1]
    token_ids = torch.randint(0, min(vocab_size, 6), (len(slots), k + 1), generator=generator)
    logits = torch.randn(len(slots) * (k + 1), vocab_size, generator=generator) * 3
    kinds = torch.tensor([[0.0, 1.0, 0.0, 0], [0.8, 1.0, 0.0, 5], [1.2, 0.9, 0.01, 0]])
    floats = kinds[torch.arange(len(logits)) % 3].T
    ints = torch.stack([floats[3].long(), torch.arange(len(logits)) << 35])
    positions = torch.tensor([[starts[s] + j if s >= 0 else j for j in range(k + 1)] for s in slots]).flatten()
    return processors, [torch.tensor(slots), token_ids, logits, floats[:3].contiguous(), ints, positions]


def move(processors: LogitsProcessors, device: str) -> LogitsProcessors:
    arrays = {f.name: getattr(processors, f.name) for f in fields(processors) if not f.name.startswith("_")}
    masks = arrays.pop("masks")
    moved = {name: array.clone().to(device) for name, array in vars(masks).items() if array is not None}
    arrays = {name: array.clone().to(device) for name, array in arrays.items()}
    return LogitsProcessors(masks=TokenMasks(**moved), **arrays)


def to(device: str, values: Sequence[Tensor]) -> list[Tensor]:
    return [x.to(device) for x in values]


def check_sampling_with_processors(device: str) -> None:
    cases = [(70, 0, torch.float32), (1100, 3, torch.bfloat16), (5000, 7, torch.float32)]
    for seed, (vocab, k, dtype) in enumerate(cases):
        processors, (slots, token_ids, logits, *settings) = make_case(seed, vocab, k)
        want = sample_tokens(logits.to(dtype), *settings, ProcessedRows(processors, slots, token_ids))
        assert not torch.equal(want, sample_tokens(logits.to(dtype), *settings)), "the processors have no effect"
        moved = move(processors, device)
        rows = ProcessedRows(moved, slots.to(device), token_ids.to(device))
        with launching_triton(sample):
            got = sample_tokens(logits.to(dtype).to(device), *to(device, settings), rows)
        assert float((got.cpu() == want).double().mean()) >= 0.98, seed  # rounding may decide a near-tie


def check_masks(device: str) -> None:
    for seed, (vocab, k) in enumerate([(70, 0), (1100, 3), (300, 9)]):
        cpu, (slots, token_ids, *_) = make_case(seed, vocab, k)
        moved = move(cpu, device)
        before = cpu.masks.allowed_SNW.clone()
        cpu.masks.prepare(cpu.flags_S, slots, token_ids, awaits=False)
        for awaits in (False, True):
            if awaits:  # the masks of grammars come from the host
                moved.masks.allowed_SNW.zero_()
                moved.masks.host_allowed_SNW, moved.masks.announced_step = before, torch.tensor([5])
                if device != "cpu":
                    moved.masks.host_allowed_SNW = before.pin_memory()
                    moved.masks.announced_step = moved.masks.announced_step.pin_memory()
                moved.masks.await_step(5)
            with launching_triton(masks_module):
                moved.masks.prepare(moved.flags_S, *to(device, (slots, token_ids)), awaits=awaits)
            for slot, params in enumerate(KINDS):
                if params.grammar is not None or params.bad_words_token_ids:
                    got, want = moved.masks.allowed_SNW[slot].cpu(), cpu.masks.allowed_SNW[slot]
                    assert torch.equal(got, want), (seed, awaits, slot)
        if k:
            assert not torch.equal(before, cpu.masks.allowed_SNW)


def check_logprobs(device: str) -> None:
    for seed, (vocab, k) in enumerate([(66, 0), (300, 3), (9001, 1)]):
        processors, (slots, token_ids, logits, *_) = make_case(seed, vocab, k)
        logits[:, 5:9] = logits[:, 4:5]  # ties
        accepted = torch.randint(0, k + 1, (len(slots),), generator=torch.Generator().manual_seed(seed))
        want = processors.compute_logprobs(logits, slots, token_ids, accepted)
        args = to(device, (logits, slots, token_ids, accepted))
        with launching_triton(processors_module):
            got = move(processors, device).compute_logprobs(*args).cpu()
        num_checked = 0
        for b, slot in enumerate(slots.tolist()):
            n = KINDS[slot].logprobs if slot >= 0 else None
            for row in range(b * (k + 1), b * (k + 1) + int(accepted[b]) + 1) if n is not None else ():
                torch.testing.assert_close(got[row, 1, : 1 + n], want[row, 1, : 1 + n], rtol=1e-5, atol=1e-5)
                ids = got[row, 0, : 1 + n].long()
                assert ids[0] == token_ids.flatten()[row] and len(set(ids[1:].tolist())) == n
                exact = logits[row].double().log_softmax(-1)[ids].float()
                torch.testing.assert_close(got[row, 1, : 1 + n], exact, rtol=1e-5, atol=1e-5)
                num_checked += 1
        assert num_checked >= 3


def check_commit_counts_output_tokens(device: str) -> None:
    processors, (slots, *_) = make_case(0, 70, 4)
    output = torch.tensor([[3, 3, 3, 7, 3]] * len(slots))
    accepted = torch.arange(len(slots)) % 5
    sides, tails = [], []
    for where, context in (("cpu", None), (device, launching_triton(step))):
        moved, state = move(processors, where), SlotState.allocate(len(KINDS), 4, 2, torch.device(where))
        args = to(where, (slots, output.where(torch.arange(5) <= accepted[:, None], -1), accepted, output[:, 1:]))
        if context is None:
            commit_state(state, *args, 100, processors=moved)
        else:
            with context:
                commit_state(state, *args, 100, processors=moved)
        sides.append(moved.entries_SV.cpu())
        tails.append(moved.masks.tail_SL.cpu())
    assert torch.equal(*sides) and torch.equal(*tails) and not torch.equal(tails[0], processors.masks.tail_SL)
    for b, slot in enumerate(slots.tolist()):
        counts = (sides[0][slot] >> 2) - (processors.entries_SV[slot] >> 2)
        counted = slot >= 0 and bool(int(processors.flags_S[slot]) & 1)
        added = output[b, : int(accepted[b]) + 1].tolist() if counted else []
        assert counts.tolist() == [added.count(token) for token in range(70)]


CHECKS: dict[str, Callable[[str], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_triton_on_the_gpu(name: str) -> None:
    CHECKS[name]("cuda")


if __name__ == "__main__":
    patch_interpreter()
    for check in CHECKS.values():
        check("cpu")
    print(f"{len(CHECKS)} kernels checked")
