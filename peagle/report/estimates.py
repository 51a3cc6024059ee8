"""Sections of `peagle tune` (timed decode steps) and `peagle plan` (roofline estimates), one per file."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.report.axes import format_number, load_axis, value_axis
from peagle.report.charts import ChartLine, ChartPanel, ChartPoint, HeatCell, HeatPanel, LinePanel
from peagle.report.page import ReportFigure, ReportSection, ReportTable, SectionResult
from peagle.report.sources import (
    ResultSource,
    assign_styles,
    configuration_name,
    group_by,
    method_name,
    split_panels,
)
from peagle.results.schema import PlanRow, TuneRow


def build_tune_sections(sources: Sequence[ResultSource]) -> SectionResult:
    sections, recommendations, warnings = [], [], []
    for source in sources:
        rows: list[TuneRow] = source.results.rows
        if not rows:
            continue
        if sentence := source.results.settings.get("recommendation"):
            recommendations.append(f"Decode steps on {source.machine}. {sentence}")
        if source.results.settings.get("acceptance_source") == "assumed":
            warnings.append(f"{source.name}: acceptance rates are assumed, not measured.")
        title = f"Decode steps: {source.name}" if len(sources) > 1 else "Decode steps"
        sections.append(ReportSection(title, (_tune_figure(rows),)))
    return SectionResult(tuple(sections), tuple(recommendations), warnings=tuple(warnings))


def _tune_figure(rows: Sequence[TuneRow]) -> ReportFigure:
    by_cell = {(row.num_speculative_tokens, row.batch_size): row for row in rows}
    ks, batch_sizes = sorted({k for k, _ in by_cell}), sorted({size for _, size in by_cell})
    cells = tuple(tuple(_tune_cell(by_cell.get((k, size)), by_cell.get((0, size))) for size in batch_sizes) for k in ks)
    title = "Expected output tokens/s and time of a decode step"
    names = tuple(f"K={k}" if k else "no speculation" for k in ks)
    panel = HeatPanel(title, "batch size", names, tuple(map(str, batch_sizes)), cells)
    table_rows = tuple(
        (str(r.batch_size), str(r.num_speculative_tokens), format_number(r.step_ms))
        + (format_number(r.expected_output_throughput), "yes" if r.chosen else "")
        for r in sorted(rows, key=lambda r: (r.batch_size, r.num_speculative_tokens))
    )
    table = ReportTable(title, ("batch size", "K", "ms per step", "tokens/s", "fastest"), table_rows)
    caption = (
        "Steps are measured; tokens/s follow from the acceptance rates. Blue is faster than no speculation, orange "
        "slower; the frame marks the fastest K."
    )
    return ReportFigure(title, caption, (panel,), table)


def _tune_cell(row: TuneRow | None, baseline: TuneRow | None) -> HeatCell | None:
    if row is None:
        return None
    throughput = row.expected_output_throughput
    ratio = None
    if baseline is not None and baseline.expected_output_throughput:
        ratio = throughput / baseline.expected_output_throughput
    gain = f", {format_number(ratio, 'times')} no speculation" if ratio is not None else ""
    step = f"{format_number(row.step_ms)} ms"
    tooltip = (
        f"K={row.num_speculative_tokens}, batch size {row.batch_size}: {step} per step, "
        f"{format_number(throughput)} tokens/s{gain}"
    )
    return HeatCell(format_number(throughput), step, ratio, tooltip, row.chosen)


def build_plan_sections(sources: Sequence[ResultSource]) -> SectionResult:
    sections, recommendations = [], []
    for source in sources:
        rows: list[PlanRow] = source.results.rows
        if not rows:
            continue
        if sentence := source.results.settings.get("recommendation"):
            recommendations.append(f"Roofline model. {sentence}")
        title = f"Plan: {source.name}" if len(sources) > 1 else "Plan"
        sections.append(ReportSection(title, (_plan_figure(rows), _plan_table(rows))))
    return SectionResult(tuple(sections), tuple(recommendations))


def _plan_figure(rows: Sequence[PlanRow]) -> ReportFigure:
    """Throughput of the fastest K of each method, by concurrency."""
    lines, table_rows = [], []
    methods = group_by(rows, [row.method for row in rows])
    for (method, members), style in zip(methods.items(), assign_styles(list(methods)), strict=True):
        points = []
        by_concurrency = group_by(members, [row.concurrency for row in members])
        for concurrency in sorted(by_concurrency):
            row = max(by_concurrency[concurrency], key=lambda row: row.output_throughput)
            k, throughput = str(row.num_speculative_tokens), format_number(row.output_throughput)
            name = configuration_name(method, row.num_speculative_tokens)
            tooltip = f"{name}, concurrency {concurrency}: {throughput} tokens/s"
            points.append(ChartPoint(concurrency, row.output_throughput, tooltip=tooltip))
            table_rows.append((method_name(method), str(concurrency), k, throughput))
        lines.append(ChartLine(method_name(method), tuple(points), style))
    title = "Planned throughput"
    x = load_axis("concurrency", [row.concurrency for row in rows])
    y = value_axis("output tokens/s", [point.y for line in lines for point in line.points])
    panels: tuple[ChartPanel, ...] = tuple(LinePanel(title, x, y, tuple(some)) for some in split_panels(lines))
    caption = "Estimates of a roofline model, not measured; the fastest K of each method."
    table = ReportTable(title, ("method", "concurrency", "K", "output tokens/s"), tuple(table_rows))
    return ReportFigure(title, caption, panels, table)


def _plan_table(rows: Sequence[PlanRow]) -> ReportTable:
    headings = ("method", "concurrency", "K", "ms per step", "tokens/s", "GPUs", "$ per million tokens", "fastest")
    table_rows = tuple(
        (method_name(r.method), str(r.concurrency), str(r.num_speculative_tokens), format_number(r.step_ms))
        + (format_number(r.output_throughput), str(r.num_gpus), format_number(r.cost_per_million_tokens))
        + ("yes" if r.chosen else "",)
        for r in sorted(rows, key=lambda r: (r.concurrency, r.method, r.num_speculative_tokens))
    )
    return ReportTable("All planned rows", headings, table_rows)
