"""A whole training step by phase: the target's pass, depth 0, chains, loss, optimizer; and what bounds each.

Part of `training_step.py --shape small`. The step is `partition.accumulate`'s, taken apart so that a clock can stand
between its parts; the undivided one is timed beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from training_variants import SHAPES, Models, Work, documents, examiner_of, ours, step_flops, target_flops, view_of

from peagle.config import TrainConfig
from peagle.training.chunk_size import auto_chunk_rows
from peagle.training.cod_sampling import generator, sample_rows
from peagle.training.hidden_states.online import Online
from peagle.training.loss import depth_weights
from peagle.training.optimizer import Optimizer
from peagle.training.partition import Leaves, chunks

PHASES = ("target", "depth 0", "chains", "loss", "optimizer")
PROMPT = 0.2  # of each document, not asked
Json = dict[str, Any]
Mark = Callable[[str], AbstractContextManager[None]]


class Clock:
    """Milliseconds by phase, between events on the device or of the host's clock."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = self.now()
        yield
        self.spans.append((phase, begin, self.now()))

    def read(self) -> dict[str, float]:
        sums = dict.fromkeys(PHASES, 0.0)
        if self.cuda:
            torch.cuda.synchronize()
        for phase, begin, end in self.spans:
            sums[phase] += begin.elapsed_time(end) if self.cuda else (end - begin) * 1e3
        self.spans.clear()
        return sums


def divided(models: Models, work: Work, online: Online, optimizer: Optimizer, chunk_rows: int, mark: Mark) -> None:
    with mark("target"):
        states = online.states(work.batch)
    work = Work(work.batch, work.rows, states, work.weights)
    with mark("depth 0"):
        examiner, view = examiner_of(models, work), view_of(models, work)
        roots = view.depth_zero()
        leaves = Leaves.of(roots)
    for chunk in chunks(work.rows, chunk_rows):
        with mark("chains"):
            said = torch.cat([leaves.said_ND[view.moved(chunk.anchor_A)], view.chains(leaves, chunk)])
        with mark("loss"):
            loss = examiner.ask(said, view.moved(chunk.depths()), chunk.questions(), chunk.links(view))
        with mark("chains"):
            loss.backward()
    with mark("depth 0"):
        pairs = [(root, leaf.grad) for root, leaf in zip(roots.tensors(), leaves.tensors(), strict=True)]
        pairs = [(root, grad) for root, grad in pairs if grad is not None]
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
    with mark("optimizer"):
        optimizer.step(1e-4)


def busy(step: Callable[[Mark], None], kind_of: Callable[[str], str]) -> dict[str, Json]:
    """Milliseconds of kernels by phase and kind, from one profiled step that waits at the end of every phase."""

    @contextmanager
    def mark(phase: str) -> Iterator[None]:
        with torch.profiler.record_function(f"phase {phase}"):
            yield
            torch.cuda.synchronize()

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(mark)
    events = list(profile.events())
    on_device = torch.autograd.DeviceType.CUDA
    marks = [e for e in events if e.name.startswith("phase ") and e.device_type != on_device]
    spans = sorted((e.time_range.start, e.time_range.end, e.name.removeprefix("phase ")) for e in marks)
    sums: dict[str, Json] = {phase: {"kernels": 0} for phase in PHASES}
    for event in events:
        if event.device_type != on_device or event.name.startswith("phase "):
            continue
        at = event.time_range.start
        phase = next((name for begin, end, name in spans if begin <= at <= end), None)
        if phase is not None:
            kind = kind_of(event.name)
            sums[phase][kind] = sums[phase].get(kind, 0.0) + event.device_time / 1e3
            sums[phase]["kernels"] += 1
    return sums


def floors(models: Models, work: Work, parameters: int, matrix_rate: float, copy_rate: float) -> dict[str, Json]:
    """Operations of each phase, and the least time they take; of the optimizer, bytes."""
    flops = step_flops(models.shape, work.batch, work.rows)
    products, attention = target_flops(models.shape, work.batch)
    found = {
        "target": products + attention,
        "depth 0": flops.depth_zero + flops.attention_zero,
        "chains": flops.chains + flops.attention_chains,
        "loss": flops.loss,
    }
    # masters, two moments: read and written; gradients: read twice, scaled, cleared; working weights written
    moved = parameters * (6 * 4 + 4 * 4 + 2)
    floor: dict[str, Json] = {k: {"tflop": v / 1e12, "floor_ms": v / matrix_rate * 1e3} for k, v in found.items()}
    return floor | {"optimizer": {"gb": moved / 1e9, "floor_ms": moved / copy_rate * 1e3}}


