"""Attention of flat rows, each over one range of keys: row r sees keys lo_r <= j < hi_r, and lo and hi never fall.

Every attention of training is of this kind: documents packed one after another, chains of drafts over the rows they
hang on, chains over themselves. What a row sees is a rule of two numbers; no mask is stored, and no rows x keys
tensor ever lives: `lse`, the log of the sum each row was divided by, is enough to make the scores again tile by tile.
It also lets `merge` join attention over two sets of keys into attention over both.

Knows nothing about documents, anchors or depths: who sees whom is decided by whoever makes the `Ranges`.

Worked example: documents of 3 and 2 tokens, each row seeing its own document up to itself. Seven keys would make two
tiles of 4; here are the five, and `row_spans(5, tile=2)`, what the rows are to each tile of two keys:

    row   0  1  2  3  4          keys 0 1   keys 2 3   keys 4
    lo    0  0  0  3  3   first      0          2         4      the first row that sees any key of the tile
    hi    1  2  3  4  5   whole      1          3         4      the first, and
                          broken     3          3         5      the one behind the last, that sees all of them
                          end        3          5         5      the one behind the last that sees any

Shapes: R rows, S keys, H heads, G key/value heads, d head width; M rows and N keys of one chunk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.host_transfer import copy_to_device

# The plain path's scores of one chunk, all heads: 16 MB in fp32.
_CHUNK_SCORES = 4 << 20
# A chunk is closed when it would look at more than twice the keys its rows see, but not before it has this many rows.
_CHUNK_ROWS = 32


def pitch_of(rows: int) -> int:
    """The next multiple of 4: lines of 32-bit numbers that long all begin on 16 bytes, as block copies want it."""
    return -(-rows // 4) * 4


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows, and the keys that any of them sees."""

    rows: slice
    keys: slice


