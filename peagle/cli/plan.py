"""`plan`: what a drafter would bring on GPUs that need not be here.

Knows nothing about how it is worked out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.app import JsonOption, app, console, examples
from peagle.cli.several import SpreadCommand, split
from peagle.config import PlanSettings
from peagle.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from peagle.config import Method
    from peagle.planning.curve import Curve
    from peagle.planning.plan import Contender, Plan
    from peagle.planning.shapes import DrafterShape, Shape
    from peagle.results.schema import PlanRow

USUAL = PlanSettings()


def whole_numbers(given: list[str], flag: str) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for part in split(given):
        try:
            found[int(part)] = None
        except ValueError:
            raise UserError(f"{flag} {part}: must be a whole number") from None
    return tuple(found)


def print_whole(*tables: Table) -> None:
    """Wider than the terminal rather than with figures cut off."""
    for table in tables:
        into = console()
        into.width = max(into.width, into.measure(table, options=into.options.update(max_width=1000)).maximum)
        into.print(table)


def _shown(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


@app.command(
    cls=SpreadCommand,
    epilog=examples(
        "peagle plan -t llama-3.1-8b --gpu h200 --rates 0.72,0.52,0.38,0.28,0.21,0.16,0.13",
        "peagle plan -t gpt-oss-120b --gpu b200 --acceptance-length 3.4 --load 50000 --per-user 100",
        "peagle plan -t TARGET_DIR -d DRAFTER_DIR --gpu h100 --results eval.json --concurrency 1,16,64 --out plan.json",
        "peagle plan -t llama-3.1-70b --gpu h100 --tensor-parallel 4 --price 2.5 --acceptance-length 3.6",
        "peagle plan -t qwen3-8b --bandwidth 1.8 --matrix-rate 400 --memory 96 --acceptance-length 3",
    ),
)
def plan(
    target: Annotated[
        str, typer.Option("--target", "-t", help="A folder with a config.json, or a known name.", metavar="T")
    ],
    gpu: Annotated[str | None, typer.Option(help="h200, h100, b200, a100, l40s, ...", metavar="NAME")] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter", "-d", help="A drafter's folder, or p-eagle:LAYERS of the target's width.", metavar="D"
        ),
    ] = "p-eagle",
    eagle3: Annotated[
        str, typer.Option(help="The EAGLE-3 drafter compared with: a folder, eagle3:LAYERS, or none.", metavar="D")
    ] = "eagle3",
    rates: Annotated[
        str | None, typer.Option(help="How often draft 1, 2, .. is accepted, all before it included.")
    ] = None,
    acceptance_length: Annotated[float | None, typer.Option(help="Tokens a round gains, at --measured-k.")] = None,
    measured_k: Annotated[int, typer.Option(help="The K that it was measured at.")] = USUAL.measured_k,
    results: Annotated[
        Path | None, typer.Option(help="Acceptance from a file that `peagle eval` wrote.", metavar="FILE")
    ] = None,
    eagle3_rates: Annotated[
        str | None, typer.Option(help="Those of the EAGLE-3 drafter.", show_default="the same")
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Requests at once on each copy.", show_default=_shown(USUAL.concurrency))
    ] = None,
    drafts: Annotated[
        list[str] | None, typer.Option(help="Numbers of drafts to try.", show_default=_shown(USUAL.drafts))
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of a request; 0 leaves their reading out.")] = USUAL.prompt_tokens,
    output_tokens: Annotated[int, typer.Option(help="Of an answer.")] = USUAL.output_tokens,
    load: Annotated[float | None, typer.Option(help="Output tokens a second to serve: how many GPUs?")] = None,
    per_user: Annotated[float | None, typer.Option(help="Tokens a second that each request gets at least.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that hold a copy together.")] = USUAL.tensor_parallel,
    engine: Annotated[str, typer.Option(help="embedded, vllm, or auto: embedded where it can.")] = USUAL.engine,
    weight_bits: Annotated[float | None, typer.Option(help="Of a weight.", show_default="the config's")] = None,
    kv_bits: Annotated[float | None, typer.Option(help="Of a cached number.", show_default="the config's")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="TB/s of memory, where the table is wrong.")] = None,
    matrix_rate: Annotated[float | None, typer.Option(help="Dense bf16 TFLOP/s.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s to its neighbours, one way.")] = None,
    price: Annotated[float | None, typer.Option(help="Dollars an hour of one GPU.", show_default="the table's")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the plan, for `peagle report`.", metavar="FILE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Work out tokens a second, the best K, GPUs and cost before anything is bought.

    A roofline: bytes over bandwidth, operations over matrix rate, and constants measured on one H200. docs/planning.md
    has the formulas and how far they were off. Nothing is loaded and no GPU is needed.
    """
    from peagle.planning.gpus import describe_gpu
    from peagle.planning.plan import choose_engine, make_plan
    from peagle.planning.roofline import Machine
    from peagle.planning.shapes import target_shape
    from peagle.results.files import to_json, write_results
    from peagle.results.provenance import Provenance
    from peagle.results.schema import Results

    started = Provenance.collect() if out is not None or as_json else None  # it looks for the GPU, which takes seconds
    for flag, bits in (("--weight-bits", weight_bits), ("--kv-bits", kv_bits)):
        if bits is not None and not 1 <= bits <= 32:
            raise UserError(f"{flag} {bits:g}: must be from 1 to 32")
    machine_gpu = describe_gpu(gpu, bandwidth, matrix_rate, memory, link, price)
    shape = target_shape(target, weight_bits, kv_bits)
    contenders = _contenders(shape, drafter, eagle3, rates, acceptance_length, measured_k, results, eagle3_rates)
    loads = USUAL.concurrency if per_user is None else USUAL.searched
    settings = PlanSettings(
        concurrency=whole_numbers(concurrency, "--concurrency") if concurrency else loads,
        drafts=whole_numbers(drafts, "--drafts") if drafts else _known_drafts(contenders),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        load=load,
        per_user=per_user,
        tensor_parallel=tensor_parallel,
        engine=engine,  # type: ignore[arg-type]
        measured_k=measured_k,
    )
    machine = Machine(machine_gpu, choose_engine(settings.engine, shape, tensor_parallel), tensor_parallel)
    made = make_plan(machine, shape, contenders, settings)
    if started is not None:
        document = Results(
            "plan", started.with_duration(), _about(made, target, contenders, settings), made.rows, True, made.notes
        )
        if out is not None:
            write_results(out, document)
        if as_json:
            print(json.dumps(to_json(document)))
            return
    _show(made, contenders, settings)
    if out is not None:
        print(f"wrote {out}")


