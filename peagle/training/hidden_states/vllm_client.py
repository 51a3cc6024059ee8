"""Lets vLLM servers write the hidden states of a dataset: sends every row as a prompt of its token ids.

The servers run `extract_hidden_states` and write to a folder this process sees (layout: `vllm_files`). Rows that have a
file are not sent, so a stopped run continues.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence

from peagle.config import EndpointSettings, SamplingParams
from peagle.data.batches import ResponseDataset
from peagle.data.generators import EndpointGenerator, GenerationRequest, GenerationResult
from peagle.errors import UserError
from peagle.training.hidden_states.online import PackedDocument
from peagle.training.hidden_states.vllm_files import HiddenStatesFiles

REPORT_INTERVAL_S = 10.0
FILE_TIMEOUT_S = 60.0  # until the file of an answered request must exist


class PrefillServer(EndpointGenerator):
    """Sends prompts of token ids for prefill; the generated token is ignored."""

    def _generate(self, request: GenerationRequest) -> GenerationResult:
        body = {"model": self.model, "prompt": request.prompt_token_ids, "max_tokens": 1, "temperature": 0.0}
        self._request_json("POST", "/completions", body)
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
    dataset: ResponseDataset,
    files: HiddenStatesFiles,
    servers: Sequence[EndpointSettings],
    report: Callable[[str], None],
) -> int:
    """Sends the rows without a file, spread over the servers, and waits for their files. Returns their number."""
    waiting = files.missing(dataset)
    num_done = len(dataset) - len(waiting)
    report(f"{files.folder}: {num_done:,} of {len(dataset):,} rows have a file; sending {len(waiting):,}")
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


def _send_rows(rows: list[PackedDocument], generators: list[PrefillServer], report: Callable[[str], None]) -> None:
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
