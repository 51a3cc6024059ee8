"""Lets vLLM write the states of a data set: every row goes to a server as a prompt of its token ids.

The servers run `extract_hidden_states` and write where this process sees it too (see `tap_vllm.py`, whose layout this
is). Rows that have a file already are not sent again, so a run that was stopped goes on. Knows HTTP only through
`EndpointGenerator`, and nothing about training.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence

from peagle.config import EndpointSettings, SamplingParams
from peagle.data.dataset import ResponseDataset
from peagle.data.endpoint import EndpointGenerator
from peagle.data.generators import GenerationRequest, GenerationResult
from peagle.errors import UserError
from peagle.training.hidden_states.online import PackedDocument
from peagle.training.hidden_states.vllm_files import HiddenStatesFiles

TOLD_EVERY_S = 10.0
LATE_S = 60.0  # until a file has come that was promised


class PrefillServer(EndpointGenerator):
    """A server that reads a prompt of token ids. What it says to it does not matter."""

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        asked = {"model": self.model, "prompt": request.prompt_token_ids, "max_tokens": 1, "temperature": 0.0}
        self._call("POST", "/completions", asked)
        return GenerationResult(request.request_id, [])


def serve_command(target: str, files: HiddenStatesFiles) -> str:
    """A vLLM that writes what is asked for; several may write to one folder."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(files.layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(files.folder.resolve())},
    }
    longest = str(files.max_length + 1)  # and the token that is said to it
    options = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    return shlex.join(["vllm", "serve", target, "--max-model-len", longest, *options])


def ask_states(
    rows: ResponseDataset, files: HiddenStatesFiles, servers: Sequence[EndpointSettings], say: Callable[[str], None]
) -> int:
    """Sends what has no file yet, to each server as much as it takes; how many rows were sent."""
    waiting = files.absent(rows)
    say(f"{files.folder}: {len(rows) - len(waiting):,} of {len(rows):,} rows are there; {len(waiting):,} are asked for")
    if not waiting:
        return 0
    sources = [PrefillServer(server) for server in servers]
    try:
        _send(waiting, sources, say)
        _await_files(rows, files, sources)
    finally:
        for source in sources:
            source.close()
    return len(waiting)


def _send(waiting: list[PackedDocument], sources: list[PrefillServer], say: Callable[[str], None]) -> None:
    sent = done = tokens = 0
    began = told = time.monotonic()
    while done < len(waiting):
        for source in sources:
            while sent < len(waiting) and source.num_free_slots > 0:
                row = waiting[sent]
                source.submit(GenerationRequest(sent, (), row.token_ids.tolist(), SamplingParams(max_tokens=1)))
                sent += 1
        for source in sources:
            for answer in source.poll():
                row = waiting[answer.request_id]
                why = answer.rejected and f"{answer.rejected}: {answer.detail}" or answer.error
                if why:
                    raise UserError(f"--endpoint {source.settings.url}: row {row.row_id!r} was not read ({why})")
                done, tokens = done + 1, tokens + len(row.token_ids)
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            say(f"{done:,} of {len(waiting):,} rows, {tokens / (told - began):,.0f} tokens/s")


def _await_files(rows: ResponseDataset, files: HiddenStatesFiles, sources: list[PrefillServer]) -> None:
    """Servers write behind their answers, some of it only when they have something else to do."""
    deadline = time.monotonic() + LATE_S
    while True:
        try:
            files.look()
            missing = files.absent(rows)
            why = f"{len(missing)} rows have no file there, the first is {missing[0].row_id!r}" if missing else ""
        except UserError as error:
            why = str(error)
        if not why:
            return
        if time.monotonic() > deadline:
            raise UserError(
                f"--vllm-states {files.folder}: all rows were read, but {why}; the servers must write to this folder, "
                "on a disk that is shared with them"
            )
        for source in sources:
            source.submit(GenerationRequest(0, (), [1], SamplingParams(max_tokens=1)))
            source.poll()
        time.sleep(0.1)
