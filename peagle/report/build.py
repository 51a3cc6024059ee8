"""Builds a report from result files and writes it as HTML or Markdown."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from peagle.config import ReportSettings
from peagle.errors import UserError
from peagle.report.acceptance import add_acceptance
from peagle.report.charts import format_number
from peagle.report.page import ReportPage, ReportSection, ReportTable, clean_strings, render_html, render_markdown
from peagle.report.sources import ResultSource, group_by, merge_warnings, method_name
from peagle.report.throughput import add_throughput
from peagle.results.files import read_results, replace_file
from peagle.results.schema import PlanRow, TuneRow

MISSING = {
    "eval": "acceptance (peagle eval)",
    "bench": "measured throughput (peagle bench)",
    "tune": "timed decode steps (peagle tune)",
    "plan": "estimates for other GPUs (peagle plan)",
}


def write_report(
    paths: Sequence[Path], html: Path | None, markdown: Path | None, settings: ReportSettings | None = None
) -> ReportPage:
    page = build_page(read_sources(paths), settings or ReportSettings())
    for flag, out, render in (("--out", html, render_html), ("--markdown", markdown, render_markdown)):
        if out is None:
            continue
        if any(out.resolve() == path.resolve() for path in paths):
            raise UserError(f"{flag} {out}: is one of the result files; use another file")
        with replace_file(out, flag) as temporary:
            temporary.write_text(render(page), encoding="utf-8")
    return page


def read_sources(paths: Sequence[Path]) -> list[ResultSource]:
    """Reads each file once. A file is named by its stem, or by its path if names are not unique."""
    unique = list({path.resolve(): path for path in paths}.values())
    names = Counter(path.name for path in unique)
    sources = []
    for path in unique:
        source = ResultSource(path.stem if names[path.name] == 1 else str(path), read_results(path))
        for i, row in enumerate(source.results.rows):
            if not math.isfinite(getattr(row, "output_throughput", 0.0)):
                raise UserError(f"{path}: rows[{i}]: output_throughput is not finite; check duration")
        sources.append(source)
    return sources


def build_page(sources: Sequence[ResultSource], settings: ReportSettings) -> ReportPage:
    sources = clean_strings(list(sources))
    by_kind = {kind: [s for s in sources if s.results.kind == kind and s.results.rows] for kind in MISSING}
    machines = dict.fromkeys(source.machine for source in sources)
    days = dict.fromkeys(sorted(source.results.provenance.started_at[:10] for source in sources))
    subtitle = f"Result files: {len(sources)}, {' to '.join(days)}, {' and '.join(machines)}"
    page = ReportPage(clean_strings(settings.title), subtitle)
    for source in sources:
        if not source.results.rows:
            page.warnings.append(f"{source.name}: has no rows.")
        if not source.results.finished:
            page.warnings.append(f"{source.name}: the run was not finished.")
        page.warnings += [f"{source.name}: {warning}" for warning in merge_warnings(source.results.warnings)]
    add_throughput(page, by_kind["bench"])
    add_acceptance(page, by_kind["eval"], settings.min_responses)
    for source in by_kind["tune"]:
        _add_tune(page, source)
    for source in by_kind["plan"]:
        _add_plan(page, source)
    _add_provenance(page, sources)
    page.missing = [text for kind, text in MISSING.items() if not by_kind[kind]]
    return page


def _add_tune(page: ReportPage, source: ResultSource) -> None:
    """Timed decode steps: a row per batch size, a column per K."""
    rows: list[TuneRow] = source.results.rows
    if sentence := source.results.settings.get("recommendation"):
        page.recommendations.append(f"Decode steps on {source.machine}. {sentence}")
    if source.results.settings.get("acceptance_source") == "assumed":
        page.warnings.append(f"{source.name}: acceptance rates are assumed, not measured.")
    by_cell = {(row.batch_size, row.num_speculative_tokens): row for row in rows}
    batch_sizes, ks = sorted({size for size, _ in by_cell}), sorted({k for _, k in by_cell})

    def show(row: TuneRow | None) -> str:
        if row is None:
            return "–"
        mark = "*" if row.chosen else ""
        return f"{format_number(row.expected_output_throughput)} ({format_number(row.step_ms)}){mark}"

    texts, ratios = [], []
    for size in batch_sizes:
        cells = [by_cell.get((size, k)) for k in ks]
        baseline = by_cell[size, 0].expected_output_throughput if (size, 0) in by_cell else 0.0
        texts.append((str(size), *map(show, cells)))
        ratios.append(
            tuple(cell.expected_output_throughput / baseline if cell and baseline else None for cell in cells)
        )
    caption = (
        "Expected output tokens/s, and measured milliseconds per step in brackets; * marks the fastest K. Tokens/s "
        "follow from the acceptance rates. Blue is faster than no speculation, orange slower."
    )
    headings = ("batch size", *(f"K={k}" if k else "no speculation" for k in ks))
    title = "Expected output tokens/s and time of a decode step"
    table = ReportTable(title, headings, tuple(texts), caption, is_open=True, ratios=tuple(ratios))
    page.sections.append(ReportSection(f"Decode steps: {source.name}", [table]))


def _add_plan(page: ReportPage, source: ResultSource) -> None:
    if sentence := source.results.settings.get("recommendation"):
        page.recommendations.append(f"Roofline model. {sentence}")
    rows: list[PlanRow] = sorted(source.results.rows, key=lambda r: (r.concurrency, r.method, r.num_speculative_tokens))
    headings = ("method", "concurrency", "K", "ms per step", "tokens/s", "GPUs", "$ per million tokens", "fastest")
    cells = tuple(
        (method_name(r.method), str(r.concurrency), str(r.num_speculative_tokens), format_number(r.step_ms))
        + (format_number(r.output_throughput), str(r.num_gpus), format_number(r.cost_per_million_tokens))
        + ("yes" if r.chosen else "",)
        for r in rows
    )
    caption = "Estimates of a roofline model, not measured."
    table = ReportTable("Planned throughput and cost", headings, cells, caption, is_open=True)
    page.sections.append(ReportSection(f"Plan: {source.name}", [table]))


def _add_provenance(page: ReportPage, sources: Sequence[ResultSource]) -> None:
    rows, tables = [], []
    for source in sources:
        provenance = source.results.provenance
        commit = (provenance.commit or "–")[:12] + ("+" if (provenance.commit or "").endswith("+") else "")
        versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
        machine = ", ".join(f"{name} {value}" for name, value in provenance.machine.items())
        cells = (provenance.started_at, f"{provenance.duration:,.0f}", commit, versions, machine)
        rows.append((source.name, source.results.kind, *cells))
        settings = tuple(
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in source.results.settings.items()
        )
        if settings:
            tables.append(ReportTable(f"Settings of {source.name}", ("setting", "value"), settings))
    headings = ("file", "kind", "started at", "seconds", "commit", "versions", "machine")
    runs = ReportTable("Runs", headings, tuple(rows), is_open=True)
    page.sections.append(ReportSection("Provenance", [runs, *tables]))
    commands = group_by(sources, [source.results.provenance.command for source in sources])
    page.commands = [(command, ", ".join(s.name for s in members)) for command, members in commands.items()]
