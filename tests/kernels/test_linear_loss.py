"""The loss from hidden states, against whole logits and autograd in fp64.

The Triton kernels run twice: here in Triton's interpreter, in a child process because the interpreter is chosen by an
environment variable that is read when the kernels are imported; and compiled, under the marker `gpu`.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import nan_filled_buffers, patch_interpreter, run_in_interpreter

from peagle.config import LK_ETA, OBJECTIVES, Objective
from peagle.kernels.loss.linear_loss import LinearLossOutput, Teacher, linear_loss, linear_loss_with


@dataclass
class Case:
    rows: int
    width: int
    vocab: int
    positions: int
    teacher_width: int
    teacher_vocab: int  # equal to vocab: not reduced
    questions: list[int]
    objective: Objective
    frozen: str  # "", "head" or "hidden": what asks for no gradient
    sharp: float
    seed: int

    def build(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Teacher, Tensor, Tensor]:
        gen = torch.Generator().manual_seed(self.seed)

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen).to(device, dtype)

        hidden = made(self.rows, self.width) * self.sharp
        head = made(self.vocab, self.width) * self.width**-0.5
        ids = None
        if self.vocab != self.teacher_vocab:
            ids = torch.randperm(self.teacher_vocab, generator=gen)[: self.vocab].sort().values.to(device)
        head_t = made(self.teacher_vocab, self.teacher_width) * self.teacher_width**-0.5
        teacher = Teacher(made(self.positions, self.teacher_width) * self.sharp, head_t, ids)
        hidden.requires_grad_(self.frozen != "hidden")
        head.requires_grad_(self.frozen != "head")
        weight = torch.rand(self.rows, generator=gen).to(device)
        weight[::5] = 0.0
        return hidden, head, teacher, torch.tensor(self.questions), weight

    def check(self, run, dtype: torch.dtype, device: str, near: float, slope_near: float | None = None) -> None:
        hidden, head, teacher, question, weight = self.build(dtype, device)
        have = run(hidden, head, teacher, question, weight, self.objective)
        assert not (have.loss_R.requires_grad or have.acceptance_R.requires_grad or have.match_R.requires_grad)
        leaves = [x for x in (hidden, head) if x.requires_grad]
        got = torch.autograd.grad(have.total * 1.7, leaves)

        exact = {id(x): x.detach().cpu().double().requires_grad_() for x in (hidden, head)}
        ids = None if teacher.draft_ids is None else teacher.draft_ids.cpu()
        teacher = Teacher(teacher.hidden_PT.cpu().double(), teacher.head_UT.cpu().double(), ids)
        want, sure = whole(exact[id(hidden)], exact[id(head)], teacher, question, weight.cpu(), self.objective, near)
        wanted = torch.autograd.grad(want.total * 1.7, [exact[id(x)] for x in leaves])
        for name in ("total", "loss_R", "acceptance_R"):
            same(getattr(have, name), getattr(want, name), near)
        assert have.match_R.dtype == torch.bool
        assert torch.equal(have.match_R.cpu()[sure], want.match_R[sure])
        assert torch.equal(have.teacher_token_R.cpu()[sure], want.teacher_token_R[sure])
        for a, b, leaf in zip(got, wanted, leaves, strict=True):
            assert a.dtype == leaf.dtype
            same(a, b, slope_near or near)


def whole(
    hidden: Tensor, head: Tensor, teacher: Teacher, question: Tensor, weight: Tensor, objective: Objective, near: float
) -> tuple[LinearLossOutput, Tensor]:
    """The oracle: all logits, torch's own autograd. And where no two tokens are too close to call the likeliest."""
    logits, asked = hidden @ head.T, teacher.hidden_PT[question] @ teacher.head_UT.T
    ids = torch.arange(len(head)) if teacher.draft_ids is None else teacher.draft_ids
    log_q, log_p = logits.log_softmax(-1), asked.log_softmax(-1)[:, ids]
    q, p = log_q.exp(), log_p.exp()
    accept = torch.minimum(p, q).sum(-1)
    kl, tv = (p * (log_p - log_q)).sum(-1), 1 - accept
    lam = (-3.0 * accept.detach()).exp()
    loss = {
        "ce": -(p * log_q).sum(-1),
        "kl": kl,
        "tv": tv,
        "lk": -accept.log(),
        "lk-hybrid": lam * kl + (1 - lam) * tv,
    }[objective]
    match = ids[logits.argmax(-1)] == asked.argmax(-1)
    sure = torch.ones(len(match), dtype=torch.bool)
    for x in (logits, asked):
        if x.shape[1] > 1:
            top = x.detach().topk(2).values
            sure &= top[:, 0] - top[:, 1] > 10 * near * top[:, 0].abs().clamp(min=1)
    said = LinearLossOutput((weight.double() * loss).sum(), loss.detach(), accept.detach(), match, asked.argmax(-1))
    return said, sure


def same(have: Tensor, want: Tensor, near: float) -> None:
    want = want.detach()
    size = max(1e-3, float(want.abs().max()))
    torch.testing.assert_close(have.detach().cpu().double(), want, rtol=0, atol=near * size)


