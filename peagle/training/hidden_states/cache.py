"""Disk cache of the target's hidden states: safetensors shards and a manifest.

    manifest.json                       what the cache belongs to; rows, size and checksum of each shard
    hidden-states-00000.safetensors     rows one behind another: hidden [tokens, D], aux_hidden_states [tokens, X];
                                        in fp8 also hidden_scale [tokens, 1], aux_hidden_states_scale [tokens, layers]

A shard is written under a temporary name and moved in place, then the manifest is; a killed process loses at most the
shard it was writing. The assignment of rows to shards follows from the data alone. Missing, truncated or changed shards
are found by size and checksum, and only they are written again. Rows are found by the hash of their tokens, so any
packing of the same data can read the cache.

Worked example: rows of 3, 4 and 2 tokens, 10 bytes per token, shards of up to 75 bytes. Rows 0 and 1 make shard 0 (70
bytes; row 2 would make it 90), row 2 makes shard 1. Row 1 is tokens 3 to 7 of shard 0.

Shapes: N tokens of a batch or forward pass, D target width, X width of the auxiliary hidden states.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.checkpoints.files import read_json
from peagle.config import CacheSettings, HiddenStatesDtype
from peagle.data.batches import PackedBatch, PackedEpoch, ResponseDataset, pack
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device
from peagle.models.decoder import Decoder
from peagle.training.hidden_states.online import (
    OnlineHiddenStates,
    PackedDocument,
    TargetHiddenStates,
    documents_in_order,
    split_documents,
    target_weights_hash,
)

VERSION = 2
MANIFEST = "manifest.json"
MAX_HEADER_BYTES = 1024  # of a shard
FP8 = torch.float8_e4m3fn
MAX_OPEN_SHARDS = 128


@dataclass(frozen=True)
class CacheKey:
    """What a cache belongs to. A difference in any field makes a cache unusable."""

    target: str  # hash of its weights
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: HiddenStatesDtype
    data: str  # hash of all truncated rows
    max_seq_len: int
    shard_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: its hidden states, and in fp8 one scale for each."""
        states = 1 + len(self.aux_layer_ids)
        return states * self.hidden_size * 2 if self.dtype == "bfloat16" else states * (self.hidden_size + 4)


@dataclass(frozen=True)
class CachedDocument:
    row_id: str
    key: str  # hash of its tokens
    num_tokens: int


@dataclass(frozen=True)
class CacheShard:
    file: str
    documents: tuple[CachedDocument, ...]
    bytes: int | None = None  # None until the shard is written
    sha256: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(document.num_tokens for document in self.documents)


def plan_shards(documents: Sequence[CachedDocument], token_bytes: int, shard_bytes: int) -> list[CacheShard]:
    """Assigns documents to shards in order; see the example above."""
    groups = _group_by_size([document.num_tokens * token_bytes for document in documents], shard_bytes)
    return [
        CacheShard(f"hidden-states-{i:05d}.safetensors", tuple(documents[begin:end]))
        for i, (begin, end) in enumerate(groups)
    ]


