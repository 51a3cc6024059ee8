"""Hidden states written by vLLM servers with the `extract_hidden_states` method and ExampleHiddenStatesConnector.

Each request makes one file, `<request id>.safetensors`: `hidden_states` [tokens, layers, target width], layers in
ascending order, and `token_ids` [tokens] of the prompt. A data row is sent as a prompt of its token ids, truncated as
`pack` truncates it, with one token to generate. With `include_output_tokens` the file has the generated tokens too,
except the last; a row's last token has no label, so that is enough.

Layer id k is the input of layer k, and id L, one past the last layer, the target's output before its final norm, which
the loss needs. Files do not name their layers; they are taken to be the auxiliary layers and L. Checked against 0.32.

Shapes: N tokens of a batch, M tokens of a file, L layers in it, D target width.
"""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.config import DecoderConfig, EndpointSettings, SamplingParams
from peagle.data.batches import PackedBatch, ResponseDataset, pack
from peagle.data.generators import EndpointGenerator, GenerationRequest, GenerationResult
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device
from peagle.models.decoder import Decoder
from peagle.training.hidden_states import online
from peagle.training.hidden_states.online import PackedDocument, TargetHiddenStates, token_hash

Report = Callable[[str], None]
REPORT_INTERVAL_S = 10.0
FILE_TIMEOUT_S = 60.0  # until the file of an answered request must exist


class HiddenStatesFiles:
    """Index of a folder: finds the file of a data row by the hash of its tokens."""

    def __init__(self, folder: Path, target: DecoderConfig, aux_layer_ids: Sequence[int], max_seq_len: int) -> None:
        self.folder, self.target, self.max_seq_len = folder, target, max_seq_len
        self.layer_ids = tuple(sorted({*aux_layer_ids, target.num_layers}))  # that vLLM must extract
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

    def _read_token_ids(self, path: Path) -> NDArray[np.int32]:
        """A file's token ids, after a check of its tensors."""
        try:
            with safe_open(path, framework="pt") as handle:
                shape = handle.get_slice("hidden_states").get_shape()
                token_ids = handle.get_tensor("token_ids").int().numpy()
        except (SafetensorError, OSError) as error:
            raise UserError(f"--vllm-hidden-states {path}: unfinished or not of vLLM ({error}); delete it") from None
        expected = [len(token_ids), len(self.layer_ids), self.target.layer.hidden_size]
        if shape != expected:
            raise UserError(
                f"--vllm-hidden-states {path}: hidden_states has shape {shape}, expected {expected}; "
                f"set eagle_aux_hidden_state_layer_ids to {list(self.layer_ids)} in vLLM"
            )
        return token_ids

    def find(self, document: PackedDocument) -> Path | None:
        found = self._file_of.get(document.key)
        return found or self._file_of.get(token_hash(document.token_ids[:-1]))

    def missing(self, dataset: ResponseDataset) -> list[PackedDocument]:
        """The truncated data rows without a file."""
        documents = online.documents_in_order(pack(dataset, self.max_seq_len))
        return [document for document in documents if self.find(document) is None]


class VllmHiddenStates:
    """Reads the hidden states of a batch from the files of its rows."""

    def __init__(self, folder: Path, target: Decoder, aux_layer_ids: Sequence[int], max_seq_len: int) -> None:
        """Uses only the embeddings and the final norm of the target."""
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)
        self.files = HiddenStatesFiles(folder, target.cfg, aux_layer_ids, max_seq_len)

    def check(self, dataset: ResponseDataset) -> None:
        """Raises an error if a row has no file, before training starts."""
        if missing := self.files.missing(dataset):
            raise UserError(
                f"--vllm-hidden-states {self.files.folder}: {len(missing)} of {len(dataset)} rows have no file, first "
                f"{missing[0].row_id!r}; run `peagle hidden-states` with this recipe"
            )

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        weight = self.target.embed_tokens.weight
        parts = []
        for document in online.split_documents(batch):
            path = self.files.find(document)
            assert path is not None, f"no file has the tokens of row {document.row_id!r}"  # see `check`
            num_tokens = len(document.token_ids)
            with safe_open(path, framework="pt") as handle:
                rows: Tensor = handle.get_slice("hidden_states")[:num_tokens]
            # zeros at the last token if the file ends before it
            parts.append(rows if len(rows) == num_tokens else torch.cat([rows, torch.zeros_like(rows[:1])]))
        states_NLD = copy_to_device(torch.cat(parts), weight.device).to(weight.dtype)
        at = [self.files.layer_ids.index(layer_id) for layer_id in self.aux_layer_ids]
        return TargetHiddenStates(self.target.norm(states_NLD[:, -1].contiguous()), states_NLD[:, at].flatten(1))


