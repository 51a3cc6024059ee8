"""Builds a report from result files and writes it as HTML or Markdown."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.config import ReportSettings
from peagle.errors import UserError
from peagle.report.acceptance import build_acceptance_section
from peagle.report.estimates import build_plan_sections, build_tune_sections
from peagle.report.page import ReportBlock, ReportPage, ReportSection, ReportTable, clean_strings, clean_text
from peagle.report.render import render_html, render_markdown
from peagle.report.sources import ResultSource, group_by
from peagle.report.throughput import build_throughput_sections
from peagle.results.files import read_results

RUN_LABEL = re.compile(r"^.*?(?:K=|c=|/s)[^:]*: ")  # the start of a warning about one run

MISSING = {
    "eval": "acceptance (peagle eval)",
    "bench": "measured throughput (peagle bench)",
    "tune": "timed decode steps (peagle tune)",
    "plan": "estimates for other GPUs (peagle plan)",
}


@dataclass(frozen=True)
class ReportSummary:
    """What `peagle report` prints: the written files and the main statements."""

    html: str | None
    markdown: str | None
    recommendations: tuple[str, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def write_report(
    paths: Sequence[Path], html: Path | None, markdown: Path | None, settings: ReportSettings | None = None
) -> ReportSummary:
    page = build_page(read_sources(paths), settings or ReportSettings())
    for flag, out, render in (("--out", html, render_html), ("--markdown", markdown, render_markdown)):
        if out is None:
            continue
        if any(out.resolve() == path.resolve() for path in paths):
            raise UserError(f"{flag} {out}: is one of the result files; use another file")
        _write_file(flag, out, render(page))
    files = [None if path is None else str(path) for path in (html, markdown)]
    return ReportSummary(files[0], files[1], page.recommendations, page.warnings, page.missing)


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
    by_kind = {kind: [s for s in sources if s.results.kind == kind] for kind in MISSING}
    parts = (
        build_throughput_sections(by_kind["bench"]),
        build_acceptance_section(by_kind["eval"], settings),
        build_tune_sections(by_kind["tune"]),
        build_plan_sections(by_kind["plan"]),
    )
    commands = group_by(sources, [source.results.provenance.command for source in sources])
    return ReportPage(
        title=clean_text(settings.title),
        subtitle=_build_subtitle(sources),
        recommendations=tuple(sentence for part in parts for sentence in part.recommendations),
        tiles=tuple(tile for part in parts for tile in part.tiles),
        warnings=merge_warnings([*_file_warnings(sources), *(w for part in parts for w in part.warnings)]),
        missing=tuple(text for kind, text in MISSING.items() if not any(s.results.rows for s in by_kind[kind])),
        sections=(*(section for part in parts for section in part.sections), _provenance_section(sources)),
        commands=tuple((command, ", ".join(s.name for s in members)) for command, members in commands.items()),
    )


def _build_subtitle(sources: Sequence[ResultSource]) -> str:
    if not sources:
        return "No results."
    machines = dict.fromkeys(source.machine for source in sources)
    days = sorted({source.results.provenance.started_at[:10] for source in sources})
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{len(sources)} result file{'' if len(sources) == 1 else 's'}, {period}, {' and '.join(machines)}"


def _file_warnings(sources: Sequence[ResultSource]) -> list[str]:
    warnings = []
    for source in sources:
        if not source.results.rows:
            warnings.append(f"{source.name}: has no rows.")
        if not source.results.finished:
            warnings.append(f"{source.name}: the run was not finished.")
        warnings += [f"{source.name}: {warning}" for warning in source.results.warnings]
    return warnings


def merge_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Merges warnings that differ only in the run and in numbers: the first one with the number of others."""
    groups: dict[str, list[str]] = {}
    for warning in dict.fromkeys(warnings):
        text, num_labels = RUN_LABEL.subn("", warning)
        groups.setdefault(re.sub(r"\d[\d.,]*", "#", text) if num_labels else warning, []).append(warning)
    return tuple(first if not more else f"{first} (and {len(more)} more)" for first, *more in groups.values())


def _provenance_section(sources: Sequence[ResultSource]) -> ReportSection:
    blocks: list[ReportBlock] = []
    if sources:
        rows = []
        for source in sources:
            provenance = source.results.provenance
            commit = (provenance.commit or "–")[:12] + ("+" if (provenance.commit or "").endswith("+") else "")
            versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
            machine = ", ".join(f"{name} {value}" for name, value in provenance.machine.items())
            cells = (provenance.started_at, f"{provenance.duration:,.0f}", commit, versions, machine)
            rows.append((source.name, source.results.kind, *cells))
        headings = ("file", "kind", "started at", "seconds", "commit", "versions", "machine")
        blocks.append(ReportTable("Runs", headings, tuple(rows), is_open=True))
    for source in sources:
        settings = tuple(
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in source.results.settings.items()
        )
        if settings:
            blocks.append(ReportTable(f"Settings of {source.name}", ("setting", "value"), settings))
    return ReportSection("Provenance", tuple(blocks))


def _write_file(flag: str, path: Path, text: str) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})") from None
