"""Disk cache of the target's hidden states: safetensors shards, and what they belong to.

    key.json                            target, data and settings of the cache
    hidden-states-00000.safetensors     rows one behind another: hidden [tokens, D], aux_hidden_states [tokens, X];
                                        in fp8 also hidden_scale [tokens, 1], aux_hidden_states_scale [tokens, layers]

The assignment of rows to shards follows from the data alone. A shard is written under a temporary name and moved in
place, so a killed process loses at most the shard it was writing; missing or truncated shards are written again. Rows
are found by the hash of their tokens, so any packing of the same data can read the cache.

Worked example: rows of 3, 4 and 2 tokens, 10 bytes per token, shards of up to 75 bytes. Rows 0 and 1 make shard 0 (70
bytes; row 2 would make it 90), row 2 makes shard 1. Row 1 is tokens 3 to 7 of shard 0.

Shapes: N tokens of a batch or forward pass, D target width, X width of the auxiliary hidden states.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.checkpoints.files import read_json, write_json
from peagle.config import CACHE_FORWARD_TOKENS, CACHE_SHARD_BYTES, HiddenStatesDtype
from peagle.data.batches import PackedBatch, ResponseDataset, pack
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device
from peagle.training.hidden_states import online
from peagle.training.hidden_states.online import OnlineHiddenStates, TargetHiddenStates

VERSION = 3  # of the layout above
KEY_FILE = "key.json"
FP8 = torch.float8_e4m3fn
MAX_OPEN_SHARDS = 128


def group_by_size(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
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
    packed = {"hidden": states.hidden_ND, "aux_hidden_states": states.aux_hidden_states_NX}
    for (name, x), num_layers in zip(list(packed.items()), (1, num_aux_layers), strict=True):
        wide = x.float().unflatten(1, (num_layers, -1))
        exponent = torch.frexp(wide.abs().amax(-1) / torch.finfo(FP8).max).exponent.clamp(min=-126)
        scale = torch.ldexp(torch.ones_like(wide[..., 0]), exponent)
        packed |= {name: (wide / scale[..., None]).to(FP8).flatten(1), f"{name}_scale": scale}
    return packed


def dequantize_states(packed: dict[str, Tensor], dtype: torch.dtype) -> TargetHiddenStates:
    whole = {}
    for name in ("hidden", "aux_hidden_states"):
        x, scale = packed[name].to(dtype), packed.get(f"{name}_scale")
        if scale is not None:
            x = (x.unflatten(1, (scale.shape[1], -1)) * scale.to(dtype)[..., None]).flatten(1)
        whole[name] = x
    return TargetHiddenStates(whole["hidden"], whole["aux_hidden_states"])


class HiddenStatesCache:
    """The hidden states of a dataset. `fill` writes them, `states` reads any packing of the rows. Shards are
    memory-mapped."""

    def __init__(
        self,
        folder: Path,
        dataset: ResponseDataset,
        source: OnlineHiddenStates,
        max_seq_len: int,
        dtype: HiddenStatesDtype = "bfloat16",
    ) -> None:
        self.folder, self.source, self.max_seq_len, self.dtype = folder, source, max_seq_len, dtype
        self.flag = f"--hidden-states-cache {folder}"
        num_states, width = 1 + len(source.aux_layer_ids), source.target.cfg.layer.hidden_size
        self.token_bytes = num_states * (2 * width if dtype == "bfloat16" else width + 4)
        self.epoch = pack(dataset, max_seq_len)
        self.documents = list(online.documents_in_order(self.epoch))
        self.num_tokens = [len(document.token_ids) for document in self.documents]
        sizes = [self.token_bytes * num_tokens for num_tokens in self.num_tokens]
        self.shards = list(group_by_size(sizes, CACHE_SHARD_BYTES))  # first and last document
        self._locations: dict[str, tuple[int, slice]] = {}  # document key -> shard and its tokens
        for index, (begin, end) in enumerate(self.shards):
            start = 0
            for document, num_tokens in zip(self.documents[begin:end], self.num_tokens[begin:end], strict=True):
                self._locations[document.key] = (index, slice(start, start + num_tokens))
                start += num_tokens
        self._open_shard = lru_cache(MAX_OPEN_SHARDS)(lambda index: safe_open(self.shard_path(index), framework="pt"))

    def shard_path(self, index: int) -> Path:
        return self.folder / f"hidden-states-{index:05d}.safetensors"

    def fill(self, report: Callable[[str], None] = print) -> None:
        """Writes the shards that are missing. Reports the required space before."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.flag}: cannot be created ({error.strerror})") from None
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process writes, others wait; the lock ends with the process
            self._check_key()
            missing = [i for i in range(len(self.shards)) if not self._is_complete(i)]
            self._check_disk_space(missing, report)
            for num_done, index in enumerate(missing, start=1):
                self._write_shard(index)
                report(f"cache {self.folder}: wrote shard {num_done} of {len(missing)}")

    def _check_key(self) -> None:
        """Refuses a folder that belongs to another target, other data or other settings; marks an empty one."""
        path = self.folder / KEY_FILE
        key = {
            "version of peagle": VERSION,
            "target": online.target_weights_hash(self.source.target),
            "--aux-layer-ids": list(self.source.aux_layer_ids),
            "--max-seq-len": self.max_seq_len,  # before the data, whose hash it changes
            "data": hashlib.sha256("".join(d.key for d in self.documents).encode()).hexdigest(),
            "--hidden-states-dtype": self.dtype,
            "shard size": CACHE_SHARD_BYTES,
        }
        if not path.exists():
            if any(not other.name.startswith(".") for other in self.folder.iterdir()):
                raise UserError(f"{self.flag}: holds other files; name a new folder")
            write_json(key, path)
        found = read_json(path)
        for name, value in key.items():
            if found.get(name) != value:
                raise UserError(f"{self.flag}: written with another {name}; name a new folder or delete it")

    def _is_complete(self, index: int) -> bool:
        with suppress(SafetensorError, OSError), safe_open(self.shard_path(index), framework="pt"):
            return True  # opening a truncated file fails
        return False

    def _check_disk_space(self, missing: list[int], report: Callable[[str], None]) -> None:
        needed = self.token_bytes * sum(sum(self.num_tokens[slice(*self.shards[i])]) for i in missing)
        free = shutil.disk_usage(self.folder).free
        sizes = f"{needed / 1e9:,.2f} GB to write, {free / 1e9:,.2f} GB free"
        if missing:
            report(f"cache {self.folder}: {len(missing)} of {len(self.shards)} shards, {sizes}")
        if needed > free:
            hint = "use --hidden-states-dtype fp8, fewer rows, another disk, or no cache"
            raise UserError(f"{self.flag}: {sizes}; {hint}")

    def _write_shard(self, index: int) -> None:
        begin, end = self.shards[index]
        passes = group_by_size(self.num_tokens[begin:end], CACHE_FORWARD_TOKENS)
        selected = self.epoch.dataset.selected[begin:end]
        parts: dict[str, list[Tensor]] = {}
        for batch in replace(self.epoch, groups=tuple(selected[first:last] for first, last in passes)):
            states = self.source.states(batch)
            for name, x in quantize_states(states, self.dtype, len(self.source.aux_layer_ids)).items():
                parts.setdefault(name, []).append(x.cpu())
        path = self.shard_path(index)
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            save_file({name: torch.cat(each) for name, each in parts.items()}, unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.chmod(0o644)  # safetensors writes with 0600
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise UserError(f"{self.flag}: cannot write {path.name} ({error}); finished shards stay") from None

    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        """On the target's device, in its dtype."""
        weight = self.source.target.embed_tokens.weight
        parts: dict[str, list[Tensor]] = {}
        for document in online.split_documents(batch):
            if document.key not in self._locations:
                problem = f"row {document.row_id!r} is missing or has other tokens"
                raise UserError(f"{self.flag}: {problem}; name a new folder for other data")
            index, tokens = self._locations[document.key]
            try:
                handle = self._open_shard(index)
            except (SafetensorError, OSError) as error:
                path = self.shard_path(index)
                raise UserError(f"{path}: cannot be read ({error}); start again to write it again") from None
            for name in handle.keys():  # not a dict
                parts.setdefault(name, []).append(handle.get_slice(name)[tokens])
        packed = {name: copy_to_device(torch.cat(each), weight.device) for name, each in parts.items()}
        return dequantize_states(packed, weight.dtype)
