"""Expected throughput, best K, number of GPUs and cost of a deployment, from the roofline model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from peagle.config import PlanSettings
from peagle.errors import UserError
from peagle.planning.acceptance import AcceptanceCurve, assumed_curve
from peagle.planning.roofline import ENGINES, EngineSpec, Replica, decode_step_seconds, prefill_seconds
from peagle.planning.shapes import DrafterShape, ModelShape
from peagle.results.schema import PlanRow

GB = 1e9
METHOD_NAMES = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}


@dataclass(frozen=True)
class PlannedDrafter:
    shape: DrafterShape
    acceptance: AcceptanceCurve
    has_borrowed_acceptance: bool = False  # the curve is that of another drafter


def assign_acceptance(
    shapes: list[DrafterShape], curves: list[AcceptanceCurve | None], num_assumed: int
) -> list[PlannedDrafter]:
    """Pairs drafters with their acceptance. A drafter without one gets that of the first drafter."""
    if len({shape.method for shape in shapes}) < len(shapes):
        raise UserError("--drafter: pass at most one drafter of each method (p-eagle, eagle3)")
    first = curves[0] or assumed_curve(num_assumed)
    return [
        PlannedDrafter(shape, curve or first, has_borrowed_acceptance=curve is None and i > 0)
        for i, (shape, curve) in enumerate(zip(shapes, curves, strict=True))
    ]


@dataclass(frozen=True)
class ServingPlan:
    rows: list[PlanRow]
    replica: Replica
    recommendation: str
    notes: list[str]

    def fastest(self, concurrency: int, method: str | None = None) -> PlanRow | None:
        """The fastest row at a concurrency, of one method or of all."""
        rows = [r for r in self.rows if r.concurrency == concurrency and method in (None, r.method)]
        return max(rows, key=_throughput, default=None)

    @property
    def concurrencies(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})


def select_engine(requested: str, target: ModelShape, tensor_parallel_size: int) -> EngineSpec:
    """Resolves "auto": the embedded engine where it was measured (one GPU, bf16, no experts), else vLLM."""
    if requested != "auto":
        return ENGINES[requested]
    is_measured = tensor_parallel_size == 1 and target.bytes_per_weight >= 2 and not any(target.is_moe_layer)
    return ENGINES["embedded" if is_measured else "vllm"]


def build_plan(
    replica: Replica, target: ModelShape, drafters: list[PlannedDrafter], settings: PlanSettings
) -> ServingPlan:
    _check_tensor_parallel_size(replica, target)
    concurrencies, memory_notes = _select_concurrencies(replica, target, drafters, settings)
    rows = [row for c in concurrencies for row in _plan_rows(replica, target, drafters, settings, c)]
    if settings.per_user_throughput is not None:
        rows = _filter_rows(rows, settings.per_user_throughput)
    fastest = {c: max((r for r in rows if r.concurrency == c), key=_throughput) for c in {r.concurrency for r in rows}}
    rows = [replace(row, chosen=row is fastest[row.concurrency]) for row in rows]
    plan = ServingPlan(rows, replica, "", _collect_notes(drafters) + memory_notes)
    if settings.throughput is None and settings.per_user_throughput is None:
        return replace(plan, recommendation=_recommend_per_concurrency(plan))
    methods = ["none", *(d.shape.method for d in drafters)]
    return replace(plan, recommendation=_recommend_deployment(plan, settings, methods))


def _collect_notes(drafters: list[PlannedDrafter]) -> list[str]:
    sources = sorted({d.acceptance.source for d in drafters if d.acceptance.is_assumed})
    notes = [f"acceptance is {source}: pass --acceptance-rates, --acceptance-length or --eval" for source in sources]
    for drafter in drafters:
        if drafter.has_borrowed_acceptance:
            name = METHOD_NAMES[drafter.shape.method]
            notes.append(f"{name} is planned with the same acceptance: pass a second --acceptance-rates list")
    return notes


def _plan_rows(
    replica: Replica, target: ModelShape, drafters: list[PlannedDrafter], settings: PlanSettings, concurrency: int
) -> Iterator[PlanRow]:
    yield _plan_row(replica, target, None, settings, concurrency, 0)
    for drafter in drafters:
        for k in settings.num_speculative_tokens:
            yield _plan_row(replica, target, drafter, settings, concurrency, k)


def _plan_row(
    replica: Replica,
    target: ModelShape,
    drafter: PlannedDrafter | None,
    settings: PlanSettings,
    concurrency: int,
    k: int,
) -> PlanRow:
    """Throughput of a steady load: a new request starts when one ends, and its prefill delays all others."""
    shape = drafter.shape if drafter is not None else None
    num_prompt_tokens, num_output_tokens = settings.num_prompt_tokens, settings.num_output_tokens
    mean_context_len = num_prompt_tokens + num_output_tokens / 2
    step_s = decode_step_seconds(replica, target, shape, k, concurrency, mean_context_len, num_output_tokens)
    prefill_s = prefill_seconds(replica, target, shape, num_prompt_tokens, concurrency)
    acceptance_length = drafter.acceptance.acceptance_length(k) if drafter is not None else 1.0
    num_steps = (num_output_tokens - 1 if num_prompt_tokens else num_output_tokens) / acceptance_length
    throughput = concurrency * num_output_tokens / (num_steps * step_s + concurrency * prefill_s)
    num_gpus, price = replica.tensor_parallel_size, replica.gpu.price_per_hour
    num_replicas = math.ceil(settings.throughput / throughput) if settings.throughput is not None else 1
    return PlanRow(
        concurrency=concurrency,
        num_speculative_tokens=k,
        method=drafter.shape.method if drafter is not None else "none",
        step_ms=step_s * 1e3,
        output_throughput=throughput,
        num_gpus=num_replicas * num_gpus,
        cost_per_million_tokens=price * num_gpus / 3600 / throughput * 1e6 if price is not None else None,
        chosen=False,
    )


def _filter_rows(rows: list[PlanRow], per_user_throughput: float) -> list[PlanRow]:
    kept = [r for r in rows if _throughput(r) / r.concurrency >= per_user_throughput]
    if not kept:
        best = max(rows, key=lambda r: _throughput(r) / r.concurrency)
        raise UserError(
            f"--per-user-throughput {per_user_throughput:g}: not reachable; the maximum is "
            f"{_throughput(best) / best.concurrency:.0f} ({_describe(best)} at concurrency {best.concurrency})"
        )
    return kept


def _check_tensor_parallel_size(replica: Replica, target: ModelShape) -> None:
    if target.num_heads % replica.tensor_parallel_size:
        divisors = [n for n in range(2, target.num_heads + 1) if target.num_heads % n == 0]
        raise UserError(
            f"--tensor-parallel-size {replica.tensor_parallel_size}: must divide the {target.num_heads} heads of "
            f"{target.name}: {', '.join(map(str, divisors))}"
        )


def _select_concurrencies(
    replica: Replica, target: ModelShape, drafters: list[PlannedDrafter], settings: PlanSettings
) -> tuple[list[int], list[str]]:
    """The concurrencies whose weights and KV cache fit into memory, and a note on the others."""
    drafter = max((d.shape for d in drafters), key=lambda shape: shape.total_weight_bytes, default=None)
    num_tokens = settings.num_prompt_tokens + settings.num_output_tokens
    weight_bytes = target.total_weight_bytes + (drafter.total_weight_bytes if drafter is not None else 0)

    def max_concurrency(size: int) -> int:
        usable_bytes = size * (replica.gpu.memory_bytes * settings.gpu_memory_utilization - settings.reserved_bytes)
        request_bytes = target.kv_cache_bytes(num_tokens, size)
        request_bytes += drafter.body.kv_cache_bytes(num_tokens, size) if drafter is not None else 0
        return max(int((usable_bytes - weight_bytes) / request_bytes), 0)

    size, requested = replica.tensor_parallel_size, sorted(set(settings.concurrency))
    limit = max_concurrency(size)
    fitting = [c for c in requested if c <= limit]
    if len(fitting) == len(requested) or (fitting and settings.concurrency == settings.concurrency_search):
        return fitting, []
    first = next(c for c in requested if c > limit)
    sizes = [n for n in range(1, settings.max_tensor_parallel_size + 1) if target.num_heads % n == 0]
    fitting_size = next((n for n in sizes if max_concurrency(n) >= first), None)
    fix = f"use --tensor-parallel-size {fitting_size}" if fitting_size else f"{sizes[-1]} GPUs are too small, too"
    note = (
        f"--concurrency {first}: {size} {replica.gpu.name} hold {weight_bytes / GB:,.1f} GB of weights and at most "
        f"{limit} requests of {num_tokens:,} tokens; {fix}"
    )
    if not fitting:
        raise UserError(note)
    return fitting, [note]


def _throughput(row: PlanRow) -> float:
    return row.output_throughput


def _describe(row: PlanRow) -> str:
    return (
        f"{METHOD_NAMES[row.method]} with K={row.num_speculative_tokens}"
        if row.num_speculative_tokens
        else METHOD_NAMES[row.method]
    )


def _recommend_per_concurrency(plan: ServingPlan) -> str:
    parts = []
    for c in plan.concurrencies:
        best, baseline = plan.fastest(c), plan.fastest(c, "none")
        assert best is not None and baseline is not None
        gain = (
            f" ({_throughput(best) / _throughput(baseline):.2f}x no speculation)" if best.num_speculative_tokens else ""
        )
        parts.append(f"{_describe(best)} at concurrency {c}{gain}")
    return f"Fastest: {'; '.join(parts)}."


def _recommend_deployment(plan: ServingPlan, settings: PlanSettings, methods: list[str]) -> str:
    """The fewest GPUs for the required throughput, and what each other method needs."""
    best_rows = {m: max((r for r in plan.rows if r.method == m), key=_throughput, default=None) for m in methods}
    best = max((row for row in best_rows.values() if row is not None), key=_throughput)

    def needs(row: PlanRow) -> str:
        cost = (
            f", ${row.cost_per_million_tokens:.3g} per million tokens"
            if row.cost_per_million_tokens is not None
            else ""
        )
        return f"{row.num_gpus} {plan.replica.gpu.name} at concurrency {row.concurrency} per replica{cost}"

    parts = [f"{_describe(best)}: {needs(best)}"]
    for method, row in best_rows.items():
        if row is None:
            parts.append(f"{METHOD_NAMES[method]}: does not reach {settings.per_user_throughput:g} tokens/s per user")
        elif row is not best:
            parts.append(f"{_describe(row)}: {needs(row)}")
    return f"Cheapest: {'; '.join(parts)}."
