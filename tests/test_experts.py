"""Experts against fp64, row by row: the torch ways here, the Triton kernels in the interpreter and, marked `gpu`,
compiled."""

from __future__ import annotations

import pytest
import torch
from interpreting import check_in_a_child, mend_interpreter, poisoned
from torch import Tensor

from peagle.kernels.experts import Clamp, Experts, expert_mlp_grouped, expert_mlp_torch, route_torch

# rows, width, experts, chosen, width of an expert
SHAPES = [(1, 24, 6, 2, 40), (5, 16, 4, 4, 8), (19, 32, 9, 3, 24), (40, 48, 3, 1, 72), (70, 16, 12, 5, 16)]


def layer(width: int, count: int, inner: int, full: bool, dtype: torch.dtype, device: str) -> Experts:
    """`full`: with biases, and gates so large that clamping matters."""
    gen = torch.Generator().manual_seed(count)

    def noise(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=gen) * (1.0 if full else 0.3)).to(device, dtype)

    weights = noise(count, 2 * inner, width), noise(count, width, inner)
    biases = (noise(count, 2 * inner), noise(count, width)) if full else (None, None)
    return Experts(*weights, *biases, Clamp(1.702, 2.0) if full else None)


def inputs(rows: int, width: int, count: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rows)
    x, logits = torch.randn(rows, width, generator=gen), 2 * torch.randn(rows, count, generator=gen)
    return x.to(device, dtype), logits.to(device, dtype)


def expected_route(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    rows = logits_TE.double().cpu()
    weights, experts = [], []
    for row in rows:
        order = sorted(range(len(row)), key=lambda e: -row[e])[:chosen]
        all_of_them = torch.exp(row).sum() if not normed else torch.exp(row[order]).sum()
        weights.append(torch.exp(row[order]) / all_of_them)
        experts.append(order)
    return torch.stack(weights), torch.tensor(experts)


def expected(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: Experts) -> Tensor:
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    wide = [t.double().cpu() if t is not None else None for t in vars(experts).values() if not isinstance(t, Clamp)]
    gate_up, down, gate_up_bias, down_bias = wide[:4]
    assert gate_up is not None and down is not None
    half = down.shape[2]
    for t, row in enumerate(x_TD.double().cpu()):
        for weight, e in zip(weight_TC[t].double().tolist(), expert_TC[t].tolist(), strict=True):
            y = gate_up[e] @ row + (gate_up_bias[e] if gate_up_bias is not None else 0)
            gate, up = y[:half], y[half:]
            if experts.clamp is None:
                hidden = gate / (1 + torch.exp(-gate)) * up
            else:
                gate, up = gate.minimum(torch.tensor(experts.clamp.limit)), up.clamp(-2.0, 2.0)
                hidden = gate / (1 + torch.exp(-experts.clamp.alpha * gate)) * (up + 1)
            out[t] += weight * (down[e] @ hidden + (down_bias[e] if down_bias is not None else 0))
    return out


def check(run, shape: tuple[int, ...], full: bool, dtype: torch.dtype, device: str, tolerance: float) -> None:
    rows, width, count, chosen, inner = shape
    x, logits = inputs(rows, width, count, dtype, device)
    weight, expert = route_torch(logits, chosen, normed=True)
    experts = layer(width, count, inner, full, dtype, device)
    got = run(x, weight, expert, experts)
    want = expected(x, weight, expert, experts)
    assert want.abs().mean() > 1e-2
    torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_ways(shape: tuple[int, ...], full: bool) -> None:
    for run in (expert_mlp_torch, expert_mlp_grouped):
        check(run, shape, full, torch.float32, "cpu", 1e-5)


def check_route(run, dtype: torch.dtype, device: str) -> None:
    for rows, _, count, chosen, _ in SHAPES:
        logits = inputs(rows, 4, count, dtype, device)[1]
        for normed in (False, True):
            weight, expert = run(logits, chosen, normed)
            want_weight, want_expert = expected_route(logits, chosen, normed)
            assert expert.dtype == torch.int32 and torch.equal(expert.cpu().long(), want_expert)
            torch.testing.assert_close(weight.double().cpu(), want_weight, rtol=1e-5, atol=1e-6)


def test_route() -> None:
    check_route(route_torch, torch.float32, "cpu")


def test_triton_in_the_interpreter() -> None:
    check_in_a_child(__file__)


def check_in_the_interpreter() -> None:
    from peagle.kernels.experts_triton import expert_mlp_triton, route_triton

    mend_interpreter()
    check_route(route_triton, torch.float32, "cpu")
    with poisoned():
        for shape in SHAPES:
            for full in (False, True):
                check(expert_mlp_triton, shape, full, torch.float32, "cpu", 1e-5)
        check(expert_mlp_triton, SHAPES[2], True, torch.float16, "cpu", 4e-3)
    print("kernels checked")


@pytest.mark.gpu
def test_compiled() -> None:
    from peagle.kernels.experts import expert_mlp, route

    check_route(route, torch.float32, "cuda")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        for shape in (*SHAPES, (300, 64, 8, 3, 96)):
            for full in (False, True):
                check(expert_mlp, shape, full, dtype, "cuda", tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 200])
def test_in_a_graph(rows: int) -> None:
    """Replayed with other rows and other choices, so nothing may have been decided on the host."""
    from peagle.kernels.experts import expert_mlp, route

    width, count, chosen = 64, 8, 3
    experts = layer(width, count, 96, True, torch.bfloat16, "cuda")
    x, logits = inputs(rows, width, count, torch.bfloat16, "cuda")
    expert_mlp(x, *route(logits, chosen, True), experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_mlp(x, *route(logits, chosen, True), experts)
    x.copy_(x.flip(0))
    logits.copy_(logits.roll(3, 1))
    graph.replay()
    want = expected(x, *route_torch(logits, chosen, True), experts)
    torch.testing.assert_close(out.double().cpu(), want, rtol=3e-2, atol=3e-2 * want.abs().max().item())


if __name__ == "__main__":
    check_in_the_interpreter()
