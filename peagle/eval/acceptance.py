"""How much of drafters' work is accepted: the whole of `peagle eval`, from names to a document of results.

Knows what is asked of whom, in which order, what is done already and where it is kept. Does none of the counting: that
is `acceptance_embedded`'s, `acceptance_counters`' and `acceptance_server`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config, trained_num_speculative_tokens
from peagle.checkpoints.target import eos_ids, load_tokenizer, read_target_config
from peagle.config import EvalServerSettings, EvalSettings
from peagle.data.chat_format import load_chat_format
from peagle.data.run import target_fingerprint
from peagle.errors import UserError
from peagle.eval.conversations import Speaker
from peagle.eval.datasets import DataSet
from peagle.eval.samples import Sample, Subject, Tell, rows_of
from peagle.hub.resolve import resolve_drafter, resolve_target
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, Results

Method = Literal["p-eagle", "eagle3"]
ENGINES = ("embedded", "reference", "vllm")
GROWING = ("data",)  # settings that a resumed run may add to
REPEATED_NOTES = 3


class Counting(Protocol):
    """Whoever counts. `notes` is what a reader of the counts has to know; `all_k` that one pass serves all K."""

    all_k: bool
    notes: list[str]

    @property
    def dtype(self) -> str: ...

    def counted(
        self, drafter: Any, data: DataSet, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample]]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Drafted:
    """A drafter by its name in the results. A server may have one that lies nowhere here."""

    name: str
    method: Method
    folder: Path | None
    trained: int | None = None  # draft tokens that it was trained for


@dataclass(frozen=True)
class Job:
    """What is asked of whoever counts in one go."""

    drafter: Drafted
    data: DataSet
    temperature: float
    ks: tuple[int, ...]


@dataclass(frozen=True)
class Where:
    """Who answers, and on what: `engine` is embedded, reference, vllm or a server's address."""

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
    """One run of `peagle eval`; `run` is the loop. Rows are in `results` as soon as they are whole."""

    target: str
    drafters: list[Drafted]
    data: list[DataSet]
    settings: EvalSettings
    where: Where
    out: Path | None = None
    tell: Tell = lambda what, done, total: None
    on_rows: Callable[[list[AcceptanceRow]], None] = lambda rows: None
    chat_template: Path | None = None
    results: Results = field(init=False)
    _before: float = field(init=False, default=0.0)
    _notes: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.folder = resolve_target(self.target)
        self.cfg = read_target_config(self.folder)
        packages = ("vllm",) if self.where.engine == "vllm" else ()
        self.results = Results("eval", Provenance.collect(packages=packages), self._settings(), [], finished=False)
        if self.out is not None and self.out.exists():
            self._resume(self.out)

    def run(self) -> Results:
        """Until every row is there, or Ctrl-C; then `results.finished` is false."""
        jobs = self._jobs()
        if jobs:
            engine = self._open()
            try:
                if self.where.server is None:
                    self._note(self._beyond_training())
                self._settle(engine.dtype)
                for job in self._ordered(jobs, engine):
                    self._work(engine, job)
            except KeyboardInterrupt:
                self._note(engine.notes)
                self._keep()
                return self.results
            finally:
                engine.close()
        self.results = dataclasses.replace(self.results, finished=True)
        self._keep()
        return self.results

    def _work(self, engine: Counting, job: Job) -> None:
        for k, samples in engine.counted(job.drafter.folder, job.data, job.temperature, job.ks):
            subject = Subject(
                job.drafter.name, job.drafter.method, self.where.engine, job.data.name, job.temperature, k
            )
            rows = rows_of(samples, subject, self.settings)
            self.results = dataclasses.replace(self.results, rows=[*self.results.rows, *rows])
            if rows[0].num_drafts < self.settings.few_rounds:
                self._note([f"too few rounds to trust: {_called(rows[0])}: {rows[0].num_drafts}"])
            self._note(engine.notes)
            engine.notes.clear()
            self._keep()
            self.on_rows(rows)

    # What is to be done

    def _jobs(self) -> list[Job]:
        """What is not in the results yet."""
        done = {(r.drafter, r.dataset, r.temperature, r.k) for r in self.results.rows if whole(r)}
        ks: Sequence[int] = self.settings.draft_tokens
        jobs = []
        for data in self.data:
            for temperature in self.settings.temperatures:
                for drafter in self.drafters:
                    name = (drafter.name, data.name, temperature)
                    left = tuple(k for k in ks if (*name, k) not in done)
                    if self.where.server is not None and any((*name, k) in done for k in range(1, 65)):
                        left = ()  # the server's K is the only one
                    if left:
                        jobs.append(Job(drafter, data, temperature, left))
        return jobs

    def _ordered(self, jobs: list[Job], engine: Counting) -> list[Job]:
        """Whoever needs a new engine for every drafter and K goes through all data with each of them."""
        if engine.all_k:
            return jobs
        single = [dataclasses.replace(job, ks=(k,)) for job in jobs for k in job.ks]
        return sorted(single, key=lambda job: (self.drafters.index(job.drafter), job.ks))

    def _beyond_training(self) -> list[str]:
        most = max(self.settings.draft_tokens)
        return [
            f"{d.name} was trained for {d.trained} draft tokens: later ones will hardly ever be accepted"
            for d in self.drafters
            if d.method == "p-eagle" and d.trained is not None and d.trained < most
        ]

    def _open(self) -> Counting:
        longest = min(self.settings.max_model_len, self.cfg.max_positions)
        tokenizer = load_tokenizer(self.folder)
        chat = None if self.settings.raw else load_chat_format(self.folder, self.chat_template)
        speaker = Speaker(chat, lambda text: list(tokenizer(text)["input_ids"]), longest, self.settings)
        where = self.where
        if where.server is not None:
            from peagle.eval.server import Server

            server = Server(where.server, speaker, sorted(eos_ids(self.folder)), self.tell)
            if self.settings.draft_tokens not in (EvalSettings.draft_tokens, (server.k,)):
                given = " ".join(map(str, self.settings.draft_tokens))
                raise UserError(f"-k {given}: this server drafts {server.k} tokens, and no other number can be asked")
            return server
        if where.engine == "vllm":
            from peagle.eval.counters import Vllm

            return Vllm(self.folder, speaker, self.settings, where.dtype or "auto", where.concurrency, self.tell)
        from peagle.eval.embedded import Embedded, Reference

        if where.engine == "reference":
            return Reference(self.folder, speaker, where.device or "cpu", self.tell)
        options = {
            "device": where.device,
            "dtype": where.dtype,
            "max_num_seqs": where.max_num_seqs,
            "threads": where.threads,
        }
        return Embedded(self.folder, speaker, self.settings, options, self.tell)

    # What is kept

    def _settings(self) -> dict[str, Any]:
        s = self.settings
        return {
            "target": self.target,
            "target_fingerprint": target_fingerprint(self.folder),
            "engine": self.where.engine,
            "dtype": self.where.dtype if self.where.server is None else None,
            "max_tokens": s.max_tokens,
            "max_model_len": min(s.max_model_len, self.cfg.max_positions),
            "limit": s.limit,
            "raw": s.raw,
            "chat_template": str(self.chat_template) if self.chat_template is not None else None,
            "each_k": s.each_k,
            "context_bounds": list(s.context_edges),
            "seed": s.seed,
            "bootstrap_samples": s.resamples,
            "data": {
                d.name: {"source": d.source, "num_prompts": len(d.prompts.rows), "sha256": d.fingerprint}
                for d in self.data
            },
        }

    def _resume(self, path: Path) -> None:
        old = read_results(path)
        if old.kind != "eval":
            raise UserError(f"--out {path}: holds results of `peagle {old.kind}`; give another file")
        now = self.results.settings
        self._same(path, old.settings, now)
        data = {**old.settings.get("data", {}), **now["data"]}
        for name, known in old.settings.get("data", {}).items():
            if data[name]["sha256"] != known.get("sha256"):
                raise UserError(f"--out {path}: it was begun with other prompts in {name}; give another file")
        self._before, self._notes = old.provenance.duration, list(old.warnings)
        settings = {**now, "dtype": old.settings.get("dtype"), "data": data}
        self.results = dataclasses.replace(self.results, settings=settings, rows=old.rows, warnings=old.warnings)

    def _same(self, path: Path, old: dict[str, Any], now: dict[str, Any]) -> None:
        for name in sorted((old.keys() | now.keys()) - set(GROWING)):
            if name == "dtype" and None in (old.get(name), now.get(name)):
                continue  # found out when an engine is there
            if old.get(name) != now.get(name):
                raise UserError(
                    f"--out {path}: it was begun with {name} {old.get(name)}, now it is {now.get(name)}; "
                    "give the same, or another file"
                )

    def _settle(self, dtype: str) -> None:
        """What the engine made of an automatic dtype, which must be the same in a resumed run."""
        before = self.results.settings["dtype"]
        if self.out is not None and self.results.rows and before not in (None, dtype):
            raise UserError(f"--out {self.out}: it was begun in {before}, now it is {dtype}; give --dtype {before}")
        self.results = dataclasses.replace(self.results, settings={**self.results.settings, "dtype": dtype})

    def _note(self, notes: Sequence[str]) -> None:
        self._notes += notes
        self.results = dataclasses.replace(self.results, warnings=collapsed(self._notes))

    def _keep(self) -> None:
        self.results = dataclasses.replace(self.results, provenance=self.results.provenance.with_duration(self._before))
        if self.out is not None:
            write_results(self.out, self.results)


