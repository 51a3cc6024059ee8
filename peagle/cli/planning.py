"""`peagle plan`: estimates a deployment with a roofline model. `peagle tune`: times decode steps on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table

from peagle.cli.app import (
    DRAFTER_FLAGS,
    JSON,
    REQUIRED_DRAFTER,
    RESULTS_OUT,
    TARGET,
    TARGET_FLAGS,
    console,
    print_tables,
    verb,
)
from peagle.config import DEFAULT_NUM_LAYERS, PlanSettings, TuneSettings
from peagle.config.options import REQUIRED, device_option, dtype_option, option
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter
from peagle.speculative.adaptive_k import AdaptiveK, StepCostTable

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.planning.plan import PlannedDrafter, ServingPlan
    from peagle.planning.tuning import CostTableKey
    from peagle.results.schema import PlanRow

DEFAULT_DRAFTERS = ("p-eagle", "eagle3")
EVAL_RESULTS = option(None, "Results file of `peagle eval`.", panel="Acceptance", flags=("--eval",))


@verb(
    "peagle plan -t llama-3.1-8b --gpu h200 --acceptance-rates 0.72,0.52,0.38,0.28,0.21,0.16,0.13",
    "peagle plan -t gpt-oss-120b --gpu b200 --acceptance-length 3.4 --throughput 50000 --per-user-throughput 100",
    "peagle plan -t TARGET_DIR -d DRAFTER_DIR --gpu h100 --eval eval.json --concurrency 1,16,64 --out plan.json",
    "peagle plan -t qwen3-8b --memory-bandwidth 1.8 --tflops 400 --gpu-memory 96 --acceptance-length 3",
    several=True,
)
def plan(
    settings: PlanSettings,
    target: str = option(
        REQUIRED, "A folder with a config.json, or a known model name.", panel="Model", flags=TARGET_FLAGS
    ),
    drafter: tuple[str, ...] = option(
        DEFAULT_DRAFTERS,
        "Drafter folders, or p-eagle:LAYERS, eagle3:LAYERS of the target's width.",
        flags=DRAFTER_FLAGS,
        metavar="DRAFTER ...",
    ),
    weight_bits: float | None = option(None, "Bits per weight.", min=1, max=32, show_default="from config.json"),
    kv_cache_bits: float | None = option(None, "Bits per KV cache element.", min=1, max=32, show_default="16"),
    acceptance_rates: tuple[str, ...] = option(
        (), "Shares of steps that accept draft tokens 1..i, a list per drafter.", panel="Acceptance", metavar="R,.. ..."
    ),
    acceptance_length: float | None = option(None, "Mean accepted tokens per step + 1."),
    eval_results: Path | None = EVAL_RESULTS,
    gpu: str | None = option(None, "GPU name: h200, h100, b200, a100, l40s, ...", panel="GPU"),
    price: float | None = option(None, "Dollars per GPU and hour.", show_default="built-in"),
    memory_bandwidth: float | None = option(None, "Memory bandwidth in TB/s."),
    tflops: float | None = option(None, "Dense bf16 TFLOP/s."),
    gpu_memory: float | None = option(None, "Memory in GB."),
    link_bandwidth: float | None = option(None, "One-way GB/s to other GPUs of the node."),
    out: Path | None = RESULTS_OUT,
    as_json: bool = JSON,
) -> None:
    """Estimate throughput, the best K, GPUs and cost with a roofline model.

    Reads only config.json files and needs no GPU. docs/planning.md has the formulas and their errors.
    """
    from peagle.planning.acceptance import load_curves
    from peagle.planning.plan import assign_acceptance, build_plan, select_engine
    from peagle.planning.roofline import Replica, describe_gpu
    from peagle.planning.shapes import load_drafter_shape, load_target_shape
    from peagle.results.files import to_json, write_results
    from peagle.results.provenance import Provenance
    from peagle.results.schema import Results

    provenance = Provenance.collect() if out is not None or as_json else None  # queries the GPU, which takes seconds
    gpu_spec = describe_gpu(gpu, memory_bandwidth, tflops, gpu_memory, link_bandwidth, price)
    target_shape = load_target_shape(target, weight_bits, kv_cache_bits)
    shapes = [load_drafter_shape(name, target_shape) for name in drafter]
    methods = [shape.method for shape in shapes]
    curves = load_curves(methods, acceptance_rates, acceptance_length, settings.acceptance_length_k, eval_results)
    if eval_results is not None and curves[0] is None:
        raise UserError(f"--eval {eval_results}: has no rows of method {methods[0]}")
    drafters = assign_acceptance(shapes, curves, max(PlanSettings.num_speculative_tokens))
    num_known = len(drafters[0].acceptance.rates)
    known_ks = tuple(dict.fromkeys(min(k, num_known) for k in PlanSettings.num_speculative_tokens))
    if settings.num_speculative_tokens == PlanSettings.num_speculative_tokens:
        settings = replace(settings, num_speculative_tokens=known_ks)
    size = settings.tensor_parallel_size
    replica = Replica(gpu_spec, select_engine(settings.engine, target_shape, size), size)
    serving_plan = build_plan(replica, target_shape, drafters, settings)
    if provenance is not None:
        described = {
            **asdict(settings),
            "target": target,
            "drafters": {d.shape.method: d.shape.body.name for d in drafters},
            "acceptance_rates": {d.shape.method: [round(r, 4) for r in d.acceptance.rates] for d in drafters},
            "acceptance_source": {d.shape.method: d.acceptance.source for d in drafters},
            "gpu": gpu_spec.name,
            "gpu_spec": asdict(gpu_spec),
            "engine": replica.engine.name,
            "recommendation": serving_plan.recommendation,
        }
        results = Results("plan", provenance.with_duration(), described, serving_plan.rows, True, serving_plan.notes)
        if out is not None:
            write_results(out, results)
        if as_json:
            print(json.dumps(to_json(results)))
            return
    _print_plan(serving_plan, drafters, settings)
    if out is not None:
        print(f"wrote {out}")


def _print_plan(serving_plan: ServingPlan, drafters: list[PlannedDrafter], settings: PlanSettings) -> None:
    from peagle.results.schema import METHOD_NAMES

    replica, methods = serving_plan.replica, [d.shape.method for d in drafters]
    title = f"Output tokens/s per replica, {replica.tensor_parallel_size} x {replica.gpu.name}, {replica.engine.name}"
    ks = settings.num_speculative_tokens
    by_k = Table("concurrency", "none", *(f"K={k}" for k in ks), title=title, box=box.SIMPLE)
    others = ("none", *methods[1:])
    gains_over = [f"x {METHOD_NAMES[method]}" for method in others]
    headings = ("concurrency", "fastest", "K", *gains_over, "per user", "GPUs", "$/M")
    best = Table(*headings, title="Fastest at each concurrency", box=box.SIMPLE)

    def show(row: PlanRow | None) -> str:
        return f"{row.output_throughput:,.0f}" if row is not None else "-"

    for c in serving_plan.concurrencies:
        own = {r.num_speculative_tokens: r for r in serving_plan.rows if r.concurrency == c and r.method == methods[0]}
        by_k.add_row(str(c), show(serving_plan.fastest(c, "none")), *(show(own.get(k)) for k in ks))
        row = serving_plan.fastest(c)
        assert row is not None
        slower = [serving_plan.fastest(c, method) for method in others]
        gains = [f"{row.output_throughput / s.output_throughput:.2f}" if s is not None else "-" for s in slower]
        cost = f"{row.cost_per_million_tokens:.3g}" if row.cost_per_million_tokens is not None else "-"
        k, per_user = str(row.num_speculative_tokens or "-"), f"{row.output_throughput / c:,.0f}"
        best.add_row(str(c), METHOD_NAMES[row.method], k, *gains, per_user, str(row.num_gpus), cost)
    print_tables(by_k, best)
    print(serving_plan.recommendation)
    for note in serving_plan.notes:
        print(f"note: {note}")
    price = replica.gpu.price_per_hour
    price_text = f"${price:g} per GPU and hour" if price is not None else "price unknown: pass --price"
    print(f"{price_text}; estimates of a roofline model, not measured: see docs/planning.md")


@verb(
    "peagle tune -d smollm2-135m-p-eagle --cost-table costs.json",
    "peagle tune -t TARGET -d DRAFTER --acceptance-rates 0.7,0.5,0.35 --concurrency 1,16,64",
    "peagle tune -t TARGET -d DRAFTER --eval eval.json --context-len 1024 --cost-table costs.json --out tune.json",
    several=True,
)
def tune(
    settings: TuneSettings,
    drafter: str = REQUIRED_DRAFTER,
    target: str = TARGET,
    acceptance_rates: str | None = option(
        None, "Shares of steps that accept draft tokens 1..i.", panel="Acceptance", show_default="assumed"
    ),
    eval_results: Path | None = EVAL_RESULTS,
    dtype: str | None = dtype_option(),
    device: str | None = device_option(),
    cost_table: Path | None = option(
        None, "Cost table for `-k auto` of serve and bench; resumed if it exists.", panel="Output"
    ),
    overwrite: bool = option(False, "Measure again what --cost-table has."),
    out: Path | None = RESULTS_OUT,
    as_json: bool = JSON,
) -> None:
    """Time decode steps by batch size and K, and print the fastest K for each.

    Ctrl-C prints the batch sizes measured so far; with --cost-table the same command resumes later.
    """
    from peagle.checkpoints.validate import build_speculative_config, vllm_model_name
    from peagle.planning.acceptance import load_curves
    from peagle.planning.tuning import cost_table_key, load_engine
    from peagle.results.files import to_json, write_results
    from peagle.results.provenance import Provenance
    from peagle.results.schema import Results, TuneRow

    methods = list(DEFAULT_NUM_LAYERS)
    rates = [acceptance_rates] * len(methods) if acceptance_rates is not None else []
    curves = dict(zip(methods, load_curves(methods, rates, None, 0, eval_results), strict=True))
    provenance = Provenance.collect()
    llm = load_engine(target, drafter, settings, device, dtype)
    assert llm.drafter is not None
    curve = curves[method := "p-eagle" if llm.drafter.cfg.parallel else "eagle3"]
    if eval_results is not None and curve is None:
        raise UserError(f"--eval {eval_results}: has no rows of method {method}, which the drafter uses")
    key = cost_table_key(llm, target, drafter, settings.context_len)
    table, num_missing = _measure(llm, settings, key, cost_table, overwrite)
    adaptive_k = AdaptiveK(llm.adaptive_k.choices, table)
    if curve is not None:
        adaptive_k.acceptance.set_prior_rates([curve.rate(i + 1) for i in range(adaptive_k.choices[-1])])
    loads = settings.concurrency or tuple(table.batch_sizes)
    best_ks = {load: adaptive_k.best_k(load) for load in loads}
    model, parallel = vllm_model_name(drafter, resolve_drafter(drafter)), llm.drafter.cfg.parallel
    vllm_configs = {load: build_speculative_config(model, k, parallel) if k else None for load, k in best_ks.items()}
    rows = [
        TuneRow(size, k, seconds * 1e3, adaptive_k.tokens_per_second(size, k), k == adaptive_k.best_k(size))
        for (size, k), seconds in sorted(table.seconds.items())
    ]
    described = {
        **asdict(key),
        "acceptance_rates": [round(rate, 4) for rate in adaptive_k.acceptance.rates],
        "acceptance_source": curve.source if curve is not None else "assumed",
        "memory": llm.memory_bytes(),
        "vllm": {str(load): config for load, config in vllm_configs.items()},
        "recommendation": recommend(adaptive_k),
    }
    results = Results("tune", provenance.with_duration(), described, rows, finished=not num_missing)
    if out is not None:
        write_results(out, results)
    if as_json:
        print(json.dumps(to_json(results)))
    else:
        _print_results(adaptive_k, described)
        for path in (cost_table, out):
            if path is not None:
                print(f"wrote {path}")
    if num_missing:
        hint = "run the same command to resume" if cost_table is not None else "pass --cost-table to be able to resume"
        print(f"stopped: {num_missing} step kinds are missing; {hint}", file=sys.stderr)
        raise typer.Exit(130)


def _measure(
    llm: LLM, settings: TuneSettings, key: CostTableKey, path: Path | None, overwrite: bool
) -> tuple[StepCostTable, int]:
    """Returns the table and the number of step kinds that are missing because of Ctrl-C."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from peagle.planning.tuning import list_step_kinds, load_cost_table, save_cost_table, time_decode_steps

    table = load_cost_table(path, key) if path is not None and not overwrite else StepCostTable()
    step_kinds = list_step_kinds(llm, settings)
    num_known = sum(kind in table.seconds for kind in step_kinds)
    if num_known:
        print(f"resumed {path}: has {num_known} of {len(step_kinds)} step kinds", file=sys.stderr)
    columns = (TextColumn("decode steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as progress:
        num_repeats = settings.warmup + settings.repeats
        task = progress.add_task("", total=(len(step_kinds) - num_known) * num_repeats)
        try:
            for size, k in time_decode_steps(llm.model_runner, step_kinds, table, settings):
                progress.update(task, advance=1, description=f"batch size {size}, K={k}")
                if path is not None and (size, k) in table.seconds:
                    save_cost_table(path, table, key, finished=False)
        except KeyboardInterrupt:
            if not any(kind in table.seconds for kind in step_kinds):
                raise
    num_missing = sum(kind not in table.seconds for kind in step_kinds)
    if path is not None:
        save_cost_table(path, table, key, finished=not num_missing)
    return table, num_missing


def recommend(adaptive_k: AdaptiveK) -> str:
    """The fastest K by batch size, one entry per range of sizes."""
    ranges = [(k, max(sizes)) for k, sizes in groupby(adaptive_k.table.batch_sizes, adaptive_k.best_k)]
    parts = [f"{f'K={k}' if k else 'no speculation'} up to batch size {size}" for k, size in ranges]
    return f"Fastest: {', then '.join(parts)}."


def _print_results(adaptive_k: AdaptiveK, described: dict[str, Any]) -> None:
    headings = ("batch size", *(f"K={k}" for k in adaptive_k.choices), "best K", "tokens/s")
    shown = Table(*headings, title="milliseconds per decode step")
    for batch_size in adaptive_k.table.batch_sizes:
        costs = [adaptive_k.table.seconds.get((batch_size, k)) for k in adaptive_k.choices]
        cells = [f"{seconds * 1e3:.2f}" if seconds is not None else "-" for seconds in costs]
        best = adaptive_k.best_k(batch_size)
        shown.add_row(str(batch_size), *cells, str(best), f"{adaptive_k.tokens_per_second(batch_size, best):,.0f}")
    print_tables(shown)
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in described["memory"].items() if size)
    print(f"memory: {memory}")
    rates = ", ".join(f"{rate:.2f}" for rate in adaptive_k.acceptance.rates)
    is_assumed = described["acceptance_source"] == "assumed"
    print(f"acceptance rates: {rates}" + (" (assumed: pass --acceptance-rates or --eval)" if is_assumed else ""))
    print(described["recommendation"])
    print("For vLLM, whose K is fixed (timed with this engine; check with `peagle bench`):")
    for load, config in described["vllm"].items():
        option = "no speculation" if config is None else f"--speculative-config {shlex.quote(json.dumps(config))}"
        print(f"  concurrency {load}: {option}")
