"""Hidden states written by vLLM: a folder of its `extract_hidden_states` method and ExampleHiddenStatesConnector.

    vllm serve TARGET --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": DIR}}'

Each request makes one file, `<request id>.safetensors`: `hidden_states` [tokens, layers, target width], layers in
ascending order, and `token_ids` [tokens] of the prompt. A data row is sent as a prompt of its token ids, truncated as
`pack` truncates it, with one token to generate. With `include_output_tokens` the file has the generated tokens too,
except the last; a row's last token has no label, so that is enough.

Layer id k is the input of layer k, and id L, one past the last layer, the target's output before its final norm, which
the loss needs. Files do not name their layers; they are taken to be the auxiliary layers and L. Checked against 0.32.

Shapes: N tokens of a batch, M tokens of a file, L layers in it, D target width.
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
from peagle.data.batches import PackedBatch, ResponseDataset, pack
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.training.hidden_states.online import (
    PackedDocument,
    TargetHiddenStates,
    documents_in_order,
    split_documents,
    token_hash,
)


def required_layer_ids(target: DecoderConfig, aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The layer ids that vLLM must extract."""
    return tuple(sorted({*aux_layer_ids, target.num_layers}))


class HiddenStatesFiles:
    """Index of a folder: finds the file of a data row by the hash of its tokens."""

    def __init__(self, folder: Path, target: DecoderConfig, aux_layer_ids: Sequence[int], max_seq_len: int) -> None:
        self.folder, self.target, self.max_seq_len = folder, target, max_seq_len
        self.layer_ids = required_layer_ids(target, aux_layer_ids)
        if not folder.is_dir():
            raise UserError(f"--vllm-hidden-states {folder}: no such folder")
        self._file_of: dict[str, Path] = {}
        self._indexed: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Adds new files to the index."""
        for path in sorted(set(self.folder.glob("*.safetensors")) - self._indexed):
            self._file_of[token_hash(self._read_token_ids(path))] = path
            self._indexed.add(path)

    def __len__(self) -> int:
        return len(self._file_of)

    def required_config(self) -> str:
        return f"set eagle_aux_hidden_state_layer_ids to {list(self.layer_ids)} in vLLM"

    def _read_token_ids(self, path: Path) -> NDArray[np.int32]:
        """A file's token ids, after a check of its tensors."""
        try:
            with safe_open(path, framework="pt") as handle:
                missing = {"hidden_states", "token_ids"} - set(handle.keys())
                if missing:
                    raise UserError(f"--vllm-hidden-states {path}: has no {missing.pop()!r}; vLLM did not write it")
                shape = handle.get_slice("hidden_states").get_shape()
                token_ids = handle.get_tensor("token_ids").int().numpy()
        except (SafetensorError, OSError) as error:
            raise UserError(f"--vllm-hidden-states {path}: damaged or unfinished ({error}); delete it") from None
        width = self.target.layer.hidden_size
        if len(shape) != 3 or shape[1] != len(self.layer_ids):
            found = shape[1] if len(shape) == 3 else 0
            raise UserError(
                f"--vllm-hidden-states {path}: has {found} layers, needs {len(self.layer_ids)}; "
                f"{self.required_config()}"
            )
        if shape[2] != width or shape[0] != len(token_ids):
            expected = [len(token_ids), len(self.layer_ids), width]
            raise UserError(f"--vllm-hidden-states {path}: hidden_states has shape {shape}, expected {expected}")
        return token_ids

    def find(self, document: PackedDocument) -> Path | None:
        found = self._file_of.get(document.key)
        return found or self._file_of.get(token_hash(document.token_ids[:-1]))

    def missing(self, dataset: ResponseDataset) -> list[PackedDocument]:
        """The truncated data rows without a file."""
        return [row for row in documents_in_order(pack(dataset, self.max_seq_len)) if self.find(row) is None]


class VllmHiddenStates:
    """Reads the hidden states of a batch from the files of its rows."""

    def __init__(self, folder: Path, target: Decoder, aux_layer_ids: Sequence[int], max_seq_len: int) -> None:
        """Uses only the embeddings and the final norm of the target."""
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)
        self.files = HiddenStatesFiles(folder, target.cfg, aux_layer_ids, max_seq_len)
        if not len(self.files):
            raise UserError(f"--vllm-hidden-states {folder}: has no .safetensors file; {self.files.required_config()}")

    def check(self, dataset: ResponseDataset) -> None:
        """Raises an error if a row has no file, before training starts."""
        missing = self.files.missing(dataset)
        if missing:
            raise self._missing_error(f"{len(missing)} of {len(dataset)} rows have no file, first", missing[0].row_id)

    def _missing_error(self, problem: str, row_id: str) -> UserError:
        return UserError(
            f"--vllm-hidden-states {self.files.folder}: {problem} {row_id!r}; run `peagle hidden-states` with this "
            f"recipe (--max-seq-len {self.files.max_seq_len})"
        )

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        weight = self.target.embed_tokens.weight
        parts = []
        for document in split_documents(batch):
            path = self.files.find(document)
            if path is None:
                raise self._missing_error("no file has the tokens of row", document.row_id)
            parts.append(self._read_states(path, len(document.token_ids)))
        states_NLD = torch.cat(parts)
        if weight.device.type == "cuda":
            states_NLD = states_NLD.pin_memory()
        states_NLD = states_NLD.to(weight.device, weight.dtype, non_blocking=True)
        at = [self.files.layer_ids.index(layer_id) for layer_id in self.aux_layer_ids]
        return TargetHiddenStates(self.target.norm(states_NLD[:, -1].contiguous()), states_NLD[:, at].flatten(1))

    def _read_states(self, path: Path, num_tokens: int) -> Tensor:
        """[num_tokens, L, D]; zeros at the last token if the file ends before it."""
        with safe_open(path, framework="pt") as handle:
            rows: Tensor = handle.get_slice("hidden_states")[:num_tokens]
        if len(rows) < num_tokens:
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        return rows
