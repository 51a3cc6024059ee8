"""`peagle tune`: the decode steps that it times, its cost table, resuming, and the vLLM config."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import forks
import pytest
import torch
from pairs import drafter_folder, target_folder

from peagle.cli import main
from peagle.config import TuneSettings
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.planning.tuning import CostTableKey, list_step_kinds, load_cost_table, load_engine, time_decode_steps
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, Results, TuneRow
from peagle.speculative.adaptive_k import StepCostTable

TARGET = str(target_folder())
RATES = (0.8, 0.6, 0.5)
CHOICES = [0, 1, 2, 3, 5, 7]


def tune_args(drafter: str, *more: str) -> list[str]:
    model = ["tune", "-t", TARGET, "-d", str(drafter_folder(drafter)), "--device", "cpu", "--dtype", "float32"]
    return [*model, "--max-model-len", "96", "--max-num-seqs", "4", "--batch-sizes", "1,3", "--repeats", "1", *more]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; returns exit status, standard output and standard error."""

    def run(drafter: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peagle", *tune_args(drafter, *more)])
        num_threads = torch.get_num_threads()
        with pytest.raises(SystemExit) as ended:
            main()
        torch.set_num_threads(num_threads)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_rows_cost_table_and_vllm_config_agree(tune: Any, tmp_path: Path) -> None:
    table_path, out = tmp_path / "costs.json", tmp_path / "tune.json"
    files = ("--cost-table", str(table_path), "--out", str(out))
    status, printed, _ = tune("p-eagle-1", "--acceptance-rates", ",".join(map(str, RATES)), *files, "--json")
    results = read_results(out)
    assert status == 0 and results.kind == "tune" and results.finished
    assert json.loads(printed)["rows"] == json.loads(out.read_text())["rows"]
    rows: list[TuneRow] = results.rows
    assert [(r.batch_size, r.num_speculative_tokens) for r in rows] == [(size, k) for size in (1, 3) for k in CHOICES]
    # past the given rates the last ratio, 0.5 / 0.6, continues
    rates = [*RATES, *(0.5 * (0.5 / 0.6) ** i for i in range(1, 5))]
    table = StepCostTable.load(table_path)
    for row in rows:
        throughput = row.batch_size * (1 + sum(rates[: row.num_speculative_tokens])) / (row.step_ms / 1e3)
        assert row.expected_output_throughput == pytest.approx(throughput)
        assert table.seconds[row.batch_size, row.num_speculative_tokens] == pytest.approx(row.step_ms / 1e3, abs=1e-7)
    for batch_size in (1, 3):
        members = [r for r in rows if r.batch_size == batch_size]
        best = max(members, key=lambda r: r.expected_output_throughput)
        assert [r.num_speculative_tokens for r in members if r.chosen] == [best.num_speculative_tokens]
        expected = {
            "method": "eagle3",
            "model": str(drafter_folder("p-eagle-1")),
            "num_speculative_tokens": best.num_speculative_tokens,
        }
        expected |= {"parallel_drafting": True}
        assert results.settings["vllm"][str(batch_size)] == (expected if best.num_speculative_tokens else None)
    drafter = drafter_folder("p-eagle-1")
    llm = LLM(TARGET, drafter, "auto", device="cpu", cost_table=table_path, max_model_len=96, threads=1)
    assert llm.adaptive_k.table.seconds == table.seconds


def test_the_recommendation_depends_on_the_batch_size(tune: Any, tmp_path: Path) -> None:
    """With a complete table nothing is timed: draft tokens are free at batch size 1 and expensive at 3."""
    path = tmp_path / "costs.json"
    drafter = str(drafter_folder("eagle3-1"))
    costs = {(1, k): 1e-3 for k in (0, 1, 2, 3)} | {(3, k): 1e-3 * (1 + k) for k in (0, 1, 2, 3)}
    StepCostTable(costs).save(path, target=TARGET, drafter=drafter, device="cpu", dtype="float32", context_len=0)
    args = ("--acceptance-rates", "0.9,0.8,0.7", "--cost-table", str(path), "--concurrency", "1,3")
    status, text, log = tune("eagle3-1", *args)
    assert status == 0 and "8 of 8 step kinds" in log
    assert StepCostTable.load(path).seconds == pytest.approx(costs)
    assert "Fastest: K=3 up to batch size 1, then no speculation up to batch size 3." in text
    line = next(line for line in text.splitlines() if line.startswith("  concurrency 1: --speculative-config "))
    config = json.loads(shlex.split(line)[-1])
    assert config == {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    assert "  concurrency 3: no speculation" in text


def test_an_unfinished_table_is_resumed(tune: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert tune("p-eagle-1", "--cost-table", str(path))[0] == 0
    complete = json.loads(path.read_text())
    assert complete["finished"] is True
    table = StepCostTable.load(path)
    marked = StepCostTable(dict.fromkeys(((1, 0), (3, 7)), 12.345))
    about = {name: complete[name] for name in ("target", "drafter", "device", "dtype", "context_len")}
    marked.save(path, **about, finished=False)
    status, _, log = tune("p-eagle-1", "--cost-table", str(path))
    assert status == 0 and "2 of 12 step kinds" in log
    seconds = StepCostTable.load(path).seconds
    assert seconds.keys() == table.seconds.keys()
    assert [kind for kind, s in seconds.items() if s == 12.345] == [(1, 0), (3, 7)]
    assert tune("p-eagle-1", "--cost-table", str(path), "--overwrite")[0] == 0
    assert 12.345 not in StepCostTable.load(path).seconds.values()
    status, _, log = tune("p-eagle-1", "--cost-table", str(path), "--context-len", "16")
    assert status == 2 and "was measured for context_len 0, not 16" in log
    status, _, log = tune("p-eagle-4", "--cost-table", str(path))
    assert status == 2 and "was measured for drafter" in log
    path.write_text("{}")
    status, _, log = tune("p-eagle-1", "--cost-table", str(path))
    assert status == 2 and "is not a cost table" in log and path.read_text() == "{}"


BLOCKED_AT_BATCH_SIZE_3 = """
import pathlib, sys, time
from peagle.planning import tuning
time_step, blocked_file = tuning.time_decode_step, pathlib.Path(sys.argv[-1])
def blocked(runner, batch_size, *more):
    if batch_size > 1:
        blocked_file.touch()
        time.sleep(600)
    return time_step(runner, batch_size, *more)
tuning.time_decode_step = blocked
sys.argv = ["peagle", *sys.argv[1:-1]]
from peagle.cli import main
main()
"""


def test_ctrl_c_keeps_complete_batch_sizes(tmp_path: Path) -> None:
    path, out, blocked = tmp_path / "costs.json", tmp_path / "tune.json", tmp_path / "blocked"
    args = tune_args("p-eagle-1", "--cost-table", str(path), "--out", str(out))
    process = forks.Process("-c", BLOCKED_AT_BATCH_SIZE_3, *args, str(blocked))
    process.wait_until(blocked.exists)
    process.kill(signal.SIGINT)
    status, text, log = process.wait(), process.stdout(), process.stderr()
    assert status == 130 and "Traceback" not in log
    assert "6 step kinds are missing; run the same command to resume" in log and "best K" in text
    assert sorted(StepCostTable.load(path).seconds) == [(1, k) for k in CHOICES]
    assert json.loads(path.read_text())["finished"] is False and read_results(out).finished is False


def test_timed_steps_have_the_context_in_separate_blocks() -> None:
    settings = TuneSettings(max_num_seqs=3, max_model_len=96, context_len=40, repeats=2, batch_sizes=(1, 3))
    llm = load_engine(TARGET, str(drafter_folder("p-eagle-1")), settings, "cpu", "float32")
    step_kinds = list_step_kinds(llm, settings)
    assert step_kinds == [(size, k) for size in (1, 3) for k in CHOICES]
    runner, steps = llm.model_runner, []
    original = runner.decode_step

    def record(slots_B: torch.Tensor, k: int) -> torch.Tensor:
        tables = runner.state.block_tables_SM[slots_B][:, : -(-(40 + k + 1) // BLOCK_SIZE)]
        block_ids = tables.flatten().tolist()
        assert 0 not in block_ids and len(set(block_ids)) == len(block_ids)
        steps.append((slots_B.tolist(), k, runner.state.num_computed_tokens_S[slots_B].tolist()))
        return original(slots_B, k)

    table = StepCostTable({(3, 7): 1.0})
    with mock.patch.object(runner, "decode_step", record):
        timed = time_decode_steps(runner, step_kinds, table, settings)
        batch_sizes = [size for size, k in timed if (size, k) in table.seconds]
    expected = [(list(range(b)), k, [40] * b) for b in (1, 3) for _ in range(3) for k in CHOICES if (b, k) != (3, 7)]
    assert steps == expected and batch_sizes == [1, 3]
    assert table.seconds.keys() == set(step_kinds) and table.seconds[3, 7] == 1.0


def test_a_context_beyond_the_kv_cache_is_refused() -> None:
    llm = LLM(
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
    settings = TuneSettings(max_num_seqs=3, max_model_len=96, context_len=80)
    with pytest.raises(UserError, match=r"--context-len 80: .*too small for 3 .*at most \d+"):
        list(time_decode_steps(llm.model_runner, [(3, 1)], StepCostTable(), settings))


def eval_file(path: Path) -> Path:
    row = AcceptanceRow("d", "eagle3", "embedded", "mt_bench", None, None, 0.0, 2, "included", 5, 300, 100, [70, 50])
    write_results(path, Results("eval", Provenance.collect("test"), {}, [row]))
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--acceptance-rates", "0.5,0.6"), "--acceptance-rates 0.5,0.6: must be between 0 and 1"),
        (("--acceptance-rates", "0.5", "--eval", "eval.json"), "--acceptance-rates and --eval: pass only one"),
        (("--eval", "none.json"), "none.json: cannot be read"),
        (("--concurrency", "5"), "--concurrency 5: must be from 1 to --max-num-seqs, 4"),
        (("--context-len", "96"), "--context-len 96: must be from 0 to below 96"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
        (("--batch-sizes", "1,two"), "--batch-sizes two: must be an integer"),
    ],
)
def test_wrong_options_fail_before_the_engine_is_loaded(tune: Any, args: tuple[str, ...], message: str) -> None:
    with mock.patch("peagle.planning.tuning.load_engine", side_effect=AssertionError("loaded")):
        status, text, log = tune("p-eagle-1", *args)
    assert status == 2 and message in log and not text


def test_acceptance_comes_from_eval_results(tune: Any, tmp_path: Path) -> None:
    path = eval_file(tmp_path / "eval.json")
    status, _, log = tune("p-eagle-1", "--eval", str(path))
    assert status == 2 and "has no rows of method p-eagle" in log
    status, text, _ = tune("eagle3-1", "--eval", str(path), "--batch-sizes", "1")
    assert status == 0 and re.search(r"acceptance rates: 0\.70, 0\.50, 0\.36$", text, re.M)


def test_a_table_without_a_key_is_refused(tmp_path: Path) -> None:
    path, key = tmp_path / "costs.json", CostTableKey("t", "d", "cpu", "float32", 0)
    assert not load_cost_table(path, key)
    StepCostTable({(1, 0): 1.0}).save(path)
    with pytest.raises(UserError, match="was measured for target None, not t"):
        load_cost_table(path, key)
