"""`tune`: what a round costs here, and how many drafts pay when.

Knows nothing about how it is measured.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.app import DeviceOption, DtypeOption, JsonOption, TargetOption, app, console, examples
from peagle.cli.several import SpreadCommand
from peagle.config import LAYERS, Method, TuneSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_drafter, shipped_drafters
from peagle.speculative.adaptive_k import AdaptiveK, StepCostTable

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.planning.curve import Curve
    from peagle.planning.tuning import Subject
    from peagle.results.schema import TuneRow

USUAL = TuneSettings()


@app.command(
    cls=SpreadCommand,
    epilog=examples(
        "peagle tune -d smollm2-135m-p-eagle --out costs.json",
        "peagle tune -t TARGET -d DRAFTER --rates 0.7,0.5,0.35 --concurrency 1,16,64",
        "peagle tune -t TARGET -d DRAFTER --eval eval.json --context 1024 --out costs.json --results tune.json",
    ),
)
def tune(
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="A drafter's folder, hub id or name.", metavar="D")],
    target: TargetOption = DEFAULT_TARGET,
    rates: Annotated[
        str | None,
        typer.Option(help="How often draft 1, 2, .. is accepted, all before it included.", show_default="a guess"),
    ] = None,
    eval_results: Annotated[
        Path | None, typer.Option("--eval", help="Take them from a file that `peagle eval` wrote.", metavar="FILE")
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Loads to name vLLM's K for.", show_default="every batch", metavar="N ..")
    ] = None,
    batches: Annotated[
        list[str] | None, typer.Option(help="Requests at once to time.", show_default="by the device", metavar="N ..")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens behind each request.")] = USUAL.context,
    repeats: Annotated[int, typer.Option(help="Of each round; the fastest counts.")] = USUAL.repeats,
    max_num_seqs: Annotated[int, typer.Option(help="The most requests at once.")] = USUAL.max_num_seqs,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer together.")] = USUAL.max_model_len,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    out: Annotated[
        Path | None, typer.Option(help="The table, for LLM(cost_table=...); a part that is there is gone on with.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure anew what --out has already.")] = False,
    results: Annotated[Path | None, typer.Option(help="Keep it all, for `peagle report`.", metavar="FILE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what a round costs here, by requests at once and drafts, and say how many drafts pay when.

    Ctrl-C shows what there is by then; with --out the same command goes on later.
    """
    from peagle.cli.plan import whole_numbers
    from peagle.planning.tuning import subject_of, untimed
    from peagle.results.files import to_json, write_results
    from peagle.results.provenance import Provenance
    from peagle.results.schema import Results

    settings = TuneSettings(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        context=context,
        repeats=repeats,
        batches=whole_numbers(batches, "--batches") if batches else None,
        concurrency=whole_numbers(concurrency, "--concurrency") if concurrency else (),
    )
    curves = _curves(rates, eval_results)
    provenance = Provenance.collect()
    options = [None if name == "auto" else name for name in (device, dtype)]
    llm = untimed(target, drafter, settings, *options)
    curve = _own_curve(curves, llm)
    subject = subject_of(llm, target, drafter, context)
    table, missing = _timed(llm, settings, subject, out, again)
    count = AdaptiveK(llm.adaptive_k.choices, table)
    if curve is not None:
        count.acceptance.set_prior_rates(curve.rates)
    loads = settings.concurrency or tuple(table.batch_sizes)
    tuned = Tuned(subject, count, {load: vllm_config(llm, drafter, count.best_k(load)) for load in loads}, curve)
    document = Results("tune", provenance.with_duration(), tuned.about(llm), tuned.rows(), finished=not missing)
    if results is not None:
        write_results(results, document)
    if as_json:
        print(json.dumps(to_json(document)))
    else:
        _show(llm, tuned)
        for path in (out, results):
            if path is not None:
                print(f"wrote {path}")
    if missing:
        how = "the same command goes on" if out is not None else "with --out FILE the same command could go on"
        print(f"stopped with {missing} rounds to go; {how}", file=sys.stderr)
        raise typer.Exit(130)


@dataclass(frozen=True)
class Tuned:
    """What came out."""

    subject: Subject
    count: AdaptiveK
    configs: dict[int, dict[str, Any] | None]  # vLLM's, by requests at once; None: no speculation
    curve: Curve | None  # None: guessed

    def rows(self) -> list[TuneRow]:
        from peagle.results.schema import TuneRow

        count = self.count
        return [
            TuneRow(batch, k, seconds * 1e3, count.tokens_per_second(batch, k), k == count.best_k(batch))
            for (batch, k), seconds in sorted(count.table.seconds.items())
        ]

    def about(self, llm: LLM) -> dict[str, Any]:
        return {
            **asdict(self.subject),
            "rates": [round(rate, 4) for rate in self.count.acceptance.rates],
            "rates_from": self.curve.source if self.curve is not None else "a guess",
            "memory": llm.memory_bytes(),
            "vllm": {str(load): config for load, config in self.configs.items()},
            "recommendation": recommendation(self.count),
        }


