"""States that vLLM kept: a folder written by its `extract_hidden_states` method through ExampleHiddenStatesConnector.

    vllm serve TARGET --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": DIR}}'

Each request makes one file, `<request id>.safetensors`: `hidden_states` [tokens, layers asked for, target width], the
layers in ascending order whatever order they were named in, and `token_ids` [tokens], those of the prompt. So a data
row is sent as a prompt of its token ids, cut as `pack` cuts them (`aux layers.rows_in_order` gives them so), with
one token
to generate. With `include_output_tokens` the generated tokens are there too but the last, which was never read; nobody
is ever asked anything at a row's last token, so that is enough.

vLLM's layer ids are ours: id k is what enters layer k, and id L, one past the last layer, is what leaves the target
before its final norm. That one is needed too: the distributions that drafters learn from are made of it. Files do not
say which layers they hold, only how many; they are taken to be the aux_layer_ids and L.

Knows nothing about running vLLM. Checked against 0.32.

Shapes: N tokens of a batch, M of a file, L layers in it, D target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.config import DecoderConfig
from peagle.data.batches import PackedBatch, pack
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.training.hidden_states.online import (
    PackedDocument,
    TargetHiddenStates,
    documents,
    documents_in_order,
    token_hash,
)


def required_layer_ids(target: Decoder, aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The layer ids that vLLM must be asked for."""
    return state_layers(target.cfg, aux_layer_ids)


def state_layers(target: DecoderConfig, aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*aux_layer_ids, target.num_layers}))


class HiddenStatesFiles:
    """Which file of a folder holds the states of which data row: that of its tokens."""

    def __init__(self, folder: Path, target: DecoderConfig, aux_layer_ids: Sequence[int], max_length: int) -> None:
        """`max_length`: rows of the data are cut to it."""
        self.folder, self.target, self.max_length = folder, target, max_length
        self.layers = state_layers(target, aux_layer_ids)
        if not folder.is_dir():
            raise UserError(f"--vllm-states {folder}: no such folder")
        self._file_of: dict[str, Path] = {}
        self._read: set[Path] = set()
        self.look()

    def look(self) -> None:
        """At files that have come since."""
        for path in sorted(set(self.folder.glob("*.safetensors")) - self._read):
            self._file_of[token_hash(self._checked_tokens(path))] = path
            self._read.add(path)

    def __len__(self) -> int:
        return len(self._file_of)

    def what_to_ask(self) -> str:
        return (
            f"ask vLLM for eagle_aux_hidden_state_layer_ids {list(self.layers)}: the aux_layer_ids, and the final state"
        )

    def _checked_tokens(self, path: Path) -> NDArray[np.int32]:
        """A file's token ids, once its header says that it holds what is needed."""
        try:
            with safe_open(path, framework="pt") as handle:
                missing = {"hidden_states", "token_ids"} - set(handle.keys())
                if missing:
                    raise UserError(f"--vllm-states {path}: no {missing.pop()!r} in it, so not written by vLLM")
                shape = handle.get_slice("hidden_states").get_shape()
                tokens = handle.get_tensor("token_ids").int().numpy()
        except (SafetensorError, OSError) as error:
            raise UserError(f"--vllm-states {path}: damaged or still being written ({error}); delete it") from None
        width = self.target.layer.hidden_size
        if len(shape) != 3 or shape[1] != len(self.layers):
            found = shape[1] if len(shape) == 3 else 0
            raise UserError(
                f"--vllm-states {path}: {found} layers a token, {len(self.layers)} are needed; {self.what_to_ask()}"
            )
        if shape[2] != width or shape[0] != len(tokens):
            raise UserError(
                f"--vllm-states {path}: hidden_states is {shape}, expected [{len(tokens)}, {len(self.layers)}, {width}]"
            )
        return tokens

    def find(self, row: PackedDocument) -> Path | None:
        found = self._file_of.get(row.name)
        return found or self._file_of.get(token_hash(row.token_ids[:-1]))

    def absent(self, examples: ResponseDataset) -> list[PackedDocument]:
        """Rows, as they are trained on, without a file."""
        return [row for row in documents_in_order(pack(examples, self.max_length)) if self.find(row) is None]


class VllmHiddenStates:
    """The states of a batch, from the files of its data rows."""

    def __init__(self, folder: Path, target: Decoder, aux_layer_ids: Sequence[int], max_length: int) -> None:
        """Of the target only its tables are asked for anything."""
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)
        self.files = HiddenStatesFiles(folder, target.cfg, aux_layer_ids, max_length)
        if not len(self.files):
            raise UserError(f"--vllm-states {folder}: no .safetensors in it; {self.files.what_to_ask()}")

    def check(self, examples: ResponseDataset) -> None:
        """Refuses data that has rows without a file, before anything is trained."""
        absent = self.files.absent(examples)
        if absent:
            raise UserError(
                self._absent(absent[0].row_id, f"{len(absent)} of {len(examples)} rows have no file, the first is")
            )

    def _absent(self, row_id: str, what: str) -> str:
        return (
            f"--vllm-states {self.files.folder}: {what} {row_id!r}; `peagle states` sends vLLM its token ids as a "
            f"prompt, cut in front to --max-length {self.files.max_length}"
        )

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        weight = self.target.embed_tokens.weight
        parts = []
        for document in documents(batch):
            path = self.files.find(document)
            if path is None:
                raise UserError(self._absent(document.row_id, "no file has the tokens of row"))
            parts.append(self._read(path, len(document.token_ids)))
        states_NLD = torch.cat(parts)
        if weight.device.type == "cuda":
            states_NLD = states_NLD.pin_memory()
        states_NLD = states_NLD.to(weight.device, weight.dtype, non_blocking=True)
        at = [self.files.layers.index(aux_layer_id) for aux_layer_id in self.aux_layer_ids]
        return TargetHiddenStates(self.target.norm(states_NLD[:, -1].contiguous()), states_NLD[:, at].flatten(1))

    def _read(self, path: Path, length: int) -> Tensor:
        """[length, L, D]; zeros at the last token where the file ends before it."""
        with safe_open(path, framework="pt") as handle:
            rows: Tensor = handle.get_slice("hidden_states")[:length]
        if len(rows) < length:
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        return rows
