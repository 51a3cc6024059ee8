"""Terminal output of `peagle bench`: two tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.results.comparison import compute_speedup, find_baseline
from peagle.results.schema import BenchRow

if TYPE_CHECKING:
    from rich.table import Table


def build_tables(rows: Sequence[BenchRow]) -> list[Table]:
    """Throughput and latency, grouped by load so that comparable rows are adjacent."""
    from rich import box
    from rich.table import Table

    throughput = Table(title="throughput", title_justify="left", box=box.SIMPLE_HEAD)
    latency = Table(title="latency: median, p95 and p99 in milliseconds", title_justify="left", box=box.SIMPLE_HEAD)
    for table in (throughput, latency):
        table.add_column("load", no_wrap=True)
        table.add_column("engine", min_width=18)
    for name in ("tokens/s", "± 95%", "speedup", "(95%)", "acceptance length", "failed"):
        throughput.add_column(name, justify="right")
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        latency.add_column(name, justify="right")
    by_load: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_load.setdefault(row.load_name, []).append(row)
    for load_name, members in by_load.items():
        for row in members:
            first, last = (load_name if row is members[0] else ""), row is members[-1]
            throughput.add_row(first, row.label, *_throughput_cells(row, rows), end_section=last)
            latency.add_row(first, row.label, *_latency_cells(row), end_section=last)
    return [throughput, latency]


def _throughput_cells(row: BenchRow, rows: Sequence[BenchRow]) -> list[str]:
    value, interval = row.output_throughput, row.output_throughput_ci95
    failed = sum(sum(repeat.failed.values()) for repeat in row.repeats)
    lengths = [repeat.acceptance_length for repeat in row.repeats if repeat.acceptance_length is not None]
    return [
        f"{value:,.0f}" if value >= 100 else f"{value:.1f}",
        f"{(interval[1] - interval[0]) / 2 / value:.1%}" if interval is not None and value else "-",
        *_speedup_cells(row, rows),
        f"{sum(lengths) / len(lengths):.2f}" if lengths else "-",
        str(failed or "-"),
    ]


def _speedup_cells(row: BenchRow, rows: Sequence[BenchRow]) -> tuple[str, str]:
    baseline = find_baseline(row, rows)
    if baseline is None or baseline is row:
        return "-", ""
    try:
        speedup = compute_speedup(row, baseline)
    except UserError:  # the warnings below the table explain it
        return "n/a", ""
    interval = f"{speedup.ci95[0]:.2f} to {speedup.ci95[1]:.2f}" if speedup.ci95 is not None else "-"
    return f"{speedup.ratio:.2f}x", interval


def _latency_cells(row: BenchRow) -> list[str]:
    """Each percentile as its mean over the repeats."""
    cells = []
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        values = [(p.median, p.p95, p.p99) for repeat in row.repeats if (p := getattr(repeat, name)) is not None]
        means = [sum(column) / len(values) for column in zip(*values, strict=True)]
        cells.append("  ".join(f"{f'{m:.0f}' if m >= 99.95 else f'{m:.3g}':>4}" for m in means) or "-")
    return cells
