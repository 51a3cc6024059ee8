"""The training dataset: conversations as token ids, checked, in flat arrays.

Reads what `peagle data` writes, and other conversations (`messages` with responses), which are encoded with the chat
template. A row whose loss mask would be all 0 or all 1 is an error. FILE.npz caches the arrays of a file.

E examples with T tokens and S spans in total; example e has tokens offset_E[e] to offset_E[e + 1] and spans
span_offset_E[e] to span_offset_E[e + 1], counted from its own first token:

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
from peagle.data.prompts import SUFFIXES, open_jsonl
from peagle.data.response_file import sidecar_path
from peagle.errors import UserError

CACHE_VERSION = 1  # of FILE.npz; increase when reading or checking changes
MAX_SHOWN_CHARS = 400  # of a text in an error


@dataclass(frozen=True)
class TrainingExample:
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]  # of the responses, end exclusive
    row_id: str


@dataclass(frozen=True)
class ResponseDataset(Sequence[TrainingExample]):
    """All examples of some files; `selected` are the indices of those in this dataset, in order."""

    token_T: NDArray[np.int32]
    offset_E: NDArray[np.int64]
    span_S2: NDArray[np.int32]
    span_offset_E: NDArray[np.int64]
    row_ids: tuple[str, ...]
    selected: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.selected)

    @overload
    def __getitem__(self, index: int) -> TrainingExample: ...
    @overload
    def __getitem__(self, index: slice) -> ResponseDataset: ...
    def __getitem__(self, index: int | slice) -> TrainingExample | ResponseDataset:
        if isinstance(index, slice):
            return self.select(self.selected[index])
        e = int(self.selected[index])
        tokens = self.token_T[self.offset_E[e] : self.offset_E[e + 1]].tolist()
        spans = self.span_S2[self.span_offset_E[e] : self.span_offset_E[e + 1]].tolist()
        return TrainingExample(tuple(tokens), tuple((start, end) for start, end in spans), self.row_ids[e])

    def select(self, selected: NDArray[np.int64]) -> ResponseDataset:
        return ResponseDataset(self.token_T, self.offset_E, self.span_S2, self.span_offset_E, self.row_ids, selected)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.offset_E[self.selected + 1] - self.offset_E[self.selected]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def split_validation(self, count: int, seed: int = 0) -> tuple[ResponseDataset, ResponseDataset]:
        """(training set, validation set of about `count` examples). All responses to a prompt are in one of them."""
        if count <= 0:
            return self, self.select(self.selected[:0])
        prompts: dict[str, list[int]] = {}
        for place, e in enumerate(self.selected.tolist()):
            prompts.setdefault(self.row_ids[e].rpartition("#")[0], []).append(place)
        if len(prompts) < 2:
            raise UserError(f"--validation-size {count}: all examples answer one prompt, so none can be split off")
        names = sorted(prompts)
        in_validation = np.zeros(len(self), dtype=bool)
        size = 0
        for i in np.random.default_rng(seed).permutation(len(names))[:-1].tolist():
            if size >= count:
                break
            in_validation[prompts[names[i]]] = True
            size += len(prompts[names[i]])
        return self.select(self.selected[~in_validation]), self.select(self.selected[in_validation])


@dataclass
class _DatasetBuilder:
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    span_counts: list[int] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)

    def add(self, tokens: NDArray[np.int32], spans: Sequence[Span], row_id: str) -> None:
        self.tokens.append(tokens)
        self.spans += spans
        self.span_counts.append(len(spans))
        self.row_ids.append(row_id)

    def build(self) -> ResponseDataset:
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
    """Loads response files, folders of them and globs.

    `chat` encodes conversations without token ids and checks the prompts of some others.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in given for file in _find_files(str(path))]
    if not files:
        raise UserError("data: name a file of responses")
    parts = [_load_file(file, chat, vocab_size) for file in dict.fromkeys(files)]
    if sum(map(len, parts)) == 0:
        raise UserError(f"{', '.join(map(str, given))}: has no row")
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = [f for f in sorted(path.rglob("*")) if f.name.endswith(SUFFIXES) and f.is_file()]
    elif path.exists():
        found = [path]
    else:
        found = [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]
    if not found:
        raise UserError(f"{name}: no such response file, nor a folder with {' or '.join(SUFFIXES)} files")
    return found


def _concatenate(parts: list[ResponseDataset]) -> ResponseDataset:
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