def _curves(rates: str | None, results: Path | None) -> dict[Method, Curve | None]:
    """Acceptance by method, as far as it was told. Wrong input is found before anything is loaded."""
    from peagle.planning.curve import from_rates, from_results

    if rates is not None and results is not None:
        raise UserError("--rates and --eval: give one of them")
    if rates is not None:
        return dict.fromkeys(LAYERS, from_rates(rates))
    return {method: from_results(results, method, "--eval") for method in LAYERS} if results is not None else {}


def _own_curve(curves: dict[Method, Curve | None], llm: LLM) -> Curve | None:
    assert llm.drafter is not None
    method: Method = "p-eagle" if llm.drafter.cfg.parallel else "eagle3"
    if curves and curves[method] is None:
        raise UserError(f"--eval: holds no rows of {method}, which the drafter is")
    return curves.get(method)


def _timed(
    llm: LLM, settings: TuneSettings, subject: Subject, out: Path | None, again: bool
) -> tuple[StepCostTable, int]:
    """The table, and how many rounds are missing in it because somebody stopped it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from peagle.planning.tuning import keep, kept, sweep, wanted

    table = kept(out, subject) if out is not None and not again else StepCostTable()
    rounds = wanted(llm, settings)
    there = sum(key in table.seconds for key in rounds)
    if there:
        print(f"{there} of {len(rounds)} rounds are in {out} already", file=sys.stderr)
    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as bar:
        turns = settings.warmup + settings.repeats
        task = bar.add_task("", total=(len(rounds) - there) * turns)

        def timed(batch: int, k: int) -> None:
            bar.update(task, advance=1, description=f"{batch} at once, K={k}")

        def done(batch: int) -> None:
            if out is not None:
                keep(out, table, subject, finished=False)

        try:
            sweep(llm.model_runner, rounds, table, settings, timed, done)
        except KeyboardInterrupt:
            if not any(key in table.seconds for key in rounds):
                raise
    missing = sum(key not in table.seconds for key in rounds)
    if out is not None:
        keep(out, table, subject, finished=not missing)
    return table, missing


def vllm_config(llm: LLM, drafter: str, k: int) -> dict[str, Any] | None:
    """What vLLM's --speculative-config takes; None where no drafts are best. It wants a shipped drafter's folder."""
    from peagle.checkpoints.validate import build_speculative_config

    assert llm.drafter is not None
    if k == 0:
        return None
    model = str(resolve_drafter(drafter)) if drafter in shipped_drafters() else drafter
    return build_speculative_config(model, k, llm.drafter.cfg.parallel)


def recommendation(count: AdaptiveK) -> str:
    """One sentence: which K up to which load."""
    spans: list[tuple[int, int]] = []  # K, the largest batch it is best for
    for batch in count.table.batch_sizes:
        k = count.best_k(batch)
        if spans and spans[-1][0] == k:
            spans.pop()
        spans.append((k, batch))
    said = [f"{f'K={k}' if k else 'no drafts'} up to {batch} request{'s' * (batch > 1)} at once" for k, batch in spans]
    return f"Most tokens a second: {', then '.join(said)}."


def _show(llm: LLM, tuned: Tuned) -> None:
    from rich.table import Table

    from peagle.cli.plan import print_whole

    count, table = tuned.count, tuned.count.table
    shown = Table("batch", *(f"K={k}" for k in count.choices), "best K", "tokens/s", title="milliseconds of a round")
    for batch in table.batch_sizes:
        costs = [table.seconds.get((batch, k)) for k in count.choices]
        cells = [f"{s * 1e3:.2f}" if s is not None else "-" for s in costs]
        best = count.best_k(batch)
        shown.add_row(str(batch), *cells, str(best), f"{count.tokens_per_second(batch, best):,.0f}")
    print_whole(shown)
    graphs, memory = llm.model_runner.decode_graphs, llm.memory_bytes()
    taken = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items() if size)
    recorded = f"{len(graphs.captured)} rounds recorded in {graphs.seconds:.1f} s; " if graphs is not None else ""
    print(f"{recorded}memory: {taken}")
    assumed = ", ".join(f"{r:.2f}" for r in count.acceptance.rates)
    print(f"for acceptance by position {assumed}" + ("" if tuned.curve else " (a guess: give --rates or --eval)"))
    print(recommendation(count))
    print("For vLLM, whose K is fixed (costs are this engine's, so check with `peagle bench`):")
    for load, config in tuned.configs.items():
        how = "no drafts" if config is None else f"--speculative-config {shlex.quote(json.dumps(config))}"
        print(f"  {load} at once: {how}")
