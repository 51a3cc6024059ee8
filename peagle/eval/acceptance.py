"""`peagle eval`: measures acceptance of drafters on data sets and writes a result file.

Decides what to measure in which order and resumes an existing file. The counting is in `embedded`, `counters` and
`server`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config, trained_num_speculative_tokens
from peagle.checkpoints.target import eos_ids, load_tokenizer, read_target_config, target_fingerprint
from peagle.config import EvalServerSettings, EvalSettings
from peagle.data.chat_format import load_chat_format
from peagle.errors import UserError
from peagle.eval.conversations import ConversationRunner
from peagle.eval.datasets import EvalDataset
from peagle.eval.samples import AcceptanceSample, EvalProgress, RowLabels, build_rows
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, Results

ENGINES = ("embedded", "reference", "vllm")
MAX_SIMILAR_WARNINGS = 3


class EvalBackend(Protocol):
    """An engine that counts accepted tokens. `measures_all_k`: one pass serves all K."""

    measures_all_k: bool
    warnings: list[str]

    @property
    def dtype(self) -> str: ...

    def measure(
        self, drafter: Any, dataset: EvalDataset, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[AcceptanceSample]]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EvalDrafter:
    """A drafter and its name in the results. The drafter of a server may have no local folder."""

    name: str
    method: Literal["p-eagle", "eagle3"]
    folder: Path | None
    trained_draft_tokens: int | None = None


@dataclass(frozen=True)
class EvalJob:
    drafter: EvalDrafter
    dataset: EvalDataset
    temperature: float
    ks: tuple[int, ...]


@dataclass(frozen=True)
class EvalEngine:
    """The engine: embedded, reference, vllm, or the URL of a server."""

    engine: str = "embedded"
    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    threads: int | None = None
    concurrency: int = EvalServerSettings.concurrency
    server: EvalServerSettings | None = None

    def __post_init__(self) -> None:
        if self.server is None and self.engine not in ENGINES:
            raise UserError(f"--engine {self.engine}: must be {', '.join(ENGINES)}, or http://HOST:PORT")


@dataclass
class Evaluation:
    """One run of `peagle eval`. Finished rows are in `results` at any time."""

    target: str
    drafters: list[EvalDrafter]
    datasets: list[EvalDataset]
    settings: EvalSettings
    engine: EvalEngine
    out: Path | None = None
    on_progress: EvalProgress = lambda activity, done, total: None
    on_rows: Callable[[list[AcceptanceRow]], None] = lambda rows: None
    chat_template: Path | None = None
    results: Results = field(init=False)
    _earlier_duration: float = field(init=False, default=0.0)
    _warnings: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.folder = resolve_target(self.target)
        self.max_model_len = min(self.settings.max_model_len, read_target_config(self.folder).max_positions)
        packages = ("vllm",) if self.engine.engine == "vllm" else ()
        provenance = Provenance.collect(packages=packages)
        self.results = Results("eval", provenance, self._result_settings(), [], finished=False)
        if self.out is not None and self.out.exists():
            self._resume(self.out)

    def run(self) -> Results:
        """Measures everything that is missing. After Ctrl-C `results.finished` is false."""
        jobs = self._missing_jobs()
        if jobs:
            evaluator = self._open_evaluator()
            try:
                if self.engine.server is None:
                    self._add_warnings(self._untrained_depth_warnings())
                self._record_dtype(evaluator.dtype)
                for job in self._order_jobs(jobs, evaluator):
                    self._run_job(evaluator, job)
            except KeyboardInterrupt:
                self._add_warnings(evaluator.warnings)
                self._save()
                return self.results
            finally:
                evaluator.close()
        self.results = dataclasses.replace(self.results, finished=True)
        self._save()
        return self.results

    def _run_job(self, evaluator: EvalBackend, job: EvalJob) -> None:
        drafter = job.drafter
        for k, samples in evaluator.measure(drafter.folder, job.dataset, job.temperature, job.ks):
            labels = RowLabels(drafter.name, drafter.method, self.engine.engine, job.dataset.name, job.temperature, k)
            rows = build_rows(samples, labels, self.settings)
            self.results = dataclasses.replace(self.results, rows=[*self.results.rows, *rows])
            if rows[0].num_drafts < self.settings.min_drafts:
                self._add_warnings(
                    [
                        f"too few drafts for a reliable mean: {drafter.name} on {job.dataset.name}, K={k}, "
                        f"temperature {job.temperature:g}: {rows[0].num_drafts}"
                    ]
                )
            self._add_warnings(evaluator.warnings)
            evaluator.warnings.clear()
            self._save()
            self.on_rows(rows)

    def _missing_jobs(self) -> list[EvalJob]:
        done = {
            (row.drafter, row.dataset, row.temperature, row.num_speculative_tokens)
            for row in self.results.rows
            if is_whole_dataset(row)
        }
        done_at_any_k = {key[:3] for key in done}
        jobs = []
        for dataset in self.datasets:
            for temperature in self.settings.temperatures:
                for drafter in self.drafters:
                    key = (drafter.name, dataset.name, temperature)
                    ks = tuple(k for k in self.settings.num_speculative_tokens if (*key, k) not in done)
                    if self.engine.server is not None and key in done_at_any_k:
                        ks = ()  # a server has one K
                    if ks:
                        jobs.append(EvalJob(drafter, dataset, temperature, ks))
        return jobs

    def _order_jobs(self, jobs: list[EvalJob], evaluator: EvalBackend) -> list[EvalJob]:
        """Sorts by drafter and K if every pair needs a new engine."""
        if evaluator.measures_all_k:
            return jobs
        single = [dataclasses.replace(job, ks=(k,)) for job in jobs for k in job.ks]
        return sorted(single, key=lambda job: (self.drafters.index(job.drafter), job.ks))

    def _untrained_depth_warnings(self) -> list[str]:
        max_k = max(self.settings.num_speculative_tokens)
        return [
            f"{drafter.name} was trained for {drafter.trained_draft_tokens} draft tokens; "
            "later ones are rarely accepted"
            for drafter in self.drafters
            if drafter.method == "p-eagle"
            and drafter.trained_draft_tokens is not None
            and drafter.trained_draft_tokens < max_k
        ]

    def _open_evaluator(self) -> EvalBackend:
        tokenizer = load_tokenizer(self.folder)
        chat_format = None if self.settings.raw else load_chat_format(self.folder, self.chat_template)
        runner = ConversationRunner(
            chat_format, lambda text: list(tokenizer(text)["input_ids"]), self.max_model_len, self.settings
        )
        engine = self.engine
        if engine.server is not None:
            from peagle.eval.server import ServerEvaluator

            server = ServerEvaluator(engine.server, runner, sorted(eos_ids(self.folder)), self.on_progress)
            ks, server_k = self.settings.num_speculative_tokens, server.num_speculative_tokens
            if ks not in (EvalSettings.num_speculative_tokens, (server_k,)):
                given = " ".join(map(str, ks))
                raise UserError(f"-k {given}: this server uses {server_k} draft tokens; leave -k out")
            return server
        if engine.engine == "vllm":
            from peagle.eval.counters import VllmEvaluator

            return VllmEvaluator(
                self.folder, runner, self.settings, engine.dtype or "auto", engine.concurrency, self.on_progress
            )
        from peagle.eval.embedded import EmbeddedEvaluator, ReferenceEvaluator

        if engine.engine == "reference":
            return ReferenceEvaluator(self.folder, runner, engine.device or "cpu", self.on_progress)
        options = {name: getattr(engine, name) for name in ("device", "dtype", "max_num_seqs", "threads")}
        return EmbeddedEvaluator(self.folder, runner, self.settings, options, self.on_progress)

    def _result_settings(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "target": self.target,
            "target_fingerprint": target_fingerprint(self.folder),
            "engine": self.engine.engine,
            "dtype": self.engine.dtype if self.engine.server is None else None,
            "max_tokens": settings.max_tokens,
            "max_model_len": self.max_model_len,
            "limit": settings.limit,
            "raw": settings.raw,
            "chat_template": str(self.chat_template) if self.chat_template is not None else None,
            "each_k": settings.each_k,
            "context_bounds": list(settings.context_bounds),
            "seed": settings.seed,
            "bootstrap_samples": settings.bootstrap_samples,
            "data": {
                dataset.name: {
                    "source": dataset.source,
                    "num_prompts": len(dataset.prompts.rows),
                    "sha256": dataset.fingerprint,
                }
                for dataset in self.datasets
            },
        }

    def _resume(self, path: Path) -> None:
        old, settings = read_results(path), self.results.settings
        if old.kind != "eval":
            raise UserError(f"--out {path}: contains results of `peagle {old.kind}`; give another file")
        for name in sorted((old.settings.keys() | settings.keys()) - {"data"}):
            before, now = old.settings.get(name), settings.get(name)
            if before != now and not (name == "dtype" and None in (before, now)):  # auto: known with the engine
                raise UserError(
                    f"--out {path}: was started with {name} {before}, now it is {now}; give the same, or another file"
                )
        old_data = old.settings.get("data", {})
        data = {**old_data, **settings["data"]}
        for name, known in old_data.items():
            if data[name]["sha256"] != known.get("sha256"):
                raise UserError(f"--out {path}: was started with other prompts in {name}; give another file")
        self._earlier_duration, self._warnings = old.provenance.duration, list(old.warnings)
        settings = {**settings, "dtype": old.settings.get("dtype"), "data": data}
        self.results = dataclasses.replace(self.results, settings=settings, rows=old.rows, warnings=old.warnings)

    def _record_dtype(self, dtype: str) -> None:
        """Stores the dtype that the engine chose; a resumed run must have the same."""
        before = self.results.settings["dtype"]
        if self.out is not None and self.results.rows and before not in (None, dtype):
            raise UserError(f"--out {self.out}: was started in {before}, now it is {dtype}; give --dtype {before}")
        self.results = dataclasses.replace(self.results, settings={**self.results.settings, "dtype": dtype})

    def _add_warnings(self, warnings: Sequence[str]) -> None:
        self._warnings += warnings
        self.results = dataclasses.replace(self.results, warnings=collapse_warnings(self._warnings))

    def _save(self) -> None:
        provenance = self.results.provenance.with_duration(self._earlier_duration)
        self.results = dataclasses.replace(self.results, provenance=provenance)
        if self.out is not None:
            write_results(self.out, self.results)


def is_whole_dataset(row: AcceptanceRow) -> bool:
    """Whether a row covers a whole data set, including looping responses."""
    return row.category is None and row.context_range is None and row.looping_responses == "included"


def open_drafters(names: Sequence[str], target: Path) -> list[EvalDrafter]:
    """Resolves drafters and checks that they fit the target. Ambiguous folder names are replaced by the given names."""
    target_config = read_target_config(target)
    drafters = []
    for name in names:
        folder = resolve_drafter(name)
        config = read_drafter_config(folder, target_config)
        check_drafter_fits(config, target_config, folder)
        method: Literal["p-eagle", "eagle3"] = "p-eagle" if config.parallel else "eagle3"
        drafters.append(EvalDrafter(Path(name).name, method, folder, trained_num_speculative_tokens(folder)))
    short = [drafter.name for drafter in drafters]
    return [
        drafter if short.count(drafter.name) == 1 else dataclasses.replace(drafter, name=name)
        for drafter, name in zip(drafters, names, strict=True)
    ]


def collapse_warnings(warnings: Sequence[str]) -> list[str]:
    """Removes duplicates; of warnings with the same text before a colon, keeps the first few and a count."""
    by_start: dict[str, list[str]] = {}
    for warning in dict.fromkeys(warnings):
        by_start.setdefault(warning.partition(": ")[0], []).append(warning)
    kept = []
    for start, similar in by_start.items():
        kept += similar[:MAX_SIMILAR_WARNINGS]
        if len(similar) > MAX_SIMILAR_WARNINGS:
            kept.append(f"{start}: {len(similar) - MAX_SIMILAR_WARNINGS} more times")
    return kept
