"""The fused linear loss against whole logits and autograd in fp64.

The Triton kernels run twice: in Triton's interpreter, in a child process, and compiled, under the marker `gpu`.
"""

from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import nan_filled_buffers, patch_interpreter, run_in_interpreter

from peagle.config import OBJECTIVES, Objective
from peagle.kernels.loss import linear_loss as module
from peagle.kernels.loss.linear_loss import LinearLossOutput, Teacher, linear_loss


@dataclass
class LossCase:
    """One call on random data."""

    rows: int
    width: int
    vocab: int
    positions: int
    teacher_width: int
    teacher_vocab: int  # larger than vocab: reduced draft vocabulary
    teacher_positions: list[int]
    objective: Objective
    frozen: str  # "", "head" or "hidden": the input without gradient
    scale: float  # of hidden states: larger is sharper
    seed: int

    def build(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Teacher, Tensor, Tensor]:
        gen = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen).to(device, dtype)

        hidden = randn(self.rows, self.width) * self.scale
        head = randn(self.vocab, self.width) * self.width**-0.5
        ids = None
        if self.vocab != self.teacher_vocab:
            ids = torch.randperm(self.teacher_vocab, generator=gen)[: self.vocab].sort().values.to(device)
        teacher_head = randn(self.teacher_vocab, self.teacher_width) * self.teacher_width**-0.5
        teacher = Teacher(randn(self.positions, self.teacher_width) * self.scale, teacher_head, ids)
        hidden.requires_grad_(self.frozen != "hidden")
        head.requires_grad_(self.frozen != "head")
        weight = torch.rand(self.rows, generator=gen).to(device)
        weight[::5] = 0.0
        return hidden, head, teacher, torch.tensor(self.teacher_positions), weight

    def check(
        self, run, dtype: torch.dtype, device: str, tolerance: float, grad_tolerance: float | None = None
    ) -> None:
        """Compares results and gradients of `run` with whole logits in fp64."""
        hidden, head, teacher, position, weight = self.build(dtype, device)
        actual = run(hidden, head, teacher, position, weight, self.objective)
        assert not (actual.loss_R.requires_grad or actual.acceptance_R.requires_grad or actual.match_R.requires_grad)
        leaves = [x for x in (hidden, head) if x.requires_grad]
        actual_grads = torch.autograd.grad(actual.total * 1.7, leaves)

        exact = {id(x): x.detach().cpu().double().requires_grad_() for x in (hidden, head)}
        ids = None if teacher.draft_ids is None else teacher.draft_ids.cpu()
        teacher = Teacher(teacher.hidden_PT.cpu().double(), teacher.head_UT.cpu().double(), ids)
        args = (exact[id(hidden)], exact[id(head)], teacher, position, weight.cpu(), self.objective)
        expected, clear = loss_from_whole_logits(*args, tolerance)
        expected_grads = torch.autograd.grad(expected.total * 1.7, [exact[id(x)] for x in leaves])
        for name in ("total", "loss_R", "acceptance_R"):
            assert_near(getattr(actual, name), getattr(expected, name), tolerance)
        assert actual.match_R.dtype == torch.bool
        assert torch.equal(actual.match_R.cpu()[clear], expected.match_R[clear])
        assert torch.equal(actual.teacher_token_R.cpu()[clear], expected.teacher_token_R[clear])
        for a, b, leaf in zip(actual_grads, expected_grads, leaves, strict=True):
            assert a.dtype == leaf.dtype
            assert_near(a, b, grad_tolerance or tolerance)


