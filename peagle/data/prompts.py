"""Reads prompts from JSONL files, folders of them, or a Hugging Face dataset.

A row has one of

    {"prompt": "..."}                                     one user turn
    {"turns": ["...", "..."]}                             several user turns
    {"messages": [{"role": "user", "content": "..."}]}    OpenAI's format; assistant messages are dropped
    {"conversations": [{"from": "human", "value": "..."}]}  ShareGPT's format

and optionally an `id`, a `source` and a `category`. A bad row is rejected with a reason; a file without a single good
row is an error.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from peagle.errors import UserError
from peagle.hub.resolve import HUB_ID

SUFFIXES = (".jsonl", ".jsonl.gz")
FIELDS = ("prompt", "turns", "messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}


@dataclass(frozen=True)
class Prompt:
    """The user turns of one conversation, and its system message."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str | None = None

    @property
    def content(self) -> str:
        """The text that identifies duplicates."""
        return json.dumps([self.system, *self.turns], ensure_ascii=False)


@dataclass(frozen=True)
class RejectedPrompt:
    where: str  # file:line
    reason: str  # one of a few, to be counted
    detail: str = ""


@dataclass(frozen=True)
class PromptSet:
    name: str  # as on the command line
    rows: tuple[Prompt, ...]
    rejected: tuple[RejectedPrompt, ...]
    num_duplicates: int
    num_excluded: int = 0

    @property
    def fingerprint(self) -> str:
        """Equal for equal prompts in equal order, independent of their file."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"{row.id}\n{row.content}\n".encode(errors="surrogatepass"))
        return digest.hexdigest()[:16]

    @property
    def rejection_reasons(self) -> dict[str, int]:
        return dict(Counter(r.reason for r in self.rejected).most_common())

    def exclude(self, ids: Collection[str]) -> Self:
        """Removes the prompts with these ids, also those renamed to ID~HASH because their id occurred before."""
        kept = tuple(row for row in self.rows if row.id not in ids and row.id.rpartition("~")[0] not in ids)
        if not kept:
            raise UserError(f"--exclude-ids: all {len(self.rows)} prompts of {self.name} are excluded")
        return replace(self, rows=kept, num_excluded=len(self.rows) - len(kept))


_FoundRow = tuple[str, str, dict[str, Any] | bytes]  # location, default source, and the row or its line


class _BadRow(Exception):
    """With the reason and the detail of a `RejectedPrompt`."""


def read_prompts(name: str, split: str = "train") -> PromptSet:
    """Reads a file, a folder of .jsonl and .jsonl.gz files, or a Hugging Face dataset with this split."""
    path = Path(name).expanduser()
    if path.exists():
        files = find_jsonl_files(path) if path.is_dir() else [path]
        return collect_prompts(name, (row for file in files for row in _file_rows(file)))
    if HUB_ID.fullmatch(name) and not name.endswith(SUFFIXES):
        return collect_prompts(name, _hub_rows(name, split))
    raise UserError(
        f"{name}: no such file or folder; give a .jsonl file, a folder of them, or a Hugging Face id like org/name"
    )


def collect_prompts(name: str, found: Iterable[_FoundRow]) -> PromptSet:
    rows: list[Prompt] = []
    rejected: list[RejectedPrompt] = []
    seen: set[str] = set()
    ids: set[str] = set()
    num_duplicates = 0
    for where, source, value in found:
        try:
            row = parse_row(_parse_line(value) if isinstance(value, bytes) else value, source)
        except _BadRow as bad:
            rejected.append(RejectedPrompt(where, *bad.args))
            continue
        digest = hashlib.sha256(row.content.encode(errors="surrogatepass")).hexdigest()
        if digest in seen:
            num_duplicates += 1
            continue
        seen.add(digest)
        # several files may number their rows from 0
        row_id = row.id or digest[:16]
        row_id = row_id if row_id not in ids else f"{row_id}~{digest[:8]}"
        ids.add(row_id)
        rows.append(replace(row, id=row_id))
    if not rows:
        first = f"; the first rejected row is {rejected[0].where}: {rejected[0].reason}" if rejected else ""
        raise UserError(f"{name}: no usable prompt in it{first}")
    return PromptSet(name, tuple(rows), tuple(rejected), num_duplicates)


def parse_row(row: dict[str, Any], source: str) -> Prompt:
    """The prompt of a row; its id is empty if the row has none."""
    given, own_source, category = row.get("id"), row.get("source"), row.get("category")
    if given is not None and not isinstance(given, (str, int)):
        raise _BadRow("not a string", f"id is {type(given).__name__}")
    source = own_source if isinstance(own_source, str) and own_source else source
    category = str(category) if isinstance(category, str | int) and str(category).strip() else None
    field = next((f for f in FIELDS if row.get(f) is not None), None)
    if field is None:
        keys = ", ".join(map(str, list(row)[:6])) or "none"
        raise _BadRow("no user turn", f"needs one of {', '.join(FIELDS)}; its keys: {keys}")
    value, system = row[field], None
    if field == "prompt":
        turns = [_parse_text(value, "prompt")]
    elif not isinstance(value, list):
        raise _BadRow("not a list", f"{field} is {type(value).__name__}")
    elif field == "turns":
        turns = [_parse_text(turn, f"turns[{i}]") for i, turn in enumerate(value)]
    else:
        system, turns = _user_turns(value, field)
    if not turns:
        raise _BadRow("no user turn")
    return Prompt(str(given) if given is not None else "", source, tuple(turns), system, category)


def _user_turns(messages: list[Any], field: str) -> tuple[str | None, list[str]]:
    system, turns = None, []
    for i, message in enumerate(messages):
        where = f"{field}[{i}]"
        if not isinstance(message, dict):
            raise _BadRow("not a message", f"{where} is {type(message).__name__}")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = ROLES.get(role, role) if isinstance(role, str) else role
        if role == "user":
            turns.append(_parse_text(content, where))
        elif role == "system":
            if turns or system is not None:
                raise _BadRow("system message in the middle", where)
            system = _parse_text(content, where)
        elif role != "assistant":  # a tool result depends on the call before it, so it cannot be reused
            raise _BadRow("unknown role", f"{where} has {role!r}")
    return system, turns


def _parse_text(value: Any, where: str) -> str:
    if isinstance(value, list):  # OpenAI's content parts
        parts = [p.get("text") for p in value if isinstance(p, dict) and p.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(value):
            raise _BadRow("not text", f"{where} has parts other than text")
        value = "".join(texts)
    if not isinstance(value, str):
        raise _BadRow("not a string", f"{where} is {type(value).__name__}")
    if not value.strip():
        raise _BadRow("empty text", where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadRow("not text", f"{where} has a lone surrogate") from None
    return value


def _file_rows(path: Path) -> Iterator[_FoundRow]:
    source = path.name.removesuffix(".gz").removesuffix(".jsonl")
    number = 0
    try:
        with open_jsonl(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", source, line
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        reason = getattr(error, "strerror", None) or str(error)
        after = f" after line {number}" if number else ""
        raise UserError(f"{path}: cannot be read{after} ({reason})") from None


def find_jsonl_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.name.endswith(SUFFIXES) and file.is_file()]


def open_jsonl(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.strip().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _BadRow("not valid JSON", str(error).splitlines()[0]) from None
    if not isinstance(value, dict):
        raise _BadRow("not a JSON object", type(value).__name__)
    return value


def _hub_rows(name: str, split: str) -> Iterator[_FoundRow]:
    try:
        from datasets import load_dataset

        found = load_dataset(name, split=split)
    except Exception as error:  # a missing package, the hub, the network and format readers raise many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{name}: no such file or folder; as a Hugging Face dataset, split {split!r} did not load ({reason}); "
            "`pip install datasets`, give --split, or give a .jsonl file"
        ) from None
    for i in range(len(found)):
        yield f"{name}[{i}]", name, dict(found[i])


def read_excluded_ids(path: Path) -> frozenset[str]:
    """The prompt ids in a file, one per line; empty lines and lines that start with # are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--exclude-ids {path}: cannot be read ({error})") from None
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
