"""Acceptance section, from rows of `peagle eval`: by position, by K, by category and by context length.

Data sets of the same name with other prompts, lengths or templates are shown as different data sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.config import ReportSettings
from peagle.report.axes import ChartAxis, format_interval, format_number
from peagle.report.charts import NUM_STYLES, ChartLine, ChartPanel, ChartPoint, LinePanel
from peagle.report.page import HeadlineTile, ReportBlock, ReportFigure, ReportSection, ReportTable, SectionResult
from peagle.report.sources import (
    ResultSource,
    assign_styles,
    engine_name,
    group_by,
    method_name,
    shortest_labels,
    split_panels,
)
from peagle.results.schema import AcceptanceRow

# Settings that change what an acceptance length means.
WORKLOAD_SETTINGS = ("max_tokens", "raw", "chat_template", "target")


@dataclass(frozen=True)
class AcceptanceEntry:
    """A row with the names of its drafter and its data set."""

    row: AcceptanceRow
    drafter: str
    dataset: str
    is_uncertain: bool  # few responses

    @property
    def length(self) -> float:
        length = self.row.acceptance_length
        assert length is not None, "rows without drafts are left out"
        return length

    @property
    def k(self) -> int:
        return self.row.num_speculative_tokens

    @property
    def part(self) -> str:
        """The category or the context length; empty for a whole data set."""
        start_end = self.row.context_range
        return self.row.category or (f"{start_end[0]:,} to {start_end[1]:,} tokens" if start_end else "")


def build_acceptance_section(sources: Sequence[ResultSource], settings: ReportSettings) -> SectionResult:
    measured = [(row, source) for source in sources for row in source.results.rows if row.num_drafts]
    num_empty = sum(not row.num_drafts for source in sources for row in source.results.rows)
    warnings = [f"{num_empty} acceptance rows have no drafts and are left out."] if num_empty else []
    if not measured:
        return SectionResult(warnings=tuple(warnings))
    entries = _name_entries(measured, settings)
    if len({e.dataset for e in entries}) > len({e.row.dataset for e in entries}):
        warnings.append("Data sets with the same name but other prompts or settings are not compared.")
    has_excluded = any(e.row.looping_responses == "excluded" for e in entries)
    shown = [e for e in entries if (e.row.looping_responses == "excluded") == has_excluded]
    overall = [e for e in shown if e.row.category is None and e.row.context_range is None]
    few = sorted({f"{e.dataset} ({e.row.num_responses})" for e in overall if e.is_uncertain})
    if few:
        warnings.append(f"Few responses, uncertain acceptance: {', '.join(few)}.")
    blocks: list[ReportBlock] = []
    if overall:
        blocks += [_figure_by_position(overall), _figure_by_k(overall)]
    if categories := [e for e in shown if e.row.category is not None]:
        blocks.append(_parts_table("Acceptance length by category", categories))
    if contexts := [e for e in shown if e.row.context_range is not None]:
        blocks.append(_parts_table("Acceptance length by context length", contexts))
    blocks.append(_counts_table([e for e in entries if e.row.category is None and e.row.context_range is None]))
    title = f"Acceptance, looping responses {'excluded' if has_excluded else 'included'}"
    return SectionResult(
        (ReportSection(title, tuple(blocks)),), tiles=_build_tiles(overall, has_excluded), warnings=tuple(warnings)
    )


def _name_entries(
    measured: Sequence[tuple[AcceptanceRow, ResultSource]], settings: ReportSettings
) -> list[AcceptanceEntry]:
    def configuration(row: AcceptanceRow) -> tuple[object, ...]:
        part = (row.dataset, row.category, row.context_range, row.num_speculative_tokens, row.looping_responses)
        return (row.drafter, row.method, row.engine, row.temperature, part)

    is_repeated = max(Counter(configuration(row) for row, _ in measured).values()) > 1
    drafter_keys = [
        (
            method_name(row.method),
            f"t={row.temperature:g}",
            row.drafter,
            engine_name(row.engine),
            source.name if is_repeated else "",
        )
        for row, source in measured
    ]
    dataset_keys = [_dataset_key(row, source) for row, source in measured]
    drafters, datasets = shortest_labels(drafter_keys), shortest_labels(dataset_keys)
    return [
        AcceptanceEntry(row, drafters[drafter], datasets[dataset], row.num_responses < settings.min_responses)
        for (row, _), drafter, dataset in zip(measured, drafter_keys, dataset_keys, strict=True)
    ]


def _dataset_key(row: AcceptanceRow, source: ResultSource) -> tuple[str, ...]:
    settings = source.results.settings
    data = settings.get("data")
    details = data.get(row.dataset) if isinstance(data, dict) else None
    digest = str(details.get("sha256") or details.get("sha") or "")[:8] if isinstance(details, dict) else ""
    values = (f"{name} {settings[name]}" if settings.get(name) is not None else "" for name in WORKLOAD_SETTINGS)
    return row.dataset, *values, f"prompts {digest}" if digest else ""


def _figure_by_position(entries: Sequence[AcceptanceEntry]) -> ReportFigure:
    """The rates of the largest K of each drafter and data set."""
    largest = [max(members, key=lambda e: e.k) for members in _by_drafter_and_dataset(entries).values()]
    width = max(e.k for e in largest)

    def points(entry: AcceptanceEntry) -> list[ChartPoint]:
        label = f"{entry.drafter}, {entry.dataset}, position"
        return [
            ChartPoint(float(i), rate, tooltip=f"{label} {i}: {rate:.1%}", is_uncertain=entry.is_uncertain)
            for i, rate in enumerate(entry.row.per_position_acceptance_rates, 1)
            if rate is not None
        ]

    x = ChartAxis("draft position", ticks=tuple(float(i) for i in range(1, width + 1)))
    y = ChartAxis("acceptance rate", "share", ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    rows = []
    for e in largest:
        for name in ("per_position_acceptance_rates", "per_position_conditional_rates"):
            rates = [*getattr(e.row, name), *[None] * (width - e.k)]
            cells = ("–" if rate is None else f"{rate:.1%}" for rate in rates)
            rows.append((e.drafter, e.dataset, "yes" if "conditional" in name else "", *cells))
    title = "Acceptance by position"
    caption = (
        "Share of drafts that accept positions 1 to i; the acceptance length is 1 plus the sum of a line. "
        "The table also has conditional rates: among drafts that accept all earlier positions."
    )
    headings = ("drafter", "data set", "conditional", *(str(i) for i in range(1, width + 1)))
    table = ReportTable(title, headings, tuple(rows))
    return ReportFigure(title, caption, _line_panels(largest, points, x, y), table)


def _figure_by_k(entries: Sequence[AcceptanceEntry]) -> ReportFigure:
    groups = {key: sorted(members, key=lambda e: e.k) for key, members in _by_drafter_and_dataset(entries).items()}

    def points(first: AcceptanceEntry) -> list[ChartPoint]:
        return [_length_point(e) for e in groups[first.drafter, first.dataset]]

    ks = sorted({e.k for e in entries})
    x = ChartAxis("K, draft tokens per step", ticks=tuple(map(float, ks)))
    panels = _line_panels(
        [members[0] for members in groups.values()], points, x, ChartAxis("acceptance length", start=1.0)
    )
    rows = []
    for (drafter, dataset), members in groups.items():
        cells = {e.k: f"{format_number(e.length)} ({format_interval(e.row.acceptance_length_ci95)})" for e in members}
        rows.append((drafter, dataset, *(cells.get(k, "–").replace(" (–)", "") for k in ks)))
    title = "Acceptance length by K"
    caption = "Mean accepted draft tokens per step plus 1, with 95% intervals. Hollow points: few responses."
    table = ReportTable(title, ("drafter", "data set", *(f"K={k}" for k in ks)), tuple(rows))
    return ReportFigure(title, caption, panels, table)


def _parts_table(title: str, entries: Sequence[AcceptanceEntry]) -> ReportTable:
    """Parts of data sets (categories, context lengths) at the largest K of each."""
    groups = group_by(entries, [(e.drafter, e.dataset, e.part) for e in entries])
    largest = [max(members, key=lambda e: e.k) for members in groups.values()]
    rows = tuple((e.drafter, e.dataset, e.part, str(e.k), str(e.row.num_responses), *_length_cells(e)) for e in largest)
    headings = ("drafter", "data set", "part", "K", "responses", "acceptance length", "95% interval")
    return ReportTable(title, headings, rows, is_open=True)


def _line_panels(
    entries: Sequence[AcceptanceEntry],
    points: Callable[[AcceptanceEntry], list[ChartPoint]],
    x: ChartAxis,
    y: ChartAxis,
) -> tuple[ChartPanel, ...]:
    """A panel per data set with a line per drafter; for a single drafter one panel with a line per data set."""
    is_single = len({e.drafter for e in entries}) == 1
    groups = {entries[0].drafter: list(entries)} if is_single else group_by(entries, [e.dataset for e in entries])
    panels: list[ChartPanel] = []
    for title, members in groups.items():
        for some in split_panels(members):
            styles = range(1, len(some) + 1) if is_single else assign_styles([e.row.method for e in some])
            lines = tuple(
                ChartLine(e.dataset if is_single else e.drafter, tuple(points(e)), style % NUM_STYLES)
                for e, style in zip(some, styles, strict=True)
            )
            panels.append(LinePanel(title, x, y, lines))
    return tuple(panels)


def _counts_table(entries: Sequence[AcceptanceEntry]) -> ReportTable:
    headings = ("drafter", "data set", "K", "looping responses", "responses", "output tokens", "drafts")
    rows = tuple(
        (e.drafter, e.dataset, str(e.k), e.row.looping_responses, f"{e.row.num_responses:,}")
        + (f"{e.row.num_output_tokens:,}", f"{e.row.num_drafts:,}", *_length_cells(e))
        for e in entries
    )
    return ReportTable("All counts", (*headings, "acceptance length", "95% interval"), rows)


def _build_tiles(entries: Sequence[AcceptanceEntry], is_excluded: bool) -> tuple[HeadlineTile, ...]:
    """Per method, at its lowest temperature and largest K: the range over data sets."""
    tiles = []
    for members in group_by(entries, [e.row.method for e in entries]).values():
        temperature, k = min(e.row.temperature for e in members), max(e.k for e in members)
        found = sorted((e for e in members if (e.row.temperature, e.k) == (temperature, k)), key=lambda e: e.length)
        if not found:
            continue
        first, last = found[0], found[-1]
        value = format_number(last.length)
        if first is not last:
            value = f"{format_number(first.length)}–{value}"
        datasets = first.dataset if first is last else f"{first.dataset} to {last.dataset}"
        loops = "excluded" if is_excluded else "included"
        tiles.append(
            HeadlineTile("Acceptance length", value, f"{last.drafter}, K={k}, {datasets}; looping responses {loops}")
        )
    return tuple(tiles[:2])


def _by_drafter_and_dataset(entries: Sequence[AcceptanceEntry]) -> dict[tuple[str, str], list[AcceptanceEntry]]:
    return group_by(entries, [(e.drafter, e.dataset) for e in entries])


def _length_point(entry: AcceptanceEntry) -> ChartPoint:
    row = entry.row
    low, high = row.acceptance_length_ci95 or (None, None)
    interval = f" (95% {format_interval(row.acceptance_length_ci95)})" if row.acceptance_length_ci95 else ""
    tooltip = f"{entry.drafter}, {entry.dataset}, K={entry.k}: {format_number(entry.length)}{interval}"
    return ChartPoint(float(entry.k), entry.length, low, high, tooltip, entry.is_uncertain)


def _length_cells(entry: AcceptanceEntry) -> tuple[str, str]:
    return format_number(entry.length), format_interval(entry.row.acceptance_length_ci95)