def _group_by_size(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive groups up to `limit`; a larger item is a group of its own."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield begin, i
            begin, total = i, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


def quantize_states(states: TargetHiddenStates, dtype: HiddenStatesDtype, num_aux_layers: int) -> dict[str, Tensor]:
    """The tensors of a shard. In fp8 each token and layer has its own scale, a power of two, so scaling is exact."""
    if dtype == "bfloat16":
        return {"hidden": states.hidden_ND.bfloat16(), "aux_hidden_states": states.aux_hidden_states_NX.bfloat16()}
    packed = {}
    for name, x, num_layers in (
        ("hidden", states.hidden_ND, 1),
        ("aux_hidden_states", states.aux_hidden_states_NX, num_aux_layers),
    ):
        wide = x.float().unflatten(1, (num_layers, -1))
        exponent = torch.frexp(wide.abs().amax(-1) / torch.finfo(FP8).max).exponent.clamp(min=-126)
        scale = torch.ldexp(torch.ones_like(wide[..., 0]), exponent)
        packed[name] = (wide / scale[..., None]).to(FP8).flatten(1)
        packed[f"{name}_scale"] = scale
    return packed


def dequantize_states(packed: dict[str, Tensor], dtype: torch.dtype) -> TargetHiddenStates:
    whole = {}
    for name in ("hidden", "aux_hidden_states"):
        x, scale = packed[name].to(dtype), packed.get(f"{name}_scale")
        if scale is not None:
            x = (x.unflatten(1, (scale.shape[1], -1)) * scale.to(dtype)[..., None]).flatten(1)
        whole[name] = x
    return TargetHiddenStates(whole["hidden"], whole["aux_hidden_states"])


# Files


@dataclass(frozen=True)
class CacheManifest:
    key: CacheKey
    shards: tuple[CacheShard, ...]

    @classmethod
    def read(cls, folder: Path) -> CacheManifest | None:
        """None if the folder has no manifest."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        values = read_json(path)
        if values.get("version") != VERSION:
            raise UserError(
                f"--hidden-states-cache {folder}: written by another version of peagle; delete it or name a new folder"
            )
        try:
            key = CacheKey(**{**values["key"], "aux_layer_ids": tuple(values["key"]["aux_layer_ids"])})
            shards = [
                CacheShard(s["file"], tuple(CachedDocument(*d) for d in s["documents"]), s["bytes"], s["sha256"])
                for s in values["shards"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path}: not a manifest of hidden states; delete the folder or name another") from None
        return cls(key, tuple(shards))

    def write(self, folder: Path) -> None:
        shards = [
            {
                "file": shard.file,
                "documents": [[d.row_id, d.key, d.num_tokens] for d in shard.documents],
                "bytes": shard.bytes,
                "sha256": shard.sha256,
            }
            for shard in self.shards
        ]
        values = {"version": VERSION, "key": asdict(self.key), "shards": shards}
        with _replace_atomically(folder / MANIFEST) as unfinished:
            unfinished.write_text(json.dumps(values) + "\n", encoding="utf-8")


@contextmanager
def _replace_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is synced and renamed to `path` at the end."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.chmod(0o644)  # safetensors writes with 0600
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--hidden-states-cache {path.parent}: cannot write {path.name} ({error}); finished shards stay"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _lock(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Waits for other processes that write the cache; the lock ends with the process."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            report(f"cache {folder}: waiting for another process that writes it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(folder: Path, shard: CacheShard) -> bool:
    path = folder / shard.file
    try:
        return shard.sha256 is not None and path.stat().st_size == shard.bytes and file_checksum(path) == shard.sha256
    except OSError:
        return False


# Writing


def prepare_cache(
    folder: Path,
    dataset: ResponseDataset,
    online: OnlineHiddenStates,
    max_seq_len: int,
    settings: CacheSettings | None = None,
    report: Callable[[str], None] = print,
) -> HiddenStatesCache:
    """Opens the cache of a dataset and writes the shards it lacks. Reports the required space before it writes."""
    settings = settings or CacheSettings()
    epoch = pack(dataset, max_seq_len)
    documents = [CachedDocument(d.row_id, d.key, len(d.token_ids)) for d in documents_in_order(epoch)]
    key = CacheKey(
        target=target_weights_hash(online.target),
        aux_layer_ids=online.aux_layer_ids,
        hidden_size=online.target.cfg.layer.hidden_size,
        dtype=settings.dtype,
        data=hashlib.sha256("".join(d.key for d in documents).encode()).hexdigest(),
        max_seq_len=max_seq_len,
        shard_bytes=settings.shard_bytes,
    )
    planned = plan_shards(documents, key.token_bytes, key.shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--hidden-states-cache {folder}: cannot be created ({error.strerror})") from None
    with _lock(folder, report):
        manifest = CacheManifest.read(folder)
        if manifest is None:
            if any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"--hidden-states-cache {folder}: holds other files; name a new folder")
            manifest = CacheManifest(key, tuple(planned))
        _check_same_key(folder, key, manifest.key)
        if [(s.file, s.documents) for s in manifest.shards] != [(s.file, s.documents) for s in planned]:
            raise UserError(f"{folder / MANIFEST}: inconsistent; delete the folder or name another")
        _write_missing_shards(folder, manifest, epoch, online, settings.forward_tokens, report)
    return HiddenStatesCache(folder, online.target)


def _check_same_key(folder: Path, expected: CacheKey, found: CacheKey) -> None:
    # max_seq_len first: it changes the data hash too, and is the better explanation
    names = {"target": "target", "aux_layer_ids": "--aux-layer-ids", "max_seq_len": "--max-seq-len", "data": "data"}
    names |= {"dtype": "--hidden-states-dtype", "shard_bytes": "shard size", "hidden_size": "target width"}
    for field, name in names.items():
        was, now = getattr(found, field), getattr(expected, field)
        if was != now:
            values = "" if field in ("target", "data") else f" ({was}, now {now})"
            raise UserError(
                f"--hidden-states-cache {folder}: written with another {name}{values}; name a new folder or delete it"
            )


def _write_missing_shards(
    folder: Path,
    manifest: CacheManifest,
    epoch: PackedEpoch,
    online: OnlineHiddenStates,
    forward_tokens: int,
    report: Callable[[str], None],
) -> None:
    key, shards = manifest.key, list(manifest.shards)
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        intact = list(pool.map(lambda shard: is_intact(folder, shard), shards))
    missing = [i for i, ok in enumerate(intact) if not ok]
    if not missing:
        return
    damaged = [shards[i].file for i in missing if shards[i].sha256 is not None]
    if damaged:
        more = " .." if len(damaged) > 4 else ""
        report(f"cache {folder}: {len(damaged)} damaged shards are written again: {', '.join(damaged[:4])}{more}")
    for i in missing:
        (folder / shards[i].file).unlink(missing_ok=True)
        shards[i] = replace(shards[i], bytes=None, sha256=None)
    _check_disk_space(folder, key, [shards[i] for i in missing], len(shards), report)
    CacheManifest(key, tuple(shards)).write(folder)  # marks the folder as a cache
    first_document = [0]
    for shard in shards:
        first_document.append(first_document[-1] + len(shard.documents))
    for num_done, i in enumerate(missing, start=1):
        selected = epoch.dataset.selected[first_document[i] : first_document[i + 1]]
        passes = _group_by_size([d.num_tokens for d in shards[i].documents], forward_tokens)
        batches = replace(epoch, groups=tuple(selected[begin:end] for begin, end in passes))
        with _replace_atomically(folder / shards[i].file) as unfinished:
            save_file(_compute_shard(batches, key, online), unfinished)
            size, checksum = unfinished.stat().st_size, file_checksum(unfinished)
        shards[i] = replace(shards[i], bytes=size, sha256=checksum)
        CacheManifest(key, tuple(shards)).write(folder)
        report(f"cache {folder}: wrote shard {num_done} of {len(missing)}")


def _check_disk_space(
    folder: Path, key: CacheKey, missing: list[CacheShard], num_shards: int, report: Callable[[str], None]
) -> None:
    num_tokens = sum(shard.num_tokens for shard in missing)
    needed = num_tokens * key.token_bytes + MAX_HEADER_BYTES * len(missing)
    free = shutil.disk_usage(folder).free
    num_documents = sum(len(shard.documents) for shard in missing)
    report(
        f"cache {folder}: {needed / 1e9:,.2f} GB to write, {free / 1e9:,.2f} GB free: {len(missing)} of {num_shards} "
        f"shards, {num_documents:,} rows, {num_tokens:,} tokens of {key.token_bytes:,} bytes ({key.dtype})"
    )
    if needed > free:
        smaller = "--hidden-states-dtype fp8, " if key.dtype != "fp8" else ""
        raise UserError(
            f"--hidden-states-cache {folder}: needs {needed / 1e9:,.2f} GB, the disk has {free / 1e9:,.2f} GB free: "
            f"use {smaller}fewer rows, another disk, or no cache"
        )


def _compute_shard(batches: Sequence[PackedBatch], key: CacheKey, online: OnlineHiddenStates) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, x in quantize_states(online.states(batch), key.dtype, len(key.aux_layer_ids)).items():
            parts.setdefault(name, []).append(x.cpu())
    return {name: torch.cat(each) for name, each in parts.items()}


# Reading


class HiddenStatesCache:
    """Reads the hidden states of any packing of the cached rows. Shards are memory-mapped."""

    def __init__(self, folder: Path, target: Decoder) -> None:
        """Hidden states go to the target's device, in its dtype."""
        manifest = CacheManifest.read(folder)
        if manifest is None:
            raise UserError(f"--hidden-states-cache {folder}: has no {MANIFEST}")
        self.folder = folder
        self.device, self.dtype = target.embed_tokens.weight.device, target.embed_tokens.weight.dtype
        self._locations: dict[str, tuple[str, slice]] = {}  # document key -> file and its tokens
        for shard in manifest.shards:
            begin = 0
            for document in shard.documents:
                self._locations[document.key] = (shard.file, slice(begin, begin + document.num_tokens))
                begin += document.num_tokens
        self._open_files: OrderedDict[str, Any] = OrderedDict()

    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        parts: dict[str, list[Tensor]] = {}
        for document in split_documents(batch):
            handle, tokens = self._find(document)
            for name in handle.keys():  # not a dict
                parts.setdefault(name, []).append(handle.get_slice(name)[tokens])
        packed = {name: copy_to_device(torch.cat(each), self.device) for name, each in parts.items()}
        return dequantize_states(packed, self.dtype)

    def _find(self, document: PackedDocument) -> tuple[Any, slice]:
        location = self._locations.get(document.key)
        if location is None:
            raise UserError(
                f"--hidden-states-cache {self.folder}: row {document.row_id!r} is missing or has other tokens; "
                "name a new folder for other data"
            )
        file, tokens = location
        return self._open_shard(file), tokens

    def _open_shard(self, file: str) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"--hidden-states-cache {self.folder}: cannot read {file} ({error}); start again to rewrite it"
                ) from None
        self._open_files.move_to_end(file)
        if len(self._open_files) > MAX_OPEN_SHARDS:
            self._open_files.popitem(last=False)
        return self._open_files[file]
