"""Training's kernels on a GPU: attention over ranges and the loss from hidden states, next to what torch has.

    python benchmarks/kernel_training.py --out training.json
    python benchmarks/kernel_training.py --quick
    python benchmarks/kernel_training.py --sweep

Attention is bound by the matrix units: the table gives TFLOP/s of the work that is asked for (4 d a pair of row and
key forward, 2.5 times that backward, whatever a kernel does besides) and its share of what a plain product reaches on
an H200. The loss is bound by them for wide models, and by reading logits for narrow ones. Everything is first checked
against the plain torch version. FlexAttention gets a block mask made from the same ranges. `--sweep` tries other
launches. The last line is one JSON object; with --out it is also written to a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import LK_ETA
from peagle.kernels.attention import ranged_triton as kernels
from peagle.kernels.attention.ranged import RangedAttention, Ranges, merge, ranged_attention, ranged_attention_torch
from peagle.kernels.loss.linear_loss import Teacher, linear_loss, linear_loss_by, linear_loss_torch, rows_torch
from peagle.kernels.loss.linear_loss_triton import rows_triton

PEAK = 790e12  # what a large bf16 product reaches on an H200
DTYPE = torch.bfloat16
MASK_BLOCK = 128  # FlexAttention's
CHAIN_ROWS = 3.16  # a token, for 8 depths at a rate of 0.8

RESULTS: dict[str, Any] = {}


def say(*words: object) -> None:
    print(*words, flush=True)


@dataclass(frozen=True)
class Shape:
    """`kind`: causal (one document), chains (rows of drafts over it), band (chains over themselves), packed."""

    model: str
    heads: int
    kv_heads: int
    width: int
    kind: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.kind} {self.tokens // 1024}K"


def big(kind: str, tokens: int) -> Shape:
    return Shape("8b", 32, 8, 128, kind, tokens)


def small(kind: str, tokens: int) -> Shape:
    return Shape("smollm2", 9, 3, 64, kind, tokens)


QUICK = (big("causal", 20480), big("chains", 20480), big("band", 20480), small("packed", 32768))
ALL = (
    big("causal", 8192),
    *QUICK[:3],
    big("causal", 65536),
    big("chains", 65536),
    QUICK[3],
    small("chains", 32768),
)
WITH_FLEX = (big("causal", 20480), big("chains", 20480), small("packed", 32768))


def document_starts(tokens: int, mean: int) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(mean // 3, 2 * mean - mean // 3, (2 * tokens // mean + 8,), generator=gen)
    ends = lengths.cumsum(0)
    index = torch.arange(tokens)
    return torch.cat([torch.zeros(1, dtype=torch.long), ends])[torch.searchsorted(ends, index, right=True)]


def ranges_of(shape: Shape) -> tuple[Ranges, int]:
    """And how many keys there are."""
    index = torch.arange(shape.tokens)
    start = torch.zeros_like(index) if shape.model == "8b" else document_starts(shape.tokens, 600)
    if shape.kind in ("causal", "packed"):
        return Ranges(start, index + 1).to("cuda"), shape.tokens
    rows = int(shape.tokens * CHAIN_ROWS)
    anchor = (torch.arange(rows) / CHAIN_ROWS).long().clamp(max=shape.tokens - 1)
    if shape.kind == "chains":
        return Ranges(start[anchor], anchor + 1).to("cuda"), shape.tokens
    first = torch.searchsorted(anchor, anchor)
    return Ranges(first, torch.arange(rows) + 1).to("cuda"), rows


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ranges: Ranges
    forward_flops: float

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v]


@cache
def inputs_of(shape: Shape) -> Inputs:
    ranges, keys = ranges_of(shape)
    made = partial(torch.randn, dtype=DTYPE, device="cuda")
    q = made(len(ranges), shape.heads, shape.width).requires_grad_()
    k, v = (made(keys, shape.kv_heads, shape.width).requires_grad_() for _ in range(2))
    pairs = float((ranges.hi_R.long() - ranges.lo_R.long()).clamp(min=0).sum())
    return Inputs(q, k, v, torch.randn_like(q), ranges, 4.0 * pairs * shape.heads * shape.width)


def block_mask(ranges: Ranges, keys: int) -> Any:
    """FlexAttention's, from lo and hi alone: block by block, the whole mask never made."""
    from torch.nn.attention.flex_attention import BlockMask

    lo, hi, rows = ranges.lo_R.long(), ranges.hi_R.long(), len(ranges)
    blocks = -(-rows // MASK_BLOCK)
    first = torch.arange(blocks, device="cuda") * MASK_BLOCK
    last = (first + MASK_BLOCK).clamp(max=rows) - 1
    low = torch.arange(-(-keys // MASK_BLOCK), device="cuda") * MASK_BLOCK
    high = (low + MASK_BLOCK).clamp(max=keys)
    any_seen = (low < hi[last][:, None]) & (high > lo[first][:, None])
    all_seen = (high <= hi[first][:, None]) & (low >= lo[last][:, None])

    def listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
        order = wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
        return wanted.sum(-1).int()[None, None], order[None, None]

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= lo[row]) & (key < hi[row])

    partial_blocks, full_blocks = listed(any_seen & ~all_seen), listed(all_seen)
    return BlockMask.from_kv_blocks(
        *partial_blocks, *full_blocks, BLOCK_SIZE=MASK_BLOCK, mask_mod=sees, seq_lengths=(rows, keys)
    )


@cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_call(shape: Shape) -> Callable[[], Tensor]:
    x = inputs_of(shape)
    mask = block_mask(x.ranges, len(x.k))
    flex = compiled_flex()

    def call() -> Tensor:
        q, k, v = (y.transpose(0, 1)[None] for y in x.leaves)
        return flex(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return call


def sdpa_call(shape: Shape) -> Callable[[], Tensor]:
    x = inputs_of(shape)

    def call() -> Tensor:
        q, k, v = (y.transpose(0, 1)[None] for y in x.leaves)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return call


def own_call(shape: Shape) -> Callable[[], Tensor]:
    x = inputs_of(shape)
    return lambda: ranged_attention(*x.leaves, x.ranges)[0]


def seconds(call: Callable[[], Any], least: float = 0.1) -> float:
    """The median of as many calls as fit into `least` seconds, at least three."""
    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < least and len(taken) < 30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def both_ways(call: Callable[[], Tensor], shape: Shape) -> Callable[[], Any]:
    x = inputs_of(shape)
    return lambda: torch.autograd.grad(call(), x.leaves, x.dout)


def check_attention(shape: Shape) -> float:
    """The largest error over the largest number, of output and gradients, on the first rows and in fp32's eyes."""
    x = inputs_of(shape)
    rows = min(len(x.q), 3000)
    keys = max(1, int(x.ranges.hi_R[rows - 1]))
    ranges = Ranges(x.ranges.lo_R[:rows], x.ranges.hi_R[:rows])
    leaves = [y.detach()[:n].requires_grad_() for y, n in ((x.q, rows), (x.k, keys), (x.v, keys))]
    exact = [y.detach().float().requires_grad_() for y in leaves]
    out, lse = ranged_attention(*leaves, ranges)
    want, want_lse = ranged_attention_torch(*exact, ranges)
    have = [out, lse, *torch.autograd.grad([out, lse], leaves, [x.dout[:rows], torch.ones_like(lse)])]
    asked = [x.dout[:rows].float(), torch.ones_like(want_lse)]
    wanted = [want, want_lse, *torch.autograd.grad([want, want_lse], exact, asked)]
    pairs = zip(have, wanted, strict=True)
    return max(float((a.float() - b).detach().abs().max() / b.detach().abs().max().clamp(min=1)) for a, b in pairs)


def attention(shape: Shape, flex: bool) -> None:
    x = inputs_of(shape)
    error = check_attention(shape)
    calls = {"peagle": own_call(shape)}
    if shape.kind == "causal":
        calls["sdpa"] = sdpa_call(shape)
    if flex:
        calls["flex"] = flex_call(shape)
    for name, call in calls.items():
        try:
            forward = seconds(call)
            both = seconds(both_ways(call, shape))
        except Exception as failure:
            say(f"  {shape.name:24} {name:8} {type(failure).__name__}: {str(failure).splitlines()[0][:120]}")
            continue
        rates = [x.forward_flops / forward, 2.5 * x.forward_flops / max(both - forward, 1e-9)]
        rates.append(3.5 * x.forward_flops / both)
        cells = "  ".join(f"{rate / 1e12:5.0f} {rate / PEAK:5.0%}" for rate in rates)
        off = f"  off by {error:.4f}" if name == "peagle" else ""
        say(f"  {shape.name:24} {name:8} {1e3 * forward:9.3f} {1e3 * both:9.3f}   {cells}{off}")
        row = {"shape": shape.name, "by": name, "forward_s": forward, "both_s": both}
        row |= {"forward_tflops": rates[0] / 1e12, "backward_tflops": rates[1] / 1e12, "tflops": rates[2] / 1e12}
        RESULTS.setdefault("attention", []).append(row | ({"error": error} if off else {}))


def merging(shape: Shape) -> None:
    """Bound by memory: reads two outputs and writes one, then reads three and writes two."""
    x = inputs_of(shape)
    out, lse = (y.detach() for y in ranged_attention(*x.leaves, x.ranges))
    parts = [y.clone().requires_grad_() for y in (out, lse, out, lse)]
    forward = seconds(lambda: merge(*parts))
    both = seconds(lambda: torch.autograd.grad(merge(*parts)[0], parts, x.dout))
    size = out.numel() * out.element_size()
    rates = 3 * size / forward / 1e12, 8 * size / both / 1e12
    times = f"{1e3 * forward:.3f} ms, {1e3 * both:.3f} ms both ways"
    say(f"  merge {len(out)} rows: {times}; {rates[0]:.1f}, {rates[1]:.1f} TB/s")
    RESULTS["merge"] = {"rows": len(out), "forward_s": forward, "both_s": both, "terabytes_s": rates}


@dataclass(frozen=True)
class LossShape:
    model: str
    vocab: int
    width: int
    rows: int

    @property
    def flops(self) -> float:
        positions = self.rows / (1 + CHAIN_ROWS)
        return 2.0 * self.vocab * self.width * (2 * self.rows + positions)


LOSSES = (LossShape("8b", 128256, 4096, 8192), LossShape("smollm2", 49152, 576, 65536))


@cache
def loss_inputs(shape: LossShape) -> tuple[Tensor, Tensor, Teacher, Tensor, Tensor]:
    made = partial(torch.randn, dtype=DTYPE, device="cuda")
    positions = int(shape.rows / (1 + CHAIN_ROWS))
    head = made(shape.vocab, shape.width) * shape.width**-0.5
    question = torch.randint(0, positions, (shape.rows,), generator=torch.Generator().manual_seed(0))
    weight = torch.rand(shape.rows, device="cuda")
    return (
        made(shape.rows, shape.width).requires_grad_(),
        head,
        Teacher(made(positions, shape.width), head),
        question,
        weight,
    )


@cache
def compiled_rows() -> Callable[..., Any]:
    return torch.compile(rows_torch, dynamic=True)


def loss_call(shape: LossShape, by: str, objective: Any, logits: int) -> Callable[[], Any]:
    args = loss_inputs(shape)
    rows_of = {"peagle": rows_triton, "compiled": compiled_rows() if by == "compiled" else rows_torch}[by]

    def call() -> Tensor:
        total = linear_loss_by(rows_of, *args, objective, LK_ETA, logits).total
        return torch.autograd.grad(total, args[0])[0]

    return call


def check_loss(shape: LossShape, objective: Any) -> float:
    hidden, head, teacher, question, weight = loss_inputs(shape)
    some = slice(0, 256)
    args = [hidden.detach()[some].requires_grad_(), head, teacher, question[some], weight[some], objective]
    have = linear_loss(*args)
    exact = [args[0].detach().float().requires_grad_(), head.float()]
    exact += [Teacher(teacher.hidden_PT.float(), teacher.head_UT.float()), *args[3:]]
    want = linear_loss_torch(*exact)
    pairs = [(have.loss_R, want.loss_R), (have.accept_R, want.accept_R)]
    pairs.append((torch.autograd.grad(have.total, args[0])[0], torch.autograd.grad(want.total, exact[0])[0]))
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


def losses(shape: LossShape, compiled: bool, quick: bool) -> None:
    for objective in ("ce",) if quick else ("ce", "lk-hybrid"):
        error = check_loss(shape, objective)
        for by, logits in (("peagle", 16 << 20), ("peagle", 64 << 20), ("peagle", 256 << 20), ("compiled", 64 << 20)):
            if by == "compiled" and not compiled or quick and logits == 256 << 20:
                continue
            call = loss_call(shape, by, objective, logits)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            took = seconds(call)
            memory = torch.cuda.max_memory_allocated() - before
            rate = shape.flops / took
            name = f"{shape.model} {objective} {logits >> 20}M logits"
            say(
                f"  {name:32} {by:8} {1e3 * took:9.3f} ms  {rate / 1e12:5.0f} TFLOP/s {rate / PEAK:5.0%}"
                f"  {memory / 2**30:6.2f} GiB  off by {error:.4f}"
            )
            row = {"model": shape.model, "objective": objective, "logits": logits, "by": by, "error": error}
            RESULTS.setdefault("loss", []).append(row | {"s": took, "tflops": rate / 1e12, "bytes": memory})


SWEEP = {
    "forward": {
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 4, 2), (128, 32, 8, 4)),
        64: ((128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 2)),
    },
    "dq": {
        128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3), (128, 128, 8, 2)),
        64: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 8, 2)),
    },
    "dkv": {
        128: ((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3)),
        64: ((64, 64, 4, 3), (64, 128, 8, 3), (32, 128, 8, 3), (32, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 2)),
    },
}
SWEPT = (big("causal", 20480), small("packed", 32768))


