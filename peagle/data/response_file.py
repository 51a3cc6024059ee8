"""The response file: JSON lines, appended and locked, that survives a kill at any moment.

Files beside FILE:

    FILE.manifest.json   settings, target, prompts, versions and command of every run
    FILE.dropped         {"id", "sample", "reason", optional "detail"} of discarded responses
    FILE.rejected        {"where", "reason", "detail"} of rejected prompts

A kill can leave an incomplete last line; the next run cuts it off. A background thread formats and writes rows, so the
GPU does not wait for the disk.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from peagle.data.loops import LOOP
from peagle.errors import UserError

RowKey = tuple[str, int]  # prompt id, sample
LINE_START = re.compile(rb'\{"id": ("(?:[^"\\]|\\.)*"), "source": "(?:[^"\\]|\\.)*", "sample": (\d+), ')
LINE_END = re.compile(rb'"spans": (\[[\[\], \d]*\]), "finish_reason": "(\w+)"\}\n\Z')
LINE_END_BYTES = 4096  # holds the spans of a long conversation; longer lines are parsed completely
ROWS_PER_WRITE = 16  # formatting them holds the GIL for a millisecond or two


@dataclass
class ResponseRow:
    """One conversation."""

    id: str
    source: str
    sample: int
    messages: list[dict[str, str]]
    token_ids: list[int]
    spans: list[tuple[int, int]]
    finish_reason: str
    undecoded: list[int] | None = None  # token ids of the last response, if its text is not decoded yet

    @property
    def num_response_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    def line(self) -> str:
        # LINE_START and LINE_END rely on this order
        values = {
            "id": self.id,
            "source": self.source,
            "sample": self.sample,
            "messages": self.messages,
            "token_ids": self.token_ids,
            "spans": self.spans,
            "finish_reason": self.finish_reason,
        }
        return json.dumps(values, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class DroppedResponse:
    """A discarded response."""

    id: str
    sample: int
    reason: str
    detail: str = ""

    def line(self) -> str:
        return json.dumps({k: v for k, v in vars(self).items() if v != ""}, ensure_ascii=False) + "\n"


@dataclass
class ResponseTotals:
    """Totals of a file over all runs."""

    lengths: array[int] = field(default_factory=lambda: array("i"))  # response tokens of each row
    num_finished: int = 0
    num_cut: int = 0  # at the start of a loop
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, num_response_tokens: int, finish_reason: str) -> None:
        self.lengths.append(num_response_tokens)
        self.num_finished += finish_reason == "stop"
        self.num_cut += finish_reason == LOOP


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
        self.out, self.decode = out, decode
        self.totals, self.done = ResponseTotals(), set[RowKey]()
        self._files: dict[type, IO[bytes]] = {}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            earlier_runs = self._read_manifest(settings)
            self._files = {ResponseRow: open(out, "a+b"), DroppedResponse: open(sidecar_path(out, "dropped"), "a+b")}
            self._lock()
            self._scan()
            manifest = {"same": settings, "runs": [*earlier_runs, run]}
            replace_text(sidecar_path(out, "manifest.json"), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from None
        self._queue: queue.SimpleQueue[ResponseRow | DroppedResponse | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run_writer, name="response-writer", daemon=True)
        self._thread.start()

    def put(self, row: ResponseRow | DroppedResponse) -> None:
        """Queues a row. Raises the error of an earlier write."""
        self._raise_error()
        self._queue.put(row)

    def close(self) -> None:
        """Waits until all queued rows are on disk."""
        self._queue.put(None)
        self._thread.join()
        for file in self._files.values():
            try:
                os.fsync(file.fileno())
                file.close()
            except OSError as error:
                self._error = self._error or error
        self._raise_error()

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):
            reason = self._error.strerror or str(self._error)
            raise UserError(
                f"--out {self.out}: a row could not be written ({reason}); free disk space and run the same command "
                "again: earlier rows are kept"
            )
        if self._error is not None:
            raise self._error

    def _run_writer(self) -> None:
        while True:
            rows: list[ResponseRow | DroppedResponse] = []
            item = self._queue.get()
            while item is not None:
                rows.append(item)
                if len(rows) == ROWS_PER_WRITE or self._queue.empty():
                    break
                item = self._queue.get()
            try:
                if rows and self._error is None:
                    self._write(rows)
            except Exception as error:  # raised by the next `put`
                self._error = error
            if item is None:
                return

    def _write(self, rows: list[ResponseRow | DroppedResponse]) -> None:
        undecoded = [row for row in rows if isinstance(row, ResponseRow) and row.undecoded is not None]
        if undecoded and self.decode is not None:
            for row, text in zip(undecoded, self.decode([row.undecoded or [] for row in undecoded]), strict=True):
                row.messages[-1]["content"] = text
        for kind, file in self._files.items():
            data = "".join(row.line() for row in rows if isinstance(row, kind)).encode()
            if not data:
                continue
            size = os.fstat(file.fileno()).st_size
            try:
                write_all(file.fileno(), data)
            except OSError:
                os.ftruncate(file.fileno(), size)  # removes a partly written row
                raise
        for written in rows:
            if isinstance(written, ResponseRow):
                self.totals.add(written.num_response_tokens, written.finish_reason)
            else:
                self.totals.dropped[written.reason] += 1

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: two runs into one file are not detected
            return
        try:
            fcntl.flock(self._files[ResponseRow].fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {self.out}: another run is writing this file") from None

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
            changed = [name for name in settings if before.get(name) != settings[name]]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{path}: damaged; delete it and {self.out}, or name another --out") from None
        if changed:
            changes = "; ".join(f"{n} was {before.get(n)!r} and is {settings[n]!r}" for n in changed)
            raise UserError(f"--out {self.out}: holds rows of a run with other settings: {changes}; name another file")
        return runs

    def _scan(self) -> None:
        for number, line in _complete_lines(self._files[ResponseRow]):
            key, num_response_tokens, finish_reason = _parse_row(line, self.out, number)
            if key in self.done:
                raise UserError(f"{self.out}:{number}: duplicate row {key[0]!r}, sample {key[1]}; delete this line")
            self.done.add(key)
            self.totals.add(num_response_tokens, finish_reason)
        for number, line in _complete_lines(self._files[DroppedResponse]):
            try:
                value = json.loads(line)
                dropped = DroppedResponse(value["id"], value["sample"], value["reason"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{sidecar_path(self.out, 'dropped')}:{number}: damaged; delete this line") from None
            self.done.add((dropped.id, dropped.sample))
            self.totals.dropped[dropped.reason] += 1


def _complete_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The complete lines; truncates the file before an incomplete last line."""
    file.seek(0)
    size = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            os.ftruncate(file.fileno(), size)
            return
        size += len(line)
        yield number, line


def _parse_row(line: bytes, out: Path, number: int) -> tuple[RowKey, int, str]:
    """Key, response tokens and finish reason of a row. Reads only the start and the end of the line: parsing all token
    ids would take a minute for a large file."""
    start, end = LINE_START.match(line), LINE_END.search(line, max(len(line) - LINE_END_BYTES, 0))
    try:
        if start is not None and end is not None:
            key = json.loads(start[1]), int(start[2])
            spans, finish_reason = json.loads(end[1]), end[2].decode()
        else:
            row = json.loads(line)
            key, spans, finish_reason = (row["id"], row["sample"]), row["spans"], row["finish_reason"]
        return key, sum(end - start for start, end in spans), finish_reason
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out}:{number}: not a response row; delete this line or name another --out") from None


def write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def replace_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if text or path.exists():
        replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
