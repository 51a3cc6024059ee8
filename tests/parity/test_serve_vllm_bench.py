"""`vllm bench serve` against our server reports the engine's own numbers.

Decoding is greedy and K is fixed, so the acceptance equals the engine's exactly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pairs
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.config import SamplingParams
from peagle.engine.llm import LLM
from peagle.server.engine_client import EngineStats
from peagle.server.metrics import ServerMetrics
from scripts.serve_load import serving

pytestmark = pytest.mark.vllm
DRAFTER, K, TOKENS, PROMPTS = "p-eagle-4", 5, 24, 40
FLAGS = ("--dtype", "float32", "--device", "cpu", "-k", str(K), "--max-num-seqs", "8")
BENCH = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [bytes(ids).decode() for ids in pairs.prompts(PROMPTS)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return engines.target().folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(str(folder), str(pairs.drafter_folder(DRAFTER)), FLAGS) as found:
        yield found


def bench(url: str, folder: Path, texts: list[str], into: Path, *flags: str) -> dict[str, Any]:
    data = into / "prompts.json"  # in ShareGPT's form; of the second turn it wants no more than that there is one
    data.write_text(json.dumps([{"conversations": [{"value": text}, {"value": "an answer"}]} for text in texts]))
    words = ["--base-url", url, "--tokenizer", str(folder), "--dataset-name", "sharegpt", "--dataset-path", str(data)]
    words += ["--sharegpt-output-len", str(TOKENS), "--num-prompts", str(len(texts)), "--temperature", "0"]
    words += ["--disable-shuffle", "--max-concurrency", "8", "--disable-tqdm"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"]
    words += ["--result-dir", str(into), "--result-filename", "result.json", *flags]
    asked = subprocess.run([sys.executable, "-c", BENCH, *words], capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stdout[-2000:] + asked.stderr[-4000:]
    return json.loads((into / "result.json").read_text())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_its_numbers_equal_the_engines(url: str, folder: Path, texts: list[str], tmp_path: Path, backend: str) -> None:
    llm = LLM(folder, pairs.drafter_folder(DRAFTER), K, device="cpu", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=TOKENS)
    want = [output.outputs[0] for output in llm.generate(texts, params)]

    flags = ["--backend", backend]
    if backend == "openai-chat":
        flags += ["--endpoint", "/v1/chat/completions"]
    before = scraped(url)
    got = bench(url, folder, texts, tmp_path, *flags)
    after = scraped(url)

    assert (got["completed"], got["failed"]) == (PROMPTS, 0), got["errors"]
    assert got["model_id"] == str(folder)
    assert got["generated_texts"] == [answer.text for answer in want]
    assert got["output_lens"] == [len(answer.token_ids) for answer in want]
    assert got["total_input_tokens"] == sum(len(text) for text in texts)

    drafts = sum(answer.num_drafts for answer in want)
    held = [sum(column) for column in zip(*(answer.num_accepted_tokens_per_pos for answer in want), strict=True)]
    assert (got["spec_decode_num_drafts"], got["spec_decode_accepted_tokens"]) == (drafts, sum(held))
    assert got["spec_decode_draft_tokens"] == llm.num_draft_tokens
    assert got["spec_decode_acceptance_length"] == pytest.approx(1 + sum(held) / drafts)
    assert got["spec_decode_per_position_acceptance_rates"] == pytest.approx([n / drafts for n in held])

    # its clock includes ours
    for theirs, ours in (("ttft", "time_to_first_token"), ("e2el", "e2e_request_latency")):
        seconds, count = (
            after[f"vllm:{ours}_seconds_{part}"] - before[f"vllm:{ours}_seconds_{part}"] for part in ("sum", "count")
        )
        assert count == PROMPTS
        assert got[f"mean_{theirs}_ms"] / 1e3 > seconds / count, theirs


def scraped(url: str) -> dict[str, float]:
    import httpx

    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
    return found


def test_random_prompts(url: str, tmp_path: Path) -> None:
    """With the model and tokenizer from /v1/models."""
    words = ["--backend", "vllm", "--base-url", url, "--dataset-name", "random"]
    words += ["--random-input-len", "16", "--random-output-len", "12", "--num-prompts", "20", "--request-rate", "50"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--disable-tqdm"]
    asked = subprocess.run([sys.executable, "-c", BENCH, *words], capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stdout[-2000:] + asked.stderr[-4000:]
    got = json.loads((tmp_path / "result.json").read_text())
    assert "tokenize unavailable" not in asked.stdout
    assert (got["completed"], got["failed"], got["total_output_tokens"]) == (20, 0, 20 * 12)


def shapes(text: str) -> dict[str, tuple[str, set[str], set[str]]]:
    """Returns type, labels and buckets of every series of vLLM."""
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and not sample.name.endswith("_created"):
                _, labels, bounds = found.setdefault(sample.name, (family.type, set(), set()))
                labels |= set(sample.labels)
                bounds |= {sample.labels["le"]} if "le" in sample.labels else set()
    return found


def test_types_labels_and_buckets_equal_vllms(folder: Path) -> None:
    """Compares vLLM's own stat logger with ours."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    drafter = {"method": "eagle3", "model": str(pairs.drafter_folder(DRAFTER)), "parallel_drafting": True}
    args = EngineArgs(model=str(folder), speculative_config={**drafter, "num_speculative_tokens": K})
    PrometheusStatLogger(args.create_engine_config())
    theirs = shapes(prometheus_client.generate_latest().decode())
    ours = shapes(ServerMetrics("small").render(EngineStats(acceptance_histogram=[0] * (K + 1)))[0].decode())
    assert ours.keys() <= theirs.keys(), ours.keys() - theirs.keys()
    for name, (kind, labels, bounds) in ours.items():
        their_kind, their_labels, their_bounds = theirs[name]
        assert (kind, labels) == (their_kind, their_labels), name
        # theirs of tokens end at the target's context, ours go on
        beyond = bounds - their_bounds if "_tokens_bucket" in name else set()
        assert bounds - beyond == their_bounds and all(float(b) > pairs.TARGET.max_positions for b in beyond), name
