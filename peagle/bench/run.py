"""`peagle bench` from what is asked for to a document: every engine, every load, every repeat.

Knows the order of things, what is measured already and what may be measured together; nothing about clocks or sockets.
A document is written after every repeat. Started again, the same command measures what is missing; other engines, loads
and more repeats are added, other prompts or settings are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from peagle.bench.server import Measured, Tell
from peagle.bench.workload import Ask, Load, Workload, loads
from peagle.config import BenchSettings, SpeculationMethod
from peagle.errors import UserError
from peagle.results.comparison import NOT_SENT, all_warnings
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import BenchRepeat, BenchRow, Results

FLAGS = {"workload_sha256": "--prompts, --max-tokens, --ignore-eos, --temperature or --seed"}


class Bench(Protocol):
    """Whoever answers, ready to be asked."""

    def measure(self, workload: Workload, asks: Sequence[Ask], load: Load, seed: int, tell: Tell) -> Measured: ...


@dataclass(frozen=True)
class Variant:
    """One way to run a target: its rows' labels, and how it is opened."""

    name: str
    engine: str  # "embedded", "vllm", or a server's address
    drafter: str | None
    method: SpeculationMethod
    k: int | Literal["auto"] | None
    open: Callable[[], AbstractContextManager[Bench]] = field(compare=False)

    def row(self, load: Load, repeats: list[BenchRepeat], prompts: str) -> BenchRow:
        return BenchRow(
            label=self.name,
            engine=self.engine,
            drafter=self.drafter,
            method=self.method,
            num_speculative_tokens=self.k,
            concurrency=load.concurrency,
            request_rate=load.rate,
            repeats=repeats,
            workload_sha256=prompts,
        )


class Watch(Protocol):
    """Whoever wants to know how far it is."""

    def start(self, name: str, load: Load, part: str, requests: int) -> None: ...

    def tell(self, requests: int, tokens: int) -> None: ...


@dataclass
class Outcome:
    results: Results
    interrupted: bool = False
    given_up: str | None = None  # the variant and load that no longer answered


class Document:
    """The rows so far, in a file or in memory alone."""

    def __init__(
        self,
        path: Path | None,
        workload: Workload,
        settings: BenchSettings,
        fixed: dict[str, Any],
        provenance: Provenance,
    ) -> None:
        self.path, self.provenance, self.sha = path, provenance, workload.sha
        self.settings = {
            "workload_sha256": self.sha,
            "data": workload.name,
            "num_prompts": len(workload.asks),
            "waves": workload.waves,
            "max_tokens": workload.max_tokens,
            "ignore_eos": workload.ignore_eos,
            "temperature": workload.temperature,
            "seed": workload.seed,
            "num_warmups": settings.warmup,
            "num_repeats": settings.repeats,
            **fixed,
        }
        self.rows: list[BenchRow] = []
        self.notes: list[str] = list(workload.notes)
        self.before_s = 0.0
        if path is not None and path.exists():
            self._go_on(read_results(path), path)

    def _go_on(self, old: Results, path: Path) -> None:
        if old.kind != "bench":
            raise UserError(f"--out {path}: holds results of `peagle {old.kind}`; give another file")
        for name, now in self.settings.items():
            was = old.settings.get(name)
            # a file may hold rows of an engine here and of a server: what only one of them has, the other leaves
            if name in ("num_repeats", "data") or name not in old.settings or was == now:
                continue
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            shown = f" ({was} there, {now} now)" if name not in FLAGS else ""
            raise UserError(f"--out {path}: was measured with other {flag}{shown}; give them again, or another file")
        here, there = self.provenance.machine, old.provenance.machine
        for part in ("gpu", "cpu"):
            if here.get(part) != there.get(part):
                raise UserError(
                    f"--out {path}: was measured on {there.get(part)}, this is {here.get(part)}; another file"
                )
        derived = set(all_warnings(old.rows))
        self.rows = list(old.rows)
        self.settings = {**old.settings, **self.settings}
        self.notes += [w for w in old.warnings if w not in derived and w not in self.notes]
        if (old.provenance.commit, old.provenance.versions) != (self.provenance.commit, self.provenance.versions):
            self.notes.append(
                f"some rows were measured by another version (commit {old.provenance.commit}, "
                f"{old.provenance.started_at})"
            )
        self.before_s = old.provenance.duration

    def repeats(self, variant: Variant, load: Load) -> list[BenchRepeat]:
        """Those that are whole; one that was given up is measured again."""
        found = [r for row in self.rows if self._is(row, variant, load) for r in row.repeats]
        return [r for r in found if NOT_SENT not in r.failed]

    def put(self, row: BenchRow, variant: Variant, load: Load, notes: Sequence[str]) -> None:
        places = [i for i, old in enumerate(self.rows) if self._is(old, variant, load)]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.notes += [n for n in (f"{row.label}, {load}: {note}" for note in notes) if n not in self.notes]

    @staticmethod
    def _is(row: BenchRow, variant: Variant, load: Load) -> bool:
        mine = variant.engine, variant.drafter, variant.method, variant.k, load.concurrency, load.rate
        return (
            row.engine,
            row.drafter,
            row.method,
            row.num_speculative_tokens,
            row.concurrency,
            row.request_rate,
        ) == mine

    def results(self, finished: bool) -> Results:
        said = self.notes + all_warnings(self.rows)
        return Results(
            "bench", self.provenance.with_duration(self.before_s), self.settings, list(self.rows), finished, said
        )

    def save(self, finished: bool) -> Results:
        made = self.results(finished)
        if self.path is not None:
            write_results(self.path, made)
        return made