def _about(made: Plan, target: str, contenders: list[Contender], settings: PlanSettings) -> dict[str, Any]:
    gpu, most = made.machine.gpu, max(settings.drafts)
    return {
        "target": target,
        "drafters": {c.method: c.shape.body.name for c in contenders},
        "gpu": gpu.name,
        "memory_gb": gpu.memory / 1e9,
        "bandwidth_tb_s": gpu.bandwidth / 1e12,
        "matrix_tflop_s": gpu.matrix_rate / 1e12,
        "price": gpu.price,
        "engine": made.machine.engine.name,
        "tensor_parallel": settings.tensor_parallel,
        "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens,
        "load": settings.load,
        "per_user": settings.per_user,
        "rates": {c.method: [round(c.curve.rate(i), 4) for i in range(1, most + 1)] for c in contenders},
        "rates_from": {c.method: c.curve.source for c in contenders},
        "recommendation": made.recommendation,
    }


def _contenders(
    target: Shape,
    drafter: str,
    eagle3: str,
    rates: str | None,
    length: float | None,
    measured_k: int,
    results: Path | None,
    eagle3_rates: str | None,
) -> list[Contender]:
    """The drafter with its acceptance, and EAGLE-3 beside it unless that is what it is."""
    from peagle.planning.curve import from_length, from_rates, from_results, guess
    from peagle.planning.plan import Contender
    from peagle.planning.shapes import drafter_shape

    told = [flag for flag, v in (("--rates", rates), ("--acceptance-length", length), ("--results", results)) if v]
    if len(told) > 1:
        raise UserError(f"{' and '.join(told)}: give one of them")

    def curve(method: Method) -> Curve | None:
        if rates is not None:
            return from_rates(rates)
        if length is not None:
            return from_length(length, measured_k)
        return from_results(results, method) if results is not None else guess(max(USUAL.drafts))

    own: DrafterShape = drafter_shape(drafter, target)
    accepted = curve(own.method)
    if accepted is None:
        raise UserError(f"--results {results}: holds no rows of {own.method}, which {drafter} is")
    found = [Contender(own, accepted)]
    if eagle3 != "none" and own.method != "eagle3":
        other = drafter_shape(eagle3, target, "--eagle3")
        if other.method != "eagle3":
            raise UserError(f"--eagle3 {eagle3}: is a P-EAGLE drafter; it goes to --drafter")
        its = from_rates(eagle3_rates, "--eagle3-rates") if eagle3_rates is not None else None
        if results is not None and its is None:
            its = curve("eagle3")
        found.append(Contender(other, its or accepted, borrowed=its is None))
    return found