def loss_from_whole_logits(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    position: Tensor,
    weight: Tensor,
    objective: Objective,
    tolerance: float,
) -> tuple[LinearLossOutput, Tensor]:
    """The oracle: whole logits and torch's autograd. Also returns the rows whose argmax tokens are not close calls."""
    logits, teacher_logits = hidden @ head.T, teacher.hidden_PT[position] @ teacher.head_UT.T
    ids = torch.arange(len(head)) if teacher.draft_ids is None else teacher.draft_ids
    log_q, log_p = logits.log_softmax(-1), teacher_logits.log_softmax(-1)[:, ids]
    q, p = log_q.exp(), log_p.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    kl, tv = (p * (log_p - log_q)).sum(-1), 1 - acceptance
    lam = (-3.0 * acceptance.detach()).exp()
    loss = {
        "ce": -(p * log_q).sum(-1),
        "kl": kl,
        "tv": tv,
        "lk": -acceptance.log(),
        "lk-hybrid": lam * kl + (1 - lam) * tv,
    }[objective]
    match = ids[logits.argmax(-1)] == teacher_logits.argmax(-1)
    clear = torch.ones(len(match), dtype=torch.bool)
    for x in (logits, teacher_logits):
        if x.shape[1] > 1:
            top = x.detach().topk(2).values
            clear &= top[:, 0] - top[:, 1] > 10 * tolerance * top[:, 0].abs().clamp(min=1)
    total = (weight.double() * loss).sum()
    return LinearLossOutput(total, loss.detach(), acceptance.detach(), match, teacher_logits.argmax(-1)), clear


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares relative to the largest expected value."""
    expected = expected.detach()
    size = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=0, atol=tolerance * size)


@st.composite
def loss_cases(draw: st.DrawFn, max_rows: int, max_vocab: int) -> LossCase:
    rows, positions = draw(st.integers(1, max_rows)), draw(st.integers(1, 12))
    vocab = draw(st.integers(1, max_vocab))
    return LossCase(
        rows=rows,
        width=draw(st.integers(1, 12)),
        vocab=vocab,
        positions=positions,
        teacher_width=draw(st.integers(1, 12)),
        teacher_vocab=vocab + draw(st.sampled_from([0, 0, 1, 50])),
        teacher_positions=draw(st.lists(st.integers(0, positions - 1), min_size=rows, max_size=rows)),
        objective=draw(st.sampled_from(OBJECTIVES)),
        frozen=draw(st.sampled_from(["", "head", "hidden"])),
        scale=draw(st.sampled_from([0.3, 2.0])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(case=loss_cases(max_rows=30, max_vocab=60), logits=st.sampled_from([1, 70, 500, 1 << 20]))
def test_torch_matches_whole_logits_for_any_chunk_size(case: LossCase, logits: int) -> None:
    case.check(partial(linear_loss, max_logits=logits * 8), torch.float64, "cpu", 1e-11)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("extra_vocab", [0, 30])
def test_torch_in_fp32(objective: Objective, extra_vocab: int) -> None:
    case = LossCase(40, 16, 90, 20, 8, 90 + extra_vocab, [i % 20 for i in range(40)], objective, "", 2.0, 0)
    case.check(linear_loss, torch.float32, "cpu", 2e-5)


def test_chunk_size_does_not_change_fp32_results() -> None:
    case = LossCase(50, 16, 90, 20, 8, 90, [i * i % 20 for i in range(50)], "lk-hybrid", "", 2.0, 0)
    results = []
    for logits in (1, 720, 9000, 1 << 24):
        hidden, head, *rest = case.build(torch.float32, "cpu")
        done = linear_loss(hidden, head, *rest, case.objective, max_logits=logits)
        results.append([done.loss_R, done.acceptance_R, *torch.autograd.grad(done.total, [hidden, head])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logits", [1, 1 << 20], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("trained_head", [False, True])
def test_scale_by_earlier_scales_loss_and_gradients(trained_head: bool, logits: int) -> None:
    """Row r + 1 is scaled by the acceptance of row r, which has the teacher position before it."""
    case = LossCase(9, 6, 20, 9, 5, 20, list(range(9)), "kl", "" if trained_head else "head", 2.0, 0)
    hidden, head, teacher, position, weight = case.build(torch.float64, "cpu")
    leaves = [hidden, head] if trained_head else [hidden]

    def scale_rows(acceptance_R: Tensor, teacher_token_R: Tensor) -> Tensor:
        return torch.cat([acceptance_R.new_ones(1), acceptance_R[:-1]])

    args = (hidden, head, teacher, position)
    actual = linear_loss(*args, weight, "kl", max_logits=logits, scale_by_earlier=scale_rows)
    actual_grads = torch.autograd.grad(actual.total, leaves)
    scaled = weight * scale_rows(actual.acceptance_R, actual.teacher_token_R)
    expected = linear_loss(*args, scaled, "kl")
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-12, atol=0)
    for a, b in zip(actual_grads, torch.autograd.grad(expected.total, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_no_grad_keeps_no_gradient() -> None:
    case = LossCase(6, 4, 9, 3, 4, 9, [0, 1, 2] * 2, "ce", "", 1.0, 0)
    with torch.no_grad():
        done = linear_loss(*case.build(torch.float64, "cpu"), case.objective)
    assert done.total.grad_fn is None
    hidden, head, *rest = case.build(torch.float64, "cpu")
    torch.testing.assert_close(done.total, linear_loss(hidden, head, *rest, case.objective).total.detach())


def test_no_rows_give_zero_loss() -> None:
    case = LossCase(0, 4, 9, 3, 4, 9, [], "ce", "", 1.0, 0)
    hidden, head, teacher, _, weight = case.build(torch.float64, "cpu")
    done = linear_loss(hidden, head, teacher, torch.zeros(0, dtype=torch.long), weight, "ce")
    done.total.backward()
    assert done.total == 0 and head.grad is not None and not head.grad.any()


def test_lk_hybrid_moves_from_kl_to_tv() -> None:
    """It is kl where p and q are disjoint, and tv with a large eta where they overlap."""
    eye = torch.eye(4, dtype=torch.float64)
    teacher = Teacher(eye * 50, eye)
    for scale, eta, limit in ((50.0, 3.0, "kl"), (1.0, 1e4, "tv")):
        hidden = (eye[:1] * scale).requires_grad_()
        args = (hidden, eye, teacher, torch.tensor([1]), torch.ones(1))
        with mock.patch.object(module, "LK_ETA", eta):
            hybrid, alone = linear_loss(*args, "lk-hybrid"), linear_loss(*args, limit)
        torch.testing.assert_close(hybrid.loss_R, alone.loss_R, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(*(torch.autograd.grad(x.total, hidden) for x in (hybrid, alone)))


def check_triton_loss(case: LossCase, logits: int, block: int) -> None:
    from peagle.kernels.loss.linear_loss_triton import compute_row_losses_triton

    row_losses = partial(compute_row_losses_triton, block=block)
    with nan_filled_buffers():
        case.check(partial(linear_loss, max_logits=logits, row_losses=row_losses), torch.float32, "cpu", 2e-5)


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    patch_interpreter()
    phases = (Phase.explicit, Phase.generate)  # shrinking would take minutes

    @settings(max_examples=18, deadline=None, derandomize=True, database=None, phases=phases)
    @given(
        case=loss_cases(max_rows=10, max_vocab=150),
        logits=st.sampled_from([1, 500, 1 << 20]),
        block=st.sampled_from([16, 64]),
    )
    def check_random_cases(case: LossCase, logits: int, block: int) -> None:
        check_triton_loss(case, logits, block)

    check_random_cases()
    for objective in OBJECTIVES:
        for extra_vocab in (0, 40):
            case = LossCase(6, 8, 100, 4, 8, 100 + extra_vocab, [i % 4 for i in range(6)], objective, "", 2.0, 3)
            check_triton_loss(case, 1 << 20, 32)
    print("kernels checked")


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("extra_vocab", [0, 7000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
def test_triton_on_the_gpu(objective: Objective, extra_vocab: int, dtype: torch.dtype, tolerance: float) -> None:
    """Default launch, and a vocabulary that is no multiple of its block."""
    vocab, positions = 30_001, [i * 7 % 50 for i in range(130)]
    case = LossCase(130, 64, vocab, 50, 128, vocab + extra_vocab, positions, objective, "", 2.0, 0)
    # If p and q of a token are equal up to rounding, it may fall on either side of the kink of tv. In plain torch with
    # the same dtype this alone changes the gradient by 0.3% and 8%.
    grad_tolerance = None if objective not in ("tv", "lk") else 5e-3 if dtype == torch.float32 else 0.15
    case.check(partial(linear_loss, max_logits=50 * vocab), dtype, "cuda", tolerance, grad_tolerance)


@pytest.mark.gpu
def test_positions_may_lie_on_either_device() -> None:
    case = LossCase(40, 64, 1000, 20, 64, 1000, [i % 20 for i in range(40)], "kl", "", 1.0, 0)
    hidden, head, teacher, position, weight = case.build(torch.bfloat16, "cuda")
    on_gpu = linear_loss(hidden, head, teacher, position.cuda(), weight, "kl")
    on_cpu = linear_loss(hidden, head, teacher, position, weight, "kl")
    assert torch.equal(on_gpu.loss_R, on_cpu.loss_R) and torch.equal(on_gpu.total, on_cpu.total)


if __name__ == "__main__":
    check_in_the_interpreter()
