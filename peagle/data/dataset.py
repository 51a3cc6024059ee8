"""Written conversations as token ids: read, checked, and kept in a few flat arrays.

Knows nothing about batches. Reads what `peagle data` writes, and conversations of others (`messages` with answers),
which are encoded by the chat template. A row that would train on nothing, or on everything, is an error that shows
its text. The arrays of a file are kept beside it (FILE.npz), so that the next start need not parse it again.

Flat arrays of E examples with T tokens and S spans together; example e has tokens offset_E[e] to offset_E[e + 1] and
spans span_offset_E[e] to span_offset_E[e + 1], counted from its own first token:

    [7 8 9] span [1, 3)  and  [4 5] span [0, 1)
    token_T 7 8 9 4 5   offset_E 0 3 5   span_S2 [1 3] [0 1]   span_offset_E 0 1 2
"""

from __future__ import annotations

import glob
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from peagle.config import PackingSettings
from peagle.data.chat_format import ChatFormat, Span
from peagle.data.prompts import SUFFIXES, opened
from peagle.data.response_file import beside
from peagle.errors import UserError

FORMAT = 1  # of the arrays kept beside a file; raise it when reading or checking changes
SHOWN = 400  # characters of a text in an error


@dataclass(frozen=True)
class TrainingExample:
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]  # where the responses lie, end exclusive
    row_id: str


@dataclass(frozen=True)
class ResponseDataset(Sequence[TrainingExample]):
    """All examples of some files; `chosen` are those of the arrays that count, in their order."""

    token_T: NDArray[np.int32]
    offset_E: NDArray[np.int64]
    span_S2: NDArray[np.int32]
    span_offset_E: NDArray[np.int64]
    row_ids: tuple[str, ...]
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> TrainingExample: ...
    @overload
    def __getitem__(self, index: slice) -> ResponseDataset: ...
    def __getitem__(self, index: int | slice) -> TrainingExample | ResponseDataset:
        if isinstance(index, slice):
            return self.only(self.chosen[index])
        e = int(self.chosen[index])
        tokens = self.token_T[self.offset_E[e] : self.offset_E[e + 1]].tolist()
        spans = self.span_S2[self.span_offset_E[e] : self.span_offset_E[e + 1]].tolist()
        return TrainingExample(tuple(tokens), tuple((start, end) for start, end in spans), self.row_ids[e])

    def only(self, chosen: NDArray[np.int64]) -> ResponseDataset:
        return ResponseDataset(self.token_T, self.offset_E, self.span_S2, self.span_offset_E, self.row_ids, chosen)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.offset_E[self.chosen + 1] - self.offset_E[self.chosen]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def split_validation(self, count: int, seed: int = 0) -> tuple[ResponseDataset, ResponseDataset]:
        """(the rest, about `count` kept aside): all responses to a prompt are on one side."""
        if count <= 0:
            return self, self.only(self.chosen[:0])
        prompts: dict[str, list[int]] = {}
        for place, e in enumerate(self.chosen.tolist()):
            prompts.setdefault(self.row_ids[e].rpartition("#")[0], []).append(place)
        if len(prompts) < 2:
            raise UserError(f"{count} examples cannot be held out: all of them answer one prompt")
        names = sorted(prompts)
        aside = np.zeros(len(self), dtype=bool)
        taken = 0
        for i in np.random.default_rng(seed).permutation(len(names))[:-1].tolist():
            if taken >= count:
                break
            aside[prompts[names[i]]] = True
            taken += len(prompts[names[i]])
        return self.only(self.chosen[~aside]), self.only(self.chosen[aside])


