"""The training dataset: loads responses as token ids in flat arrays, and packs them into batches.

Reads what `peagle data` writes, and other conversations (`messages` with responses), which are encoded with the chat
template. A row whose loss mask would be all 0 or all 1 is an error. FILE.npz caches the arrays of a file.

E examples with T tokens and S spans in total; example e has tokens offset_E[e] to offset_E[e + 1] and spans
span_offset_E[e] to span_offset_E[e + 1], counted from its own first token:

    [7 8 9] span [1, 3)  and  [4 5] span [0, 1)
    token_T 7 8 9 4 5   offset_E 0 3 5   span_S2 [1 3] [0 1]   span_offset_E 0 1 2

The order of batches is fixed by (seed, epoch). A conversation is never split. One longer than a batch, or than
`max_seq_len`, loses the start of its prompt, then the end of its response. A batch of N tokens and D documents
[7 8 9], whose response is [8 9], and [4 5], whose response is [5]:

    token_ids_N  7 8 9 4 5
    position_N   0 1 2 0 1
    start_N      0 0 0 3 3
    end_N        3 3 3 5 5
    loss_mask_N  . x x . x
"""

import glob
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import BoolTensor, LongTensor

from peagle.config import CHECKED_EVERY, CHECKED_ROWS, OPEN_BATCHES
from peagle.data.chat_format import ChatFormat, Span
from peagle.data.prompts import SUFFIXES, find_jsonl_files, open_jsonl
from peagle.data.response_file import sidecar_path
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device

CACHE_VERSION = 2  # of FILE.npz; increase when reading or checking changes
ARRAYS = ("token_T", "offset_E", "span_S2", "span_offset_E")  # in FILE.npz


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

    def __getitem__(self, index: int) -> TrainingExample:  # type: ignore[override]
        e = int(self.selected[index])
        tokens = self.token_T[self.offset_E[e] : self.offset_E[e + 1]].tolist()
        spans = self.span_S2[self.span_offset_E[e] : self.span_offset_E[e + 1]].tolist()
        return TrainingExample(tuple(tokens), tuple((start, end) for start, end in spans), self.row_ids[e])

    def select(self, selected: NDArray[np.int64]) -> Self:
        return replace(self, selected=selected)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.offset_E[self.selected + 1] - self.offset_E[self.selected]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def split_validation(self, count: int, seed: int = 0) -> tuple[Self, Self]:
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


def _build_dataset(rows: Sequence[tuple[NDArray[np.int32], list[Span], str]]) -> ResponseDataset:
    return ResponseDataset(
        np.concatenate([tokens for tokens, _, _ in rows]) if rows else np.zeros(0, np.int32),
        _offsets([len(tokens) for tokens, _, _ in rows]),
        np.array([span for _, spans, _ in rows for span in spans], np.int32).reshape(-1, 2),
        _offsets([len(spans) for _, spans, _ in rows]),
        tuple(row_id for _, _, row_id in rows),
        np.arange(len(rows)),
    )


