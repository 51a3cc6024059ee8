"""Weights of training rows by the rows before and behind them."""

import pytest
import torch

from peagle.kernels.loss.linear_loss import Teacher, linear_loss
from peagle.training.loss_weighting import NOBODY, Links


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("logits", [40, 10**6], ids=["in parts", "at once"])
def test_by_value_tv_is_about_the_drafts_kept(trained_head: bool, logits: int) -> None:
    """Of whole chains by reach and by value, the gradient is that of what is wanted: the drafts in a row that are kept,
    each with its chance, summed over rounds that begin anywhere."""
    gen = torch.Generator().manual_seed(4)
    chains, depths, width, vocab = 6, 4, 8, 20
    rows = chains * depths
    hidden = torch.randn(rows, width, generator=gen).double().requires_grad_()
    head = torch.randn(vocab, width, generator=gen).double().requires_grad_(trained_head)
    asked = torch.randn(chains + depths, width, generator=gen).double()
    teacher = Teacher(asked, torch.randn(vocab, width, generator=gen).double() * 0.5)
    # first rows first, then the others chain by chain
    place = torch.cat([torch.arange(chains)[:, None], torch.arange(chains, rows).view(chains, depths - 1)], 1)
    question, before = torch.empty(2, rows, dtype=torch.long)
    question[place] = torch.arange(chains)[:, None] + torch.arange(depths)
    before[place] = torch.cat([torch.full((chains, 1), NOBODY), place[:, :-1]], 1)
    left = torch.empty(rows, dtype=torch.long)
    left[place] = depths - 1 - torch.arange(depths).expand(chains, -1)
    text = (asked @ teacher.head_UT.T).argmax(-1)[question]
    links = Links(before, text, torch.full((chains,), NOBODY)).counting(left_R=left, most_left=depths - 1)
    leaves = [hidden, head] if trained_head else [hidden]

    scales = {"scale_by_earlier": links.share, "scale_by_all": links.worth}
    said = linear_loss(hidden, head, teacher, question, torch.ones(rows), "tv", max_logits=logits, **scales)
    got = torch.autograd.grad(said.total, leaves)
    p, q = (asked @ teacher.head_UT.T).softmax(-1)[question], (hidden @ head.T).softmax(-1)
    kept = torch.minimum(p, q).sum(-1)[place].cumprod(1).sum()
    for a, b in zip(got, torch.autograd.grad(-kept, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
