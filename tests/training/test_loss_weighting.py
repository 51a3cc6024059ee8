"""Acceptance weighting against a loop over chains."""

import torch

from peagle.training.loss import NO_PREVIOUS, ChainLinks


def test_docstring_example() -> None:
    previous = torch.tensor([NO_PREVIOUS, NO_PREVIOUS, 0, 2, 1])
    a, b, c, d, e = torch.rand(5, dtype=torch.float64)
    product = ChainLinks(previous, torch.zeros(5, dtype=torch.long)).prefix_product(torch.stack([a, b, c, d, e]))
    assert product.tolist() == [1.0, 1.0, a.item(), (a * c).item(), b.item()]


def test_weights_equal_a_loop_over_chains() -> None:
    gen = torch.Generator().manual_seed(4)
    num_chains, num_depths = 7, 6
    size = num_chains * num_depths
    index = torch.randperm(size, generator=gen).view(num_chains, num_depths)  # positions of a chain, in any order
    previous = torch.full((size,), NO_PREVIOUS)
    previous[index[:, 1:]] = index[:, :-1]
    acceptance = torch.rand(size, generator=gen, dtype=torch.float64)
    labels, tokens = torch.randint(0, 2, (2, size), generator=gen)
    weight = ChainLinks(previous, labels).acceptance_weight(acceptance, tokens)
    for chain in index.tolist():
        expected = 1.0
        for position in chain:
            assert weight[position].item() == expected or abs(weight[position].item() - expected) < 1e-15
            expected *= acceptance[position].item() * (labels[position] == tokens[position]).item()