def bound(ms: float, kernels: Json) -> str:
    """What most of a phase's time is."""
    kinds = {kind: spent for kind, spent in kernels.items() if kind != "kernels"}
    gaps = ms - sum(kinds.values())
    if gaps > max(kinds.values(), default=0.0):
        return f"host: {gaps / ms:.0%} between {kernels['kernels']} kernels"
    kind = max(kinds, key=lambda k: kinds[k])
    names = {"products": "matrix products", "attention": "attention", "loss": "loss kernels (memory)"}
    return f"{names.get(kind, 'norms, gates, sums (memory)')}, {kinds[kind] / ms:.0%}"


def phases(job: Json, matrix_rate: float, copy_rate: float, kind_of: Callable[[str], str]) -> Json:
    device, cuda = torch.device(job["device"]), job["device"] == "cuda"
    shape, tokens = SHAPES[job["shape"]], job["lengths"][0]
    models = Models.random(shape, torch.bfloat16 if cuda else torch.float32, device, whole_target=True)
    rng = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while sum(lengths) < tokens:  # 300 to 700 tokens, 500 on average
        lengths.append(min(int(torch.randint(300, 701, (), generator=rng)), tokens - sum(lengths)))
    batch = documents(lengths, PROMPT, shape.vocab)
    rows = sample_rows(batch, shape.depths, shape.rate, generator(0, 0))
    online, optimizer = Online(models.target, shape.aux_layer_ids), Optimizer(models.drafter, TrainConfig())
    work = Work(batch, rows, online.states(batch), depth_weights(shape.depths))
    chunk_rows = job["chunk_rows"] or auto_chunk_rows(models.drafter, tokens, shape.depths)
    clock, undivided, by_phase = Clock(cuda), [], []

    def step(mark: Mark) -> None:
        divided(models, work, online, optimizer, chunk_rows, mark)

    for turn in range(6):
        step(clock)
        spent = clock.read()
        begin = time.perf_counter()
        ours(models, Work(batch, rows, online.states(batch), work.weights), chunk_rows)
        optimizer.step(1e-4)
        if cuda:
            torch.cuda.synchronize()
        if turn >= 2:
            by_phase.append(spent)
            undivided.append((time.perf_counter() - begin) * 1e3)
    ms = {phase: statistics.median(s[phase] for s in by_phase) for phase in PHASES}
    kernels: dict[str, Json] = {}
    profile_error = None
    try:
        kernels = busy(step, kind_of) if cuda else {}
    except RuntimeError as error:  # what was timed counts without it
        profile_error = str(error)[:300]
    parameters = sum(p.numel() for p in models.drafter.parameters())
    floor = floors(models, work, parameters, matrix_rate, copy_rate)
    whole = statistics.median(undivided)
    lines = [
        f"{tokens:,} tokens in {len(lengths)} documents, {sum(rows.counts):,} rows asked, chunks of {chunk_rows:,}",
        f"{whole:.1f} ms a step, {tokens / whole * 1e3:,.0f} tokens/s (divided into phases {sum(ms.values()):.1f} ms)",
        f"{'phase':12}{'ms':>9}{'least ms':>10}{'share':>8}  bound by",
    ]
    for phase in PHASES:
        least = floor[phase]["floor_ms"]
        why = bound(ms[phase], kernels[phase]) if kernels else ""
        lines.append(f"{phase:12}{ms[phase]:9.2f}{least:10.2f}{least / ms[phase]:8.0%}  {why}")
    total = sum(f.get("tflop", 0.0) for f in floor.values())
    found: Json = {"ms": whole, "ms_all": undivided, "tok_s": tokens / whole * 1e3, "flops": total * 1e12}
    found |= {"phases_ms": ms, "floors": floor, "kernels_ms": kernels, "rows": sum(rows.counts)}
    found |= {"chunk_rows": chunk_rows, "documents": len(lengths), "share": total * 1e12 / whole * 1e3 / matrix_rate}
    if cuda:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found | {"lines": lines} | ({"profile_error": profile_error} if profile_error else {})
