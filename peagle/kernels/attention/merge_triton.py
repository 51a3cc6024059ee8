# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Merge of two attention states in Triton, forward and backward.

Shapes: R rows, H query heads, d head width.
"""

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.attention.ranged_triton import load_rows, with_unit_stride

_ROWS = 64  # per program


@triton.jit
def _merge_weights(a, b):
    """Returns each side's weight (0 and 0 if both are empty) and the merged lse."""
    running_max = tl.maximum(a, b)
    running_max = tl.where(running_max == float("-inf"), 0.0, running_max)
    weight_a, weight_b = tl.exp(a - running_max), tl.exp(b - running_max)
    running_sum = weight_a + weight_b
    nonempty = running_sum > 0.0
    over = tl.where(nonempty, running_sum, 1.0)
    return weight_a / over, weight_b / over, tl.where(nonempty, running_max + tl.log(over), float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, dout, dlse,
    result_a, result_lse_a, result_b, result_lse_b,
    rows,
    a_row_stride, a_head_stride, b_row_stride, b_head_stride,
    lse_a_row_stride, lse_a_head_stride, lse_b_row_stride, lse_b_head_stride,
    dout_row_stride, dout_head_stride, dlse_row_stride, dlse_head_stride,
    BACKWARD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes out [R, H, d] and lse [H, R] to the first results, or with BACKWARD the gradients of both inputs in the
    same layouts."""
    r0, h, heads = (tl.program_id(0) * ROWS).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i, cols = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    r = r0 + i
    valid = r < rows
    wide = valid[:, None] & (cols < D)[None, :]
    a = load_rows(out_a, r0, h, i, cols, valid, a_row_stride, a_head_stride, True, False, D, WIDTH).to(tl.float32)
    b = load_rows(out_b, r0, h, i, cols, valid, b_row_stride, b_head_stride, True, False, D, WIDTH).to(tl.float32)
    sum_a = tl.load(lse_a + r * lse_a_row_stride + h * lse_a_head_stride, mask=valid, other=0.0)
    sum_b = tl.load(lse_b + r * lse_b_row_stride + h * lse_b_head_stride, mask=valid, other=0.0)
    weight_a, weight_b, merged_lse = _merge_weights(sum_a, sum_b)
    to = (r * heads + h)[:, None] * D + cols[None, :]
    line = h * rows + r
    if BACKWARD:
        d = load_rows(dout, r0, h, i, cols, valid, dout_row_stride, dout_head_stride, True, False, D, WIDTH)
        d = d.to(tl.float32)
        dmerged = tl.load(dlse + r * dlse_row_stride + h * dlse_head_stride, mask=valid, other=0.0)
        shift = weight_a * weight_b * tl.sum(d * (a - b), 1)
        tl.store(result_a + to, (d * weight_a[:, None]).to(result_a.dtype.element_ty), mask=wide)
        tl.store(result_b + to, (d * weight_b[:, None]).to(result_b.dtype.element_ty), mask=wide)
        tl.store(result_lse_a + line, weight_a * dmerged + shift, mask=valid)
        tl.store(result_lse_b + line, weight_b * dmerged - shift, mask=valid)
    else:
        result = a * weight_a[:, None] + b * weight_b[:, None]
        tl.store(result_a + to, result.to(result_a.dtype.element_ty), mask=wide)
        tl.store(result_lse_a + line, merged_lse, mask=valid)


def _launch_merge(
    states: tuple[Tensor, ...], grads: tuple[Tensor | None, Tensor | None], results: list[Tensor | None]
) -> None:
    """Launches the backward pass if there are gradients, otherwise the forward pass."""
    (out_a, lse_a, out_b, lse_b), (dout, dlse) = states, grads
    rows, heads, width = out_a.shape
    grad_strides = (0, 0, 0, 0) if dout is None or dlse is None else (*dout.stride()[:2], *dlse.stride())
    _merge_kernel[triton.cdiv(rows, _ROWS), heads](
        *states, *grads, *results, rows,
        *out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride(), *grad_strides,
        BACKWARD=dout is not None, D=width, WIDTH=max(16, triton.next_power_of_2(width)), ROWS=_ROWS,
    )  # fmt: skip


def merge_forward_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the merged output and log-sum-exp."""
    states = (with_unit_stride(out_a), lse_a, with_unit_stride(out_b), lse_b)
    out_RHd, lse_HR = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.T.shape)
    _launch_merge(states, (None, None), [out_RHd, lse_HR, None, None])
    return out_RHd, lse_HR.T


def merge_backward_triton(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of out_a, lse_a, out_b and lse_b."""
    states = (with_unit_stride(out_a), lse_a, with_unit_stride(out_b), lse_b)
    dout_a, dlse_a, dout_b, dlse_b = results = [x.new_empty(x.shape) for x in (out_a, lse_a.T, out_b, lse_b.T)]
    _launch_merge(states, (with_unit_stride(dout), dlse), [*results])
    return dout_a, dlse_a.T, dout_b, dlse_b.T
