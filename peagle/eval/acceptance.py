"""`peagle eval`: measures acceptance of drafters on data sets and writes a result file.

Decides what to measure in which order and resumes an existing file. The counting is in `replay` and `counters`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
from peagle.checkpoints.target import eos_ids, load_tokenizer, read_target_config, target_fingerprint
from peagle.config import EvalServerSettings, EvalSettings
from peagle.data.chat_format import load_chat_format
from peagle.errors import UserError
from peagle.eval.conversations import ConversationRunner, EvalDrafter, EvalJob, EvalProgress, Evaluator
from peagle.eval.datasets import EvalDataset
from peagle.eval.samples import build_rows
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.results.files import read_resumable, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, Results

ENGINES = ("embedded", "reference", "vllm")


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

    def __post_init__(self) -> None:
        self.folder = resolve_target(self.target)
        self.max_model_len = min(self.settings.max_model_len, read_target_config(self.folder).max_positions)
        packages = ("vllm",) if self.engine.engine == "vllm" else ()
        self._provenance = Provenance.collect(packages=packages)
        settings = {
            "target": self.target,
            "target_fingerprint": target_fingerprint(self.folder),
            "engine": self.engine.engine,
            "dtype": self.engine.dtype if self.engine.server is None else None,
            "max_tokens": self.settings.max_tokens,
            "max_model_len": self.max_model_len,
            "limit": self.settings.limit,
            "raw": self.settings.raw,
            "chat_template": str(self.chat_template) if self.chat_template is not None else None,
            "context_bounds": list(self.settings.context_bounds),
            "seed": self.settings.seed,
            "bootstrap_samples": self.settings.bootstrap_samples,
            "data": {
                dataset.name: {
                    "source": dataset.source,
                    "num_prompts": len(dataset.prompts.rows),
                    "sha256": dataset.prompts.fingerprint,
                }
                for dataset in self.datasets
            },
        }
        self.results = Results("eval", self._provenance, settings, [], finished=False)
        if self.out is not None and self.out.exists():
            self._resume(self.out)

    def run(self) -> Results:
        """Measures everything that is missing. After Ctrl-C `results.finished` is false."""
        jobs = self._missing_jobs()
        if jobs:
            evaluator = self._open_evaluator()
            try:
                dtype, before = evaluator.dtype, self.results.settings["dtype"]
                if self.out is not None and self.results.rows and before not in (None, dtype):
                    resumed = f"was started in {before}, now it is {dtype}; give --dtype {before}"
                    raise UserError(f"--out {self.out}: {resumed}")
                self.results.settings["dtype"] = dtype
                if not evaluator.measures_all_k:  # every drafter and K needs a new engine
                    jobs = [dataclasses.replace(job, ks=(k,)) for job in jobs for k in job.ks]
                    jobs.sort(key=lambda job: (self.drafters.index(job.drafter), job.ks))
                for job in jobs:
                    self._run_job(evaluator, job)
            except KeyboardInterrupt:
                self._save(evaluator.warnings)
                return self.results
            finally:
                evaluator.close()
        self.results.finished = True
        self._save()
        return self.results

    def _run_job(self, evaluator: Evaluator, job: EvalJob) -> None:
        labels: dict[str, Any] = {
            "drafter": job.drafter.name,
            "method": job.drafter.method,
            "engine": self.engine.engine,
            "dataset": job.dataset.name,
            "temperature": job.temperature,
        }
        for k, samples in evaluator.measure(job):
            rows = build_rows(samples, k, self.settings, labels)
            self.results.rows += rows
            if rows[0].num_drafts < self.settings.min_drafts:
                evaluator.warnings.append(
                    f"too few drafts for a reliable mean: {job.drafter.name} on {job.dataset.name}, K={k}, "
                    f"temperature {job.temperature:g}: {rows[0].num_drafts}"
                )
            self._save(evaluator.warnings)
            evaluator.warnings.clear()
            self.on_rows(rows)

    def _missing_jobs(self) -> list[EvalJob]:
        rows = [row for row in self.results.rows if row.is_whole_dataset]
        done = {(row.drafter, row.dataset, row.temperature, row.num_speculative_tokens) for row in rows}
        jobs = []
        for dataset in self.datasets:
            for temperature in self.settings.temperatures:
                for drafter in self.drafters:
                    key = (drafter.name, dataset.name, temperature)
                    ks = tuple(k for k in self.settings.num_speculative_tokens if (*key, k) not in done)
                    one_k_is_done = self.engine.server is not None and key in {row[:3] for row in done}
                    if ks and not one_k_is_done:  # a server has one K
                        jobs.append(EvalJob(drafter, dataset, temperature, ks))
        return jobs

    def _open_evaluator(self) -> Evaluator:
        tokenizer = load_tokenizer(self.folder)
        chat_format = None if self.settings.raw else load_chat_format(self.folder, self.chat_template)

        def encode(text: str) -> list[int]:
            return list(tokenizer(text)["input_ids"])

        runner = ConversationRunner(chat_format, encode, self.max_model_len, self.settings, self.on_progress)
        engine = self.engine
        if engine.server is not None:
            from peagle.eval.counters import ServerEvaluator

            server = ServerEvaluator(engine.server, runner, sorted(eos_ids(self.folder)))
            ks, server_k = self.settings.num_speculative_tokens, server.num_speculative_tokens
            if ks not in (EvalSettings.num_speculative_tokens, (server_k,)):
                given = " ".join(map(str, ks))
                raise UserError(f"-k {given}: this server uses {server_k} draft tokens; leave -k out")
            return server
        if engine.engine == "vllm":
            from peagle.eval.counters import VllmEvaluator

            return VllmEvaluator(self.folder, runner, engine.dtype or "auto", engine.concurrency)
        from peagle.eval.replay import EmbeddedEvaluator, ReferenceEvaluator

        if engine.engine == "reference":
            return ReferenceEvaluator(self.folder, runner, engine.device or "cpu")
        options = {name: getattr(engine, name) for name in ("device", "dtype", "max_num_seqs", "threads")}
        return EmbeddedEvaluator(self.folder, runner, options)

    def _resume(self, path: Path) -> None:
        settings = self.results.settings
        old = read_resumable(path, "eval", settings, ignored=("data", "dtype"))  # the dtype is known with the engine
        old_data = old.settings.get("data", {})
        for name in old_data.keys() & settings["data"].keys():
            if settings["data"][name]["sha256"] != old_data[name].get("sha256"):
                raise UserError(f"--out {path}: was started with other prompts in {name}; give another file")
        settings |= {"dtype": old.settings.get("dtype"), "data": {**old_data, **settings["data"]}}
        self.results.rows = old.rows
        self.results.warnings = old.warnings
        self._earlier_duration = old.provenance.duration

    def _save(self, warnings: Sequence[str] = ()) -> None:
        self.results.warnings = list(dict.fromkeys([*self.results.warnings, *warnings]))
        self.results.provenance = self._provenance.with_duration(self._earlier_duration)
        if self.out is not None:
            write_results(self.out, self.results)


def open_drafters(names: Sequence[str], target: Path) -> list[EvalDrafter]:
    """Resolves drafters and checks that they fit the target. Ambiguous folder names are replaced by the given names."""
    target_config, short_names = read_target_config(target), [Path(name).name for name in names]
    drafters = []
    for name, short_name in zip(names, short_names, strict=True):
        folder = resolve_drafter(name)
        config = read_drafter_config(folder, target_config)
        check_drafter_fits(config, target_config, folder)
        shown = short_name if short_names.count(short_name) == 1 else name
        drafters.append(EvalDrafter(shown, "p-eagle" if config.parallel else "eagle3", folder))
    return drafters
