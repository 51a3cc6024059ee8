"""`peagle bench`: measures every variant under every load and writes a result file.

The file is written after every repeat. The same command resumes an interrupted run; more variants, loads and repeats
are added to the file, other prompts or settings are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from peagle.bench.server import MeasuredRepeat, OnProgress
from peagle.bench.workload import BenchPrompt, Load, Workload, list_loads
from peagle.config import BenchSettings, SpeculationMethod
from peagle.errors import UserError
from peagle.results.comparison import NOT_SENT, all_warnings
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import BenchRepeat, BenchRow, Results

WORKLOAD_FLAGS = "--data, --max-tokens, --ignore-eos, --temperature or --seed"


class BenchEngine(Protocol):
    """An engine or server that is ready for requests."""

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> MeasuredRepeat: ...


class ProgressListener(Protocol):
    def start(self, label: str, load: Load, phase: str, num_requests: int) -> None: ...

    def update(self, finished_requests: int, new_tokens: int) -> None: ...


@dataclass(frozen=True)
class BenchVariant:
    """One way to run a target: the labels of its rows and a function that opens it."""

    label: str
    engine: str  # "embedded", "vllm", or the URL of a server
    drafter: str | None
    method: SpeculationMethod
    num_speculative_tokens: int | Literal["auto"] | None
    open: Callable[[], AbstractContextManager[BenchEngine]] = field(compare=False)

    def build_row(self, load: Load, repeats: list[BenchRepeat], workload_sha256: str) -> BenchRow:
        return BenchRow(
            label=self.label,
            engine=self.engine,
            drafter=self.drafter,
            method=self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            concurrency=load.concurrency,
            request_rate=load.request_rate,
            repeats=repeats,
            workload_sha256=workload_sha256,
        )


@dataclass
class BenchOutcome:
    results: Results
    interrupted: bool = False
    gave_up_at: str | None = None  # variant and load whose requests kept failing


class BenchResultFile:
    """The rows measured so far, in a file or in memory."""

    def __init__(
        self,
        path: Path | None,
        workload: Workload,
        settings: BenchSettings,
        shared_settings: dict[str, Any],
        provenance: Provenance,
    ) -> None:
        self.path, self.provenance, self.workload_sha256 = path, provenance, workload.sha256
        self.settings = {
            "workload_sha256": self.workload_sha256,
            "data": workload.name,
            "num_prompts": len(workload.prompts),
            "max_tokens": workload.max_tokens,
            "ignore_eos": workload.ignore_eos,
            "temperature": workload.temperature,
            "seed": workload.seed,
            "num_warmups": settings.num_warmups,
            "num_repeats": settings.repeats,
            **shared_settings,
        }
        self.rows: list[BenchRow] = []
        self.warnings: list[str] = list(workload.warnings)
        self.earlier_duration = 0.0
        if path is not None and path.exists():
            self._resume(read_results(path), path)

    def _resume(self, old: Results, path: Path) -> None:
        if old.kind != "bench":
            raise UserError(f"--out {path}: contains results of `peagle {old.kind}`; give another file")
        for name, value in self.settings.items():
            # a file may hold rows of an engine and of a server, which have different settings
            if name in ("num_repeats", "data") or name not in old.settings or old.settings[name] == value:
                continue
            if name == "workload_sha256":
                raise UserError(f"--out {path}: was measured with other {WORKLOAD_FLAGS}; give another file")
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--out {path}: was measured with other {flag} ({old.settings[name]} there, {value} now); "
                "give the same value, or another file"
            )
        here, there = self.provenance.machine, old.provenance.machine
        for part in ("gpu", "cpu"):
            if here.get(part) != there.get(part):
                raise UserError(
                    f"--out {path}: was measured on {there.get(part)}, this is {here.get(part)}; give another file"
                )
        row_warnings = set(all_warnings(old.rows))
        self.rows = list(old.rows)
        self.settings = {**old.settings, **self.settings}
        self.warnings += [w for w in old.warnings if w not in row_warnings and w not in self.warnings]
        if (old.provenance.commit, old.provenance.versions) != (self.provenance.commit, self.provenance.versions):
            self.warnings.append(
                f"some rows were measured by another version (commit {old.provenance.commit}, "
                f"{old.provenance.started_at})"
            )
        self.earlier_duration = old.provenance.duration

    def find_repeats(self, variant: BenchVariant, load: Load) -> list[BenchRepeat]:
        """Complete repeats of a row; one that was given up is measured again."""
        repeats = [r for row in self.rows if self._matches(row, variant, load) for r in row.repeats]
        return [repeat for repeat in repeats if NOT_SENT not in repeat.failed]

    def put_row(self, row: BenchRow, variant: BenchVariant, load: Load, warnings: Sequence[str]) -> None:
        matching = [i for i, old in enumerate(self.rows) if self._matches(old, variant, load)]
        if matching:
            self.rows[matching[0]] = row
        else:
            self.rows.append(row)
        labelled = (f"{row.label}, {load}: {warning}" for warning in warnings)
        self.warnings += [warning for warning in labelled if warning not in self.warnings]

    @staticmethod
    def _matches(row: BenchRow, variant: BenchVariant, load: Load) -> bool:
        same_load = (row.concurrency, row.request_rate) == (load.concurrency, load.request_rate)
        names = ("engine", "drafter", "method", "num_speculative_tokens")
        return same_load and all(getattr(row, name) == getattr(variant, name) for name in names)

    def save(self, finished: bool) -> Results:
        provenance = self.provenance.with_duration(self.earlier_duration)
        warnings = self.warnings + all_warnings(self.rows)
        results = Results("bench", provenance, self.settings, list(self.rows), finished, warnings)
        if self.path is not None:
            write_results(self.path, results)
        return results


def run_bench(
    variants: Sequence[BenchVariant],
    workload: Workload,
    settings: BenchSettings,
    progress: ProgressListener,
    out: Path | None = None,
    shared_settings: dict[str, Any] | None = None,
) -> BenchOutcome:
    """Measures what `out` does not contain yet. Rows of a file must agree in `shared_settings`."""
    packages = ("vllm",) if any(variant.engine == "vllm" for variant in variants) else ()
    file = BenchResultFile(out, workload, settings, shared_settings or {}, Provenance.collect(packages=packages))
    gave_up_at, interrupted = None, False
    try:
        for variant in variants:
            loads = [at for at in list_loads(settings) if len(file.find_repeats(variant, at)) < settings.repeats]
            if not loads:
                continue
            with variant.open() as engine:
                for load in loads:
                    if not _measure_row(engine, variant, load, workload, settings, file, progress):
                        gave_up_at = f"{variant.label}, {load}"
                        break
    except KeyboardInterrupt:
        interrupted = True
    return BenchOutcome(file.save(finished=not interrupted and gave_up_at is None), interrupted, gave_up_at)


def _measure_row(
    engine: BenchEngine,
    variant: BenchVariant,
    load: Load,
    workload: Workload,
    settings: BenchSettings,
    file: BenchResultFile,
    progress: ProgressListener,
) -> bool:
    """Measures all missing repeats of one row; False if requests kept failing.

    Every engine warms up alike: it runs the same prompts under the same load once before the first measured repeat.
    """
    warmup = workload.prompts[: settings.num_warmups]  # None: all of them
    if warmup:
        progress.start(variant.label, load, "warm-up", len(warmup))
        engine.measure(workload, warmup, load, settings.seed, progress.update)
    while True:
        repeats = file.find_repeats(variant, load)
        if len(repeats) >= settings.repeats:
            return True
        progress.start(variant.label, load, f"{len(repeats) + 1} of {settings.repeats}", len(workload.prompts))
        # Arrival times differ between repeats and are equal for all variants.
        seed = settings.seed + len(repeats)
        measured = engine.measure(workload, workload.prompts, load, seed, progress.update)
        row = variant.build_row(load, [*repeats, measured.repeat], file.workload_sha256)
        file.put_row(row, variant, load, measured.warnings)
        file.save(finished=False)
        if NOT_SENT in measured.repeat.failed:
            return False


def disambiguate_labels(variants: Sequence[BenchVariant]) -> list[BenchVariant]:
    """Appends the drafter's name to labels that occur more than once."""
    labels = [variant.label for variant in variants]
    return [
        replace(variant, label=f"{variant.label} ({Path(variant.drafter).name})")
        if labels.count(variant.label) > 1 and variant.drafter
        else variant
        for variant in variants
    ]