def _load_file(path: Path, chat: ChatFormat | None, vocab_size: int | None) -> ResponseDataset:
    try:
        stat = path.stat()
        key = json.dumps(
            [CACHE_VERSION, stat.st_size, stat.st_mtime_ns, chat.key if chat is not None else None, vocab_size]
        )
        cached = _load_cache(sidecar_path(path, "npz"), key)
        if cached is not None:
            return cached
        builder = _DatasetBuilder()
        for number, line in _lines(path):
            builder.add(*_RowReader(f"{path}:{number}", chat, vocab_size, number).read(line))
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = builder.build()
    _save_cache(sidecar_path(path, "npz"), key, found)
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_jsonl(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


@dataclass(frozen=True)
class _RowReader:
    """Parses and checks one row."""

    location: str  # file:line
    chat: ChatFormat | None
    vocab_size: int | None
    number: int

    def read(self, line: bytes) -> tuple[NDArray[np.int32], list[Span], str]:
        try:
            row = json.loads(line)
            row_id = f"{row.get('id', Path(self.location).name)}#{row.get('sample', 0)}"
        except (ValueError, AttributeError, RecursionError):
            raise UserError(
                f"{self.location}: not a JSON object; delete this line (`peagle data` cuts off incomplete lines)"
            ) from None
        given = row.get("token_ids")
        if given is None:
            ids, spans = self._encode(row)
        else:
            ids, spans = given, row.get("spans")
        try:
            tokens = np.asarray(ids)
            if tokens.ndim != 1 or (len(tokens) and tokens.dtype != np.int64):  # bools, floats, large integers
                raise ValueError
            spans = [(int(start), int(end)) for start, end in spans]
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{self.location}: token_ids must be a list of ids, spans a list of pairs") from None
        self._check(tokens, spans)
        is_sampled = self.number <= PackingSettings.checked_rows or self.number % PackingSettings.checked_every == 0
        if given is not None and self.chat is not None and is_sampled:
            self._check_prompt(row, tokens, spans)
        return tokens.astype(np.int32), spans, row_id

    def _encode(self, row: dict[str, Any]) -> tuple[list[int], list[Span]]:
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise UserError(f"{self.location}: has neither token_ids nor messages with role and content")
        if self.chat is None:
            raise UserError(f"{self.location}: has no token_ids, and there is no tokenizer to encode its messages")
        if not any(m["role"] == "assistant" for m in messages):
            raise UserError(f"{self.location}: has no response; generate one with `peagle data`")
        try:
            return self.chat.encode_with_spans(messages)
        except UserError as error:
            raise UserError(f"{self.location}: {error}") from None

    def _check(self, tokens: NDArray[np.int64], spans: list[Span]) -> None:
        count = len(tokens)
        if not count:
            raise UserError(f"{self.location}: has no token")
        limit = self.vocab_size if self.vocab_size is not None else np.iinfo(np.int32).max
        if tokens.min() < 0 or tokens.max() >= limit:
            wrong = int(tokens.max() if tokens.max() >= limit else tokens.min())
            raise UserError(f"{self.location}: token id {wrong} is outside the vocabulary (0 to {limit - 1})")
        last = 0
        for start, end in spans:
            if not last <= start < end <= count:
                raise UserError(f"{self.location}: span [{start}, {end}] is not within {count} tokens and after {last}")
            last = end
        num_response_tokens = sum(end - start for start, end in spans)
        if num_response_tokens in (0, count):
            problem = "it has no prompt" if num_response_tokens else "it has no response token"
            mask = int(num_response_tokens > 0)
            raise UserError(
                f"{self.location}: {problem}, so its loss mask would be all {mask}: {self._show_text(tokens)}"
            )

    def _check_prompt(self, row: dict[str, Any], tokens: NDArray[np.int64], spans: list[Span]) -> None:
        """Checks that the tokens before the last response are the template's rendering of the messages before it."""
        messages = row.get("messages")
        if self.chat is None or not isinstance(messages, list) or not messages:
            return
        prompt = tokens[: spans[-1][0]].tolist()
        text = self.chat.render(messages[:-1], add_generation_prompt=True)
        if prompt == self.chat.encode([text])[0] or (decoded := self.chat.decode(prompt)) == text:
            return
        at = len(os.path.commonprefix([decoded, text]))
        raise UserError(
            f"{self.location}: the prompt does not round-trip: its tokens decode to {_excerpt(decoded, at)}, "
            f"this target's {self.chat.name} gives {_excerpt(text, at)}; use the target (and "
            "--chat-template FILE or --raw) of the responses"
        )

    def _show_text(self, tokens: NDArray[np.int64]) -> str:
        if self.chat is None:
            return f"token ids {tokens[:32].tolist()}"
        text = self.chat.decode(tokens.tolist())
        return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:200]} ... {text[-200:]}")


def _excerpt(text: str, at: int) -> str:
    return repr(text[max(at - 60, 0) : at + 60])


# The cached arrays of a file


def _load_cache(path: Path, key: str) -> ResponseDataset | None:
    try:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            ids, lengths = kept["row_ids"].tobytes().decode(), kept["row_id_offset_E"].tolist()
            row_ids = tuple(ids[a:b] for a, b in zip(lengths, lengths[1:], strict=False))
            token_T, offset_E = kept["token_T"], kept["offset_E"]
            span_S2, span_offset_E = kept["span_S2"], kept["span_offset_E"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None  # missing or damaged: the file is parsed again
    return ResponseDataset(token_T, offset_E, span_S2, span_offset_E, row_ids, np.arange(len(row_ids)))


def _save_cache(path: Path, key: str, found: ResponseDataset) -> None:
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
    except OSError:  # read-only folder or full disk: parsed again next time
        new.unlink(missing_ok=True)
