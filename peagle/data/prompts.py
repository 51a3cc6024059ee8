"""Prompts: what users would type, read from JSONL files, folders of them, or a dataset on the hub.

Knows nothing about tokens or chat templates. A row has one of

    {"prompt": "..."}                                     one user turn
    {"turns": ["...", "..."]}                             several
    {"messages": [{"role": "user", "content": "..."}]}    OpenAI's; answers in it are dropped for the target's own
    {"conversations": [{"from": "human", "value": "..."}]}  the same in older words

and maybe an `id`, a `source` and a `category`. A bad row is refused by name and the rest goes on; a file without a
single good row is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from peagle.errors import UserError
from peagle.hub.resolve import HUB_ID

SUFFIXES = (".jsonl", ".jsonl.gz")
FIELDS = ("prompt", "turns", "messages", "conversations")
GZIP_MAGIC = b"\x1f\x8b"
ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}  # older and newer words for the same


@dataclass(frozen=True)
class Prompt:
    """One conversation's user turns, and what the system message says if there is one."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str | None = None

    @property
    def content(self) -> str:
        """What makes it this prompt and no other."""
        return json.dumps([self.system, *self.turns], ensure_ascii=False)


@dataclass(frozen=True)
class RejectedPrompt:
    where: str  # file:line
    reason: str  # of a few, to be counted
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class PromptSet:
    name: str  # what the user called them
    rows: tuple[Prompt, ...]
    refused: tuple[RejectedPrompt, ...]
    duplicates: int

    @property
    def fingerprint(self) -> str:
        """The same for the same prompts in the same order, whatever file they lie in."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"{row.id}\n{row.content}\n".encode(errors="surrogatepass"))
        return digest.hexdigest()[:16]

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(r.reason for r in self.refused).most_common())


class _BadRow(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


def read_prompts(name: str, split: str = "train") -> PromptSet:
    """From a file, a folder of .jsonl and .jsonl.gz files, or a hub id; `split` is the hub dataset's."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.name.endswith(SUFFIXES) and f.is_file()]
        if not files:
            raise UserError(f"{name}: no {' or '.join(SUFFIXES)} file in this folder")
        return _gathered(name, (row for file in files for row in _file_rows(file)))
    if path.exists():
        return _gathered(name, _file_rows(path))
    if HUB_ID.fullmatch(name) and not name.endswith(SUFFIXES):
        return _gathered(name, _hub_rows(name, split))
    raise UserError(f"{name}: no such file or folder; give a .jsonl file, a folder of them, or a hub id like org/name")


# (where, default source, the row or what is wrong with it)
_Found = tuple[str, str, "dict[str, Any] | _BadRow"]


def _gathered(name: str, found: Iterable[_Found]) -> PromptSet:
    rows: list[Prompt] = []
    refused: list[RejectedPrompt] = []
    seen: set[str] = set()
    ids: set[str] = set()
    duplicates = 0
    for where, source, value in found:
        try:
            if isinstance(value, _BadRow):
                raise value
            row = parse_row(value, source)
        except _BadRow as bad:
            refused.append(RejectedPrompt(where, bad.reason, bad.detail))
            continue
        digest = hashlib.sha256(row.content.encode(errors="surrogatepass")).hexdigest()
        if digest in seen:
            duplicates += 1
            continue
        seen.add(digest)
        # several files may number their rows from 0
        own = row.id or digest[:16]
        own = own if own not in ids else f"{own}~{digest[:8]}"
        ids.add(own)
        rows.append(replace(row, id=own))
    if not rows:
        why = f"; the first row refused is {refused[0]}" if refused else ": it is empty"
        raise UserError(f"{name}: not a single prompt in it{why}")
    return PromptSet(name, tuple(rows), tuple(refused), duplicates)


def parse_row(row: dict[str, Any], source: str) -> Prompt:
    """A row's prompt; its id is empty where the row has none."""
    given = row.get("id")
    if given is not None and not isinstance(given, (str, int)):
        raise _BadRow("not a string", f"id is {type(given).__name__}")
    told = row.get("source")
    named = (str(given) if given is not None else "", told if isinstance(told, str) and told else source)
    kind = row.get("category")
    category = str(kind) if isinstance(kind, str | int) and str(kind).strip() else None
    field = next((f for f in FIELDS if row.get(f) is not None), None)
    if field is None:
        has = ", ".join(map(str, list(row)[:6])) or "nothing"
        raise _BadRow("no user turn", f"none of {', '.join(FIELDS)}; it has {has}")
    value = row[field]
    if field == "prompt":
        return Prompt(*named, (_text(value, "prompt"),), category=category)
    if not isinstance(value, list):
        raise _BadRow("not a list", f"{field} is {type(value).__name__}")
    if field == "turns":
        turns = [_text(turn, f"turns[{i}]") for i, turn in enumerate(value)]
        system = None
    else:
        system, turns = _user_turns(value, field)
    if not turns:
        raise _BadRow("no user turn")
    return Prompt(*named, tuple(turns), system, category)


def _user_turns(messages: list[Any], field: str) -> tuple[str | None, list[str]]:
    system, turns = None, []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _BadRow("not a message", f"{field}[{i}] is {type(message).__name__}")
        role = message.get("role", message.get("from"))
        role = ROLES.get(role, role) if isinstance(role, str) else role
        content = message.get("content", message.get("value"))
        where = f"{field}[{i}]"
        if role == "user":
            turns.append(_text(content, where))
        elif role == "system":
            if turns or system is not None:
                raise _BadRow("system message in the middle", where)
            system = _text(content, where)
        elif role != "assistant":  # what a tool says depends on what was called, so it cannot be asked again
            raise _BadRow("unknown role", f"{where} has {role!r}")
    return system, turns


def _text(value: Any, where: str) -> str:
    if isinstance(value, list):  # OpenAI's parts
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise _BadRow("not text", f"{where} has parts other than text")
        value = "".join(texts)
    if not isinstance(value, str):
        raise _BadRow("not a string", f"{where} is {type(value).__name__}")
    if not value.strip():
        raise _BadRow("empty text", where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadRow("not text", f"{where} has half a character") from None
    return value


def _file_rows(path: Path) -> Iterator[_Found]:
    source = path.name.removesuffix(".gz").removesuffix(".jsonl")
    number = 0
    try:
        with opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", source, _parsed(line)
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        reason = getattr(error, "strerror", None) or str(error)
        behind = f" behind line {number}" if number else ""
        raise UserError(f"{path}: cannot be read{behind} ({reason})") from None


def opened(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if packed else open(path, "rb")  # type: ignore[return-value]


def _parsed(line: bytes) -> dict[str, Any] | _BadRow:
    try:
        value = json.loads(line.strip().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return _BadRow("not valid JSON", str(error).splitlines()[0])
    return value if isinstance(value, dict) else _BadRow("not a JSON object", type(value).__name__)


def _hub_rows(name: str, split: str) -> Iterator[_Found]:
    asked = f"{name}: no such file or folder, and as a hub dataset"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{asked} it needs `pip install datasets`; or give a .jsonl file") from None
    try:
        found = load_dataset(name, split=split)
        count = len(found)
    except Exception as error:  # whatever the hub, the network or a reader of formats says
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{asked} split {split!r} did not load ({reason}); give --split or a .jsonl file") from None
    for i in range(count):
        yield f"{name}[{i}]", name, dict(found[i])