def whole(row: AcceptanceRow) -> bool:
    """Of a whole data set, loops and all: there is one for everything that was measured."""
    return row.category is None and row.context_range is None and row.looping_responses == "included"


def open_drafters(names: Sequence[str], target: Path) -> list[Drafted]:
    """Named by their folders' names, where these tell them apart. Whether they fit is found out here."""
    cfg = read_target_config(target)
    found = []
    for name in names:
        folder = resolve_drafter(name)
        own = read_drafter_config(folder, cfg)
        check_drafter_fits(own, cfg, folder)
        found.append((name, own, folder))
    short = [Path(name).name for name, _, _ in found]
    return [
        Drafted(
            own_name if short.count(own_name) == 1 else name,
            "p-eagle" if own.parallel else "eagle3",
            folder,
            trained_num_speculative_tokens(folder),
        )
        for (name, own, folder), own_name in zip(found, short, strict=True)
    ]


def collapsed(notes: Sequence[str]) -> list[str]:
    """Each once; of many that begin alike the first few and how many more there are."""
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        alike.setdefault(note.partition(": ")[0], []).append(note)
    kept = []
    for start, some in alike.items():
        kept += some[:REPEATED_NOTES]
        if len(some) > REPEATED_NOTES:
            kept.append(f"{start}: {len(some) - REPEATED_NOTES} more times")
    return kept


def _called(row: AcceptanceRow) -> str:
    return f"{row.drafter} on {row.dataset}, K={row.num_speculative_tokens}, temperature {row.temperature:g}"
