"""`peagle bench --engine vllm`: stock vLLM and the embedded engine answer the same load with as many tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pairs
import pytest
from engines import write_tokenizer
from support import set_config

from peagle.bench.run import EngineVariants, run_bench
from peagle.config import BenchEngineSettings, BenchSettings
from peagle.display import ProgressBar
from peagle.results.files import read_results

pytestmark = pytest.mark.vllm
SETTINGS = BenchSettings(concurrency=(1, 4), num_prompts=32, repeats=1, num_warmups=1, max_tokens=24, raw=True)


def test_both_engines_under_one_load(tmp_path: Path) -> None:
    """One file holds both; texts end where they end by themselves, so equal counts mean equal texts."""
    target = tmp_path / "target"
    shutil.copytree(pairs.target_folder(), target)
    write_tokenizer(target, pairs.VOCAB)
    set_config(target, eos_token_id=ord("."))
    text, prompts, out = pairs.TEXT.decode(), tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    prompts.write_text("".join(json.dumps({"prompt": text[i : i + 30 + i % 7]}) + "\n" for i in range(500, 8000, 201)))
    drafters = [str(pairs.drafter_folder(name)) for name in ("p-eagle-1", "eagle3-1")]
    for engine in ("embedded", "vllm"):
        own = BenchEngineSettings("cpu", "float32", max_num_seqs=8, max_model_len=128, kv_cache_memory_bytes=64 << 20)
        asked = EngineVariants(str(target), drafters, [3], True, own, engine)
        workload = asked.build_workload([str(prompts)], SETTINGS)
        results = run_bench(
            asked.build(workload, SETTINGS), workload, SETTINGS, ProgressBar(), out, asked.shared_settings
        )
        assert results.finished
    rows = {(r.engine, r.method, r.concurrency): r.repeats[0] for r in read_results(out).rows}
    assert len(rows) == 12
    for (engine, method, concurrency), ours in rows.items():
        if engine == "embedded":
            theirs = rows["vllm", method, concurrency]
            assert (ours.completed, ours.total_output_tokens, ours.failed) == (32, theirs.total_output_tokens, {})
            assert ours.total_output_tokens < 32 * 24, "no text ended by itself: it would prove little"
            if method != "none":
                assert ours.acceptance_length is not None and theirs.acceptance_length is not None
                assert 1.2 < theirs.acceptance_length <= ours.acceptance_length + 1e-9, "kept ones are fewer"
                assert theirs.acceptance_length > 0.8 * ours.acceptance_length
