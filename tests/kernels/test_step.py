"""One decode step between the two models: inputs of target and drafter, and updates of the request slots.

The torch versions are compared with naive Python. The `check_*` functions compare the Triton kernels with the torch
versions, on a GPU (marker `gpu`) or in Triton's interpreter. The interpreter is chosen when a kernel is defined, so it
runs in a process of its own: this file, run as a script.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many
from test_sample import mixed_settings
from torch import Tensor
from triton_interpreter import launching_triton, patch_interpreter, run_in_interpreter

from peagle.kernels import step
from peagle.kernels.host_transfer import PinnedRing
from peagle.kernels.sampling.sample import argmax, sample_tokens
from peagle.kernels.sampling.verify import accept_draft_tokens
from peagle.kernels.step import (
    DraftInputs,
    SlotState,
    SlotUpdates,
    build_draft_inputs,
    build_verify_inputs,
    commit_state,
)

ROOT = Path(__file__).resolve().parents[2]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


# The drafter's rows


def test_draft_inputs_worked_example() -> None:
    x, b, mask = 21, 22, 99
    hidden = torch.tensor([[10.0], [11.0], [12.0]])
    args = (torch.tensor([[x, b, -1]]), ids(1), ids(10), hidden, torch.tensor([-1.0]), mask, 2)
    rows = build_draft_inputs(*args, 100)
    assert rows.token_ids_R.tolist() == [x, b, mask, mask]
    assert rows.hidden_states_RD[:, 0].tolist() == [10.0, 11.0, -1.0, -1.0]
    assert rows.positions_R.tolist() == [10, 11, 12, 13]
    assert rows.query_lens_B.tolist() == [3]
    assert rows.sample_rows_BK.tolist() == [[1, 2]]
    rows = build_draft_inputs(*args, 12)
    assert rows.query_lens_B.tolist() == [2]
    assert rows.positions_R.tolist() == [10, 11, 11, 11]


def naive_draft_inputs(
    emitted: list[list[int]], accepted: list[int], starts: list[int], mask: int | None, k: int, limit: int
) -> dict[str, Any]:
    """Builds the rows one by one; a hidden state is its row's number, -1 the mask's."""
    verified = len(emitted[0])
    out: dict[str, Any] = {name: [] for name in ("tokens", "hidden", "positions", "live", "sample")}
    rows = verified + k - 1 if mask is not None and k > 0 else verified
    for b, (tokens, m, start) in enumerate(zip(emitted, accepted, starts, strict=True)):
        guesses = k if mask is not None else min(k, 1)
        live = m + max(guesses, 1)
        for j in range(rows):
            out["positions"].append(max(min(start + j, limit - 1), 0))
            if j <= m:
                out["tokens"].append(tokens[j])
                out["hidden"].append(b * verified + j)
            elif mask is not None:
                out["tokens"].append(mask)
                out["hidden"].append(-1)
            else:  # padding of EAGLE-3: any token
                out["tokens"].append(0)
                out["hidden"].append(b * verified + j)
        out["live"].append(max(min(live, limit - start), 0))
        out["sample"].append([b * rows + m + i for i in range(guesses)])
    return out


def as_naive(rows: DraftInputs) -> dict[str, Any]:
    return {
        "tokens": rows.token_ids_R.tolist(),
        "hidden": rows.hidden_states_RD[:, 0].tolist(),
        "positions": rows.positions_R.tolist(),
        "live": rows.query_lens_B.tolist(),
        "sample": rows.sample_rows_BK.tolist(),
    }


@many(300)
@given(st.data())
def test_draft_inputs_match_the_naive_loop(data: st.DataObject) -> None:
    batch, k = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    mask = data.draw(st.sampled_from([None, 1, 77]))
    accepted = data.draw(st.lists(st.integers(0, k), min_size=batch, max_size=batch))
    starts = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    limit = data.draw(st.integers(max(starts), max(starts) + 12))
    emitted = [[10 * b + j if j <= m else -1 for j in range(k + 1)] for b, m in enumerate(accepted)]
    hidden = torch.arange(batch * (k + 1)).float()[:, None].expand(-1, 3).contiguous()
    rows = build_draft_inputs(
        torch.tensor(emitted),
        torch.tensor(accepted),
        torch.tensor(starts),
        hidden,
        torch.full((3,), -1.0) if mask is not None else None,
        mask,
        k,
        limit,
    )
    assert as_naive(rows) == naive_draft_inputs(emitted, accepted, starts, mask, k, limit)
    assert bool((rows.hidden_states_RD == rows.hidden_states_RD[:, :1]).all())
    assert rows.query_lens_B.dtype == torch.int32
    assert rows.token_ids_R.dtype == rows.positions_R.dtype == rows.sample_rows_BK.dtype == torch.long
    assert rows.sample_rows_BK.shape == (batch, k if mask is not None else min(k, 1))


@many(300)
@given(st.data())
def test_commit_writes_the_next_step(data: st.DataObject) -> None:
    count, k = 5, data.draw(st.integers(0, 3))
    slots = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
    slots += [-1] * data.draw(st.integers(0, 2))
    accepted = [data.draw(st.integers(0, k)) for _ in slots]
    longest = data.draw(st.integers(3, 30))
    emitted = [[100 * b + j for j in range(k + 1)] for b in range(len(slots))]
    drafts = torch.arange(len(slots) * k).view(len(slots), k) + 1000
    tokens, start = torch.arange(count * 6).view(count, 6), torch.arange(count) * 3
    available = torch.full((count,), 9)
    want = tokens.tolist(), start.tolist(), available.tolist()
    for b, (slot, m) in enumerate(zip(slots, accepted, strict=True)):
        if slot >= 0:
            want[0][slot][: k + 1] = [emitted[b][m], *drafts[b].tolist()]
            want[1][slot] += m + 1
            known = want[1][slot] + 1  # tokens known, the newest included, as the reference counts them
            want[2][slot] = max(min(k, longest - known - 1), 0)
    commit_state(
        committed((tokens, start, available)),
        torch.tensor(slots),
        torch.tensor(emitted),
        torch.tensor(accepted),
        drafts,
        longest,
    )
    assert (tokens.tolist(), start.tolist(), available.tolist()) == want


# Triton kernels against the torch versions


def to(device: str, values: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.to(device) for x in values]


def check_draft_inputs(device: str) -> None:
    for k, width, mask, dtype in (
        (3, 40, 500, torch.float32),
        (1, 64, 1, torch.bfloat16),
        (7, 2880, 500, torch.bfloat16),
        (0, 16, 500, torch.float32),
        (3, 40, None, torch.float32),
        (0, 5, None, torch.bfloat16),
    ):
        batch = 4
        accepted = torch.randint(0, k + 1, (batch,), generator=rng(k))
        emitted = torch.randint(0, 400, (batch, k + 1), generator=rng(k + 1))
        emitted[torch.arange(k + 1) > accepted[:, None]] = -1
        starts = ids(0, 10, 12, 3).int()
        hidden = torch.randn(batch * (k + 1), width, generator=rng(2)).to(dtype)
        mask_hidden = torch.randn(width, generator=rng(3)).to(dtype) if mask is not None else None
        on = to(device, (emitted, accepted, starts, hidden))
        there = None if mask_hidden is None else mask_hidden.to(device)
        for limit in (100, 13, 12):
            want = build_draft_inputs(emitted, accepted, starts, hidden, mask_hidden, mask, k, limit)
            with launching_triton(step):
                got = build_draft_inputs(*on, there, mask, k, limit)
            for name, value in vars(want).items():
                other = getattr(got, name)
                assert other.dtype == value.dtype and other.shape == value.shape, name
                assert torch.equal(other.cpu(), value), name


def committed(parts: tuple[Tensor, ...]) -> SlotState:
    """A state of these token ids, computed tokens and draft counts: the fields that `commit_state` writes."""
    return SlotState(*parts, *[torch.empty(0)] * 3)


def check_commit_state(device: str) -> None:
    for k in (3, 0, 7):
        state = (torch.arange(60).view(6, 10), torch.arange(6) * 4, torch.full((6,), 9))
        slots, accepted = ids(4, 0, -1, 5), torch.arange(4) % (k + 1)
        emitted = torch.randint(0, 400, (4, k + 1), generator=rng(k))
        drafts = torch.randint(0, 400, (4, k), generator=rng(k + 1))
        for longest in (1, 9, 22, 24, 2000):
            want, got = tuple(x.clone() for x in state), to(device, tuple(x.clone() for x in state))
            commit_state(committed(want), slots, emitted, accepted, drafts, longest)
            with launching_triton(step):
                commit_state(committed(got), *to(device, (slots, emitted, accepted, drafts)), longest)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.cpu(), b)
            # Explicit positions give the same result as counting from the slot's state.
            moved, before = tuple(x.clone() for x in state), state[1][slots] + accepted + 1
            args = (*to(device, (slots, emitted, accepted, drafts)), longest, before.to(device))
            for launching in (nullcontext(), launching_triton(step)):
                placed = to(device, tuple(x.clone() for x in moved))
                placed[1].fill_(33)
                with launching:
                    commit_state(committed(placed), *args)
                for i, (a, b) in enumerate(zip(placed, want, strict=True)):
                    rows = slots[slots >= 0] if i == 1 else slice(None)
                    assert torch.equal(a.cpu()[rows], b[rows])
                assert (placed[1].cpu()[[1, 2, 3]] == 33).all()


def slot_state(seed: int, slots: int = 5, drafts: int = 7, blocks: int = 300) -> SlotState:
    rng = torch.Generator().manual_seed(seed)
    state = SlotState.allocate(slots, drafts, blocks, torch.device("cpu"))
    for name, most in (
        ("token_ids_SN", 1000),
        ("num_computed_tokens_S", 60),
        ("num_draft_tokens_S", 8),
        ("block_tables_SM", 50),
    ):
        getattr(state, name).random_(0, most, generator=rng)
    state.float_params_3S.uniform_(generator=rng)
    state.int_params_2S.random_(0, 2**62, generator=rng)
    return state


def check_verify_inputs(device: str) -> None:
    for k in (0, 1, 3, 7):
        state = slot_state(k)
        slots = torch.tensor([3, -1, 0, 4])
        want = build_verify_inputs(state, slots, k, 50)
        moved = SlotState(**{f.name: getattr(state, f.name).to(device) for f in fields(state)})
        with launching_triton(step):
            have = build_verify_inputs(moved, slots.to(device), k, 50)
        for f in fields(want):
            a, b = getattr(want, f.name), getattr(have, f.name).cpu()
            assert a.dtype == b.dtype and torch.equal(a, b), (k, f.name)


def check_slot_updates(device: str) -> None:
    """Updates change their cells and no others: several programs, 63-bit seeds, fp32 values, first and last cells."""
    for seed in range(3):
        g = rng(seed)
        state = slot_state(seed, slots=9)
        want = SlotState(**{f.name: getattr(state, f.name).clone() for f in fields(state)})
        moved = SlotState(**{f.name: getattr(state, f.name).to(device) for f in fields(state)})
        # The interpreter takes no pinned memory.
        sides = [SlotUpdates(each, mock.Mock(to_pinned=lambda x: x.to(device))) for each in (state, moved)]
        for slot in (0, 4, 8):
            first = int(torch.randint(0, 250, (), generator=g))
            blocks = torch.randint(0, 2**31 - 1, (300 - first,), generator=g)
            want.block_tables_SM[slot, first:] = blocks.int()
            shares, counts = torch.rand(3, generator=g), torch.randint(0, 2**63 - 1, (2,), generator=g)
            want.float_params_3S[:, slot], want.int_params_2S[:, slot] = shares, counts
            for updates in sides:
                updates.set_blocks(slot, first, blocks.tolist())
                updates.set_sampling_params(slot, shares.tolist(), counts.tolist())
        sides[0].send()
        with launching_triton(step):
            sides[1].send()
        for f in fields(want):
            for have in (state, moved):
                assert torch.equal(getattr(want, f.name), getattr(have, f.name).cpu()), (seed, f.name)


@pytest.mark.gpu
def test_updates_are_read_from_pinned_memory() -> None:
    """A kernel may run long after its updates were collected; later updates must not replace them."""
    state, want = (SlotState.allocate(8, 3, 40, torch.device(device)) for device in ("cuda", "cpu"))
    sides = [SlotUpdates(each, PinnedRing(64)) for each in (state, want)]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    for turn in range(40):
        for updates in sides:
            updates.set_blocks(turn % 8, turn % 30, [turn, turn + 1, turn + 2])
            updates.set_sampling_params(turn % 8, (turn / 7, turn / 9, turn / 11), (turn, 2**62 + turn))
            updates.send()
    for f in fields(want):
        assert torch.equal(getattr(want, f.name), getattr(state, f.name).cpu()), f.name


def test_verify_inputs_worked_example() -> None:
    """The worked example of `build_verify_inputs`, and a padding request."""
    state = SlotState.allocate(2, 2, 4, torch.device("cpu"))
    state.token_ids_SN[1] = torch.tensor([7, 8, 9])
    state.num_computed_tokens_S[1] = 5
    rows = build_verify_inputs(state, torch.tensor([1, -1]), 2, 7)
    assert rows.token_ids_BQ.tolist() == [[7, 8, 9], [0, 0, 0]]
    assert rows.positions_T.tolist() == [5, 6, 6, 0, 1, 2]
    assert rows.sample_positions_T.tolist() == [6, 7, 8, 1, 2, 3]
    assert rows.query_lens_B.tolist() == [2, 3] and rows.num_draft_tokens_B.tolist() == [0, 0]


CHECKS: dict[str, Callable[[str], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_triton_on_the_gpu(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.gpu
def test_a_captured_step_reads_its_inputs_at_replay() -> None:
    batch, k, vocab, width = 3, 4, 5000, 96
    rows = k + 1

    def inputs(seed: int) -> tuple[Tensor, ...]:
        g = rng(seed)
        logits = torch.randn(batch * rows, vocab, generator=g) * 3
        settings = tuple(x.roll(seed, -1) for x in mixed_settings(batch * rows))
        tokens = torch.cat([torch.zeros(batch, 1).long(), sample_tokens(logits, *settings).view(batch, rows)[:, :k]], 1)
        tokens[0, 2] = 0  # one draft token is rejected
        available = torch.randint(1, rows, (batch,), generator=g)
        hidden, mask_hidden = torch.randn(batch * rows, width, generator=g), torch.randn(width, generator=g)
        starts = torch.randint(0, 50, (batch,), generator=g)
        return logits, *settings, tokens, available, hidden, mask_hidden, starts

    def run_step(x: list[Tensor], state: tuple[Tensor, ...]) -> list[Tensor]:
        logits, settings, (tokens, available, hidden, mask_hidden, starts) = x[0], x[1:4], x[4:]
        chosen = sample_tokens(logits, *settings).view(batch, rows)
        accepted, emitted, _ = accept_draft_tokens(tokens, chosen, available, None, starts, starts)
        made = build_draft_inputs(emitted, accepted, starts, hidden, mask_hidden, 7, k, 60)
        drafts = argmax(logits)[made.sample_rows_BK % (batch * rows)]
        commit_state(committed(state), torch.arange(batch, device=logits.device), emitted, accepted, drafts, 60)
        return [chosen, accepted, emitted, *vars(made).values(), drafts]

    def fresh_state(device: str) -> tuple[Tensor, ...]:
        return (
            torch.zeros(4, rows).long().to(device),
            torch.zeros(4).long().to(device),
            torch.zeros(4).long().to(device),
        )

    there = [x.cuda() for x in inputs(0)]
    state = fresh_state("cuda")
    run_step(there, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run_step(there, state)
    for seed in (1, 2, 3):
        here, fresh = inputs(seed), fresh_state("cpu")
        for a, b in zip(there, here, strict=True):
            a.copy_(b)
        for x in state:
            x.zero_()
        graph.replay()
        want = run_step(list(here), fresh)
        for a, b in zip([*result, *state], [*want, *fresh], strict=True):
            assert torch.equal(a.cpu(), b)


def test_everything_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from peagle.kernels.step import build_draft_inputs
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.sampling.verify import accept_draft_tokens
params = torch.tensor([[1.0], [0.9], [0.1]]).expand(-1, 2), torch.tensor([[3, 3], [1, 1]])
tokens = sample_tokens(torch.randn(2, 9), *params, torch.ones(2).long())
tokens, zero = tokens.view(1, 2), torch.zeros(1).long()
accepted, emitted, _ = accept_draft_tokens(tokens, tokens, zero + 1, None, zero, zero)
made = build_draft_inputs(emitted, accepted, zero, torch.randn(2, 4), torch.randn(4), 3, 1, 9)
print(made.query_lens_B.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("[1]", "[2]")


if __name__ == "__main__":
    patch_interpreter()
    for check in CHECKS.values():
        check("cpu")
    print("kernels checked")
