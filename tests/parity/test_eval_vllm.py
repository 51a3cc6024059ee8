"""`peagle eval` over the embedded engine, over the reference and over stock vLLM on the CPU: identical counts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pairs
import pytest
from engines import write_tokenizer
from support import set_config

from peagle.config import EvalServerSettings, EvalSettings
from peagle.eval.acceptance import EvalEngine, Evaluation, open_drafters
from peagle.eval.counters import UNEXPLAINED
from peagle.eval.datasets import EvalDataset, open_datasets
from peagle.results.schema import Results

pytestmark = pytest.mark.vllm
EOS = ord(",")
SETTINGS = EvalSettings(num_speculative_tokens=(1, 3, 5), max_tokens=40, max_model_len=192, min_drafts=1)
HERE = EvalEngine("embedded", "cpu", "float32", threads=1)


def small_target(folder: Path) -> Path:
    target = folder / "target"
    shutil.copytree(pairs.target_folder(), target)
    write_tokenizer(target, pairs.VOCAB)
    set_config(target, eos_token_id=EOS)
    return target


def small_data(folder: Path) -> list[EvalDataset]:
    text = pairs.TEXT.decode()
    rows = [
        {"turns": [text[i : i + 24 + i % 5], text[i + 50 : i + 70]], "category": "ab"[i % 2]}
        for i in range(700, 7000, 901)
    ]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_datasets([str(folder / "text.jsonl")])


def test_the_same_counts_from_three_engines(tmp_path: Path) -> None:
    """Two turns, two categories, a P-EAGLE and an EAGLE-3 drafter. A sum over a category is compared, since that is
    what vLLM's counters tell."""
    target, data = small_target(tmp_path), small_data(tmp_path)
    drafters = open_drafters([str(pairs.drafter_folder(n)) for n in ("p-eagle-4-reduced", "eagle3-1")], target)

    found = {}
    for engine in ("embedded", "reference", "vllm"):
        where = EvalEngine(engine, "cpu", "float32", threads=1, concurrency=8)
        results = Evaluation(str(target), drafters, data, SETTINGS, where).run()
        assert not [w for w in results.warnings if UNEXPLAINED in w], results.warnings
        found[engine] = {
            (r.drafter, r.method, r.category, r.num_speculative_tokens): (
                r.num_responses,
                r.num_output_tokens,
                r.num_drafts,
                r.num_accepted_tokens_per_pos,
            )
            for r in results.rows
            if r.context_range is None and r.looping_responses == "included"
        }
    assert found["embedded"] == found["reference"] == found["vllm"]
    whole = {key: counts for key, counts in found["vllm"].items() if key[2] is None}
    assert len(whole) == 6 and len(found["vllm"]) == 18
    assert all(0 < accepted[0] < rounds for _, _, rounds, accepted in whole.values()), "it would prove nothing"


def test_a_vllm_server_tells_the_same(tmp_path: Path) -> None:
    """Over HTTP, from its /metrics; one answer at a time, so that every answer is told apart."""
    target, data = small_target(tmp_path), small_data(tmp_path)
    drafters = open_drafters([str(pairs.drafter_folder("p-eagle-1"))], target)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"method": "eagle3", "model": str(pairs.drafter_folder("p-eagle-1")), "num_speculative_tokens": 3}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "192", "--max-num-seqs", "8"]
    command += ["--speculative-config", json.dumps({**speculative, "parallel_drafting": True})]
    url = f"http://127.0.0.1:{port}"
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until_healthy(url, process, tmp_path / "log")
            where = EvalEngine(url, server=EvalServerSettings(url, concurrency=1))
            settings = replace(SETTINGS, num_speculative_tokens=EvalSettings.num_speculative_tokens)
            theirs = Evaluation(str(target), drafters, data, settings, where).run()
        finally:
            process.terminate()
    ours = Evaluation(str(target), drafters, data, replace(SETTINGS, num_speculative_tokens=(3,)), HERE).run()

    def told(results: Results) -> list[object]:
        rows = [r for r in results.rows if r.context_range is None]
        return [
            (
                r.category,
                r.looping_responses,
                r.num_speculative_tokens,
                r.num_responses,
                r.num_output_tokens,
                r.num_drafts,
                r.num_accepted_tokens_per_pos,
                r.acceptance_length_ci95,
            )
            for r in rows
        ]

    assert told(theirs) == told(ours)
    assert not theirs.warnings, theirs.warnings


def until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 400
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")
