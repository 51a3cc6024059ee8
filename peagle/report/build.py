"""`peagle report`: any set of results as one page.

Knows which parts a page has and in which order; what each says is told beside it, how it looks by the writers.
"""

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
from peagle.report.acceptance import acceptance_part
from peagle.report.html import html_of
from peagle.report.markdown import markdown_of
from peagle.report.outlook import plan_part, tune_part
from peagle.report.page import Block, Command, Note, Page, Section, Table
from peagle.report.series import Source, by_key, listed
from peagle.report.speed import speed_part
from peagle.results.files import read_results

LABEL = re.compile(r"^.*?(?:K=|c=|/s)[^:]*: ")  # of a run: a method, K and load, or a method, set and K

MISSING = {
    "eval": "how many drafts are accepted (peagle eval)",
    "bench": "measured speed (peagle bench)",
    "tune": "what a round costs here, and which K when (peagle tune)",
    "plan": "what to expect of other machines and loads, and its cost (peagle plan)",
}


@dataclass(frozen=True)
class Written:
    """What a report says in short, and where it lies."""

    html: Path | None
    markdown: Path | None
    recommendations: tuple[str, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def write_report(
    paths: Sequence[Path], html: Path | None, markdown: Path | None, settings: ReportSettings | None = None
) -> Written:
    settings = settings or ReportSettings()
    page = build_page(read_sources(paths), settings)
    for out, text in ((html, html_of), (markdown, markdown_of)):
        if out is None:
            continue
        if any(out.resolve() == path.resolve() for path in paths):
            raise UserError(f"{out}: holds results that the report is made from; give another place to write it to")
        _write(out, text(page))
    return Written(html, markdown, page.recommendations, page.warnings, page.missing)


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Each file once, by its name; files of one name in different folders by their paths."""
    once = list({path.resolve(): path for path in paths}.values())
    names = Counter(path.name for path in once)
    sources = [Source(path.stem if names[path.name] == 1 else str(path), read_results(path)) for path in once]
    for path, source in zip(once, sources, strict=True):
        for i, row in enumerate(source.results.rows):
            # a time next to nothing: each number is one, what follows from them is not
            if not math.isfinite(getattr(row, "output_throughput", 0.0)):
                raise UserError(f"{path}: rows[{i}]: its tokens and seconds make no speed")
    return sources


def build_page(sources: Sequence[Source], settings: ReportSettings) -> Page:
    of_kind = {kind: [s for s in sources if s.results.kind == kind] for kind in MISSING}
    acceptance = acceptance_part(of_kind["eval"], settings)
    measured = speed_part(of_kind["bench"])
    tuned, planned = tune_part(of_kind["tune"]), plan_part(of_kind["plan"])
    parts = (measured, acceptance, tuned, planned)
    recommendations = measured.recommendations + tuned.recommendations + planned.recommendations
    filled = [kind for kind, members in of_kind.items() if any(s.results.rows for s in members)]
    return Page(
        title=settings.title,
        about=_about(sources),
        recommendations=recommendations or acceptance.recommendations,
        tiles=tuple(tile for part in parts for tile in part.tiles),
        warnings=folded([*_of_files(sources), *(sentence for part in parts for sentence in part.warnings)]),
        missing=tuple(text for kind, text in MISSING.items() if kind not in filled),
        sections=(*(section for part in parts for section in part.sections), _origin(sources)),
    )


def _about(sources: Sequence[Source]) -> str:
    if not sources:
        return "No results."
    machines = dict.fromkeys(source.machine for source in sources)
    days = sorted({source.results.provenance.started_at[:10] for source in sources})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    files = f"{len(sources)} file{'' if len(sources) == 1 else 's'} of results"
    return f"From {files}, measured {when} on {' and '.join(machines)}"


def _of_files(sources: Sequence[Source]) -> list[str]:
    said = []
    for source in sources:
        results = source.results
        if not results.rows:
            said.append(f"{source.name}: holds no rows.")
        if not results.finished:
            said.append(f"{source.name}: the run was not finished; these are the rows it had.")
        said += [f"{source.name}: {warning}" for warning in results.warnings]
    return said


def _origin(sources: Sequence[Source]) -> Section:
    """Where the numbers come from: what it takes to get them again."""
    blocks: list[Block] = []
    if sources:
        rows = []
        for source in sources:
            provenance = source.results.provenance
            commit = (provenance.commit or "–")[:12] + ("+" if (provenance.commit or "").endswith("+") else "")
            versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
            rows.append(
                (
                    source.name,
                    source.results.kind,
                    provenance.started_at,
                    f"{provenance.duration:,.0f}",
                    commit,
                    versions,
                )
            )
        heads = ("file", "kind", "started", "seconds", "commit", "versions")
        blocks.append(Table("Runs", heads, tuple(rows), open=True))
        blocks.append(_machines(sources))
    else:
        blocks.append(Note("There are no results to tell the origin of.", "warning"))
    commands = by_key(sources, [source.results.provenance.command for source in sources])
    blocks += [Command(command, listed([s.name for s in made])) for command, made in commands.items()]
    for source in sources:
        settings = tuple((name, _plain(value)) for name, value in source.results.settings.items())
        if settings:
            blocks.append(Table(f"Settings of {source.name}", ("setting", "value"), settings))
    return Section("Where the numbers come from", tuple(blocks))


def _machines(sources: Sequence[Source]) -> Table:
    fields = dict.fromkeys(name for source in sources for name in source.results.provenance.machine)
    rows = tuple(
        (source.name, *(str(source.results.provenance.machine.get(name, "–")) for name in fields)) for source in sources
    )
    return Table("Machines", ("file", *fields), rows, open=True)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def folded(warnings: Sequence[str]) -> tuple[str, ...]:
    """Those that say the same of several runs as one, by the first: forty lines about one thing hide the others."""
    alike: dict[str, list[str]] = {}
    for warning in dict.fromkeys(warnings):
        said, of_a_run = LABEL.subn("", warning)
        alike.setdefault(re.sub(r"\d[\d.,]*", "#", said) if of_a_run else warning, []).append(warning)
    return tuple(first if not more else f"{first} (and {len(more)} more like it)" for first, *more in alike.values())
