"""Ranged attention and the merge of attention states, with gradients, against a dense mask and autograd in fp64.

The Triton kernels run twice: in Triton's interpreter, in a child process, and compiled, under the marker `gpu`.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import nan_filled_buffers, patch_interpreter, run_in_interpreter

from peagle.kernels.attention import types as module
from peagle.kernels.attention.ranged import (
    MergeAttnStatesFunction,
    RangedAttentionFunction,
    backward_torch,
    forward_torch,
    merge_attn_states,
    ranged_attention,
)
from peagle.kernels.attention.types import AttentionLaunch, KeyRanges


def dense_attention(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """The oracle: all scores, a mask, torch's softmax and autograd."""
    keys = torch.arange(len(k_SGd))
    seen_RS = (keys >= ranges.lo_R.cpu()[:, None]) & (keys < ranges.hi_R.cpu()[:, None])
    shared = q_RHd.shape[1] // k_SGd.shape[1]
    k, v = k_SGd.repeat_interleave(shared, 1), v_SGd.repeat_interleave(shared, 1)
    scores = torch.einsum("rhd,shd->hrs", q_RHd, k) * q_RHd.shape[-1] ** -0.5
    empty = ~seen_RS.any(1)
    scores = scores.masked_fill(~seen_RS & ~empty[:, None], float("-inf"))
    out = torch.einsum("hrs,shd->rhd", scores.softmax(-1), v).masked_fill(empty[:, None, None], 0.0)
    return out, scores.logsumexp(-1).T.masked_fill(empty[:, None], float("-inf"))


