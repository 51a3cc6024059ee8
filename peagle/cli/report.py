"""`report`: any set of results as one page.

Knows nothing about what the page says.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import JsonOption, app, examples
from peagle.config import ReportSettings

DEFAULT_OUT = Path("report.html")


@app.command(
    epilog=examples(
        "peagle report eval.json bench.json --out report.html",
        "peagle report results/*.json --out report.html --markdown report.md",
        "peagle report bench.json --markdown report.md --title 'K on our GPUs'",
    )
)
def report(
    results: Annotated[list[Path], typer.Argument(help="Files that eval, bench, tune or plan wrote.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option(help="The page, one HTML file.", show_default=f"{DEFAULT_OUT}, unless --markdown")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="The same as Markdown, tables for charts.")] = None,
    title: Annotated[str, typer.Option(help="What the page is called.")] = ReportSettings.title,
    as_json: JsonOption = False,
) -> None:
    """Make one page of results: charts, tables, a recommendation, and where the numbers come from.

    Runs of different prompts, lengths or machines are never compared: each set has its own section.
    """
    from peagle.report.build import write_report

    if out is None and markdown is None:
        out = DEFAULT_OUT
    written = write_report(results, out, markdown, ReportSettings(title=title))
    if as_json:
        print(json.dumps({**asdict(written), "html": _path(out), "markdown": _path(markdown)}))
        return
    for sentence in written.recommendations:
        print(sentence)
    for warning in written.warnings:
        print(f"warning: {warning}")
    if written.missing:
        print(f"not in these results: {'; '.join(written.missing)}")
    for path in (out, markdown):
        if path is not None:
            print(f"wrote {path}")


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)
