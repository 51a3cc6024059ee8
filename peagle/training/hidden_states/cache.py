"""The target's states of a whole data set, kept on disk: shards of safetensors, and a manifest that knows them all.

    manifest.json              what was asked of whom, and each shard's rows, size and checksum once it is there
    hidden-states-00000.safetensors     its rows one behind another: hidden [tokens, D] and auxiliary hidden states
    [tokens, X],
    hidden-states-00001.safetensors     in fp8 with their scales: hidden_scale [tokens, 1], aux_hidden_states_scale
    [tokens, auxiliary hidden states]

A shard is written beside its place and moved in, then the manifest is; so whatever ends the process costs the shard in
work. Which rows are in which shard follows from the data, before anything is computed. Shards that are missing, cut or
changed are found by size and checksum, and they alone are made again.

Rows are found by their tokens, so a batch may pack them as it likes, and other data finds nothing. Knows nothing about
how the target is run.

Worked example: rows of 3, 4 and 2 tokens, 10 bytes a token, shards of up to 75 bytes. Rows 0 and 1 make shard 0 (70
bytes; row 2 would make it 90), row 2 makes shard 1. Row 1 is tokens 3 to 7 of shard 0.

Shapes: N tokens of a batch or pass, D target width, X width of the auxiliary hidden states.
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
from peagle.data.batches import PackedBatch, PackedEpoch, pack
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device
from peagle.models.decoder import Decoder
from peagle.training.hidden_states.online import (
    OnlineHiddenStates,
    PackedDocument,
    TargetHiddenStates,
    documents,
    documents_in_order,
    fingerprint,
)

VERSION = 1
MANIFEST = "manifest.json"
HEADER = 1024  # bytes of a shard that are not states, at most
FP8 = torch.float8_e4m3fn
OPEN_SHARDS = 128


def size_text(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


@dataclass(frozen=True)
class CacheKey:
    """What a cache holds. Two that differ in anything have nothing to do with each other."""

    target: str  # fingerprint
    aux_layer_ids: tuple[int, ...]
    width: int  # of the target
    dtype: HiddenStatesDtype
    data: str  # fingerprint of all rows, as they are trained on
    max_length: int
    shard_bytes: int

    @property
    def token_bytes(self) -> int:
        """On disk, of one token: its states, and for fp8 a scale of each."""
        states = 1 + len(self.aux_layer_ids)
        return states * self.width * 2 if self.dtype == "bfloat16" else states * (self.width + 4)


@dataclass(frozen=True)
class CachedDocument:
    id: str
    name: str  # of its tokens
    tokens: int


@dataclass(frozen=True)
class CacheShard:
    file: str
    rows: tuple[CachedDocument, ...]
    bytes: int | None = None  # these two once it is there
    sha256: str | None = None

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


def plan_shards(rows: Sequence[CachedDocument], token_bytes: int, shard_bytes: int) -> list[CacheShard]:
    """Rows in order, as many to a shard as fit; see the example above."""
    groups = _in_groups([row.tokens * token_bytes for row in rows], shard_bytes)
    return [
        CacheShard(f"hidden-states-{i:05d}.safetensors", tuple(rows[begin:end]))
        for i, (begin, end) in enumerate(groups)
    ]


def _in_groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive groups that are as large as the limit allows; one too large is alone."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield begin, i
            begin, total = i, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


# Numbers


def pack_states(states: TargetHiddenStates, dtype: HiddenStatesDtype, num_aux_layers: int) -> dict[str, Tensor]:
    """As a shard holds them. A scale in fp8 is a token's own, and a tap's own: later layers speak louder. It is a power
    of two, so nothing is lost in multiplying with it, in no matter what dtype."""
    if dtype == "bfloat16":
        return {"hidden": states.hidden_ND.bfloat16(), "aux_hidden_states": states.aux_hidden_states_NX.bfloat16()}
    packed = {}
    for name, x, parts in (
        ("hidden", states.hidden_ND, 1),
        ("aux_hidden_states", states.aux_hidden_states_NX, num_aux_layers),
    ):
        wide = x.float().unflatten(1, (parts, -1))
        exponent = torch.frexp(wide.abs().amax(-1) / torch.finfo(FP8).max).exponent.clamp(min=-126)
        scale = torch.ldexp(torch.ones_like(wide[..., 0]), exponent)
        packed[name] = (wide / scale[..., None]).to(FP8).flatten(1)
        packed[f"{name}_scale"] = scale
    return packed


def unpack_states(packed: dict[str, Tensor], dtype: torch.dtype) -> TargetHiddenStates:
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
    kind: CacheKey
    shards: tuple[CacheShard, ...]

    @classmethod
    def read(cls, folder: Path) -> CacheManifest | None:
        """None where there is no cache yet."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        values = read_json(path)
        if values.get("version") != VERSION:
            raise UserError(f"--cache {folder}: made by another version of this format; delete it or name a new folder")
        try:
            kind = CacheKey(**{**values["kind"], "aux_layer_ids": tuple(values["kind"]["aux_layer_ids"])})
            shards = [
                CacheShard(**{**s, "rows": tuple(CachedDocument(*row) for row in s["rows"])}) for s in values["shards"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(
                f"{path}: not the manifest of a cache of hidden states; delete the folder or name another"
            ) from None
        return cls(kind, tuple(shards))

    def write(self, folder: Path) -> None:
        rows = [[[row.id, row.name, row.tokens] for row in shard.rows] for shard in self.shards]
        shards = [
            {"file": shard.file, "rows": own, "bytes": shard.bytes, "sha256": shard.sha256}
            for shard, own in zip(self.shards, rows, strict=True)
        ]
        values = {"version": VERSION, "kind": asdict(self.kind), "shards": shards}
        with _moved_in(folder / MANIFEST) as unfinished:
            unfinished.write_text(json.dumps(values) + "\n", encoding="utf-8")


@contextmanager
def _moved_in(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end takes its place as a whole, and not before it is on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.chmod(0o644)  # safetensors writes for its owner alone
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--cache {path.parent}: cannot write {path.name} ({error}); finished shards stay") from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits for any other process that is at it; the lock ends with the process, however it ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"cache {folder}: waiting for another process that is writing it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sound(folder: Path, shard: CacheShard) -> bool:
    path = folder / shard.file
    try:
        return shard.sha256 is not None and path.stat().st_size == shard.bytes and checksum(path) == shard.sha256
    except OSError:
        return False


# Writing


def prepare_cache(
    folder: Path,
    examples: ResponseDataset,
    online: OnlineHiddenStates,
    max_length: int,
    settings: CacheSettings | None = None,
    say: Callable[[str], None] = print,
) -> HiddenStatesCache:
    """The cache of these examples, cut to `max_length` as batches cut them, made as far as it is not there yet.

    `say` is told what it will take before anything is written.
    """
    settings = settings or CacheSettings()
    packing = pack(examples, max_length)
    rows = [CachedDocument(row.row_id, row.name, len(row.token_ids)) for row in documents_in_order(packing)]
    kind = CacheKey(
        target=fingerprint(online.target),
        aux_layer_ids=online.aux_layer_ids,
        width=online.target.cfg.layer.hidden_size,
        dtype=settings.dtype,
        data=hashlib.sha256("".join(row.name for row in rows).encode()).hexdigest(),
        max_length=max_length,
        shard_bytes=settings.shard_bytes,
    )
    planned = plan_shards(rows, kind.token_bytes, kind.shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache {folder}: cannot be made ({error.strerror})") from None
    with _alone(folder, say):
        manifest = CacheManifest.read(folder)
        if manifest is None:
            if any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"--cache {folder}: holds something else; name a new folder")
            manifest = CacheManifest(kind, tuple(planned))
        _check_same(folder, kind, manifest.kind)
        if [(s.file, s.rows) for s in manifest.shards] != [(s.file, s.rows) for s in planned]:
            raise UserError(f"{folder / MANIFEST}: does not fit its own rows; delete the folder or name another")
        _fill(folder, manifest, packing, online, settings.pass_tokens, say)
    return HiddenStatesCache(folder, online.target)


def _check_same(folder: Path, asked: CacheKey, there: CacheKey) -> None:
    # max_length first: where it differs the data do too, and it is the better explanation
    names = {
        "target": "target",
        "aux layers": "set of auxiliary layers",
        "max_length": "--max-length",
        "data": "set of rows",
    }
    names |= {"dtype": "--cache-dtype", "shard_bytes": "size of shards", "width": "width of the target"}
    for field, name in names.items():
        was, now = getattr(there, field), getattr(asked, field)
        if was != now:
            told = "" if field in ("target", "data") else f" ({was}, now {now})"
            raise UserError(f"--cache {folder}: made with another {name}{told}; name a new folder or delete this one")


def _fill(
    folder: Path,
    manifest: CacheManifest,
    packing: PackedEpoch,
    online: OnlineHiddenStates,
    pass_tokens: int,
    say: Callable[[str], None],
) -> None:
    kind, shards = manifest.kind, list(manifest.shards)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        sound = list(pool.map(lambda shard: is_sound(folder, shard), shards))
    lost = [i for i, ok in enumerate(sound) if not ok]
    if not lost:
        return
    damaged = [shards[i].file for i in lost if shards[i].sha256 is not None]
    if damaged:
        more = " .." if len(damaged) > 4 else ""
        say(f"cache {folder}: damaged or missing, made again: {', '.join(damaged[:4])}{more} ({len(damaged)})")
    for i in lost:
        (folder / shards[i].file).unlink(missing_ok=True)
        shards[i] = replace(shards[i], bytes=None, sha256=None)
    _announce(folder, kind, [shards[i] for i in lost], len(shards), say)
    CacheManifest(kind, tuple(shards)).write(folder)  # from here on the folder is known for what it is
    first = [0]  # row of each shard
    for shard in shards:
        first.append(first[-1] + len(shard.rows))
    for done, i in enumerate(lost, start=1):
        chosen = packing.examples.chosen[first[i] : first[i + 1]]
        passes = _in_groups([row.tokens for row in shards[i].rows], pass_tokens)
        batches = replace(packing, groups=tuple(chosen[begin:end] for begin, end in passes))
        with _moved_in(folder / shards[i].file) as unfinished:
            save_file(_shard_tensors(batches, kind, online), unfinished)
            written = replace(shards[i], bytes=unfinished.stat().st_size, sha256=checksum(unfinished))
        shards[i] = written
        CacheManifest(kind, tuple(shards)).write(folder)
        say(f"cache {folder}: shard {done} of {len(lost)} written")


def _announce(folder: Path, kind: CacheKey, lost: list[CacheShard], shards: int, say: Callable[[str], None]) -> None:
    """Says what will be written, and refuses if there is no room for it."""
    tokens = sum(shard.tokens for shard in lost)
    need, free = tokens * kind.token_bytes + HEADER * len(lost), shutil.disk_usage(folder).free
    rows = sum(len(shard.rows) for shard in lost)
    say(
        f"cache {folder}: {size_text(need)} to write, {size_text(free)} free: {len(lost)} of {shards} shards, "
        f"{rows:,} rows, {tokens:,} tokens of {kind.token_bytes:,} bytes ({kind.dtype})"
    )
    if need > free:
        smaller = "--cache-dtype fp8, " if kind.dtype != "fp8" else ""
        raise UserError(
            f"--cache {folder}: takes {size_text(need)}, the disk has {size_text(free)} free: use {smaller}fewer rows, "
            "another disk, or no cache"
        )


def _shard_tensors(batches: Sequence[PackedBatch], kind: CacheKey, online: OnlineHiddenStates) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, x in pack_states(online.states(batch), kind.dtype, len(kind.aux_layer_ids)).items():
            parts.setdefault(name, []).append(x.cpu())
    return {name: torch.cat(each) for name, each in parts.items()}


# Reading


class HiddenStatesCache:
    """States of any packing of the rows it holds. Shards are mapped, not loaded."""

    def __init__(self, folder: Path, target: Decoder) -> None:
        """`target` says where the states go, and in what dtype."""
        manifest = CacheManifest.read(folder)
        if manifest is None:
            raise UserError(f"--cache {folder}: no {MANIFEST} in it")
        self.folder = folder
        self.device, self.dtype = target.embed_tokens.weight.device, target.embed_tokens.weight.dtype
        self._places: dict[str, tuple[str, slice]] = {}  # file, and which of its tokens, by the name of a row's
        for shard in manifest.shards:
            begin = 0
            for row in shard.rows:
                self._places[row.name] = (shard.file, slice(begin, begin + row.tokens))
                begin += row.tokens
        self._open: OrderedDict[str, Any] = OrderedDict()

    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        parts: dict[str, list[Tensor]] = {}
        for document in documents(batch):
            handle, tokens = self._find(document)
            for name in handle.keys():  # not a dict
                parts.setdefault(name, []).append(handle.get_slice(name)[tokens])
        return unpack_states({name: self._moved(torch.cat(each)) for name, each in parts.items()}, self.dtype)

    def _find(self, document: PackedDocument) -> tuple[Any, slice]:
        found = self._places.get(document.name)
        if found is None:
            raise UserError(
                f"--cache {self.folder}: row {document.row_id!r} is not in it, or with other tokens; "
                "name a new folder for other data"
            )
        file, tokens = found
        return self._opened(file), tokens

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"--cache {self.folder}: cannot read {file} ({error}); start again to redo it"
                ) from None
        self._open.move_to_end(file)
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[file]

    def _moved(self, x: Tensor) -> Tensor:
        return copy_to_device(x, self.device)
