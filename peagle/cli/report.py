"""`peagle report`: renders result files as one HTML or Markdown page."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import OUTPUT_PANEL, JsonOption, app, examples
from peagle.config import ReportSettings

DEFAULT_OUT = Path("report.html")
OutputOption = partial(typer.Option, rich_help_panel=OUTPUT_PANEL)


@app.command(
    epilog=examples(
        "peagle report eval.json bench.json --out report.html",
        "peagle report results/*.json --out report.html --markdown report.md",
        "peagle report bench.json --markdown report.md --title 'K on our GPUs'",
    )
)
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of eval, bench, tune or plan.", metavar="FILE")],
    out: Annotated[
        Path | None, OutputOption(help="HTML file.", show_default=f"{DEFAULT_OUT}, unless --markdown is passed")
    ] = None,
    markdown: Annotated[Path | None, OutputOption(help="Markdown file: tables instead of charts.")] = None,
    title: Annotated[str, OutputOption(help="Title of the page.")] = ReportSettings.title,
    as_json: JsonOption = False,
) -> None:
    """Write a page with charts, tables, a recommendation and the provenance of the results.

    Runs with different prompts, lengths, loads or machines are never compared: each set has its own section.
    """
    from peagle.report.build import write_report

    if out is None and markdown is None:
        out = DEFAULT_OUT
    page = write_report(results, out, markdown, ReportSettings(title=title))
    if as_json:
        files = {"html": str(out) if out else None, "markdown": str(markdown) if markdown else None}
        findings = {name: getattr(page, name) for name in ("recommendations", "warnings", "missing")}
        print(json.dumps(files | findings))
        return
    for line in (*page.recommendations, *(f"warning: {warning}" for warning in page.warnings)):
        print(line)
    for path in (out, markdown):
        if path is not None:
            print(f"wrote {path}")
