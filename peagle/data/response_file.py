"""The file of responses: one whole line a row, appended, locked, and gone on with after a kill at any moment.

Knows nothing about how rows come to be. Beside FILE lie

    FILE.manifest.json   what the run was: settings, target, prompts, versions, command
    FILE.dropped         {"id", "sample", "reason", maybe "detail"} of responses that were asked for and not kept
    FILE.refused         {"where", "reason", "detail"} of prompts that were not asked

A row is there when its line is. A kill can leave half a line at the end; it is cut off on the next start. Rows are
formatted and written by a thread of their own, so that the GPU does not wait for a disk.
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

Key = tuple[str, int]  # prompt's id, which of its samples
HEAD = re.compile(rb'\{"id": ("(?:[^"\\]|\\.)*"), "source": "(?:[^"\\]|\\.)*", "sample": (\d+), ')
TAIL = re.compile(rb'"spans": (\[[\[\], \d]*\]), "finish_reason": "(\w+)"\}\n\Z')
TAIL_BYTES = 4096  # the spans of even a long conversation; more of them are found the slow way
BLOCK_ROWS = 16  # formatted in one go: a millisecond or two of Python's lock


@dataclass
class ResponseRow:
    """One written conversation."""

    id: str
    source: str
    sample: int
    messages: list[dict[str, str]]
    token_ids: list[int]
    spans: list[tuple[int, int]]
    finish_reason: str
    unread: list[int] | None = None  # the last answer's ids, where its message waits for their text

    @property
    def key(self) -> Key:
        return self.id, self.sample

    @property
    def asked(self) -> int:
        return sum(end - start for start, end in self.spans)

    def line(self) -> str:
        # in this order, which is what the scan looks for
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
    """A response that was asked for and is not kept."""

    id: str
    sample: int
    reason: str
    detail: str = ""

    def line(self) -> str:
        return json.dumps({k: v for k, v in vars(self).items() if v != ""}, ensure_ascii=False) + "\n"


@dataclass
class ResponseTotals:
    """What a file holds, over all runs that wrote it."""

    lengths: array[int] = field(default_factory=lambda: array("i"))  # response tokens of each row
    ended: int = 0
    cut: int = 0  # before a loop
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, asked: int, finish_reason: str) -> None:
        self.lengths.append(asked)
        self.ended += finish_reason == "stop"
        self.cut += finish_reason == LOOP


def beside(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}")


class ResponseFile:
    """Opened for appending; `done` are the keys that need not be asked again."""

    def __init__(
        self,
        out: Path,
        run: dict[str, Any],
        same: dict[str, Any],
        texts: Callable[[list[list[int]]], list[str]] | None = None,
    ) -> None:
        """`run` is for the record; `same` must not differ from an earlier run's. `texts` decodes the answers of rows
        that wait for it."""
        self.out, self.texts = out, texts
        self.totals, self.done = ResponseTotals(), set[Key]()
        self._files: dict[type, IO[bytes]] = {}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            before = self._check_manifest(same)
            self._files = {ResponseRow: open(out, "a+b"), DroppedResponse: open(beside(out, "dropped"), "a+b")}
            self._lock()
            self._scan()
            replace_json(beside(out, "manifest.json"), {"same": same, "runs": [*before, run]})
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from None
        self._queue: queue.SimpleQueue[ResponseRow | DroppedResponse | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def put(self, one: ResponseRow | DroppedResponse) -> None:
        """Queues a row; what went wrong with an earlier one is said here."""
        self._check()
        self._queue.put(one)

    def close(self) -> None:
        """Waits until everything queued is on the disk."""
        self._queue.put(None)
        self._thread.join()
        for file in self._files.values():
            try:
                os.fsync(file.fileno())
                file.close()
            except OSError as error:
                self._failed = self._failed or error
        self._check()

    def _check(self) -> None:
        if isinstance(self._failed, OSError):
            reason = self._failed.strerror or str(self._failed)
            raise UserError(
                f"--out {self.out}: a row could not be written ({reason}); make room and run the same command again: "
                "the rows before it are kept"
            )
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while True:
            block: list[ResponseRow | DroppedResponse] = []
            more = self._queue.get()
            while more is not None:
                block.append(more)
                if len(block) == BLOCK_ROWS or self._queue.empty():
                    break
                more = self._queue.get()
            try:
                if block and self._failed is None:
                    self._write(block)
            except Exception as error:  # said by the next `put`, in the thread that can stop the run
                self._failed = error
            if more is None:
                return

    def _write(self, block: list[ResponseRow | DroppedResponse]) -> None:
        waiting = [one for one in block if isinstance(one, ResponseRow) and one.unread is not None]
        if waiting and self.texts is not None:
            for row, text in zip(waiting, self.texts([row.unread or [] for row in waiting]), strict=True):
                row.messages[-1]["content"] = text
        for kind, file in self._files.items():
            lines = [one.line() for one in block if isinstance(one, kind)]
            if not lines:
                continue
            size = os.fstat(file.fileno()).st_size
            try:
                write_all(file.fileno(), "".join(lines).encode())
            except OSError:
                os.ftruncate(file.fileno(), size)  # giving bytes back needs no room
                raise
        for one in block:
            if isinstance(one, ResponseRow):
                self.totals.add(one.asked, one.finish_reason)
            else:
                self.totals.dropped[one.reason] += 1

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows; two runs into one file are then not noticed
            return
        try:
            fcntl.flock(self._files[ResponseRow].fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {self.out}: another run is writing it") from None

    def _check_manifest(self, same: dict[str, Any]) -> list[dict[str, Any]]:
        """The runs that have written this file."""
        path = beside(self.out, "manifest.json")
        if not path.exists():
            if self.out.exists() and self.out.stat().st_size:
                raise UserError(f"--out {self.out}: exists, but was not written by `peagle data`; name another file")
            return []
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            before, runs = manifest["same"], list(manifest["runs"])
            wrong = [name for name in same if before.get(name) != same[name]]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{path}: damaged; delete it and {self.out}, or name another --out") from None
        if wrong:
            said = "; ".join(f"{n} was {before.get(n)!r} and is {same[n]!r}" for n in wrong)
            raise UserError(f"--out {self.out} holds rows of another run: {said}; use those again or name another file")
        return runs

    def _scan(self) -> None:
        for number, line in _whole_lines(self._files[ResponseRow]):
            key, asked, finish = _row_of(line, self.out, number)
            if key in self.done:
                raise UserError(f"{self.out}:{number}: {key[0]!r}, sample {key[1]}, is there twice; delete this line")
            self.done.add(key)
            self.totals.add(asked, finish)
        for number, line in _whole_lines(self._files[DroppedResponse]):
            try:
                value = json.loads(line)
                dropped = DroppedResponse(value["id"], value["sample"], value["reason"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{beside(self.out, 'dropped')}:{number}: damaged; delete this line") from None
            self.done.add((dropped.id, dropped.sample))
            self.totals.dropped[dropped.reason] += 1


def _whole_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are there to their end; what a kill has torn is cut off the file."""
    file.seek(0)
    whole = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            os.ftruncate(file.fileno(), whole)
            return
        whole += len(line)
        yield number, line


def _row_of(line: bytes, out: Path, number: int) -> tuple[Key, int, str]:
    """Key, response tokens and finish reason of a row. Found at its two ends: parsing all the ids between them
    would take a minute for the rows of a long run."""
    head, tail = HEAD.match(line), TAIL.search(line, max(len(line) - TAIL_BYTES, 0))
    try:
        if head is not None and tail is not None:
            key = json.loads(head[1]), int(head[2])
            spans, finish = json.loads(tail[1]), tail[2].decode()
        else:
            row = json.loads(line)
            key, spans, finish = (row["id"], row["sample"]), row["spans"], row["finish_reason"]
        return key, sum(end - start for start, end in spans), finish
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out}:{number}: not a row of responses; delete this line or name another --out") from None


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def replace_json(path: Path, value: dict[str, Any]) -> None:
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def replace_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if text or path.exists():
        replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """The old or the new file is there, never half of one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