def launches_with(width: int, part: str, launch: tuple[int, ...]) -> kernels.Launches:
    usual = kernels.choose(width, DTYPE)
    return kernels.Launches(**(vars(usual) | {part: kernels.Launch(*launch)}))


def swept_call(shape: Shape, part: str, launch: tuple[int, ...], tma: bool | None) -> Callable[[], Any]:
    x = inputs_of(shape)
    launches = launches_with(shape.width, part, launch)
    forward = partial(kernels.forward_triton, launch=launches.forward, tma=tma)
    backward = partial(kernels.backward_triton, launches=launches, tma=tma)
    scale = shape.width**-0.5
    if part == "forward":
        return lambda: forward(x.q.detach(), x.k.detach(), x.v.detach(), x.ranges, scale)
    return lambda: torch.autograd.grad(
        RangedAttention.apply(*x.leaves, x.ranges, scale, forward, backward)[0], x.leaves, x.dout
    )


def sweep() -> None:
    """Forward alone; for the parts of the backward everything, so that only differences mean something."""
    for shape in SWEPT:
        for part, by_width in SWEEP.items():
            for launch in by_width[shape.width]:
                for tma in (None, False) if launch == by_width[shape.width][0] else (None,):
                    how = "" if tma is None else " by pointers"
                    try:
                        took = seconds(swept_call(shape, part, launch, tma))
                    except Exception as failure:
                        say(f"  {shape.name} {part} {launch}{how}: {str(failure).splitlines()[0][:100]}")
                        continue
                    say(f"  {shape.name:24} {part:8} {str(launch):20} {1e3 * took:9.3f} ms{how}")
                    row = {"shape": shape.name, "part": part, "launch": launch, "tma": tma is None, "s": took}
                    RESULTS.setdefault("sweep", []).append(row)
    for loss in LOSSES:
        for block, warps in ((8192, 32), (4096, 16), (4096, 8), (2048, 8), (2048, 4)):
            hidden, head, teacher, question, weight = loss_inputs(loss)
            rows_of = partial(rows_triton, block=block, warps=warps)

            def call(rows_of: Any = rows_of, args: Any = (hidden, head, teacher, question, weight)) -> Tensor:
                return linear_loss_by(rows_of, *args, "ce", LK_ETA, 64 << 20).total

            took = seconds(call)
            say(f"  {loss.model} loss by rows of {block} with {warps} warps: {1e3 * took:.3f} ms")
            RESULTS.setdefault("sweep", []).append({"loss": loss.model, "block": block, "warps": warps, "s": took})


