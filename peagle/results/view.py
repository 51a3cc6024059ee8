"""Terminal output of `peagle eval` and `peagle bench`: tables of rows."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from peagle.errors import UserError
from peagle.results.comparison import compute_speedup, find_baseline
from peagle.results.schema import AcceptanceRow, BenchRow, Results


def _new_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with columns for the names of a row, and for numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def build_acceptance_tables(results: Results) -> list[Table]:
    """A table of all data sets, then tables by category and by context length."""
    rows: list[AcceptanceRow] = results.rows
    tables = [_dataset_table(results)]
    parts: tuple[tuple[str, Callable[[AcceptanceRow], str | None]], ...] = (
        ("category", lambda row: row.category),
        ("context", lambda row: "{:,} - {:,}".format(*row.context_range) if row.context_range is not None else None),
    )
    return tables + [_part_table(name, part, rows) for name, part in parts if any(part(row) for row in rows)]


def _dataset_table(results: Results) -> Table:
    rows: list[AcceptanceRow] = results.rows
    without_loops = {_row_key(row): row for row in rows if row.looping_responses == "excluded"}
    s = results.settings
    title = f"{s['target']}, {s['engine']} engine, {s['dtype']}, max_tokens {s['max_tokens']}"
    numbers = ("K", "acceptance length", "95%", "no loops", "drafts", "accepted % by position", "conditional %")
    table = _new_table(title, ("drafter", "data", "T"), numbers)
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    shown = sorted(
        (row for row in rows if row.is_whole_dataset),
        key=lambda r: (drafters.index(r.drafter), datasets.index(r.dataset), r.temperature, r.num_speculative_tokens),
    )
    for row in shown:
        other, interval = without_loops.get(_row_key(row)), row.acceptance_length_ci95
        table.add_row(
            *_row_key(row),
            _format_number(row.acceptance_length),
            f"{interval[0]:.2f} - {interval[1]:.2f}" if interval is not None else "",
            _format_number(other.acceptance_length) if other is not None else "",
            f"{row.num_drafts:,}",
            _format_percents(row.per_position_acceptance_rates),
            _format_percents(row.per_position_conditional_rates),
        )
    return table


def _part_table(title: str, part: Callable[[AcceptanceRow], str | None], rows: list[AcceptanceRow]) -> Table:
    """Acceptance length of every part of a data set, with a column for every K."""
    selected = [row for row in rows if part(row) is not None]
    ks = sorted({row.num_speculative_tokens for row in selected})
    table = _new_table(f"acceptance length by {title}", ("drafter", "data", "T", title), [f"K={k}" for k in ks])
    lines: dict[tuple[str, ...], dict[int, float | None]] = {}
    for row in selected:
        line = (*_row_key(row)[:3], part(row) or "")
        lines.setdefault(line, {})[row.num_speculative_tokens] = row.acceptance_length
    for names, by_k in lines.items():
        table.add_row(*names, *(_format_number(by_k.get(k)) for k in ks))
    return table


def _row_key(row: AcceptanceRow) -> tuple[str, str, str, str]:
    return row.drafter, row.dataset, f"{row.temperature:g}", str(row.num_speculative_tokens)


def _format_number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _format_percents(shares: Sequence[float | None]) -> str:
    return " ".join(f"{share * 100:.0f}" if share is not None else "-" for share in shares)


def build_bench_tables(rows: Sequence[BenchRow]) -> list[Table]:
    """Throughput and latency, grouped by load so that comparable rows are adjacent."""
    numbers = ("tokens/s", "± 95%", "speedup (95%)", "acceptance length", "failed")
    throughput = _new_table("throughput", ("load", "engine"), numbers)
    title = "latency: median, p95 and p99 in milliseconds"
    latency = _new_table(title, ("load", "engine"), ("TTFT", "TPOT", "ITL", "E2EL"))
    loads = list(dict.fromkeys(row.load_name for row in rows))
    for row in sorted(rows, key=lambda row: loads.index(row.load_name)):
        speedup, baseline = "-", find_baseline(row, rows)
        if baseline is not None and baseline is not row:
            try:
                speedup = str(compute_speedup(row, baseline))
            except UserError:  # the warnings below the table explain it
                speedup = "n/a"
        value, interval = row.output_throughput, row.output_throughput_ci95
        lengths = [repeat.acceptance_length for repeat in row.repeats if repeat.acceptance_length is not None]
        throughput.add_row(
            row.load_name,
            row.label,
            f"{value:,.0f}" if value >= 100 else f"{value:.1f}",
            f"{(interval[1] - interval[0]) / 2 / value:.1%}" if interval is not None and value else "-",
            speedup,
            _format_number(sum(lengths) / len(lengths) if lengths else None),
            str(sum(sum(repeat.failed.values()) for repeat in row.repeats) or "-"),
        )
        cells = []
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
            values = [(p.median, p.p95, p.p99) for repeat in row.repeats if (p := getattr(repeat, name)) is not None]
            means = [sum(column) / len(values) for column in zip(*values, strict=True)]  # over the repeats
            cells.append("  ".join(f"{f'{m:.0f}' if m >= 99.95 else f'{m:.3g}':>4}" for m in means) or "-")
        latency.add_row(row.load_name, row.label, *cells)
    return [throughput, latency]