@dataclass(frozen=True, eq=False)
class Ranges:
    """Row r sees keys lo_r <= j < hi_r, none if hi_r <= lo_r. Neither lo nor hi falls from a row to the next.

    What a kernel wants to know about tiles is found once and kept, so layers share one object; the tensors must not
    change during its life.
    """

    lo_R: Tensor
    hi_R: Tensor
    bounds: Tensor = field(init=False, repr=False)  # both as one, int32, with rows to spare: [2, pitch_of(R)]
    _chunks: dict[int, list[Chunk]] = field(default_factory=dict, init=False, repr=False)
    _spans: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        rows = len(self.lo_R)
        assert self.lo_R.shape == self.hi_R.shape == (rows,), (self.lo_R.shape, self.hi_R.shape)
        both = self.lo_R.new_zeros(2, pitch_of(rows), dtype=torch.int32)
        both[0, :rows], both[1, :rows] = self.lo_R, self.hi_R
        for name, value in (("bounds", both), ("lo_R", both[0, :rows]), ("hi_R", both[1, :rows])):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.lo_R)

    def to(self, device: torch.device | str) -> Ranges:
        return Ranges(copy_to_device(self.lo_R, device), copy_to_device(self.hi_R, device))

    def row_spans(self, keys: int, tile: int) -> Tensor:
        """[4, tiles] int32, for each tile of keys: first, whole, broken, end. See the example above.

        Computed on the device without waiting for it.
        """
        if (keys, tile) not in self._spans:
            low = torch.arange(0, keys, tile, dtype=torch.int32, device=self.lo_R.device)
            high = (low + tile).clamp(max=keys)
            spans = (
                torch.searchsorted(self.hi_R, low, right=True, out_int32=True),
                torch.searchsorted(self.hi_R, high, out_int32=True),
                torch.searchsorted(self.lo_R, low, right=True, out_int32=True),
                torch.searchsorted(self.lo_R, high, out_int32=True),
            )
            self._spans[keys, tile] = torch.stack(spans)
        return self._spans[keys, tile]

    def chunks(self, heads: int) -> list[Chunk]:
        """All rows in order, cut so that a chunk's scores are few and mostly wanted. Rows that see nothing too."""
        if heads not in self._chunks:
            self._chunks[heads] = _cut(self.lo_R.tolist(), self.hi_R.tolist(), _CHUNK_SCORES // heads)
        return self._chunks[heads]


def _cut(lo: list[int], hi: list[int], scores: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    first = seen = 0
    for row in range(len(lo)):
        assert row == 0 or (lo[row - 1] <= lo[row] and hi[row - 1] <= hi[row]), f"ranges fall at row {row}"
        own = max(hi[row] - lo[row], 0)
        rows, keys = row + 1 - first, max(hi[row] - lo[first], 0)
        wasteful = rows > _CHUNK_ROWS and rows * keys > 2 * (seen + own)
        if row > first and (rows * keys > scores or wasteful):
            chunks.append(_chunk(lo, hi, first, row))
            first, seen = row, 0
        seen += own
    if len(lo):
        chunks.append(_chunk(lo, hi, first, len(lo)))
    return chunks


def _chunk(lo: list[int], hi: list[int], first: int, end: int) -> Chunk:
    return Chunk(slice(first, end), slice(lo[first], max(hi[end - 1], lo[first])))


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_kv_head(x_MHd: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[G, heads that share one * M, d]"""
    return x_MHd.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """The way back: [M, H, ...]"""
    x = x.unflatten(1, (-1, rows)).transpose(1, 2)  # [G, M, heads that share one, ...]
    return x.transpose(0, 1).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, ranges: Ranges, chunk: Chunk, scale: float) -> Tensor:
    """[G, shared * M, N], -inf where a row does not see a key."""
    keys = torch.arange(chunk.keys.start, chunk.keys.stop, device=q.device)
    lo, hi = ranges.lo_R[chunk.rows, None], ranges.hi_R[chunk.rows, None]
    hidden_MN = (keys < lo) | (keys >= hi)
    scores = (q @ k.mT).mul_(scale)
    scores.unflatten(1, (-1, len(hidden_MN))).masked_fill_(hidden_MN, float("-inf"))
    return scores


def forward_torch(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: Ranges, scale: float) -> tuple[Tensor, Tensor]:
    dtype, kv_heads = _exact(q_RHd.dtype), k_SGd.shape[1]
    out_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    lse_RH = q_RHd.new_empty(q_RHd.shape[:2], dtype=dtype)
    for chunk in ranges.chunks(q_RHd.shape[1]):
        q = _by_kv_head(q_RHd[chunk.rows], kv_heads, dtype)
        k, v = (x[chunk.keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        scores = _scores(q, k, ranges, chunk, scale)
        best = scores.new_full(scores.shape[:2], float("-inf")) if not scores.shape[2] else scores.amax(-1)
        best = best.masked_fill(best == float("-inf"), 0.0)
        p = scores.sub_(best[..., None]).exp_()
        total = p.sum(-1)
        rows = chunk.rows.stop - chunk.rows.start
        out_RHd[chunk.rows] = _by_row((p @ v) / total.where(total > 0, 1.0)[..., None], rows).to(out_RHd.dtype)
        lse_RH[chunk.rows] = _by_row(best + total.log(), rows)
    return out_RHd, lse_RH


def backward_torch(
    q_RHd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    out_RHd: Tensor,
    lse_RH: Tensor,
    ranges: Ranges,
    scale: float,
    dout_RHd: Tensor,
    dlse_RH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, kv_heads = _exact(q_RHd.dtype), k_SGd.shape[1]
    dq_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    dk_SGd, dv_SGd = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k_SGd, v_SGd))
    delta_RH = (out_RHd.to(dtype) * dout_RHd.to(dtype)).sum(-1)
    if dlse_RH is not None:
        delta_RH -= dlse_RH
    empty_RH = lse_RH == float("-inf")
    delta_RH, lse_RH = delta_RH.masked_fill(empty_RH, 0.0), lse_RH.masked_fill(empty_RH, 0.0)
    for chunk in ranges.chunks(q_RHd.shape[1]):
        q, dout = (_by_kv_head(x[chunk.rows], kv_heads, dtype) for x in (q_RHd, dout_RHd))
        k, v = (x[chunk.keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        lse, delta = (_by_kv_head(x[chunk.rows, :, None], kv_heads, dtype) for x in (lse_RH, delta_RH))
        p = _scores(q, k, ranges, chunk, scale).sub_(lse).exp_()
        dv_SGd[chunk.keys] += (p.mT @ dout).transpose(0, 1)
        ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(scale)
        dk_SGd[chunk.keys] += (ds.mT @ q).transpose(0, 1)
        dq_RHd[chunk.rows] = _by_row(ds @ k, chunk.rows.stop - chunk.rows.start).to(dq_RHd.dtype)
    return dq_RHd, dk_SGd.to(k_SGd.dtype), dv_SGd.to(v_SGd.dtype)


Forward = Callable[[Tensor, Tensor, Tensor, Ranges, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class RangedAttention(torch.autograd.Function):
    """Keeps q, k, v, out and lse; the scores are made again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        q_RHd: Tensor,
        k_SGd: Tensor,
        v_SGd: Tensor,
        ranges: Ranges,
        scale: float,
        forward: Forward,
        backward: Backward,
    ) -> tuple[Tensor, Tensor]:
        out_RHd, lse_RH = forward(q_RHd, k_SGd, v_SGd, ranges, scale)
        ctx.save_for_backward(q_RHd, k_SGd, v_SGd, out_RHd, lse_RH)
        ctx.ranges, ctx.scale, ctx.way_back = ranges, scale, backward
        ctx.set_materialize_grads(False)
        return out_RHd, lse_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RHd: Tensor | None, dlse_RH: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout_RHd is None and dlse_RH is None:
            return (None,) * 7
        q_RHd, k_SGd, v_SGd, out_RHd, lse_RH = ctx.saved_tensors
        if dout_RHd is None:
            dout_RHd = torch.zeros_like(out_RHd)
        grads = ctx.way_back(q_RHd, k_SGd, v_SGd, out_RHd, lse_RH, ctx.ranges, ctx.scale, dout_RHd, dlse_RH)
        return *grads, None, None, None, None


def _checked_scale(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: Ranges, scale: float | None) -> float:
    assert len(ranges) == len(q_RHd) and k_SGd.shape == v_SGd.shape, (q_RHd.shape, k_SGd.shape, v_SGd.shape)
    assert q_RHd.shape[1] % k_SGd.shape[1] == 0 and q_RHd.shape[2] == k_SGd.shape[2], (q_RHd.shape, k_SGd.shape)
    assert q_RHd.dtype == k_SGd.dtype == v_SGd.dtype, (q_RHd.dtype, k_SGd.dtype, v_SGd.dtype)
    return q_RHd.shape[-1] ** -0.5 if scale is None else scale


def ranged_attention_torch(
    q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: Ranges, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """In chunks of rows, each looking at the keys between the least lo and the greatest hi of its own."""
    scale = _checked_scale(q_RHd, k_SGd, v_SGd, ranges, scale)
    return RangedAttention.apply(q_RHd, k_SGd, v_SGd, ranges, scale, forward_torch, backward_torch)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_triton(x: Tensor) -> bool:
    return x.is_cuda and _has_triton() and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def ranged_attention(
    q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: Ranges, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output [R, H, d], and the log of each row's sum, [R, H] in fp32 (fp64 for fp64).

    Differentiable in q, k and v, through both results. A row that sees nothing has output 0 and lse -inf, and asks
    nothing of anyone. `scale` is d ** -0.5 unless given. All ranges must lie
    within the keys, and what a key holds must be finite even if no row sees it.
    """
    if not takes_triton(q_RHd) or q_RHd.shape[-1] > 256:
        return ranged_attention_torch(q_RHd, k_SGd, v_SGd, ranges, scale)
    from peagle.kernels.attention.ranged_triton import backward_triton, forward_triton

    scale = _checked_scale(q_RHd, k_SGd, v_SGd, ranges, scale)
    return RangedAttention.apply(q_RHd, k_SGd, v_SGd, ranges, scale, forward_triton, backward_triton)


def merge_forward_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    out = out_a.to(lse.dtype) * weight_a[..., None] + out_b.to(lse.dtype) * weight_b[..., None]
    return out.to(out_a.dtype), lse


def merge_backward_torch(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    exact = dout.to(dlse.dtype)
    shift = weight_a * weight_b * (exact * (out_a.to(exact.dtype) - out_b.to(exact.dtype))).sum(-1)
    dout_a, dout_b = ((exact * w[..., None]).to(out_a.dtype) for w in (weight_a, weight_b))
    return dout_a, weight_a * dlse + shift, dout_b, weight_b * dlse - shift


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each side's share of the whole, 0 and 0 if neither saw anything, and the whole's lse."""
    best = torch.maximum(lse_a, lse_b)
    best = best.masked_fill(best == float("-inf"), 0.0)
    a, b = (lse_a - best).exp(), (lse_b - best).exp()
    total = a + b
    over = total.where(total > 0, 1.0)
    return a / over, b / over, best + total.log()


class Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out_a: Tensor,
        lse_a: Tensor,
        out_b: Tensor,
        lse_b: Tensor,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b)
        ctx.way_back = backward
        return forward(out_a, lse_a, out_b, lse_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.way_back(*ctx.saved_tensors, dout, dlse), None, None


def merge_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return Merge.apply(out_a, lse_a, out_b, lse_b, merge_forward_torch, merge_backward_torch)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the same rows over two sets of keys without a key in common -> over both. Differentiable.

    out [R, H, d] and lse [R, H] as `ranged_attention` gives them. Where neither side saw anything: 0 and -inf.
    """
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:2], (out_a.shape, out_b.shape)
    if not takes_triton(out_a) or not len(out_a):
        return merge_torch(out_a, lse_a, out_b, lse_b)
    from peagle.kernels.attention.ranged_triton import merge_backward_triton, merge_forward_triton

    return Merge.apply(out_a, lse_a, out_b, lse_b, merge_forward_triton, merge_backward_triton)
