"""`peagle plan`: expected throughput, best K, GPUs and cost of a deployment."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.app import MODEL_PANEL, OUTPUT_PANEL, JsonOption, app, console, examples
from peagle.cli.several import MultiValueCommand, split_commas
from peagle.config import PlanSettings
from peagle.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from peagle.planning.plan import PlannedDrafter, ServingPlan
    from peagle.results.schema import PlanRow

DEFAULTS = PlanSettings()
DEFAULT_DRAFTERS = ("p-eagle", "eagle3")
ModelOption = partial(typer.Option, rich_help_panel=MODEL_PANEL)
AcceptanceOption = partial(typer.Option, rich_help_panel="Acceptance")
LoadOption = partial(typer.Option, rich_help_panel="Load")
GpuOption = partial(typer.Option, rich_help_panel="GPU")


def parse_int_list(values: list[str], flag: str) -> tuple[int, ...]:
    """Parses `1,8 64` to (1, 8, 64), without duplicates."""
    numbers: dict[int, None] = {}
    for part in split_commas(values):
        try:
            numbers[int(part)] = None
        except ValueError:
            raise UserError(f"{flag} {part}: must be an integer") from None
    return tuple(numbers)


def print_tables(*tables: Table) -> None:
    """Prints tables in full width: a narrow terminal wraps lines instead of cutting off numbers."""
    for table in tables:
        output = console()
        output.width = max(output.width, output.measure(table, options=output.options.update(max_width=1000)).maximum)
        output.print(table)


def _join(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


@app.command(
    cls=MultiValueCommand,
    epilog=examples(
        "peagle plan -t llama-3.1-8b --gpu h200 --acceptance-rates 0.72,0.52,0.38,0.28,0.21,0.16,0.13",
        "peagle plan -t gpt-oss-120b --gpu b200 --acceptance-length 3.4 --throughput 50000 --per-user-throughput 100",
        "peagle plan -t TARGET_DIR -d DRAFTER_DIR --gpu h100 --eval eval.json --concurrency 1,16,64 --out plan.json",
        "peagle plan -t qwen3-8b --memory-bandwidth 1.8 --tflops 400 --gpu-memory 96 --acceptance-length 3",
    ),
)
def plan(
    target: Annotated[str, ModelOption("--target", "-t", help="A folder with a config.json, or a known model name.")],
    drafter: Annotated[
        list[str] | None,
        ModelOption(
            "--drafter",
            "-d",
            metavar="DRAFTER ...",
            help="Drafter folders, or p-eagle:LAYERS, eagle3:LAYERS of the target's width.",
            show_default=" ".join(DEFAULT_DRAFTERS),
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        ModelOption(
            "--num-speculative-tokens",
            "-k",
            help="Values of K.",
            metavar="K ...",
            show_default=_join(DEFAULTS.num_speculative_tokens),
        ),
    ] = None,
    weight_bits: Annotated[float | None, ModelOption(help="Bits per weight.", show_default="from config.json")] = None,
    kv_cache_bits: Annotated[float | None, ModelOption(help="Bits per KV cache element.", show_default="16")] = None,
    acceptance_rates: Annotated[
        list[str] | None,
        AcceptanceOption(help="Shares of steps that accept draft tokens 1..i, a list per drafter.", metavar="R,.. ..."),
    ] = None,
    acceptance_length: Annotated[float | None, AcceptanceOption(help="Mean accepted tokens per step + 1.")] = None,
    acceptance_length_k: Annotated[
        int, AcceptanceOption(help="K of --acceptance-length.")
    ] = DEFAULTS.acceptance_length_k,
    eval_results: Annotated[Path | None, AcceptanceOption("--eval", help="Results file of `peagle eval`.")] = None,
    concurrency: Annotated[
        list[str] | None,
        LoadOption(help="Requests per replica.", metavar="N ...", show_default=_join(DEFAULTS.concurrency)),
    ] = None,
    num_prompt_tokens: Annotated[
        int, LoadOption(help="Prompt tokens per request; 0 ignores prefill.")
    ] = DEFAULTS.num_prompt_tokens,
    num_output_tokens: Annotated[int, LoadOption(help="Output tokens per request.")] = DEFAULTS.num_output_tokens,
    throughput: Annotated[float | None, LoadOption(help="Total output tokens/s to serve.")] = None,
    per_user_throughput: Annotated[float | None, LoadOption(help="Minimum output tokens/s per request.")] = None,
    gpu: Annotated[str | None, GpuOption(help="GPU name: h200, h100, b200, a100, l40s, ...")] = None,
    tensor_parallel_size: Annotated[int, GpuOption(help="GPUs per replica.")] = DEFAULTS.tensor_parallel_size,
    engine: Annotated[str, GpuOption(help="embedded, vllm, or auto.")] = DEFAULTS.engine,
    price: Annotated[float | None, GpuOption(help="Dollars per GPU and hour.", show_default="built-in")] = None,
    memory_bandwidth: Annotated[float | None, GpuOption(help="Memory bandwidth in TB/s.")] = None,
    tflops: Annotated[float | None, GpuOption(help="Dense bf16 TFLOP/s.")] = None,
    gpu_memory: Annotated[float | None, GpuOption(help="Memory in GB.")] = None,
    link_bandwidth: Annotated[float | None, GpuOption(help="One-way GB/s to other GPUs of the node.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results file, for `peagle report`.", rich_help_panel=OUTPUT_PANEL)
    ] = None,
    as_json: JsonOption = False,
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
    for flag, bits in (("--weight-bits", weight_bits), ("--kv-cache-bits", kv_cache_bits)):
        if bits is not None and not 1 <= bits <= 32:
            raise UserError(f"{flag} {bits:g}: must be from 1 to 32")
    gpu_spec = describe_gpu(gpu, memory_bandwidth, tflops, gpu_memory, link_bandwidth, price)
    target_shape = load_target_shape(target, weight_bits, kv_cache_bits)
    shapes = [load_drafter_shape(name, target_shape) for name in split_commas(drafter) or DEFAULT_DRAFTERS]
    methods = [shape.method for shape in shapes]
    curves = load_curves(methods, acceptance_rates or [], acceptance_length, acceptance_length_k, eval_results)
    if eval_results is not None and curves[0] is None:
        raise UserError(f"--eval {eval_results}: has no rows of method {methods[0]}")
    drafters = assign_acceptance(shapes, curves, max(DEFAULTS.num_speculative_tokens))
    num_known = len(drafters[0].acceptance.rates)
    known_ks = tuple(dict.fromkeys(min(k, num_known) for k in DEFAULTS.num_speculative_tokens))
    default_concurrency = DEFAULTS.concurrency if per_user_throughput is None else DEFAULTS.concurrency_search
    settings = PlanSettings(
        concurrency=parse_int_list(concurrency, "--concurrency") if concurrency else default_concurrency,
        num_speculative_tokens=parse_int_list(num_speculative_tokens, "-k") if num_speculative_tokens else known_ks,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        throughput=throughput,
        per_user_throughput=per_user_throughput,
        tensor_parallel_size=tensor_parallel_size,
        engine=engine,  # type: ignore[arg-type]
    )
    replica = Replica(
        gpu_spec, select_engine(settings.engine, target_shape, tensor_parallel_size), tensor_parallel_size
    )
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
    from rich import box
    from rich.table import Table

    from peagle.results.schema import METHOD_NAMES

    replica, methods = serving_plan.replica, [d.shape.method for d in drafters]
    title = f"Output tokens/s per replica, {replica.tensor_parallel_size} x {replica.gpu.name}, {replica.engine.name}"
    by_k = Table(
        "concurrency", "none", *(f"K={k}" for k in settings.num_speculative_tokens), title=title, box=box.SIMPLE
    )
    others = ("none", *methods[1:])
    best_headings = (
        "concurrency",
        "fastest",
        "K",
        *(f"x {METHOD_NAMES[m]}" for m in others),
        "per user",
        "GPUs",
        "$/M",
    )
    best = Table(*best_headings, title="Fastest at each concurrency", box=box.SIMPLE)

    def show(row: PlanRow | None) -> str:
        return f"{row.output_throughput:,.0f}" if row is not None else "-"

    for c in serving_plan.concurrencies:
        own = {r.num_speculative_tokens: r for r in serving_plan.rows if r.concurrency == c and r.method == methods[0]}
        by_k.add_row(
            str(c), show(serving_plan.fastest(c, "none")), *(show(own.get(k)) for k in settings.num_speculative_tokens)
        )
        row = serving_plan.fastest(c)
        assert row is not None
        slower = [serving_plan.fastest(c, method) for method in others]
        gains = [f"{row.output_throughput / s.output_throughput:.2f}" if s is not None else "-" for s in slower]
        cost = f"{row.cost_per_million_tokens:.3g}" if row.cost_per_million_tokens is not None else "-"
        per_user = f"{row.output_throughput / c:,.0f}"
        best.add_row(
            str(c),
            METHOD_NAMES[row.method],
            str(row.num_speculative_tokens or "-"),
            *gains,
            per_user,
            str(row.num_gpus),
            cost,
        )
    print_tables(by_k, best)
    print(serving_plan.recommendation)
    for note in serving_plan.notes:
        print(f"note: {note}")
    price = replica.gpu.price_per_hour
    price_text = f"${price:g} per GPU and hour" if price is not None else "price unknown: pass --price"
    print(f"{price_text}; estimates of a roofline model, not measured: see docs/planning.md")
