"""Acceptance section, from rows of `peagle eval`: by position, by K, by category and by context length.

Data sets of the same name with other prompts, lengths or templates are shown as different data sets.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.report.charts import (
    MARKS,
    ChartAxis,
    ChartLine,
    ChartPanel,
    ChartPoint,
    format_interval,
    format_number,
    linear_ticks,
    with_interval,
)
from peagle.report.page import HeadlineTile, ReportPage, ReportSection, ReportTable
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

    def point(self, x: float, y: float, value: str, interval: tuple[float, float] | None = None) -> ChartPoint:
        return ChartPoint(x, y, interval, f"{self.drafter}, {self.dataset}, {value}", self.is_uncertain)


def add_acceptance(page: ReportPage, sources: Sequence[ResultSource], min_responses: int) -> None:
    rows = [(row, source) for source in sources for row in source.results.rows]
    measured = [(row, source) for row, source in rows if row.num_drafts]
    if len(measured) < len(rows):
        page.warnings.append(f"{len(rows) - len(measured)} acceptance rows have no drafts and are left out.")
    if not measured:
        return
    entries = _name_entries(measured, min_responses)
    if len({e.dataset for e in entries}) > len({e.row.dataset for e in entries}):
        page.warnings.append("Data sets with the same name but other prompts or settings are not compared.")
    looping = "excluded" if any(e.row.looping_responses == "excluded" for e in entries) else "included"
    shown = [e for e in entries if e.row.looping_responses == looping]
    overall = [e for e in shown if not e.part]
    if few := sorted({f"{e.dataset} ({e.row.num_responses})" for e in overall if e.is_uncertain}):
        page.warnings.append(f"Few responses, uncertain acceptance: {', '.join(few)}.")
    tables = [_position_figure(overall), _length_figure(overall)] if overall else []
    if parts := [e for e in shown if e.part]:
        groups = group_by(parts, [(e.drafter, e.dataset, e.part) for e in parts])
        largest = [max(members, key=lambda e: e.k) for members in groups.values()]
        tables.append(_counts_table("Acceptance length by category and context length", largest, is_open=True))
    tables.append(_counts_table("All counts", [e for e in entries if not e.part]))
    page.sections.append(ReportSection(f"Acceptance, looping responses {looping}", [*tables]))
    page.tiles += _build_tiles(overall, looping)


def _name_entries(measured: Sequence[tuple[AcceptanceRow, ResultSource]], min_responses: int) -> list[AcceptanceEntry]:
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
    dataset_keys = []
    for row, source in measured:
        settings = source.results.settings
        data = settings.get("data")
        details = data.get(row.dataset) if isinstance(data, dict) else None
        digest = str(details.get("sha256") or details.get("sha") or "")[:8] if isinstance(details, dict) else ""
        values = (f"{name} {settings[name]}" if settings.get(name) is not None else "" for name in WORKLOAD_SETTINGS)
        dataset_keys.append((row.dataset, *values, f"prompts {digest}" if digest else ""))
    drafters, datasets = shortest_labels(drafter_keys), shortest_labels(dataset_keys)
    return [
        AcceptanceEntry(row, drafters[drafter], datasets[dataset], row.num_responses < min_responses)
        for (row, _), drafter, dataset in zip(measured, drafter_keys, dataset_keys, strict=True)
    ]


def _by_drafter_and_dataset(entries: Sequence[AcceptanceEntry]) -> list[list[AcceptanceEntry]]:
    """Entries of one drafter and data set, by K."""
    groups = group_by(entries, [(e.drafter, e.dataset) for e in entries])
    return [sorted(members, key=lambda e: e.k) for members in groups.values()]


def _position_figure(entries: Sequence[AcceptanceEntry]) -> ReportTable:
    """The rates of the largest K of each drafter and data set."""
    largest = [members[-1] for members in _by_drafter_and_dataset(entries)]
    positions = range(1, max(e.k for e in largest) + 1)
    lines, rows = [], []
    for e in largest:
        rates = e.row.per_position_acceptance_rates
        lines.append([e.point(i, r, f"position {i}: {r:.1%}") for i, r in enumerate(rates, 1) if r is not None])
        for conditional, shown in (("", rates), ("yes", e.row.per_position_conditional_rates)):
            padded = [*shown, *[None] * (len(positions) - e.k)]
            rows.append((e.drafter, e.dataset, conditional, *("–" if r is None else f"{r:.1%}" for r in padded)))
    x = ChartAxis("draft position", tuple(map(float, positions)))
    y = ChartAxis("acceptance rate", (0.0, 0.25, 0.5, 0.75, 1.0), unit="share")
    caption = (
        "Share of drafts that accept positions 1 to i; the acceptance length is 1 plus the sum of a line. "
        "The table also has conditional rates: among drafts that accept all earlier positions."
    )
    headings = ("drafter", "data set", "conditional", *map(str, positions))
    panels = _line_panels(largest, lines, x, y)
    return ReportTable("Acceptance by position", headings, tuple(rows), caption, panels=panels)


def _length_figure(entries: Sequence[AcceptanceEntry]) -> ReportTable:
    groups = _by_drafter_and_dataset(entries)
    ks = sorted({e.k for e in entries})
    lines, rows = [], []
    for members in groups:
        cells = {e.k: with_interval(format_number(e.length), e.row.acceptance_length_ci95) for e in members}
        lines.append([e.point(e.k, e.length, f"K={e.k}: {cells[e.k]}", e.row.acceptance_length_ci95) for e in members])
        rows.append((members[0].drafter, members[0].dataset, *(cells.get(k, "–") for k in ks)))
    highest = max(end for e in entries for end in (e.length, *(e.row.acceptance_length_ci95 or ())))
    x = ChartAxis("K, draft tokens per step", tuple(map(float, ks)))
    y = ChartAxis("acceptance length", linear_ticks(1.0, highest))
    caption = "Mean accepted draft tokens per step plus 1, with 95% intervals. Hollow points: few responses."
    headings = ("drafter", "data set", *(f"K={k}" for k in ks))
    panels = _line_panels([members[0] for members in groups], lines, x, y)
    return ReportTable("Acceptance length by K", headings, tuple(rows), caption, panels=panels)


def _line_panels(
    entries: Sequence[AcceptanceEntry], points: Sequence[list[ChartPoint]], x: ChartAxis, y: ChartAxis
) -> tuple[ChartPanel, ...]:
    """A panel per data set with a line per drafter; for a single drafter one panel with a line per data set."""
    is_single = len({e.drafter for e in entries}) == 1
    pairs = list(zip(entries, points, strict=True))
    panels = []
    for title, members in group_by(pairs, [e.drafter if is_single else e.dataset for e in entries]).items():
        for some in split_panels(members):
            styles = range(1, len(some) + 1) if is_single else assign_styles([e.row.method for e, _ in some])
            lines = tuple(
                ChartLine(e.dataset if is_single else e.drafter, tuple(own), style % len(MARKS))
                for (e, own), style in zip(some, styles, strict=True)
            )
            panels.append(ChartPanel(title, x, y, lines))
    return tuple(panels)


def _counts_table(title: str, entries: Sequence[AcceptanceEntry], is_open: bool = False) -> ReportTable:
    headings = ("drafter", "data set", "part", "K", "looping responses", "responses", "output tokens", "drafts")
    rows = tuple(
        (e.drafter, e.dataset, e.part, str(e.k), e.row.looping_responses, f"{e.row.num_responses:,}")
        + (f"{e.row.num_output_tokens:,}", f"{e.row.num_drafts:,}")
        + (format_number(e.length), format_interval(e.row.acceptance_length_ci95))
        for e in entries
    )
    return ReportTable(title, (*headings, "acceptance length", "95% interval"), rows, is_open=is_open)


def _build_tiles(entries: Sequence[AcceptanceEntry], looping: str) -> list[HeadlineTile]:
    """Per method, at its lowest temperature and largest K: the range over data sets."""
    tiles = []
    for members in group_by(entries, [e.row.method for e in entries]).values():
        temperature, k = min(e.row.temperature for e in members), max(e.k for e in members)
        found = sorted((e for e in members if (e.row.temperature, e.k) == (temperature, k)), key=lambda e: e.length)
        if not found:
            continue
        values = dict.fromkeys(format_number(e.length) for e in (found[0], found[-1]))
        datasets = dict.fromkeys(e.dataset for e in (found[0], found[-1]))
        description = f"{found[-1].drafter}, K={k}, {' to '.join(datasets)}; looping responses {looping}"
        tiles.append(HeadlineTile("Acceptance length", "–".join(values), description))
    return tiles[:2]