def _offsets(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def load_responses(
    paths: str | Path | Sequence[str | Path], chat: ChatFormat | None = None, vocab_size: int | None = None
) -> ResponseDataset:
    """Loads response files, folders of them and globs.

    `chat` encodes conversations without token ids and checks the prompts of some others.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in given for file in _find_files(str(path))]
    parts = [_load_file(file, chat, vocab_size) for file in dict.fromkeys(files)]
    if sum(map(len, parts)) == 0:
        raise UserError(f"{', '.join(map(str, given))}: has no row")
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = find_jsonl_files(path)
    else:
        found = [path] if path.exists() else [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]
    if not found:
        raise UserError(f"{name}: no such response file, nor a folder with {' or '.join(SUFFIXES)} files")
    return found


def _concatenate(parts: list[ResponseDataset]) -> ResponseDataset:
    lengths = np.concatenate([np.diff(p.offset_E) for p in parts])
    counts = np.concatenate([np.diff(p.span_offset_E) for p in parts])
    return ResponseDataset(
        np.concatenate([p.token_T for p in parts]),
        _offsets(lengths),
        np.concatenate([p.span_S2 for p in parts]),
        _offsets(counts),
        tuple(row_id for p in parts for row_id in p.row_ids),
        np.arange(len(lengths)),
    )


# One file


def _load_file(path: Path, chat: ChatFormat | None, vocab_size: int | None) -> ResponseDataset:
    cache, rows = sidecar_path(path, "npz"), list[tuple[NDArray[np.int32], list[Span], str]]()
    try:
        stat, chat_key = path.stat(), chat.key if chat is not None else None
        key = json.dumps([CACHE_VERSION, stat.st_size, stat.st_mtime_ns, chat_key, vocab_size])
        if (cached := _load_cache(cache, key)) is not None:
            return cached
        with open_jsonl(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    is_sampled = number <= CHECKED_ROWS or number % CHECKED_EVERY == 0
                    rows.append(_read_row(line, f"{path.name}:{number}", chat, vocab_size, check_prompt=is_sampled))
    except UserError as error:
        raise UserError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = _build_dataset(rows)
    _save_cache(cache, key, found)
    return found


def _read_row(
    line: bytes, default_id: str, chat: ChatFormat | None, vocab_size: int | None, check_prompt: bool
) -> tuple[NDArray[np.int32], list[Span], str]:
    """The tokens, spans and id of a row, checked."""
    try:
        row = json.loads(line)
        row_id = f"{row.get('id', default_id)}#{row.get('sample', 0)}"
    except (ValueError, AttributeError, RecursionError):
        raise UserError("not a JSON object; delete this line (`peagle data` cuts off incomplete lines)") from None
    given, messages = row.get("token_ids"), row.get("messages")
    ids, spans = _encode(messages, chat) if given is None else (given, row.get("spans"))
    try:
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype != np.int64):  # bools, floats, large integers
            raise ValueError
        spans = [(int(start), int(end)) for start, end in spans]
    except (ValueError, TypeError, OverflowError):
        raise UserError("token_ids must be a list of ids, spans a list of pairs") from None
    _check_tokens(tokens, spans, np.iinfo(np.int32).max if vocab_size is None else vocab_size)
    if check_prompt and given is not None and chat is not None and isinstance(messages, list) and messages:
        _check_prompt(messages[:-1], tokens[: spans[-1][0]].tolist(), chat)
    return tokens.astype(np.int32), spans, row_id


def _encode(messages: Any, chat: ChatFormat | None) -> tuple[list[int], list[Span]]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError("has neither token_ids nor messages with role and content")
    if chat is None:
        raise UserError("has no token_ids, and there is no tokenizer to encode its messages")
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError("has no response; generate one with `peagle data`")
    return chat.encode_with_spans(messages)


def _check_tokens(tokens: NDArray[np.int64], spans: list[Span], vocab_size: int) -> None:
    count, last = len(tokens), 0
    if not count:
        raise UserError("has no token")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise UserError(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
    for start, end in spans:
        if not last <= start < end <= count:
            raise UserError(f"span [{start}, {end}] is not within {count} tokens and after {last}")
        last = end
    num_response_tokens = sum(end - start for start, end in spans)
    if num_response_tokens in (0, count):
        problem = "it has no prompt" if num_response_tokens else "it has no response token"
        raise UserError(f"{problem}, so its loss mask would be all {int(num_response_tokens > 0)}")


def _check_prompt(messages: list[Any], prompt: list[int], chat: ChatFormat) -> None:
    """Checks that `prompt`, the tokens before the last response, is the template's rendering of `messages`."""
    text = chat.render(messages, add_generation_prompt=True)
    if prompt == chat.encode([text])[0] or (decoded := chat.decode(prompt)) == text:
        return
    start = max(len(os.path.commonprefix([decoded, text])) - 60, 0)
    raise UserError(
        f"the prompt does not round-trip: its tokens decode to {decoded[start:]!r:.120}, this target's {chat.name} "
        f"gives {text[start:]!r:.120}; use the target (and --chat-template FILE or --raw) of the responses"
    )


# The cached arrays of a file


def _load_cache(path: Path, key: str) -> ResponseDataset | None:
    try:
        with np.load(path, allow_pickle=False) as cached:
            if str(cached["key"]) != key:
                return None
            row_ids = json.loads(str(cached["row_ids"]))
            arrays = {name: cached[name] for name in ARRAYS}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None  # missing or damaged: the file is parsed again
    return ResponseDataset(**arrays, row_ids=tuple(row_ids), selected=np.arange(len(row_ids)))


def _save_cache(path: Path, key: str, dataset: ResponseDataset) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}.npz")
    arrays = {name: getattr(dataset, name) for name in ARRAYS}
    try:
        np.savez(new, key=np.array(key), row_ids=np.array(json.dumps(dataset.row_ids)), **arrays)
        os.replace(new, path)
    except OSError:  # read-only folder or full disk: parsed again next time
        new.unlink(missing_ok=True)


# Packing


@dataclass(frozen=True)
class PackedBatch:
    token_ids_N: LongTensor
    position_N: LongTensor  # within the document
    start_N: LongTensor  # index of the document's first token
    end_N: LongTensor  # index behind the document's last token
    loss_mask_N: BoolTensor  # True for response tokens
    row_ids: tuple[str, ...]  # of the documents

    def to(self, device: torch.device | str) -> Self:
        names = ("token_ids_N", "position_N", "start_N", "end_N", "loss_mask_N")
        moved: dict[str, Any] = {name: copy_to_device(getattr(self, name), device) for name in names}
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.token_ids_N)