@dataclass
class _Arrays:
    """Examples in the making."""

    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    span_counts: list[int] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)

    def add(self, tokens: NDArray[np.int32], spans: Sequence[Span], row_id: str) -> None:
        self.tokens.append(tokens)
        self.spans += spans
        self.span_counts.append(len(spans))
        self.row_ids.append(row_id)

    def done(self) -> ResponseDataset:
        return ResponseDataset(
            np.concatenate(self.tokens) if self.tokens else np.zeros(0, np.int32),
            _offsets([len(t) for t in self.tokens]),
            np.array(self.spans, np.int32).reshape(-1, 2),
            _offsets(self.span_counts),
            tuple(self.row_ids),
            np.arange(len(self.tokens)),
        )


def _offsets(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def load_responses(
    paths: str | Path | Sequence[str | Path], chat: ChatFormat | None = None, vocab_size: int | None = None
) -> ResponseDataset:
    """Everything in response files, folders of them and globs. A `chat` encodes conversations that have no token ids
    yet and checks some of those that have; a `vocab_size` bounds the ids."""
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in given for file in _files_of(str(path))]
    if not files:
        raise UserError("no file of responses was named")
    parts = [_file_examples(file, chat, vocab_size) for file in dict.fromkeys(files)]
    if sum(map(len, parts)) == 0:
        raise UserError(f"{', '.join(map(str, given))}: not a single row in it")
    return parts[0] if len(parts) == 1 else _joined(parts)


def _files_of(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = [f for f in sorted(path.rglob("*")) if f.name.endswith(SUFFIXES) and f.is_file()]
    elif path.exists():
        found = [path]
    else:
        found = [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]
    if not found:
        raise UserError(f"{name}: no such file of responses, nor a folder with {' or '.join(SUFFIXES)} files")
    return found


def _joined(parts: list[ResponseDataset]) -> ResponseDataset:
    lengths = np.concatenate([np.diff(p.offset_E) for p in parts])
    counts = np.concatenate([np.diff(p.span_offset_E) for p in parts])
    return ResponseDataset(
        np.concatenate([p.token_T for p in parts]),
        _offsets(lengths),  # type: ignore[arg-type]
        np.concatenate([p.span_S2 for p in parts]),
        _offsets(counts),  # type: ignore[arg-type]
        tuple(row_id for p in parts for row_id in p.row_ids),
        np.arange(len(lengths)),
    )


# One file


def _file_examples(path: Path, chat: ChatFormat | None, vocab_size: int | None) -> ResponseDataset:
    try:
        stat = path.stat()
        key = json.dumps([FORMAT, stat.st_size, stat.st_mtime_ns, chat.key if chat is not None else None, vocab_size])
        kept = _load(beside(path, "npz"), key)
        if kept is not None:
            return kept
        made = _Arrays()
        for number, line in _lines(path):
            made.add(*_Checked(f"{path}:{number}", chat, vocab_size, number).read(line))
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = made.done()
    _keep(beside(path, "npz"), key, found)
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


@dataclass(frozen=True)
class _Checked:
    """One row, and everything that may be wrong with it."""

    where: str
    chat: ChatFormat | None
    vocab_size: int | None
    number: int

    def read(self, line: bytes) -> tuple[NDArray[np.int32], list[Span], str]:
        try:
            row = json.loads(line)
            row_id = f"{row.get('id', Path(self.where).name)}#{row.get('sample', 0)}"
        except (ValueError, AttributeError, RecursionError):
            raise UserError(f"{self.where}: not a JSON object; delete this line (`peagle data` does)") from None
        given = row.get("token_ids")
        if given is None:
            ids, spans = self._encoded(row)
        else:
            ids, spans = given, row.get("spans")
        try:
            tokens = np.asarray(ids)
            if tokens.ndim != 1 or (len(tokens) and tokens.dtype != np.int64):  # bools, floats, huge numbers
                raise ValueError
            spans = [(int(start), int(end)) for start, end in spans]
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{self.where}: token_ids and spans must be lists of ids and of pairs") from None
        self._check(tokens, spans)
        sampled = self.number <= PackingSettings.checked_rows or self.number % PackingSettings.checked_every == 0
        if given is not None and self.chat is not None and sampled:
            self._check_prompt(row, tokens, spans)
        return tokens.astype(np.int32), spans, row_id

    def _encoded(self, row: dict[str, Any]) -> tuple[list[int], list[Span]]:
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise UserError(f"{self.where}: neither token_ids nor messages with role and content in it")
        if self.chat is None:
            raise UserError(f"{self.where}: has no token_ids, and no tokenizer was given to make them of its messages")
        if not any(m["role"] == "assistant" for m in messages):
            raise UserError(f"{self.where}: no answer in it; let the target write one with `peagle data`")
        try:
            return self.chat.conversation(messages)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None

    def _check(self, tokens: NDArray[np.int64], spans: list[Span]) -> None:
        count = len(tokens)
        if not count:
            raise UserError(f"{self.where}: no token in it")
        most = self.vocab_size if self.vocab_size is not None else np.iinfo(np.int32).max
        if tokens.min() < 0 or tokens.max() >= most:
            wrong = int(tokens.max() if tokens.max() >= most else tokens.min())
            raise UserError(f"{self.where}: token id {wrong} is outside the vocabulary (0 to {most - 1})")
        last = 0
        for start, end in spans:
            if not last <= start < end <= count:
                raise UserError(f"{self.where}: span [{start}, {end}] is not one of {count} tokens behind {last}")
            last = end
        asked = sum(end - start for start, end in spans)
        if asked in (0, count):
            what = "no token of it is a response's" if not asked else "all of it is a response, without a prompt"
            raise UserError(
                f"{self.where}: {what}, so its loss mask would be all {int(asked > 0)}: {self._text(tokens)}"
            )

    def _check_prompt(self, row: dict[str, Any], tokens: NDArray[np.int64], spans: list[Span]) -> None:
        """What stands before the last answer is what the template makes of the messages before it."""
        messages = row.get("messages")
        if self.chat is None or not isinstance(messages, list) or not messages:
            return
        prompt = tokens[: spans[-1][0]].tolist()
        text = self.chat.text(messages[:-1], ready=True)
        if prompt == self.chat.encode([text])[0] or (told := self.chat.decode(prompt)) == text:
            return
        at = len(os.path.commonprefix([told, text]))
        raise UserError(
            f"{self.where}: the prompt does not round-trip: its tokens say {_cut(told, at)}, this target's "
            f"{self.chat.rule} {_cut(text, at)}; use the target (and --chat-template FILE or --raw) that the responses "
            "were written with"
        )

    def _text(self, tokens: NDArray[np.int64]) -> str:
        if self.chat is None:
            return f"token ids {tokens[:32].tolist()}"
        text = self.chat.decode(tokens.tolist())
        return repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}")


