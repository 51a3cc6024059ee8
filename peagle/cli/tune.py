"""`tune`: what a round costs here, and how many drafts pay when.

Knows nothing about how it is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import AsJson, Device, Dtype, Target, app, console, examples
from peagle.errors import UserError
from peagle.hub import DEFAULT_TARGET


@app.command(
    epilog=examples(
        "peagle tune -d smollm2-135m-p-eagle", "peagle tune -t TARGET -d DRAFTER --rates 0.7,0.5,0.35 --out costs.json"
    )
)
def tune(
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="A drafter's folder, hub id or name.", metavar="D")],
    target: Target = DEFAULT_TARGET,
    rates: Annotated[
        str | None,
        typer.Option(help="How often draft 1, 2, .. is accepted, all before it included.", show_default="a guess"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most requests at once.")] = 64,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer together.")] = 2048,
    dtype: Dtype = "auto",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Keep the table, for LLM(cost_table=...).")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a round costs here, by requests at once and drafts, and say how many drafts pay when."""
    from peagle.engine.llm import LLM

    options = {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
    llm = LLM(target, drafter, "auto", max_num_seqs=max_num_seqs, max_model_len=max_model_len, **options)
    count, table = llm.draft_count, llm.draft_count.table
    if rates is not None:
        count.acceptance.assume(_rates(rates))
    best = {batch: max(count.choices, key=lambda k: count.tokens_per_second(batch, k)) for batch in table.batches}
    about = {"target": target, "drafter": drafter, "device": str(llm.runner.device)}
    graphs, memory = llm.runner.graphs, llm.memory()
    if out is not None:
        table.save(out, **about)
    if as_json:
        rows = [{"batch": b, "drafts": k, "ms": round(s * 1e3, 4)} for (b, k), s in sorted(table.seconds.items())]
        print(json.dumps({**about, "rounds": rows, "best": best, "rates": count.acceptance.rates, "memory": memory}))
        return
    from rich.table import Table

    shown = Table("batch", *(f"K={k}" for k in count.choices), "best K", "tokens/s", title="milliseconds of a round")
    for batch in table.batches:
        costs = [table.seconds.get((batch, k)) for k in count.choices]
        cells = [f"{s * 1e3:.2f}" if s is not None else "-" for s in costs]
        shown.add_row(str(batch), *cells, str(best[batch]), f"{count.tokens_per_second(batch, best[batch]):,.0f}")
    console().print(shown)
    taken = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items() if size)
    recorded = f"{len(graphs.rounds)} rounds recorded in {graphs.seconds:.1f} s; " if graphs is not None else ""
    print(f"{recorded}memory: {taken}")
    assumed = ", ".join(f"{r:.2f}" for r in count.acceptance.rates)
    print(f"for acceptance by position {assumed}" + ("" if rates else " (a guess: give --rates)"))
    if out is not None:
        print(f"wrote {out}")


def _rates(given: str) -> list[float]:
    try:
        rates = [float(r) for r in given.split(",")]
    except ValueError:
        raise UserError(f"--rates {given}: must be numbers between 0 and 1, by commas") from None
    if not all(0 <= b <= a <= 1 for a, b in zip([1.0, *rates], rates, strict=False)):
        raise UserError(f"--rates {given}: must be between 0 and 1, none larger than the one before it")
    return rates