class PrefillServer(EndpointGenerator):
    """Sends prompts of token ids for prefill; the generated token is ignored."""

    def _generate(self, request: GenerationRequest) -> GenerationResult:
        body = {"model": self.model, "prompt": request.prompt_token_ids, "max_tokens": 1, "temperature": 0.0}
        self._post("/completions", body)
        return GenerationResult(request.request_id, [])


def vllm_serve_command(target: str, files: HiddenStatesFiles) -> str:
    """The command of a vLLM server that writes these hidden states; several may write to one folder."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(files.layer_ids)}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(files.folder.resolve())},
    }
    max_model_len = str(files.max_seq_len + 1)  # the generated token included
    options = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    return shlex.join(["vllm", "serve", target, "--max-model-len", max_model_len, *options])


def request_hidden_states(
    dataset: ResponseDataset, files: HiddenStatesFiles, servers: Sequence[EndpointSettings], report: Report
) -> int:
    """Sends the rows without a file, spread over the servers, and waits for their files. Returns their number."""
    waiting = files.missing(dataset)
    counts = f"{len(dataset) - len(waiting):,} of {len(dataset):,} rows have a file; sending {len(waiting):,}"
    report(f"{files.folder}: {counts}")
    if not waiting:
        return 0
    generators = [PrefillServer(server) for server in servers]
    try:
        _send_rows(waiting, generators, report)
        _wait_for_files(dataset, files, generators)
    finally:
        for generator in generators:
            generator.close()
    return len(waiting)


def _send_rows(rows: list[PackedDocument], generators: list[PrefillServer], report: Report) -> None:
    num_sent = num_done = num_tokens = 0
    started = reported = time.monotonic()
    while num_done < len(rows):
        for generator in generators:
            while num_sent < len(rows) and generator.num_free_slots > 0:
                token_ids = rows[num_sent].token_ids.tolist()
                generator.submit(GenerationRequest(num_sent, (), token_ids, SamplingParams(max_tokens=1)))
                num_sent += 1
        for generator in generators:
            for result in generator.poll():
                row = rows[result.request_id]
                problem = result.rejected and f"{result.rejected}: {result.detail}" or result.error
                if problem:
                    raise UserError(f"--endpoint {generator.settings.url}: row {row.row_id!r} failed ({problem})")
                num_done, num_tokens = num_done + 1, num_tokens + len(row.token_ids)
        if time.monotonic() - reported > REPORT_INTERVAL_S:
            reported = time.monotonic()
            report(f"{num_done:,} of {len(rows):,} rows, {num_tokens / (reported - started):,.0f} tokens/s")


def _wait_for_files(dataset: ResponseDataset, files: HiddenStatesFiles, generators: list[PrefillServer]) -> None:
    """vLLM writes files after it answers, some only in a later step, so this sends short prompts meanwhile."""
    deadline = time.monotonic() + FILE_TIMEOUT_S
    while True:
        try:
            files.refresh()
            missing = files.missing(dataset)
            problem = f"{len(missing)} rows have no file, first {missing[0].row_id!r}" if missing else ""
        except UserError as error:
            problem = str(error)
        if not problem:
            return
        if time.monotonic() > deadline:
            raise UserError(
                f"--vllm-hidden-states {files.folder}: all rows were sent, but {problem}; the servers must write to "
                "this folder on a shared disk"
            )
        for generator in generators:
            generator.submit(GenerationRequest(0, (), [1], SamplingParams(max_tokens=1)))
            generator.poll()
        time.sleep(0.1)
