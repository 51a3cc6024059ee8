"""Expected throughput, best K, number of GPUs and cost of a deployment, from the roofline model."""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

from peagle.config import PlanSettings
from peagle.errors import UserError
from peagle.planning.acceptance import AcceptanceCurve, assumed_curve
from peagle.planning.roofline import ENGINES, GB, EngineSpec, Replica, decode_step_seconds, prefill_seconds
from peagle.planning.shapes import DrafterShape, ModelShape
from peagle.results.schema import METHOD_NAMES, PlanRow, configuration_name

by_throughput = attrgetter("output_throughput")


@dataclass(frozen=True)
class PlannedDrafter:
    shape: DrafterShape
    acceptance: AcceptanceCurve


def assign_acceptance(
    shapes: list[DrafterShape], curves: list[AcceptanceCurve | None], num_assumed: int
) -> list[PlannedDrafter]:
    """Pairs drafters with their acceptance. A drafter without one gets that of the first drafter."""
    if len({shape.method for shape in shapes}) < len(shapes):
        raise UserError("--drafter: pass at most one drafter of each method (p-eagle, eagle3)")
    first = curves[0] or assumed_curve(num_assumed)
    return [PlannedDrafter(shape, curve or first) for shape, curve in zip(shapes, curves, strict=True)]


@dataclass(frozen=True)
class ServingPlan:
    rows: list[PlanRow]
    replica: Replica
    notes: list[str]
    recommendation: str = ""

    def fastest(self, concurrency: int, method: str | None = None) -> PlanRow | None:
        """The fastest row at a concurrency, of one method or of all."""
        rows = [r for r in self.rows if r.concurrency == concurrency and method in (None, r.method)]
        return max(rows, key=by_throughput, default=None)

    @property
    def concurrencies(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})


def select_engine(requested: str, target: ModelShape, tensor_parallel_size: int) -> EngineSpec:
    """Resolves "auto": the embedded engine where it was measured (one GPU, bf16, no experts), else vLLM."""
    if requested != "auto":
        return ENGINES[requested]
    is_measured = tensor_parallel_size == 1 and target.bytes_per_weight >= 2 and target.experts is None
    return ENGINES["embedded" if is_measured else "vllm"]


def build_plan(
    replica: Replica, target: ModelShape, drafters: list[PlannedDrafter], settings: PlanSettings
) -> ServingPlan:
    concurrencies, notes = _select_concurrencies(replica, target, drafters, settings)
    num_prompt_tokens, num_output_tokens = settings.num_prompt_tokens, settings.num_output_tokens
    num_gpus, price = replica.tensor_parallel_size, replica.gpu.price_per_hour

    def plan_row(concurrency: int, drafter: PlannedDrafter | None, k: int) -> PlanRow:
        """Throughput of a steady load: a new request starts when one ends, and its prefill delays all others."""
        shape = drafter.shape if drafter is not None else None
        mean_context_len = num_prompt_tokens + num_output_tokens / 2
        step_s = decode_step_seconds(replica, target, shape, k, concurrency, mean_context_len, num_output_tokens)
        prefill_s = prefill_seconds(replica, target, shape, num_prompt_tokens, concurrency)
        acceptance_length = drafter.acceptance.acceptance_length(k) if drafter is not None else 1.0
        num_steps = (num_output_tokens - 1 if num_prompt_tokens else num_output_tokens) / acceptance_length
        throughput = concurrency * num_output_tokens / (num_steps * step_s + concurrency * prefill_s)
        num_replicas = math.ceil(settings.throughput / throughput) if settings.throughput is not None else 1
        return PlanRow(
            concurrency=concurrency,
            num_speculative_tokens=k,
            method=shape.method if shape is not None else "none",
            step_ms=step_s * 1e3,
            output_throughput=throughput,
            num_gpus=num_replicas * num_gpus,
            cost_per_million_tokens=price * num_gpus / 3600 / throughput * 1e6 if price is not None else None,
            chosen=False,
        )

    configurations = [(None, 0), *((d, k) for d in drafters for k in settings.num_speculative_tokens)]
    rows = [plan_row(c, drafter, k) for c in concurrencies for drafter, k in configurations]
    if settings.per_user_throughput is not None:
        best = max(rows, key=lambda r: r.output_throughput / r.concurrency)
        rows = [r for r in rows if r.output_throughput / r.concurrency >= settings.per_user_throughput]
        if not rows:
            given = f"--per-user-throughput {settings.per_user_throughput:g}"
            most = f"{best.output_throughput / best.concurrency:.0f}"
            at = f"{_describe(best)} at concurrency {best.concurrency}"
            raise UserError(f"{given}: not reachable; the maximum is {most} ({at})")
    assumed = sorted({d.acceptance.source for d in drafters if d.acceptance.is_assumed})
    borrowed = [METHOD_NAMES[d.shape.method] for d in drafters[1:] if d.acceptance is drafters[0].acceptance]
    notes = [
        *(f"acceptance is {source}: pass --acceptance-rates, --acceptance-length or --eval" for source in assumed),
        *(f"{name} is planned with the same acceptance: pass a second --acceptance-rates list" for name in borrowed),
        *notes,
    ]
    plan = ServingPlan(rows, replica, notes)
    plan = replace(plan, rows=[replace(row, chosen=row is plan.fastest(row.concurrency)) for row in rows])
    if settings.throughput is None and settings.per_user_throughput is None:
        return replace(plan, recommendation=_recommend_per_concurrency(plan))
    methods = ["none", *(d.shape.method for d in drafters)]
    return replace(plan, recommendation=_recommend_deployment(plan, settings, methods))


