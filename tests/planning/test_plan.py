"""`peagle plan`: throughput against measured and published figures, the rows of a plan, memory, and the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forks
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.cli import main
from peagle.config import PlanSettings
from peagle.errors import UserError
from peagle.planning.acceptance import AcceptanceCurve, curve_from_length
from peagle.planning.plan import PlannedDrafter, ServingPlan, assign_acceptance, build_plan, select_engine
from peagle.planning.roofline import EMBEDDED, ENGINES, GPUS, VLLM, Replica, decode_step_seconds, prefill_seconds
from peagle.planning.shapes import ModelShape, load_drafter_shape, load_target_shape
from peagle.results.files import read_results
from peagle.results.schema import PlanRow

H200, B200 = GPUS["h200"], GPUS["b200"]
LLAMA_8B = load_target_shape("llama-3.1-8b")
GPT_OSS = load_target_shape("gpt-oss-20b", kv_cache_bits=8)
RATES = (0.72, 0.52, 0.38, 0.28, 0.21, 0.16, 0.13)
GPT_OSS_RATES = (0.746, 0.534, 0.375, 0.26, 0.179, 0.122, 0.083)
QWEN_RATES = (0.948, 0.866, 0.774, 0.68, 0.589, 0.503, 0.426)

# (model, rates, engine, method, K, concurrency, output tokens/s) measured on one H200 with 256 prompt and output tokens
MEASURED = [
    ("llama-3.1-8b", RATES, "embedded", "none", 0, 1, 245.4),
    ("llama-3.1-8b", RATES, "embedded", "p-eagle", 7, 1, 662.8),
    ("llama-3.1-8b", RATES, "embedded", "p-eagle", 7, 8, 3873.3),
    ("llama-3.1-8b", RATES, "vllm", "none", 0, 1, 208.9),
    ("llama-3.1-8b", RATES, "vllm", "none", 0, 64, 8510.4),
    ("llama-3.1-8b", RATES, "vllm", "p-eagle", 7, 1, 554.5),
    ("llama-3.1-8b", RATES, "vllm", "p-eagle", 3, 64, 10490.1),
    ("llama-3.1-8b", RATES, "vllm", "p-eagle", 5, 64, 9537.0),
    ("llama-3.1-8b", RATES, "vllm", "p-eagle", 7, 64, 8536.0),
    ("llama-3.1-8b", RATES, "vllm", "eagle3", 3, 64, 11260.7),
    ("gpt-oss-20b", GPT_OSS_RATES, "embedded", "none", 0, 1, 492.9),
    ("gpt-oss-20b", GPT_OSS_RATES, "embedded", "none", 0, 8, 2201.0),
    ("gpt-oss-20b", (0.768, 0.568, 0.414), "embedded", "p-eagle", 3, 1, 771.2),
    ("gpt-oss-20b", (0.768, 0.568, 0.414), "embedded", "p-eagle", 3, 8, 3558.4),
    ("gpt-oss-20b", GPT_OSS_RATES, "embedded", "p-eagle", 7, 1, 751.6),
    ("gpt-oss-20b", GPT_OSS_RATES, "embedded", "p-eagle", 7, 8, 3676.1),
    ("gpt-oss-20b", (0.768, 0.568, 0.414), "embedded", "eagle3", 3, 1, 687.7),
    ("gpt-oss-20b", (0.768, 0.568, 0.414), "embedded", "eagle3", 3, 8, 3298.7),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "none", 0, 1, 281.5),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "none", 0, 8, 965.7),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "p-eagle", 7, 1, 627.5),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "p-eagle", 7, 8, 2406.0),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "eagle3", 3, 1, 556.1),
    ("qwen3-coder-30b-a3b", QWEN_RATES, "embedded", "eagle3", 3, 8, 1854.7),
]


def planned(method: str, target: ModelShape, rates: tuple[float, ...] = RATES) -> PlannedDrafter:
    return PlannedDrafter(load_drafter_shape(method, target), AcceptanceCurve(rates, "test"))


@pytest.mark.parametrize(("model", "rates", "engine", "method", "k", "concurrency", "throughput"), MEASURED)
def test_throughput_is_within_15_percent_of_measurements(
    model: str, rates: tuple[float, ...], engine: str, method: str, k: int, concurrency: int, throughput: float
) -> None:
    target = load_target_shape(model)
    drafters = [planned(method, target, rates)] if k else []
    settings = PlanSettings((concurrency,), (k or 1,), num_prompt_tokens=256, num_output_tokens=256)
    row = build_plan(Replica(H200, ENGINES[engine]), target, drafters, settings).fastest(concurrency, method)
    assert row is not None and row.output_throughput == pytest.approx(throughput, rel=0.15)


# The model card of amazon/GPT-OSS-20B-P-EAGLE (H200, MXFP4 weights, fp8 KV cache, vLLM, one request, K=7), and the
# announcement of P-EAGLE in vLLM (B200, GPT-OSS-20B, best K each).
@pytest.mark.parametrize(("acceptance_length", "throughput"), [(3.30, 533), (3.80, 600), (3.44, 536)])
def test_published_figures_are_close(acceptance_length: float, throughput: float) -> None:
    curve = curve_from_length(acceptance_length, 7)
    drafters = [PlannedDrafter(load_drafter_shape(m, GPT_OSS), curve) for m in ("p-eagle", "eagle3")]
    settings = PlanSettings((1, 64), tuple(range(1, 8)), num_prompt_tokens=256, num_output_tokens=1024)
    on_h200 = build_plan(Replica(H200, VLLM), GPT_OSS, drafters, settings)
    row = next(r for r in on_h200.rows if (r.concurrency, r.method, r.num_speculative_tokens) == (1, "p-eagle", 7))
    assert row.output_throughput == pytest.approx(throughput, rel=0.15)

    on_b200 = build_plan(Replica(B200, VLLM), GPT_OSS, drafters, settings)
    assert 2.1 <= ratio(on_b200, 1, "none") <= 4.2
    assert 1.05 <= ratio(on_b200, 64, "eagle3") <= 1.25


def ratio(plan: ServingPlan, concurrency: int, other: str) -> float:
    ours, theirs = plan.fastest(concurrency, "p-eagle"), plan.fastest(concurrency, other)
    assert ours is not None and theirs is not None
    return ours.output_throughput / theirs.output_throughput


@many(25)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda r: tuple(sorted(r, reverse=True))),
    st.lists(st.sampled_from([1, 2, 8, 32]), min_size=1, unique=True),
    st.one_of(st.none(), st.floats(10, 1e6)),
    st.integers(0, 2000),
    st.integers(1, 500),
)
def test_rows_follow_from_steps_and_acceptance(
    rates: tuple[float, ...],
    concurrencies: list[int],
    throughput: float | None,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> None:
    replica, drafter = Replica(H200, EMBEDDED), planned("p-eagle", LLAMA_8B, rates)
    settings = PlanSettings(
        tuple(concurrencies),
        (1, 3, 8),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        throughput=throughput,
    )
    plan = build_plan(replica, LLAMA_8B, [drafter], settings)
    assert {(r.concurrency, r.num_speculative_tokens) for r in plan.rows} == {
        (c, k) for c in concurrencies for k in (0, 1, 3, 8)
    }
    known = list(rates) + [0.0] * 8
    step = rates[-1] / (rates[-2] if len(rates) > 1 else 1.0) if rates[-1] else 0.0
    for i in range(len(rates), 8):
        known[i] = known[i - 1] * step
    for row in plan.rows:
        shape = drafter.shape if row.num_speculative_tokens else None
        mean_context_len = num_prompt_tokens + num_output_tokens / 2
        step_s = decode_step_seconds(
            replica, LLAMA_8B, shape, row.num_speculative_tokens, row.concurrency, mean_context_len
        )
        prefill_s = prefill_seconds(replica, LLAMA_8B, shape, num_prompt_tokens, row.concurrency)
        num_steps = (num_output_tokens - (num_prompt_tokens > 0)) / (1 + sum(known[: row.num_speculative_tokens]))
        seconds = num_steps * step_s + row.concurrency * prefill_s
        assert row.output_throughput == pytest.approx(row.concurrency * num_output_tokens / seconds)
        assert row.num_gpus == (math.ceil(throughput / row.output_throughput) if throughput is not None else 1)
        assert row.cost_per_million_tokens == pytest.approx(3.8 / 3600 / row.output_throughput * 1e6)
        same = [r.output_throughput for r in plan.rows if r.concurrency == row.concurrency]
        assert row.chosen == (row.output_throughput == max(same)) or same.count(max(same)) > 1
    assert sum(r.chosen for r in plan.rows) == len(concurrencies)


def test_per_user_throughput_limits_the_concurrency() -> None:
    drafters = [planned(m, LLAMA_8B) for m in ("p-eagle", "eagle3")]
    settings = PlanSettings(PlanSettings.concurrency_search, (1, 3, 7), throughput=20000, per_user_throughput=220)
    plan = build_plan(Replica(H200, EMBEDDED), LLAMA_8B, drafters, settings)
    assert all(r.output_throughput / r.concurrency >= 220 for r in plan.rows)
    best = max(plan.rows, key=lambda r: r.output_throughput)
    baseline = max((r for r in plan.rows if r.method == "none"), key=lambda r: r.output_throughput)
    assert (
        f"K={best.num_speculative_tokens}: {best.num_gpus} h200 at concurrency {best.concurrency}"
        in plan.recommendation
    )
    assert f"no speculation: {baseline.num_gpus} h200" in plan.recommendation and baseline.num_gpus > best.num_gpus
    with pytest.raises(UserError, match=r"--per-user-throughput 5000: .* \d+ \(P-EAGLE with K=7 at concurrency 1\)"):
        build_plan(Replica(H200, EMBEDDED), LLAMA_8B, drafters, replace(settings, per_user_throughput=5000))
    strict = build_plan(Replica(H200, EMBEDDED), LLAMA_8B, drafters, replace(settings, per_user_throughput=300))
    assert "no speculation: does not reach 300" in strict.recommendation


@pytest.mark.parametrize(
    "settings", [PlanSettings((1,)), PlanSettings((64,), num_prompt_tokens=8000), PlanSettings((1, 512))]
)
def test_memory_limits_the_concurrency(settings: PlanSettings) -> None:
    big, h100 = load_target_shape("llama-3.1-70b"), GPUS["h100"]
    drafter = planned("p-eagle", big)

    def fits(size: int) -> tuple[bool, str]:
        try:
            plan = build_plan(Replica(h100, VLLM, size), big, [drafter], settings)
        except UserError as error:
            return False, str(error)
        return plan.concurrencies == sorted(settings.concurrency), " ".join(plan.notes)

    outcomes = {size: fits(size) for size in (1, 2, 4, 8, 16)}
    smallest = next(size for size, (fitting, _) in outcomes.items() if fitting)
    assert smallest > 1
    num_tokens = settings.num_prompt_tokens + settings.num_output_tokens
    weight_bytes = 70.55e9 * 2 + drafter.shape.total_weight_bytes
    request_bytes = big.kv_cache_bytes(num_tokens) + drafter.shape.body.kv_cache_bytes(num_tokens)
    for size, (fitting, message) in outcomes.items():
        free_bytes = size * (80e9 * 0.9 - 3 * 2**30) - weight_bytes
        needed_bytes = max(settings.concurrency) * request_bytes * max(1, size / 8)
        assert fitting == (free_bytes >= needed_bytes) or free_bytes == pytest.approx(needed_bytes, rel=0.05)
        if not fitting and free_bytes > request_bytes:
            assert f"--tensor-parallel-size {smallest}" in message
    assert "--tensor-parallel-size 3: must divide the 64 heads" in fits(3)[1]


def test_auto_selects_the_embedded_engine_where_it_was_measured() -> None:
    assert select_engine("auto", LLAMA_8B, 1) is EMBEDDED
    for shape, size in ((LLAMA_8B, 2), (GPT_OSS, 1), (load_target_shape("qwen3-8b", weight_bits=4), 1)):
        assert select_engine("auto", shape, size) is VLLM
        assert select_engine("embedded", shape, size) is EMBEDDED


def test_a_drafter_without_acceptance_borrows_that_of_the_first() -> None:
    shapes = [load_drafter_shape(m, LLAMA_8B) for m in ("p-eagle", "eagle3")]
    curve = AcceptanceCurve(RATES, "test")
    first, second = assign_acceptance(shapes, [curve, None], 9)
    assert first.acceptance is second.acceptance is curve
    assert all(drafter.acceptance.is_assumed for drafter in assign_acceptance(shapes, [None, None], 9))
    with pytest.raises(UserError, match="--drafter: pass at most one drafter of each method"):
        assign_acceptance([shapes[0], shapes[0]], [curve, curve], 9)


MODEL_ARGS = ("-t", "llama-3.1-8b", "--gpu", "h200", "--concurrency", "1", "8,64")
PLAN_ARGS = (*MODEL_ARGS, "--price", "4", "--acceptance-rates", ",".join(map(str, RATES)))


def test_the_command_prints_tables_and_writes_results(tmp_path: Path) -> None:
    """In a new interpreter, where nothing else may be printed, and in a forked process."""
    printed = subprocess.run([sys.executable, "-m", "peagle", "plan", *PLAN_ARGS], capture_output=True, text=True)
    assert printed.returncode == 0 and printed.stderr == ""
    assert "P-EAGLE with K=7 at concurrency 1 (2." in printed.stdout and "$4 per GPU and hour" in printed.stdout
    assert "EAGLE-3 is planned with the same acceptance" in printed.stdout
    out = tmp_path / "plan.json"
    as_json = forks.Process("-m", "peagle", "plan", *PLAN_ARGS, "0.6,0.3", "--json", "--out", str(out))
    assert as_json.wait() == 0 and as_json.stderr() == ""
    results = read_results(out)
    assert results.kind == "plan" and json.loads(as_json.stdout())["rows"] == json.loads(out.read_text())["rows"]
    rows: list[PlanRow] = results.rows
    assert {r.num_speculative_tokens for r in rows} == {0, 1, 2, 3, 4, 5, 7} and {r.concurrency for r in rows} == {
        1,
        8,
        64,
    }
    assert results.settings["acceptance_rates"]["eagle3"] == [0.6, 0.3] and not results.warnings


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-t", "llama-3.1-8b"), "--memory-bandwidth, --tflops, --gpu-memory: required"),
        ((*PLAN_ARGS, "--acceptance-length", "3"), "--acceptance-rates and --acceptance-length: pass only one"),
        ((*MODEL_ARGS, "--acceptance-length", "9"), "--acceptance-length 9: must be between 1 and 8"),
        ((*PLAN_ARGS, "--concurrency", "1,x"), "--concurrency x: must be an integer"),
        ((*PLAN_ARGS, "-k", "0"), "-k 0: must be between 1 and 64"),
        ((*PLAN_ARGS, "-d", "eagle3", "eagle3:2"), "--drafter: pass at most one drafter of each method"),
        ((*PLAN_ARGS, "--engine", "sglang"), "--engine sglang: must be"),
        ((*MODEL_ARGS, "--eval", "none.json"), "none.json: cannot be read"),
    ],
)
def test_wrong_options_end_with_one_line(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peagle", "plan", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and message in printed.err and printed.err.count("\n") == 1 and not printed.out
