"""Tables of the HTTP comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import make_tables


def row(server: str, which: str, rate: float, **other: Any) -> dict[str, Any]:
    latencies = {"ttft_p99_ms": 20.4, "itl_p99_ms": 10.0, "tpot_p50_ms": 1.5}
    found = {"server": server, "pass": which, "concurrency": 64, "sampling": "greedy", "output_tokens_per_second": rate}
    return found | latencies | other


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    rows = [row("vllm-eagle3-k3", "steady", 1000.0), row("vllm-p-eagle-k7", "steady", 2000.0, itl_p99_ms=30.0)]
    rows += [row("peagle", "steady", 3000.0), row("peagle", "cold", 1500.0)]
    rows += [row("vllm-p-eagle-k7", "steady", 500.0, concurrency=8, sampling="json_schema")]
    rows += [row("peagle", "steady", 9000.0, concurrency=8, sampling="json_schema", error="failed requests")]
    rows += [{key: value for key, value in row("in-process", "steady", 4000.0).items() if not key.endswith("ms")}]
    ready_s = {"vllm-eagle3-k3": 80.0, "vllm-p-eagle-k7": 99.6, "peagle": 40.0, "peagle, second start": 20.0}
    (tmp_path / "h200-http-smollm2.json").write_text(json.dumps({"rows": rows, "ready_s": ready_s}))
    return tmp_path


def test_each_row_has_the_best_vllm(results: Path) -> None:
    lines = make_tables.http_table("smollm2").splitlines()
    steady = "2,000/3,000 **1.50x** | 20/20 | 30/10 | 1.50/1.50 |"
    assert f"| 64 requests, greedy | -/1,500 | {steady}" in lines
    assert not any("JSON schema" in line for line in lines), "peagle did not finish this load"


def test_second_starts_and_shares(results: Path) -> None:
    assert "| SmolLM2-135M with the included drafters | 80 to 100 | 40 | 20 |" in make_tables.http_start_table()
    assert "| 4,000 | 3,000 | **75%** |" in make_tables.http_share_table()


def test_missing_results_leave_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    for name in ("http-llama-8b", "http-smollm2", "http-start", "http-share"):
        assert make_tables.TABLES[name]() == ""