def _select_concurrencies(
    replica: Replica, target: ModelShape, drafters: list[PlannedDrafter], settings: PlanSettings
) -> tuple[list[int], list[str]]:
    """The concurrencies whose weights and KV cache fit into memory, and a note on the others."""
    size, num_heads = replica.tensor_parallel_size, target.cfg.layer.num_heads
    sizes = [n for n in range(1, settings.max_tensor_parallel_size + 1) if num_heads % n == 0]
    if size not in sizes:
        fix = f"must divide the {num_heads} heads of {target.name}: {', '.join(map(str, sizes[1:]))}"
        raise UserError(f"--tensor-parallel-size {size}: {fix}")
    drafter = max((d.shape for d in drafters), key=lambda shape: shape.total_weight_bytes, default=None)
    num_tokens = settings.num_prompt_tokens + settings.num_output_tokens
    weight_bytes = target.total_weight_bytes + (drafter.total_weight_bytes if drafter is not None else 0)

    def max_concurrency(size: int) -> int:
        usable_bytes = size * (replica.gpu.memory_bytes * settings.gpu_memory_utilization - settings.reserved_bytes)
        request_bytes = target.kv_cache_bytes(num_tokens, size)
        request_bytes += drafter.body.kv_cache_bytes(num_tokens, size) if drafter is not None else 0
        return max(int((usable_bytes - weight_bytes) / request_bytes), 0)

    requested, limit = sorted(set(settings.concurrency)), max_concurrency(size)
    fitting = [c for c in requested if c <= limit]
    if len(fitting) == len(requested) or (fitting and settings.concurrency == settings.concurrency_search):
        return fitting, []
    first = next(c for c in requested if c > limit)
    fitting_size = next((n for n in sizes if max_concurrency(n) >= first), None)
    fix = f"use --tensor-parallel-size {fitting_size}" if fitting_size else f"{sizes[-1]} GPUs are too small, too"
    note = (
        f"--concurrency {first}: {size} {replica.gpu.name} hold {weight_bytes / GB:,.1f} GB of weights and at most "
        f"{limit} requests of {num_tokens:,} tokens; {fix}"
    )
    if not fitting:
        raise UserError(note)
    return fitting, [note]


def _describe(row: PlanRow) -> str:
    return configuration_name(row.method, row.num_speculative_tokens)


def _recommend_per_concurrency(plan: ServingPlan) -> str:
    parts = []
    for c in plan.concurrencies:
        best, baseline = plan.fastest(c), plan.fastest(c, "none")
        assert best is not None and baseline is not None
        gain = f" ({best.output_throughput / baseline.output_throughput:.2f}x no speculation)"
        parts.append(f"{_describe(best)} at concurrency {c}{gain if best.num_speculative_tokens else ''}")
    return f"Fastest: {'; '.join(parts)}."


def _recommend_deployment(plan: ServingPlan, settings: PlanSettings, methods: list[str]) -> str:
    """The fewest GPUs for the required throughput, and what each other method needs."""
    best_rows = {m: max((r for r in plan.rows if r.method == m), key=by_throughput, default=None) for m in methods}
    found = sorted((row for row in best_rows.values() if row is not None), key=by_throughput, reverse=True)
    parts = []
    for row in found:
        dollars = row.cost_per_million_tokens
        cost = f", ${dollars:.3g} per million tokens" if dollars is not None else ""
        gpus = f"{row.num_gpus} {plan.replica.gpu.name} at concurrency {row.concurrency} per replica"
        parts.append(f"{_describe(row)}: {gpus}{cost}")
    for method, best in best_rows.items():
        if best is None:
            parts.append(f"{METHOD_NAMES[method]}: does not reach {settings.per_user_throughput:g} tokens/s per user")
    return f"Cheapest: {'; '.join(parts)}."