@dataclass(frozen=True)
class BatchCursor:
    """The next batch."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class PackedEpoch(Sequence[PackedBatch]):
    """The batches of an epoch; each is built on access."""

    dataset: ResponseDataset
    begin_E: NDArray[np.int64]  # first kept token
    num_removed_E: NDArray[np.int64]  # tokens removed before it
    length_E: NDArray[np.int64]  # kept tokens
    groups: tuple[NDArray[np.int64], ...]  # examples of each batch

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> PackedBatch:  # type: ignore[override]
        group, dataset = self.groups[index], self.dataset
        length_D = self.length_E[group]
        end_D = np.cumsum(length_D)
        start_D = end_D - length_D
        size = int(end_D[-1])
        index_N = np.arange(size)
        start_N = np.repeat(start_D, length_D)
        token_N = dataset.token_T[np.repeat(self.begin_E[group] - start_D, length_D) + index_N]
        return PackedBatch(
            torch.from_numpy(token_N.astype(np.int64)),  # type: ignore[arg-type]
            torch.from_numpy(index_N - start_N),  # type: ignore[arg-type]
            torch.from_numpy(start_N),  # type: ignore[arg-type]
            torch.from_numpy(np.repeat(end_D, length_D)),  # type: ignore[arg-type]
            torch.from_numpy(self._loss_mask(group, start_D, length_D, size)),  # type: ignore[arg-type]
            tuple(dataset.row_ids[e] for e in group.tolist()),
        )

    def _loss_mask(
        self, group: NDArray[np.int64], start_D: NDArray[np.int64], length_D: NDArray[np.int64], size: int
    ) -> NDArray[np.bool_]:
        """Adds +1 at the start and -1 behind the end of each span, then takes the cumulative sum."""
        spans, offset = self.dataset.span_S2, self.dataset.span_offset_E
        count_D = offset[group + 1] - offset[group]
        which = np.repeat(offset[group] - (np.cumsum(count_D) - count_D), count_D) + np.arange(count_D.sum())
        removed, start, length = (np.repeat(x_D, count_D) for x_D in (self.num_removed_E[group], start_D, length_D))
        steps = np.zeros(size + 1, np.int32)
        for side, sign in ((0, 1), (1, -1)):
            np.add.at(steps, start + np.clip(spans[which, side] - removed, 0, length), sign)
        return np.cumsum(steps[:-1]) > 0


def pack(
    dataset: ResponseDataset, tokens_per_batch: int, seed: int = 0, epoch: int = 0, max_seq_len: int | None = None
) -> PackedEpoch:
    """Packs all examples once into batches of at most `tokens_per_batch` tokens."""
    if not len(dataset):
        raise UserError("data: no example left to train on")
    limit = min(tokens_per_batch, max_seq_len or tokens_per_batch)
    whole_E = np.diff(dataset.offset_E)
    first_span_E = dataset.span_S2[dataset.span_offset_E[:-1], 0]
    num_removed_E = np.minimum(np.maximum(whole_E - limit, 0), first_span_E)
    length_E = np.minimum(whole_E, limit)
    rng = np.random.default_rng([seed, epoch])
    order = dataset.selected[np.argsort(rng.random(len(dataset)), kind="stable")]
    groups = _fill_batches(order, length_E, tokens_per_batch)
    # batches close in an order that depends on lengths, so they are shuffled again
    shuffled = np.argsort(rng.random(len(groups)), kind="stable").tolist()
    ordered = tuple(np.array(groups[i]) for i in shuffled)
    begin_E = dataset.offset_E[:-1] + num_removed_E
    return PackedEpoch(dataset, begin_E, num_removed_E, length_E, ordered)


def _fill_batches(order: NDArray[np.int64], length_E: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Puts each example into the first open batch it fits; when too many are open, closes the fullest."""
    closed: list[list[int]] = []
    opened: list[list[int]] = []
    free: list[int] = []
    for e, length in zip(order.tolist(), length_E[order].tolist(), strict=True):
        for i, num_free in enumerate(free):
            if length <= num_free:
                opened[i].append(e)
                free[i] -= length
                break
        else:
            if len(opened) == OPEN_BATCHES:
                fullest = free.index(min(free))
                closed.append(opened.pop(fullest))
                del free[fullest]
            opened.append([e])
            free.append(capacity - length)
    return closed + opened


def batches(
    dataset: ResponseDataset,
    tokens_per_batch: int,
    seed: int = 0,
    start: BatchCursor | None = None,
    max_seq_len: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[PackedBatch, BatchCursor]]:
    """One rank's batches from `start` on, each with the cursor behind its step, which is the same for every rank.

    All ranks share one endless sequence, epoch after epoch: in each step, rank r of w takes the r-th of the next w
    batches. So no batch is skipped or repeated at the end of an epoch.
    """
    cursor = start or BatchCursor()
    packed = pack(dataset, tokens_per_batch, seed, cursor.epoch, max_seq_len)
    if not 0 <= cursor.batch <= len(packed):
        raise UserError(
            f"batch {cursor.batch} of epoch {cursor.epoch}: the epoch has {len(packed)} batches; the data changed"
        )
    while True:
        own = None
        for turn in range(world_size):
            while cursor.batch >= len(packed):
                cursor = BatchCursor(cursor.epoch + 1)
                packed = pack(dataset, tokens_per_batch, seed, cursor.epoch, max_seq_len)
            if turn == rank:
                own = packed[cursor.batch]
            cursor = BatchCursor(cursor.epoch, cursor.batch + 1)
        assert own is not None
        yield own, cursor