@st.composite
def cases(draw: st.DrawFn, most_rows: int, most_vocab: int) -> Case:
    rows, positions = draw(st.integers(1, most_rows)), draw(st.integers(1, 12))
    vocab = draw(st.integers(1, most_vocab))
    more = draw(st.sampled_from([0, 0, 1, 50]))
    return Case(
        rows=rows,
        width=draw(st.integers(1, 12)),
        vocab=vocab,
        positions=positions,
        teacher_width=draw(st.integers(1, 12)),
        teacher_vocab=vocab + more,
        questions=draw(st.lists(st.integers(0, positions - 1), min_size=rows, max_size=rows)),
        objective=draw(st.sampled_from(OBJECTIVES)),
        frozen=draw(st.sampled_from(["", "head", "hidden"])),
        sharp=draw(st.sampled_from([0.3, 2.0])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=120, deadline=None)
@given(case=cases(most_rows=30, most_vocab=60), logits=st.sampled_from([1, 70, 500, 1 << 20]))
def test_torch_against_whole_logits(case: Case, logits: int) -> None:
    """Any chunk size, to the last digits of fp64."""
    case.check(partial(linear_loss, max_logits=logits * 8), torch.float64, "cpu", 1e-11)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("more", [0, 30])
def test_torch_in_fp32(objective: Objective, more: int) -> None:
    case = Case(40, 16, 90, 20, 8, 90 + more, [i % 20 for i in range(40)], objective, "", 2.0, 0)
    case.check(linear_loss, torch.float32, "cpu", 2e-5)


def test_chunks_change_nothing_in_fp32() -> None:
    case = Case(50, 16, 90, 20, 8, 90, [i * i % 20 for i in range(50)], "lk-hybrid", "", 2.0, 0)
    found = []
    for logits in (1, 720, 9000, 1 << 24):
        hidden, head, *rest = case.build(torch.float32, "cpu")
        done = linear_loss(hidden, head, *rest, case.objective, max_logits=logits)
        found.append([done.loss_R, done.acceptance_R, *torch.autograd.grad(done.total, [hidden, head])])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    case = Case(6, 4, 9, 3, 4, 9, [0, 1, 2] * 2, "ce", "", 1.0, 0)
    with torch.no_grad():
        done = linear_loss(*case.build(torch.float64, "cpu"), case.objective)
    assert done.total.grad_fn is None
    hidden, head, *rest = case.build(torch.float64, "cpu")
    torch.testing.assert_close(done.total, linear_loss(hidden, head, *rest, case.objective).total.detach())


def test_no_rows_is_no_loss() -> None:
    case = Case(0, 4, 9, 3, 4, 9, [], "ce", "", 1.0, 0)
    hidden, head, teacher, _, weight = case.build(torch.float64, "cpu")
    done = linear_loss(hidden, head, teacher, torch.zeros(0, dtype=torch.long), weight, "ce")
    done.total.backward()
    assert done.total == 0 and head.grad is not None and not head.grad.any()


def test_hybrid_moves_from_kl_to_tv() -> None:
    """Where p and q share nothing it is kl; a large eta makes it tv where they share anything."""
    eye = torch.eye(4, dtype=torch.float64)
    teacher = Teacher(eye * 50, eye)
    for scale, eta, part in ((50.0, 3.0, "kl"), (1.0, 1e4, "tv")):
        hidden = (eye[:1] * scale).requires_grad_()
        args = (hidden, eye, teacher, torch.tensor([1]), torch.ones(1))
        mixed, alone = linear_loss(*args, "lk-hybrid", eta), linear_loss(*args, part)
        torch.testing.assert_close(mixed.loss_R, alone.loss_R, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(*(torch.autograd.grad(x.total, hidden) for x in (mixed, alone)))


def triton_loss(case: Case, dtype: torch.dtype, device: str, near: float, logits: int, **launch: int) -> None:
    from peagle.kernels.loss.linear_loss_triton import compute_row_losses_triton

    def run(*args) -> LinearLossOutput:
        return linear_loss_with(partial(compute_row_losses_triton, **launch), *args, LK_ETA, logits)

    with nan_filled_buffers():
        case.check(run, dtype, device, near)


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    patch_interpreter()
    # No shrinking, which would take minutes.
    phases = (Phase.explicit, Phase.generate)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=phases)
    @given(
        case=cases(most_rows=12, most_vocab=150),
        logits=st.sampled_from([1, 500, 1 << 20]),
        block=st.sampled_from([16, 64]),
    )
    def against_whole_logits(case: Case, logits: int, block: int) -> None:
        triton_loss(case, torch.float32, "cpu", 2e-5, logits, block=block)

    against_whole_logits()
    for objective in OBJECTIVES:
        for more in (0, 40):
            case = Case(9, 8, 100, 6, 8, 100 + more, [i % 6 for i in range(9)], objective, "", 2.0, 3)
            triton_loss(case, torch.float32, "cpu", 2e-5, 1 << 20, block=32)
    print("kernels checked")


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("more", [0, 7000])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
def test_triton_on_the_gpu(objective: Objective, more: int, dtype: torch.dtype, near: float) -> None:
    """With the launch in use, and a vocabulary that its blocks do not divide."""
    vocab, questions = 30_001, [i * 7 % 50 for i in range(130)]
    case = Case(130, 64, vocab, 50, 128, vocab + more, questions, objective, "", 2.0, 0)
    # a token whose p and q are the same but for rounding may fall on either side of the kink of tv: in plain torch, in
    # the same dtype, that alone is 0.3% and 8% of the slope here
    slope_near = None if objective not in ("tv", "lk") else 5e-3 if dtype == torch.float32 else 0.15
    case.check(partial(linear_loss, max_logits=50 * vocab), dtype, "cuda", near, slope_near)


@pytest.mark.gpu
def test_questions_may_lie_on_either_side() -> None:
    case = Case(40, 64, 1000, 20, 64, 1000, [i % 20 for i in range(40)], "kl", "", 1.0, 0)
    hidden, head, teacher, question, weight = case.build(torch.bfloat16, "cuda")
    there = linear_loss(hidden, head, teacher, question.cuda(), weight, "kl")
    here = linear_loss(hidden, head, teacher, question, weight, "kl")
    assert torch.equal(there.loss_R, here.loss_R) and torch.equal(there.total, here.total)


if __name__ == "__main__":
    check_in_the_interpreter()
