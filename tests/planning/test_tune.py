"""`peagle tune`: what it times, what it keeps, how it goes on, and what it tells vLLM."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pairs import drafter_folder, target_folder

from peagle.cli import main
from peagle.config import TuneSettings
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.planning.tuning import Subject, kept, sweep, untimed, wanted
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, Results, TuneRow
from peagle.speculative.adaptive_k import StepCostTable

TARGET = str(target_folder())
RATES = (0.8, 0.6, 0.5)
CHOICES = [0, 1, 2, 3, 5, 7]


def command(drafter: str, *more: str) -> list[str]:
    ask = ["tune", "-t", TARGET, "-d", str(drafter_folder(drafter)), "--device", "cpu", "--dtype", "float32"]
    return [*ask, "--max-model-len", "96", "--max-num-seqs", "4", "--batches", "1,3", "--repeats", "1", *more]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: exit status, what it printed, what it complained about."""

    def run(drafter: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peagle", *command(drafter, *more)])
        before = torch.get_num_threads()
        with pytest.raises(SystemExit) as ended:
            main()
        torch.set_num_threads(before)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_rows_table_and_vllm_agree(tune: Any, tmp_path: Path) -> None:
    out, results = tmp_path / "costs.json", tmp_path / "tune.json"
    rates = ",".join(map(str, RATES))
    status, printed, _ = tune("p-eagle-1", "--rates", rates, "--out", str(out), "--results", str(results), "--json")
    document = read_results(results)
    assert status == 0 and document.kind == "tune" and document.finished
    assert json.loads(printed)["rows"] == json.loads(results.read_text())["rows"]
    rows: list[TuneRow] = document.rows
    assert [(r.batch_size, r.num_speculative_tokens) for r in rows] == [(b, k) for b in (1, 3) for k in CHOICES]
    # the rates are gone on with at the last step: 0.5 / 0.6 of the one before
    known = [*RATES, *(0.5 * (0.5 / 0.6) ** i for i in range(1, 5))]
    table = StepCostTable.load(out)
    for row in rows:
        speed = row.batch_size * (1 + sum(known[: row.num_speculative_tokens])) / (row.step_ms / 1e3)
        assert row.expected_output_throughput == pytest.approx(speed)
        assert table.seconds[row.batch_size, row.num_speculative_tokens] == pytest.approx(row.step_ms / 1e3, abs=1e-7)
    for batch in (1, 3):
        own = [r for r in rows if r.batch_size == batch]
        best = max(own, key=lambda r: r.expected_output_throughput)
        assert [r.num_speculative_tokens for r in own if r.chosen] == [best.num_speculative_tokens]
        config = document.settings["vllm"][str(batch)]
        model = str(drafter_folder("p-eagle-1"))
        wanted_config = {
            "method": "eagle3",
            "model": model,
            "num_speculative_tokens": best.num_speculative_tokens,
            "parallel_drafting": True,
        }
        assert config == (wanted_config if best.num_speculative_tokens else None)
    llm = LLM(TARGET, drafter_folder("p-eagle-1"), "auto", device="cpu", cost_table=out, max_model_len=96, threads=1)
    assert llm.adaptive_k.table.seconds == table.seconds


def test_the_recommendation_follows_the_load(tune: Any, tmp_path: Path) -> None:
    """From a finished table nothing is timed, so the answer is known: drafts are free for one, dear for three."""
    out = tmp_path / "costs.json"
    subject = {"target": TARGET, "drafter": str(drafter_folder("eagle3-1")), "device": "cpu", "dtype": "float32"}
    costs = {(1, k): 1e-3 for k in (0, 1, 2, 3)} | {(3, k): 1e-3 * (1 + k) for k in (0, 1, 2, 3)}
    StepCostTable(costs).save(out, **subject, context=0)
    status, text, told = tune("eagle3-1", "--rates", "0.9,0.8,0.7", "--out", str(out), "--concurrency", "1,3")
    assert status == 0 and "8 of 8 rounds are in" in told
    assert StepCostTable.load(out).seconds == pytest.approx(costs)
    assert "Most tokens a second: K=3 up to 1 request at once, then no drafts up to 3 requests at once." in text
    line = next(line for line in text.splitlines() if line.startswith("  1 at once: --speculative-config "))
    config = json.loads(shlex.split(line)[-1])
    assert config == {"method": "eagle3", "model": subject["drafter"], "num_speculative_tokens": 3}
    assert "  3 at once: no drafts" in text


def test_it_goes_on_where_it_stopped(tune: Any, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    assert tune("p-eagle-1", "--out", str(out))[0] == 0
    whole = json.loads(out.read_text())
    assert whole["finished"] is True
    old = [
        {**row, "ms": 12345.0}
        for row in whole["steps"]
        if (row["batch_size"], row["num_draft_tokens"]) in ((1, 0), (3, 7))
    ]
    out.write_text(json.dumps({**whole, "steps": old, "finished": False}))
    status, _, told = tune("p-eagle-1", "--out", str(out))
    assert status == 0 and "2 of 12 rounds are in" in told
    seconds = StepCostTable.load(out).seconds
    assert len(seconds) == 12 and [key for key, s in seconds.items() if s == 12.345] == [(1, 0), (3, 7)]
    assert tune("p-eagle-1", "--out", str(out), "--again")[0] == 0
    assert max(StepCostTable.load(out).seconds.values()) < 12
    status, _, told = tune("p-eagle-1", "--out", str(out), "--context", "16")
    assert status == 2 and "is a table for context 0, not 16; name another file, or --again" in told
    status, _, told = tune("p-eagle-4", "--out", str(out))
    assert status == 2 and "is a table for drafter" in told
    out.write_text("{}")
    status, _, told = tune("p-eagle-1", "--out", str(out))
    assert status == 2 and "no table of `peagle tune`" in told and out.read_text() == "{}"


def test_ctrl_c_keeps_the_batches_that_are_done(tmp_path: Path) -> None:
    out, results = tmp_path / "costs.json", tmp_path / "tune.json"
    # the second batch takes for ever, the first is in the table by then
    ask = [sys.executable, "-c", SLOW, *command("p-eagle-1", "--out", str(out), "--results", str(results))]
    hearing = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hearing)
    deadline = time.monotonic() + 120
    while not out.exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.1)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    text, told = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in told
    assert "stopped with 6 rounds to go; the same command goes on" in told and "best K" in text
    assert sorted(StepCostTable.load(out).seconds) == [(1, k) for k in CHOICES]
    assert json.loads(out.read_text())["finished"] is False and read_results(results).finished is False