@dataclass
class RangedCase:
    """One call on random data; `fused_qkv`: q, k and v are slices of one tensor."""

    lo: list[int]
    hi: list[int]
    keys: int
    kv_heads: int
    group: int
    width: int
    fused_qkv: bool
    seed: int

    def ranges(self, device: str = "cpu") -> KeyRanges:
        return KeyRanges(torch.tensor(self.lo, device=device), torch.tensor(self.hi, device=device))

    def build(self, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns q, k and v as leaves, and the gradients of both results."""
        gen = torch.Generator().manual_seed(self.seed)
        heads, rows = self.kv_heads * self.group, len(self.lo)
        parts = [(rows, heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads)]
        if self.fused_qkv:
            max_len = torch.randn(max(rows, self.keys), heads + 2 * self.kv_heads, self.width, generator=gen)
            cut = max_len.to(device, dtype).split([h for _, h in parts], 1)
            qkv = [x[:n] for x, (n, _) in zip(cut, parts, strict=True)]
        else:
            qkv = [torch.randn(n, h, self.width, generator=gen).to(device, dtype) for n, h in parts]
        dout = torch.randn(rows, heads, self.width, generator=gen).to(device, dtype)
        dlse = torch.randn(rows, heads, generator=gen).to(device)
        return [x.detach().requires_grad_() for x in qkv], dout, dlse

    def check(self, attend, dtype: torch.dtype, device: str, tolerance: float, lse_grad: bool = True) -> None:
        """Compares results and gradients of `attend` with the oracle's."""
        leaves, dout, dlse = self.build(dtype, device)
        out, lse = attend(*leaves, self.ranges(device))
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and out.dtype == dtype
        state_grads = [dout, dlse.to(lse.dtype)] if lse_grad else [dout]
        actual = torch.autograd.grad([out, lse] if lse_grad else [out], leaves, state_grads)

        exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
        expected_out, expected_lse = dense_attention(*exact, self.ranges())
        empty = (expected_lse == float("-inf")).detach()
        state_grads = [dout.cpu().double(), dlse.cpu().double().masked_fill(empty, 0.0)]
        expected_states = [expected_out, expected_lse.masked_fill(empty, 0.0)]
        expected = torch.autograd.grad(
            expected_states if lse_grad else expected_states[:1], exact, state_grads if lse_grad else state_grads[:1]
        )
        assert_near(out, expected_out, tolerance)
        assert_near(lse, expected_lse, tolerance)
        for a, b in zip(actual, expected, strict=True):
            assert_near(a, b, tolerance)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares relative to the largest expected value."""
    expected = expected.detach()
    size = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.isfinite().any() else 1.0
    torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=0, atol=tolerance * size)


def pack_documents(lengths: list[int]) -> tuple[list[int], list[int]]:
    starts = [sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)]
    return starts, [i + 1 for i in range(sum(lengths))]


@st.composite
def ranged_cases(draw: st.DrawFn, max_len: int, shapes: list[tuple[int, int, int]]) -> RangedCase:
    """Packed documents, chains over them, chains over themselves, or any ranges that never decrease."""
    size = st.one_of(st.integers(1, 5), st.integers(1, max_len), st.sampled_from([15, 16, 17, 31, 32, 33, 64]))
    lengths = draw(st.lists(size.map(lambda n: min(n, max_len)), min_size=1, max_size=4))
    lo, hi = pack_documents(lengths)
    keys = len(lo)
    kind = draw(st.sampled_from(["documents", "chains", "bands", "any"]))
    if kind == "chains":  # each token anchors some rows, or none
        anchored = [i for i in range(keys) for _ in range(draw(st.integers(0, 3)))]
        lo, hi = [lo[i] for i in anchored], [hi[i] for i in anchored]
    elif kind == "bands":
        lo, hi = pack_documents([draw(st.integers(1, 7)) for _ in range(max(1, keys // 4))])
        keys = len(lo)
    elif kind == "any":
        rows = draw(st.integers(1, 2 * max_len))
        bound = st.lists(st.integers(0, keys), min_size=rows, max_size=rows).map(sorted)
        lo, hi = draw(bound), draw(bound)
    if not lo:
        lo, hi = [0], [0]
    kv_heads, group, width = draw(st.sampled_from(shapes))
    return RangedCase(lo, hi, keys, kv_heads, group, width, draw(st.booleans()), draw(st.integers(0, 99)))


SHAPES = [(1, 1, 8), (2, 3, 8), (3, 1, 16), (2, 2, 12), (1, 4, 32)]
TILED = [(1, 1, 16), (2, 3, 16), (1, 2, 32), (1, 3, 8), (2, 2, 24)]


def test_row_spans_worked_example() -> None:
    lo, hi = pack_documents([3, 2])
    ranges = KeyRanges(torch.tensor(lo), torch.tensor(hi))
    assert ranges.lo_R.tolist() == [0, 0, 0, 3, 3] and ranges.hi_R.tolist() == [1, 2, 3, 4, 5]
    assert ranges.get_row_spans(5, 2).tolist() == [[0, 2, 4], [1, 3, 4], [3, 3, 5], [3, 5, 5]]
    assert ranges.get_row_spans(5, 2) is ranges.get_row_spans(5, 2)


@settings(max_examples=40, deadline=None)
@given(case=ranged_cases(max_len=40, shapes=SHAPES[:1]), tile=st.integers(1, 20))
def test_row_spans_match_visibility(case: RangedCase, tile: int) -> None:
    spans = case.ranges().get_row_spans(case.keys, tile).T.tolist()
    assert len(spans) == -(-case.keys // tile)
    for n, (first, full_first, full_end, end) in enumerate(spans):
        keys = range(n * tile, min((n + 1) * tile, case.keys))
        for row, (lo, hi) in enumerate(zip(case.lo, case.hi, strict=True)):
            seen = [lo <= key < hi for key in keys]
            assert first <= row < end or not any(seen)
            assert (full_first <= row < full_end) == all(seen)


@settings(max_examples=60, deadline=None)
@given(case=ranged_cases(max_len=60, shapes=SHAPES), scores=st.sampled_from([1, 300, 1 << 20]), lse_grad=st.booleans())
def test_torch_matches_dense_attention(case: RangedCase, scores: int, lse_grad: bool) -> None:
    """Any chunk size gives the same result up to fp64 rounding."""
    before = module.MAX_CHUNK_SCORES, module.MIN_CHUNK_ROWS
    module.MAX_CHUNK_SCORES, module.MIN_CHUNK_ROWS = scores, min(scores, 32)
    try:
        case.check(ranged_attention, torch.float64, "cpu", 1e-12, lse_grad)
    finally:
        module.MAX_CHUNK_SCORES, module.MIN_CHUNK_ROWS = before


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (2, 0), (0, 0)])
def test_no_rows_or_no_keys(rows: int, keys: int) -> None:
    RangedCase([0] * rows, [0] * rows, keys, 1, 2, 8, False, 0).check(ranged_attention, torch.float64, "cpu", 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_torch_in_fp32_and_bf16(dtype: torch.dtype, tolerance: float) -> None:
    lo, hi = pack_documents([50, 3, 70])
    RangedCase(lo, hi, 123, 2, 3, 24, True, 0).check(ranged_attention, dtype, "cpu", tolerance)


def count_scores(rows: slice, keys: slice) -> int:
    return (rows.stop - rows.start) * (keys.stop - keys.start)


def test_chunks_cover_every_row_with_few_scores() -> None:
    lo, hi = pack_documents([7] * 1000)
    chunks = KeyRanges(torch.tensor(lo), torch.tensor(hi)).get_chunks(heads=8)
    assert [rows.start for rows, _ in chunks[1:]] == [rows.stop for rows, _ in chunks[:-1]]
    assert chunks[0][0].start == 0 and chunks[-1][0].stop == 7000
    seen = sum(h - low for low, h in zip(lo, hi, strict=True))
    looked_at = sum(count_scores(*chunk) for chunk in chunks)
    assert looked_at < 20 * seen  # of 7000 * 7000, which is 1750 times as many
    long = KeyRanges(*(torch.tensor(x) for x in pack_documents([30_000]))).get_chunks(heads=8)
    assert max(count_scores(*chunk) for chunk in long) * 8 <= module.MAX_CHUNK_SCORES


def test_decreasing_ranges_are_rejected() -> None:
    q = torch.zeros(2, 1, 8)
    with pytest.raises(AssertionError, match="decrease at row 1"):
        ranged_attention(q, q, q, KeyRanges(torch.tensor([1, 0]), torch.tensor([2, 2])))


def check_merge(case: RangedCase, attend, merge_fn, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Cuts each row's keys in two; merging both halves must give the whole, with gradients."""
    leaves, dout, dlse = case.build(dtype, device)
    cut = [min(max((low + 2 * high) // 3, low), max(high, low)) for low, high in zip(case.lo, case.hi, strict=True)]
    cut = [max(cut[: n + 1]) for n in range(len(cut))]
    left, right = replace(case, hi=[min(c, h) for c, h in zip(cut, case.hi, strict=True)]), replace(case, lo=cut)
    merged = merge_fn(*attend(*leaves, left.ranges(device)), *attend(*leaves, right.ranges(device)))
    actual = torch.autograd.grad(merged, leaves, [dout, dlse.to(merged[1].dtype)])
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    bounded = replace(case, lo=[min(x, c) for x, c in zip(case.lo, cut, strict=True)])
    out, lse = dense_attention(*exact, bounded.ranges())
    empty = (lse == float("-inf")).detach()
    state_grads = [dout.cpu().double(), dlse.cpu().double().masked_fill(empty, 0.0)]
    expected = torch.autograd.grad([out, lse.masked_fill(empty, 0.0)], exact, state_grads)
    assert_near(merged[0], out, tolerance)
    assert_near(merged[1], lse, tolerance)
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, tolerance)


@settings(max_examples=40, deadline=None)
@given(case=ranged_cases(max_len=40, shapes=SHAPES))
def test_merge_of_two_halves_is_the_whole(case: RangedCase) -> None:
    check_merge(case, ranged_attention, merge_attn_states, torch.float64, "cpu", 1e-12)


def test_mask_token_rows_see_context_and_own_chain() -> None:
    """As in training: chains over depth-0 keys merged with chains over themselves, against one mask over both."""
    gen = torch.Generator().manual_seed(0)
    anchors, depth = [0, 0, 0, 2, 3, 3], [1, 2, 3, 1, 1, 2]
    first = [0, 0, 0, 3, 4, 4]
    q, k, v = (torch.randn(6, 2, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    deep_k, deep_v = (torch.randn(5, 2, 8, generator=gen, dtype=torch.float64) for _ in range(2))
    context = ranged_attention(q, deep_k, deep_v, KeyRanges(torch.zeros(6), torch.tensor(anchors) + 1))
    chain = ranged_attention(q, k, v, KeyRanges(torch.tensor(first), torch.arange(6) + 1))
    out, _ = merge_attn_states(*context, *chain)
    for row in range(6):
        own = [j for j in range(6) if anchors[j] == anchors[row] and depth[j] <= depth[row]]
        keys = torch.cat([deep_k[: anchors[row] + 1], k[own]])
        values = torch.cat([deep_v[: anchors[row] + 1], v[own]])
        p = (torch.einsum("hd,shd->hs", q[row], keys) * 8**-0.5).softmax(-1)
        torch.testing.assert_close(out[row], torch.einsum("hs,shd->hd", p, values))


def check_triton_ranged(
    case: RangedCase, dtype: torch.dtype, device: str, tolerance: float, tiles=None, tma=None
) -> None:
    from peagle.kernels.attention import ranged_triton as t

    launch = AttentionLaunch(*tiles, 4, 2) if tiles is not None else None

    def forward(*args):
        return t.forward_triton(*args, launch=launch, tma=tma)

    def backward(*args):
        return t.backward_triton(*args, launch=launch, tma=tma)

    def attend(q, k, v, ranges):
        return RangedAttentionFunction.apply(q, k, v, ranges, (forward, backward))

    with nan_filled_buffers():
        case.check(attend, dtype, device, tolerance)
        case.check(attend, dtype, device, tolerance, lse_grad=False)


def check_triton_merge(case: RangedCase, dtype: torch.dtype, device: str, tolerance: float) -> None:
    from peagle.kernels.attention.ranged_triton import merge_backward_triton, merge_forward_triton

    def merge_fn(*args):
        return MergeAttnStatesFunction.apply(*args, (merge_forward_triton, merge_backward_triton))

    def attend_torch(*args):
        return RangedAttentionFunction.apply(*args, (forward_torch, backward_torch))

    with nan_filled_buffers():
        check_merge(case, attend_torch, merge_fn, dtype, device, tolerance)


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    patch_interpreter()
    # Shrinking would take minutes.
    phases = (Phase.explicit, Phase.generate)
    repeatable = settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=phases)

    @repeatable
    @given(
        case=ranged_cases(max_len=40, shapes=TILED),
        tiles=st.sampled_from([(16, 16), (32, 16), (16, 64)]),
        pointers=st.booleans(),
    )
    def ranged(case: RangedCase, tiles: tuple[int, int], pointers: bool) -> None:
        check_triton_ranged(case, torch.float32, "cpu", 1e-5, tiles, False if pointers else None)

    @repeatable
    @given(case=ranged_cases(max_len=40, shapes=TILED))
    def merged(case: RangedCase) -> None:
        check_triton_merge(case, torch.float32, "cpu", 1e-5)

    ranged()
    merged()
    check_triton_ranged(RangedCase([], [], 5, 1, 2, 16, False, 0), torch.float32, "cpu", 1e-5)
    check_triton_ranged(RangedCase([0, 0], [0, 0], 0, 1, 2, 16, False, 0), torch.float32, "cpu", 1e-5)
    # The first row of a tile is no multiple of 4, which TMA requires.
    lo, hi = ([0] + [x for x in bound for _ in range(3)] for bound in pack_documents([50]))
    uneven = RangedCase(lo, hi, 50, 1, 2, 16, False, 0)
    for tma in (True, False):
        check_triton_ranged(uneven, torch.float32, "cpu", 1e-5, (16, 16), tma)
    lo, hi = pack_documents([20, 40])
    check_triton_ranged(RangedCase(lo, hi, 60, 1, 2, 16, True, 0), torch.float16, "cpu", 1e-2, (16, 32))
    print("kernels checked")


COMPILED = [(3, 3, 64), (2, 4, 128), (1, 2, 96)]  # few, as each is compiled several times


@pytest.mark.gpu
@settings(max_examples=30, deadline=None)
@given(case=ranged_cases(max_len=500, shapes=COMPILED))
def test_triton_on_the_gpu(case: RangedCase) -> None:
    """Default launches."""
    check_triton_ranged(case, torch.bfloat16, "cuda", 2e-2)  # rounded scores alone cause up to 1%


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(case=ranged_cases(max_len=200, shapes=COMPILED[:1] + [(2, 2, 16)]))
def test_triton_fp32_on_the_gpu(case: RangedCase) -> None:
    check_triton_ranged(case, torch.float32, "cuda", 1e-5)
    check_triton_ranged(case, torch.float32, "cuda", 1e-5, tma=False)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(case=ranged_cases(max_len=300, shapes=COMPILED))
def test_merge_on_the_gpu(case: RangedCase) -> None:
    check_triton_merge(case, torch.float32, "cuda", 1e-5)
    check_merge(case, ranged_attention, merge_attn_states, torch.bfloat16, "cuda", 2e-2)


@pytest.mark.gpu
def test_long_document_on_the_gpu() -> None:
    """More than 2^31 elements between the first and the last row, and the same bits every time."""
    rows, heads, width = 70_000, 2, 128
    wide = torch.empty(rows, 32 * 1024, dtype=torch.bfloat16, device="cuda").normal_()
    q, k, v = (wide[:, i * 256 : (i + 1) * 256].unflatten(1, (heads, width)) for i in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    lo = (torch.arange(rows, device="cuda") - 100).clamp(min=0)  # a window keeps the oracle fast
    ranges = KeyRanges(lo, torch.arange(rows, device="cuda") + 1)
    dout = torch.randn(rows, heads, width, dtype=torch.bfloat16, device="cuda")

    def run(attend, leaves):
        out, lse = attend(*leaves, ranges)
        return out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    first, again = run(ranged_attention, leaves), run(ranged_attention, leaves)
    exact = run(ranged_attention, [x.detach().double().requires_grad_() for x in leaves])
    for a, b, c in zip(first, again, exact, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.float(), c.float(), rtol=0, atol=2e-2 * max(1.0, float(c.abs().max())))


@pytest.mark.gpu
def test_training_batch_on_the_gpu() -> None:
    """The rows of a training step over reused memory: most key tiles have no row that sees all of their keys, and some
    have only such rows."""
    torch.manual_seed(0)
    lengths = torch.randint(20, 900, (20,))
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    anchor = torch.arange(len(starts)).repeat_interleave(torch.randint(0, 5, (len(starts),)))
    first = torch.searchsorted(anchor, anchor)
    keys, rows = len(starts), len(anchor)
    kinds = {
        "depth 0": (keys, keys, KeyRanges(starts, torch.arange(keys) + 1)),
        "above": (rows, keys, KeyRanges(starts[anchor], anchor + 1)),
        "own": (rows, rows, KeyRanges(first, torch.arange(rows) + 1)),
    }
    junk = [torch.full((1 << 25,), 3e30, device="cuda") for _ in range(20)]
    del junk
    for kind, (count, seen, ranges) in kinds.items():
        ranges = KeyRanges(ranges.lo_R.cuda(), ranges.hi_R.cuda())
        q = torch.randn(count, 9, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        k, v = (torch.randn(seen, 3, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2))
        dout = torch.randn_like(q)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(ranged_attention(*exact, ranges)[0], exact, dout.double())
        for _ in range(8):
            found = torch.autograd.grad(ranged_attention(q, k, v, ranges)[0], [q, k, v], dout)
            for ours, right in zip(found, expected, strict=True):
                assert (ours.float() - right).norm() < 1e-2 * right.norm(), kind


if __name__ == "__main__":
    check_in_the_interpreter()