def _cut(text: str, at: int) -> str:
    return repr(text[max(at - 60, 0) : at + 60])


# The arrays beside a file


def _load(path: Path, key: str) -> ResponseDataset | None:
    try:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            ids, lengths = kept["row_ids"].tobytes().decode(), kept["row_id_offset_E"].tolist()
            row_ids = tuple(ids[a:b] for a, b in zip(lengths, lengths[1:], strict=False))
            token_T, offset_E = kept["token_T"], kept["offset_E"]
            span_S2, span_offset_E = kept["span_S2"], kept["span_offset_E"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None  # not there, or damaged: the file itself is what counts
    return ResponseDataset(token_T, offset_E, span_S2, span_offset_E, row_ids, np.arange(len(row_ids)))


def _keep(path: Path, key: str, found: ResponseDataset) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}.npz")
    try:
        np.savez(
            new,
            key=np.array(key),
            token_T=found.token_T,
            offset_E=found.offset_E,
            span_S2=found.span_S2,
            span_offset_E=found.span_offset_E,
            row_ids=np.frombuffer("".join(found.row_ids).encode(), np.uint8),
            row_id_offset_E=_offsets([len(row_id) for row_id in found.row_ids]),
        )
        os.replace(new, path)
    except OSError:  # a folder that is not ours, or a full disk: it is parsed again next time
        new.unlink(missing_ok=True)