def bench(
    variants: Sequence[Variant],
    workload: Workload,
    settings: BenchSettings,
    watch: Watch,
    out: Path | None = None,
    fixed: dict[str, Any] | None = None,
) -> Outcome:
    """Measures what `out` does not have yet. `fixed` are settings that a file's rows must share beside the load's."""
    packages = ("vllm",) if any(variant.engine == "vllm" for variant in variants) else ()
    document = Document(out, workload, settings, fixed or {}, Provenance.collect(packages=packages))
    given_up, interrupted = None, False
    try:
        for variant in variants:
            open_loads = [at for at in loads(settings) if len(document.repeats(variant, at)) < settings.repeats]
            if not open_loads:
                continue
            with variant.open() as engine:
                for load in open_loads:
                    if not _measure(engine, variant, load, workload, settings, document, watch):
                        given_up = f"{variant.name}, {load}"
                        break
    except KeyboardInterrupt:
        interrupted = True
    return Outcome(document.save(finished=not interrupted and given_up is None), interrupted, given_up)


def _measure(
    engine: Bench,
    variant: Variant,
    load: Load,
    workload: Workload,
    settings: BenchSettings,
    document: Document,
    watch: Watch,
) -> bool:
    """All missing repeats of one row; False where whoever answers was given up."""
    warm = workload.warmup(load.at_once if settings.warmup is None else settings.warmup)
    if warm:
        watch.start(variant.name, load, "warm-up", len(warm))
        engine.measure(workload, warm, Load(min(load.at_once, len(warm))), settings.seed, watch.tell)
    asks = workload.asks[: settings.count_of(load.concurrency)]
    while True:
        repeats = document.repeats(variant, load)
        if len(repeats) >= settings.repeats:
            return True
        number = len(repeats)
        watch.start(variant.name, load, f"{number + 1} of {settings.repeats}", len(asks))
        # every repeat has its own arrivals, the same for every variant
        made = engine.measure(workload, asks, load, settings.seed + number, watch.tell)
        document.put(variant.row(load, [*repeats, made.repeat], document.sha), variant, load, made.notes)
        document.save(finished=False)
        if NOT_SENT in made.repeat.failed:
            return False


def renamed(variants: Sequence[Variant]) -> list[Variant]:
    """Tells apart those that would have the same name, by their drafters."""
    names = [v.name for v in variants]
    return [
        replace(v, name=f"{v.name} ({Path(v.drafter).name})") if names.count(v.name) > 1 and v.drafter else v
        for v in variants
    ]
