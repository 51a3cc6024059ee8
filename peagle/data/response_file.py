"""The response file: JSON lines, appended and locked, that survives a kill at any moment; and its summary.

Files beside FILE:

    FILE.manifest.json   settings, target, prompts, versions and command of every run
    FILE.dropped         {"id", "sample", "reason", optional "detail"} of discarded responses
    FILE.rejected        {"where", "reason", "detail"} of rejected prompts

A kill can leave an incomplete last line; the next run cuts it off. A background thread formats and writes rows, so the
GPU does not wait for the disk.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from peagle.data.generators import LOOP
from peagle.errors import UserError

RowKey = tuple[str, int]  # prompt id, sample


@dataclass
class ResponseRow:
    """One conversation."""

    id: str
    source: str
    sample: int
    messages: list[dict[str, str]]
    token_ids: list[int] = field(default_factory=list)  # up to the last response
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    undecoded: list[int] | None = None  # token ids of the last response, if its text is not decoded yet


@dataclass(frozen=True)
class DataSummary:
    """Totals of a response file over all runs; from `num_new` on, of this run alone."""

    out: str
    num_rows: int
    num_requested: int
    num_tokens: int  # of responses
    finished_share: float  # of the rows
    num_cut: int  # rows cut where their response starts to loop
    dropped: dict[str, int]  # responses by reason
    rejected: dict[str, int]  # prompts by reason
    num_duplicates: int
    num_excluded: int  # prompts removed by --exclude-ids
    num_new: int
    num_failed: int  # requests to retry
    num_generated_tokens: int  # dropped responses included
    seconds: float
    tokens_per_second: float
    interrupted: bool
    complete: bool

    def text(self) -> str:
        lines = [
            f"{self.out}: {self.num_rows:,} of {self.num_requested:,} rows, {self.num_tokens:,} response tokens; "
            f"{self.finished_share:.1%} finished",
        ]
        for label, counts in (("dropped responses", self.dropped), ("rejected prompts", self.rejected)):
            if counts:
                lines.append(f"  {label}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items()))
        for label, count in (
            ("cut at the start of a loop", self.num_cut),
            ("duplicate prompts", self.num_duplicates),
            ("prompts of the validation set, excluded", self.num_excluded),
            ("failed requests (the same command retries them)", self.num_failed),
        ):
            if count:
                lines.append(f"  {label}: {count:,}")
        lines.append(
            f"  this run: {self.num_new:,} rows in {self.seconds:,.1f} s, {self.tokens_per_second:,.0f} tokens/s"
            + ("; interrupted: the same command resumes" if self.interrupted else "")
        )
        return "\n".join(lines)


def sidecar_path(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}")


class ResponseFile:
    """A response file opened for appending; `done` are the keys of finished rows."""

    def __init__(
        self,
        out: Path,
        run: dict[str, Any],
        settings: dict[str, Any],
        decode: Callable[[list[list[int]]], list[str]] | None = None,
    ) -> None:
        """`run` is added to the manifest; `settings` must equal those of earlier runs. `decode` decodes responses."""
        self.out, self.decode, self.done = out, decode, set[RowKey]()
        # totals over all runs; `num_cut` rows end at the start of a loop
        self.num_rows = self.num_tokens = self.num_finished = self.num_cut = 0
        self.dropped: Counter[str] = Counter()
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            earlier_runs = self._read_manifest(settings)
            self._rows, self._dropped = open(out, "a+b"), open(sidecar_path(out, "dropped"), "a+b")
            fcntl.flock(self._rows.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
            manifest = {"same": settings, "runs": [*earlier_runs, run]}
            replace_text(sidecar_path(out, "manifest.json"), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        except BlockingIOError:
            raise UserError(f"--out {out}: another run is writing this file") from None
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from None
        self._writer = ThreadPoolExecutor(1, "response-writer")
        self._error: Exception | None = None

    def put(self, row: ResponseRow | dict[str, Any]) -> None:
        """Queues a row, or the line of a discarded response. Raises the error of an earlier write."""
        self._raise_error()
        self._writer.submit(self._write, row)

    def close(self) -> None:
        """Waits until all queued rows are on disk."""
        self._writer.shutdown()
        for file in (self._rows, self._dropped):
            try:
                os.fsync(file.fileno())
                file.close()
            except OSError as error:
                self._error = self._error or error
        self._raise_error()

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):
            raise UserError(
                f"--out {self.out}: a row could not be written ({self._error.strerror or self._error}); free disk "
                "space and run the same command again: earlier rows are kept"
            )
        if self._error is not None:
            raise self._error

    def _write(self, row: ResponseRow | dict[str, Any]) -> None:
        if self._error is not None:
            return
        try:
            values, file = row, self._dropped
            if isinstance(row, ResponseRow):
                if row.undecoded is not None and self.decode is not None:
                    row.messages[-1]["content"] = self.decode([row.undecoded])[0]
                values = {f.name: getattr(row, f.name) for f in fields(ResponseRow) if f.name != "undecoded"}
                file = self._rows
            _append(file.fileno(), (json.dumps(values, ensure_ascii=False) + "\n").encode())
            self._count(values)
        except Exception as error:  # raised by the next `put`
            self._error = error

    def _count(self, values: Any) -> None:
        if "reason" in values:
            self.dropped[values["reason"]] += 1
            return
        self.num_rows += 1
        self.num_tokens += sum(end - start for start, end in values["spans"])
        self.num_finished += values["finish_reason"] == "stop"
        self.num_cut += values["finish_reason"] == LOOP

    def _read_manifest(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """The earlier runs of this file."""
        path = sidecar_path(self.out, "manifest.json")
        if not path.exists():
            if self.out.exists() and self.out.stat().st_size:
                raise UserError(f"--out {self.out}: exists, but `peagle data` did not write it; name another file")
            return []
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            before, runs = manifest["same"], list(manifest["runs"])
            changed = [name for name in settings if (before.get(name) or None) != (settings[name] or None)]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{path}: damaged; delete it and {self.out}, or name another --out") from None
        if changed:
            changes = "; ".join(f"{n} was {before.get(n)!r} and is {settings[n]!r}" for n in changed)
            raise UserError(f"--out {self.out}: holds rows of a run with other settings: {changes}; name another file")
        return runs

    def _scan(self) -> None:
        for file in (self._rows, self._dropped):
            for where, row in _complete_rows(file):
                key = row["id"], row["sample"]
                if key in self.done:
                    raise UserError(f"{where}: duplicate row {key[0]!r}, sample {key[1]}; delete this line")
                self.done.add(key)
                self._count(row)


def _complete_rows(file: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Locations and rows of the complete lines; truncates the file before an incomplete last line."""
    file.seek(0)
    size = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            os.ftruncate(file.fileno(), size)
            return
        size += len(line)
        where = f"{file.name}:{number}"
        try:
            yield where, json.loads(line)
        except ValueError:
            raise UserError(f"{where}: damaged; delete this line or name another --out") from None


def _append(descriptor: int, data: bytes) -> None:
    size, remaining = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    except OSError:
        os.ftruncate(descriptor, size)  # removes a partly written row
        raise


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