def _known_drafts(contenders: list[Contender]) -> tuple[int, ...]:
    """No more drafts than acceptance is known for."""
    known = len(contenders[0].curve.rates)
    return tuple(dict.fromkeys([*(k for k in USUAL.drafts if k < known), min(known, max(USUAL.drafts))]))


def _show(made: Plan, contenders: list[Contender], settings: PlanSettings) -> None:
    from rich import box
    from rich.table import Table

    from peagle.planning.plan import NAMES

    main, gpu = contenders[0].method, made.machine.gpu
    name = f"{made.machine.tensor_parallel} x {gpu.name}" if made.machine.tensor_parallel > 1 else gpu.name
    title = f"expected output tokens/s of one copy on {name}, {made.machine.engine.name} engine, by K"
    beside = [c.method for c in contenders[1:]]
    heads = [f"{NAMES[method]}, K" for method in beside] + [f"K={k}" for k in settings.drafts]
    speeds = Table("at once", "none", *heads, title=title, box=box.SIMPLE)
    bought = ("K", "x none", *(f"x {NAMES[m]}" for m in beside), "each", "GPUs", "$/M", "$/M none")
    choices = Table("at once", "best", *bought, title="best for each load", box=box.SIMPLE)

    def speed(row: PlanRow | None, with_k: bool = False) -> str:
        if row is None:
            return "-"
        return f"{row.output_throughput:,.0f}" + (f", {row.num_speculative_tokens}" if with_k else "")

    def gain(row: PlanRow, over: PlanRow | None) -> str:
        return f"{row.output_throughput / over.output_throughput:.2f}" if over is not None else "-"

    def dollars(row: PlanRow | None) -> str:
        return (
            f"{row.cost_per_million_tokens:.3g}" if row is not None and row.cost_per_million_tokens is not None else "-"
        )

    for c in made.loads:
        best, plain = made.best(c), made.best(c, "none")
        assert best is not None
        own = {row.num_speculative_tokens: row for row in made.rows if row.concurrency == c and row.method == main}
        others = [made.best(c, method) for method in beside]
        speeds.add_row(
            str(c),
            speed(plain),
            *(speed(row, with_k=True) for row in others),
            *(speed(own.get(k)) for k in settings.drafts),
        )
        each = f"{best.output_throughput / c:,.0f}"
        gains = [gain(best, row) for row in (plain, *others)]
        choices.add_row(
            str(c),
            NAMES[best.method] if best.num_speculative_tokens else "none",
            str(best.num_speculative_tokens or "-"),
            *gains,
            each,
            str(best.num_gpus),
            dollars(best),
            dollars(plain),
        )
    print_whole(speeds, choices)
    print(made.recommendation)
    for note in made.notes:
        print(f"note: {note}")
    paid = f"${gpu.price:g} an hour for a GPU" if gpu.price is not None else "no price known: give --price"
    print(f"{paid}; paper figures, not measured: see docs/planning.md")