def warm(job: tuple[Any, ...]) -> str:
    """In a process of its own: one call, whose compilations the main process then finds in the caches on disk."""
    try:
        kind, shape, *rest = job
        if kind == "loss":
            by, objective, logits = rest
            loss_call(shape, by, objective, logits)()
        elif kind == "sweep":
            swept_call(shape, *rest)()
        else:
            both_ways({"peagle": own_call, "flex": flex_call}[kind](shape), shape)()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{job}: {type(error).__name__} {error}".splitlines()[0][:200]


def compile_ahead(jobs: list[tuple[Any, ...]], workers: int) -> None:
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        errors = [error for error in pool.imap_unordered(warm, jobs) if error]
    say(f"{len(jobs)} calls compiled ahead in {time.monotonic() - began:.0f} s", *errors)


def jobs_of(shapes: tuple[Shape, ...], flexed: tuple[Shape, ...], args: argparse.Namespace) -> list[tuple[Any, ...]]:
    jobs: list[tuple[Any, ...]] = [("flex", shape) for shape in flexed]
    jobs += [("peagle", shape) for shape in (QUICK[0], QUICK[3])]
    for loss in LOSSES:
        jobs.append(("loss", loss, "peagle", "ce", 64 << 20))
        if not args.quick:
            jobs += [("loss", loss, "compiled", objective, 64 << 20) for objective in ("ce", "lk-hybrid")]
    if args.sweep:
        for shape in SWEPT:
            small_one = Shape(shape.model, shape.heads, shape.kv_heads, shape.width, shape.kind, 2048)
            jobs += [("sweep", small_one, part, x, None) for part in SWEEP for x in SWEEP[part][shape.width]]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--quick", action="store_true", help="the shapes that matter most")
    parser.add_argument("--sweep", action="store_true", help="other launches too")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out, which takes long to compile")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0: none")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    torch.manual_seed(0)
    began = time.monotonic()
    RESULTS.update(device=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
    say(RESULTS["device"], "torch", torch.__version__)
    shapes = QUICK if args.quick else ALL
    flexed = () if args.no_flex else tuple(s for s in WITH_FLEX if s in shapes)[: 1 if args.quick else None]
    if args.workers:
        compile_ahead(jobs_of(shapes, flexed, args), args.workers)
    say(f"  {'attention':33} forward ms   both ms   TFLOP/s forward, backward, both, and shares of {PEAK / 1e12:.0f}")
    for shape in shapes:
        attention(shape, shape in flexed)
        if shape.kind == "chains" and shape.tokens == 20480:
            merging(shape)
        inputs_of.cache_clear()
    say("  loss, forward and gradient")
    for loss in LOSSES:
        losses(loss, not args.quick, args.quick)
    if args.sweep:
        sweep()
    RESULTS["seconds"] = time.monotonic() - began
    say(f"done in {RESULTS['seconds']:.0f} s")
    if args.out is not None:
        args.out.write_text(json.dumps(RESULTS))
    print(json.dumps(RESULTS), flush=True)


if __name__ == "__main__":
    main()