SLOW = """
import sys, time
from peagle.engine.model_runner import ModelRunner
fast = ModelRunner.round
def slow(self, slots, k):
    if len(slots) > 1:
        time.sleep(60)
    return fast(self, slots, k)
ModelRunner.round = slow
sys.argv[0] = "peagle"
from peagle.cli import main
main()
"""


def test_rounds_have_the_context_behind_them() -> None:
    """Every timed round starts at the context, in blocks that no two requests share."""
    settings = TuneSettings(max_num_seqs=3, max_model_len=96, context=40, repeats=2, batches=(1, 3))
    llm = untimed(TARGET, str(drafter_folder("p-eagle-1")), settings, "cpu", "float32")
    assert wanted(llm, settings) == [(b, k) for b in (1, 3) for k in CHOICES]
    runner, seen = llm.model_runner, []
    original = runner.decode_step

    def watched(slots_B: torch.Tensor, k: int) -> torch.Tensor:
        tables = runner.state.block_tables_SM[slots_B][:, : -(-(40 + k + 1) // BLOCK_SIZE)]
        blocks = tables.flatten().tolist()
        assert 0 not in blocks and len(set(blocks)) == len(blocks)
        seen.append((slots_B.tolist(), k, runner.state.num_computed_tokens_S[slots_B].tolist()))
        return original(slots_B, k)

    table = StepCostTable({(3, 7): 1.0})
    batches: list[int] = []
    with mock.patch.object(runner, "decode_step", watched):
        sweep(runner, wanted(llm, settings), table, settings, done=batches.append)
    turns = [(list(range(b)), k, [40] * b) for b in (1, 3) for _ in range(3) for k in CHOICES if (b, k) != (3, 7)]
    assert seen == turns and batches == [1, 3]
    assert table.seconds.keys() == {(b, k) for b in (1, 3) for k in CHOICES} and table.seconds[3, 7] == 1.0

    tight = LLM(
        TARGET,
        drafter_folder("p-eagle-1"),
        3,
        device="cpu",
        dtype="float32",
        max_num_seqs=3,
        max_model_len=96,
        kv_cache_memory_bytes=9 * 49152,
        threads=1,
    )
    with pytest.raises(UserError, match=r"--context 80: the cache has no room for 3 requests of it; at most \d+"):
        sweep(tight.model_runner, [(3, 1)], StepCostTable(), TuneSettings(max_num_seqs=3, max_model_len=96, context=80))


def test_wrong_input_is_told_before_anything_is_loaded(tune: Any, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    row = AcceptanceRow("d", "eagle3", "embedded", "mt_bench", None, None, 0.0, 2, "included", 5, 300, 100, [70, 50])
    write_results(path, Results("eval", Provenance.collect("test"), {}, [row]))
    with mock.patch("peagle.planning.tuning.untimed", side_effect=AssertionError("loaded")):
        for more, complaint in (
            (("--rates", "0.5,0.6"), "--rates 0.5,0.6: must be between 0 and 1"),
            (("--rates", "0.5", "--eval", str(path)), "--rates and --eval: give one of them"),
            (("--eval", str(tmp_path / "none.json")), "none.json: cannot be read"),
            (("--concurrency", "5"), "--concurrency 5: must be from 1 to --max-num-seqs, 4"),
            (("--context", "96"), "--context 96: must be from 0 to below 96"),
            (("--repeats", "0"), "--repeats 0: must be at least 1"),
            (("--batches", "1,two"), "--batches two: must be a whole number"),
        ):
            status, text, told = tune("p-eagle-1", *more)
            assert status == 2 and complaint in told and not text
    status, _, told = tune("p-eagle-1", "--eval", str(path))
    assert status == 2 and "--eval: holds no rows of p-eagle" in told
    status, text, _ = tune("eagle3-1", "--eval", str(path), "--batches", "1")
    assert status == 0 and re.search(r"for acceptance by position 0\.70, 0\.50, 0\.36$", text, re.M)


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    path, subject = tmp_path / "costs.json", Subject("t", "d", "cpu", "float32", 0)
    assert not kept(path, subject)
    StepCostTable({(1, 0): 1.0}).save(path)  # of the time before tables said what they are of
    with pytest.raises(UserError, match="is a table for target None, not t"):
        kept(path, subject)
