"""`peagle plan`: against rounds measured on an H200, published figures, and parameters counted in real modules."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import TARGET, drafter_folder, load_pair, target_folder
from support import many

from benchmarks.shapes import SHAPES
from peagle.cli import main
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, PlanSettings, RopeConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.planning.curve import Curve, from_length, from_rates, from_results
from peagle.planning.gpus import GPUS, describe_gpu, gpu_by_name
from peagle.planning.plan import Contender, choose_engine, make_plan
from peagle.planning.roofline import EMBEDDED, ENGINES, SHARPNESS, VLLM, Engine, Machine, prompt_seconds, round_seconds
from peagle.planning.shapes import CONFIGS, Shape, drafter_shape, read_shape, target_shape
from peagle.results.files import read_results, write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, PlanRow, Results

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results"
H200, B200 = GPUS["h200"], GPUS["b200"]
RATES = (0.72, 0.52, 0.38, 0.28, 0.21, 0.16, 0.13)  # with which h200-serving.json was measured: 3.40 at K=7
EIGHT = target_shape("llama-3.1-8b")
GPT_OSS = target_shape("gpt-oss-20b", kv_bits=8)


def measured(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / name).read_text())


def near(value: float, wanted: float, share: float) -> bool:
    return abs(value / wanted - 1) <= share


# Against our own measurements


@pytest.mark.parametrize("file", ["h200-round-8b.json", "h200-round-8b-16k.json"])
def test_rounds_of_the_embedded_engine_are_within_15_percent(file: str) -> None:
    drafter = drafter_shape("p-eagle", EIGHT)
    rows = measured(file)["rows"]
    assert rows
    for row in rows:
        said = round_seconds(Machine(H200, EMBEDDED), EIGHT, drafter, row["drafts"], row["batch"], row["context"]) * 1e3
        assert near(said, row["ms"], 0.15), row


SERVED = [
    (EMBEDDED, "peagle/8b-none", "c1", "none", 0),
    (EMBEDDED, "peagle/8b-p7", "c1", "p-eagle", 7),
    (EMBEDDED, "peagle/8b-p7", "c8", "p-eagle", 7),
    (VLLM, "vllm/8b-none", "c1", "none", 0),
    (VLLM, "vllm/8b-none", "c64", "none", 0),
    (VLLM, "vllm/8b-p7", "c1", "p-eagle", 7),
    (VLLM, "vllm/8b-p3", "c64", "p-eagle", 3),
    (VLLM, "vllm/8b-p5", "c64", "p-eagle", 5),
    (VLLM, "vllm/8b-p7", "c64", "p-eagle", 7),
    (VLLM, "vllm/8b-e3", "c64", "eagle3", 3),
]


@pytest.mark.parametrize(("engine", "key", "load", "method", "k"), SERVED, ids=[f"{s[1]}-{s[2]}" for s in SERVED])
def test_served_tokens_are_within_15_percent(engine: Engine, key: str, load: str, method: str, k: int) -> None:
    row = measured("h200-serving.json")["measurements"][key][load]
    contenders = [Contender(drafter_shape(method, EIGHT), Curve(RATES, "synthetic"))] if k else []
    concurrency = row["concurrency"]
    settings = PlanSettings((concurrency,), (k or 1,), prompt_tokens=256, output_tokens=256)
    plan = make_plan(Machine(H200, engine), EIGHT, contenders, settings)
    said = plan.best(concurrency, method)
    # the drawn acceptance differs from run to run, so the figure at equal acceptance counts where there is one
    assert said is not None and near(said.output_throughput, row.get("even_tok_s", row["tok_s"]), 0.15)


FULL = {"gpt-oss-20b": ("none", "p3", "p7", "e3"), "qwen3-coder-30b-a3b": ("none", "p7", "e3")}


@pytest.mark.parametrize("load", ["c1", "c8"])
@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FULL.items() for key in keys])
def test_experts_in_the_embedded_engine_are_within_15_percent(name: str, key: str, load: str) -> None:
    """Up to 64 rows a round. Acceptance was drawn with the rates of benchmarks/shapes.py."""
    row = measured("h200-full-shapes.json")["measurements"][f"peagle/{name}-{key}"][load]
    shape, k = target_shape(name), int(key[1:]) if key != "none" else 0
    method = {"n": "none", "p": "p-eagle", "e": "eagle3"}[key[0]]
    contenders = (
        [Contender(drafter_shape(method, shape), Curve(tuple(SHAPES[name].acceptance_rates(k)), "drawn"))] if k else []
    )
    settings = PlanSettings((row["concurrency"],), (k or 1,), prompt_tokens=256, output_tokens=256)
    said = make_plan(Machine(H200, EMBEDDED), shape, contenders, settings).best(row["concurrency"], method)
    assert said is not None and near(said.output_throughput, row.get("even_tok_s", row["tok_s"]), 0.15)


# Against published figures: amazon/GPT-OSS-20B-P-EAGLE's model card (H200, MXFP4 weights, fp8 cache, vllm bench, one
# request, K=7; a constant is fitted on these three, so they only hold it in place) and the announcement of P-EAGLE in
# vLLM (B200, GPT-OSS-20B, best K each).
CARD = {"MT-Bench": (3.30, 533), "HumanEval": (3.80, 600), "GSM8K": (3.44, 536)}
OVER_NONE, OVER_EAGLE3_ALONE, OVER_EAGLE3_LOADED = (2.1, 4.2), (1.55, 1.69), (1.05, 1.25)


@pytest.mark.parametrize("name", CARD)
def test_published_figures(name: str) -> None:
    length, tokens = CARD[name]
    both = [Contender(drafter_shape(m, GPT_OSS), from_length(length, 7)) for m in ("p-eagle", "eagle3")]
    settings = PlanSettings((1, 64), tuple(range(1, 8)), prompt_tokens=256, output_tokens=1024)
    card = make_plan(Machine(H200, VLLM), GPT_OSS, both, settings)
    said = next(r for r in card.rows if (r.concurrency, r.method, r.num_speculative_tokens) == (1, "p-eagle", 7))
    assert near(said.output_throughput, tokens, 0.15)

    plan = make_plan(Machine(B200, VLLM), GPT_OSS, both, settings)
    alone, loaded = ({m: plan.best(c, m) for m in ("none", "eagle3", "p-eagle")} for c in (1, 64))
    ratio = {
        (load, over): rows["p-eagle"].output_throughput / rows[over].output_throughput
        for load, rows in (("alone", alone), ("loaded", loaded))
        for over in ("none", "eagle3")
    }
    assert OVER_NONE[0] <= ratio["alone", "none"] <= OVER_NONE[1]
    assert OVER_EAGLE3_LOADED[0] <= ratio["loaded", "eagle3"] <= OVER_EAGLE3_LOADED[1]
    # no check of the model but of the docs: a miss that they own up to, in these figures
    assert 1.29 <= ratio["alone", "eagle3"] <= 1.35 < OVER_EAGLE3_ALONE[0]
    assert alone["p-eagle"].num_speculative_tokens == 7 and alone["eagle3"].num_speculative_tokens < 7


# Shapes against real modules


def llama_config(cfg: DecoderConfig) -> dict[str, Any]:
    layer = cfg.layer
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "dtype": "float32",
    }


def matrices(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in {id(p): p for p in module.parameters()}.values() if p.dim() > 1)


@many(12)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(3, 40), st.booleans())
def test_a_dense_target_weighs_what_its_modules_do(
    layers: int, kv_heads: int, groups: int, width: int, vocab: int, tied: bool
) -> None:
    layer = LayerConfig(32 * width, 48 * width, kv_heads * groups, kv_heads, 16)
    cfg = DecoderConfig("llama", vocab, layers, layer, RopeConfig(), 64, tied, (None,) * layers)
    with torch.device("meta"):
        model = Decoder(cfg)
    model.tie_weights()
    shape = read_shape(llama_config(cfg), Path("config.json"), "x", None, None)
    # weights are read as float32, tables as bf16 at most
    tables = shape.head_weights * (1 if tied else 2)
    assert shape.stored_bytes == 4 * (matrices(model) - tables) + 2 * tables


def test_a_drafter_weighs_what_its_modules_do(tmp_path: Path) -> None:
    target, _ = load_pair("p-eagle-4")
    for name in ("p-eagle-4", "eagle3-1"):
        folder = drafter_folder(name)
        drafter = load_pair(name)[1]
        shape = drafter_shape(str(folder), target_shape(str(target_folder())))
        assert shape.method == ("p-eagle" if drafter.cfg.parallel else "eagle3")
        own = {n: p for n, p in drafter.named_parameters() if p.dim() > 1 and n not in ("mask_hidden",)}
        tables = [n for n in own if "embed_tokens" in n or "lm_head" in n]
        assert shape.stored_bytes == 2 * sum(p.numel() for n, p in own.items() if n not in tables)
    layer = TARGET.layer
    cfg = DrafterConfig(160, 160, 3, layer, RopeConfig(), 64, 64, (1, 2, 4), mask_token_id=3)
    with torch.device("meta"):
        model = Drafter(cfg)
    weighs = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2)
    usual = drafter_shape("p-eagle:3", target_shape(str(target_folder())))
    assert usual.stored_bytes == 2 * weighs


def test_known_models_weigh_what_their_checkpoints_do() -> None:
    """Sizes of the safetensors on the hub, in GB."""
    sizes = {"llama-3.1-8b": 16.06, "llama-3.1-70b": 141.1, "qwen3-8b": 16.38, "qwen3-32b": 65.5}
    sizes |= {"qwen3-coder-30b-a3b": 61.1, "gpt-oss-20b": 13.76, "gpt-oss-120b": 65.25, "smollm2-135m": 0.269}
    for name, gigabytes in sizes.items():
        assert near(target_shape(name).stored_bytes / 1e9, gigabytes, 0.005), name
    head = drafter_shape("p-eagle", target_shape("gpt-oss-120b"))
    tables = 2 * head.body.head_weights * 2
    assert near((head.stored_bytes + tables) / 2 / 1e9, 1.7, 0.02)  # amazon/gpt-oss-120b-p-eagle: 1.7 billion


@pytest.mark.parametrize(("experts", "active", "rows"), [(32, 4, 1), (32, 4, 8), (8, 2, 3), (128, 8, 64), (4, 4, 2)])
def test_experts_touched_are_those_of_rows_that_choose_at_random(experts: int, active: int, rows: int) -> None:
    shape = replace(GPT_OSS, experts=experts, active=active)
    draw = random.Random(0)
    tries = [len({e for _ in range(rows) for e in draw.sample(range(experts), active)}) for _ in range(2000)]
    assert near(shape.experts_touched(rows), sum(tries) / len(tries), 0.02)


# The roofline's own laws


def machines() -> st.SearchStrategy[Machine]:
    return st.builds(Machine, st.sampled_from(list(GPUS.values())), st.sampled_from(list(ENGINES.values())), st.just(1))


@many(60)
@given(machines(), st.sampled_from(sorted(CONFIGS)), st.integers(0, 8), st.integers(1, 200), st.integers(1, 20000))
def test_a_round_is_never_shorter_than_its_bounds_and_grows_with_everything(
    machine: Machine, name: str, k: int, requests: int, context: int
) -> None:
    shape = target_shape(name)
    drafter = drafter_shape("p-eagle", shape) if k else None
    took = round_seconds(machine, shape, drafter, k, requests, context)
    gpu, rows = machine.gpu, requests * (k + 1)
    attention = sum(map(shape.attention_weights, range(shape.layers)))
    once = attention * shape.weight_bytes + shape.head_weights * shape.head_bytes
    assert took > once / gpu.bandwidth
    assert took > 2 * rows * (attention + shape.head_weights) / gpu.matrix_rate
    assert took > requests * shape.cached_bytes(context) / gpu.bandwidth
    assert round_seconds(machine, shape, drafter, k, requests + 1, context) >= took
    assert round_seconds(machine, shape, drafter, k, requests, context * 2) >= took
    more = drafter_shape("p-eagle", shape)
    assert round_seconds(machine, shape, more, k + 1, requests, context) >= took
    faster = replace(gpu, bandwidth=2 * gpu.bandwidth, matrix_rate=2 * gpu.matrix_rate)
    assert round_seconds(replace(machine, gpu=faster), shape, drafter, k, requests, context) <= took
    assert prompt_seconds(machine, shape, drafter, context, requests) <= prompt_seconds(
        machine, shape, drafter, context
    )


def test_tensor_parallel_divides_the_work_and_pays_for_the_link() -> None:
    """By hand, for a free engine: no floors, all of bandwidth and rate, so that only the split is left."""
    free = Engine("free", 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    one = round_seconds(Machine(H200, free), EIGHT, None, 0, 4, 1000)
    four = round_seconds(Machine(H200, free, 4), EIGHT, None, 0, 4, 1000)
    reduced = H200.link_s + 2 * 3 / 4 * 4 * 4096 * 2 / H200.link
    gathered = H200.link_s + 3 / 4 * 4 * 128256 * 2 / H200.link
    assert four == pytest.approx(one / 4 + 32 * 2 * reduced + gathered)
    infinite = replace(H200, link=math.inf, link_s=0.0)
    assert round_seconds(Machine(infinite, free, 4), EIGHT, None, 0, 4, 1000) == pytest.approx(one / 4)


# Plans


@many(25)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda r: tuple(sorted(r, reverse=True))),
    st.lists(st.sampled_from([1, 2, 8, 32]), min_size=1, unique=True),
    st.one_of(st.none(), st.floats(10, 1e6)),
    st.integers(0, 2000),
    st.integers(1, 500),
)
def test_rows_follow_from_rounds_and_acceptance(
    rates: tuple[float, ...], loads: list[int], load: float | None, prompt: int, output: int
) -> None:
    machine, drafter = Machine(H200, EMBEDDED), drafter_shape("p-eagle", EIGHT)
    settings = PlanSettings(tuple(loads), (1, 3, 8), prompt_tokens=prompt, output_tokens=output, load=load)
    plan = make_plan(machine, EIGHT, [Contender(drafter, Curve(rates, "given"))], settings)
    assert {(r.concurrency, r.num_speculative_tokens) for r in plan.rows} == {
        (c, k) for c in loads for k in (0, 1, 3, 8)
    }
    known = list(rates) + [0.0] * 8
    step = rates[-1] / (rates[-2] if len(rates) > 1 else 1.0) if rates[-1] else 0.0
    for i in range(len(rates), 8):
        known[i] = known[i - 1] * step
    for row in plan.rows:
        shape = drafter if row.num_speculative_tokens else None
        one = round_seconds(machine, EIGHT, shape, row.num_speculative_tokens, row.concurrency, prompt + output / 2)
        reading = prompt_seconds(machine, EIGHT, shape, prompt, row.concurrency)
        rounds = (output - (prompt > 0)) / (1 + sum(known[: row.num_speculative_tokens]))
        seconds = rounds * one + row.concurrency * reading
        assert row.output_throughput == pytest.approx(row.concurrency * output / seconds)
        assert row.num_gpus == (math.ceil(load / row.output_throughput) if load is not None else 1)
        assert row.cost_per_million_tokens == pytest.approx(3.8 / 3600 / row.output_throughput * 1e6)
        same = [r.output_throughput for r in plan.rows if r.concurrency == row.concurrency]
        assert row.chosen == (row.output_throughput == max(same)) or same.count(max(same)) > 1
    assert sum(r.chosen for r in plan.rows) == len(loads)


def test_what_each_user_gets_decides_the_load() -> None:
    both = [Contender(drafter_shape(m, EIGHT), Curve(RATES, "given")) for m in ("p-eagle", "eagle3")]
    settings = PlanSettings(PlanSettings.searched, (1, 3, 7), load=20000, per_user=220)
    plan = make_plan(Machine(H200, EMBEDDED), EIGHT, both, settings)
    assert all(r.output_throughput / r.concurrency >= 220 for r in plan.rows)
    best = max(plan.rows, key=lambda r: r.output_throughput)
    assert (
        f"Use {best.num_gpus} h200 for 20,000 tokens/s" in plan.recommendation
        and f"K={best.num_speculative_tokens}" in plan.recommendation
    )
    plain = max((r for r in plan.rows if r.method == "none"), key=lambda r: r.output_throughput)
    assert f"no speculation takes {plain.num_gpus}" in plan.recommendation and plain.num_gpus > best.num_gpus
    with pytest.raises(
        UserError, match=r"--per-user 5000: out of reach here; the most is \d+ \(P-EAGLE with K=7, 1 at"
    ):
        make_plan(Machine(H200, EMBEDDED), EIGHT, both, replace(settings, per_user=5000))
    unreached = make_plan(Machine(H200, EMBEDDED), EIGHT, both, replace(settings, per_user=300))
    assert "no speculation does not reach 300" in unreached.recommendation


def test_what_does_not_fit_is_told_with_what_would() -> None:
    big = target_shape("llama-3.1-70b")
    contenders = [Contender(drafter_shape("p-eagle", big), Curve(RATES, "given"))]
    h100 = GPUS["h100"]

    def fits(parts: int, settings: PlanSettings) -> tuple[bool, str]:
        try:
            plan = make_plan(Machine(h100, VLLM, parts), big, contenders, settings)
        except UserError as error:
            return False, str(error)
        return plan.loads == sorted(settings.concurrency), " ".join(plan.notes)

    for settings in (PlanSettings((1,)), PlanSettings((64,), prompt_tokens=8000), PlanSettings((1, 512))):
        said = [(parts, *fits(parts, settings)) for parts in (1, 2, 4, 8, 16)]
        first = next(parts for parts, fitting, _ in said if fitting)
        assert first > 1
        weights = 70.55e9 * 2 + contenders[0].shape.stored_bytes
        each = big.cached_bytes(settings.prompt_tokens + settings.output_tokens)
        each += contenders[0].shape.body.cached_bytes(settings.prompt_tokens + settings.output_tokens)
        for parts, fitting, told in said:
            room = parts * (80e9 * 0.9 - 3 * 2**30) - weights
            needed = max(settings.concurrency) * each * max(1, parts / 8)
            assert fitting == (room >= needed) or near(room, needed, 0.05)
            if not fitting and room > each:
                assert f"--tensor-parallel {first} fits" in told
    assert "--tensor-parallel 3: llama-3.1-70b has 64 heads" in fits(3, PlanSettings())[1]


def test_engines_are_taken_for_what_they_run() -> None:
    assert choose_engine("auto", EIGHT, 1) is EMBEDDED
    for shape, parts in ((EIGHT, 2), (GPT_OSS, 2), (target_shape("qwen3-8b", weight_bits=4), 1)):
        assert choose_engine("auto", shape, parts) is VLLM
        with pytest.raises(UserError, match="--engine embedded: nothing is known"):
            choose_engine("embedded", shape, parts)
    assert choose_engine("auto", GPT_OSS, 1) is VLLM and choose_engine("embedded", GPT_OSS, 1) is EMBEDDED
    plan = make_plan(Machine(H200, EMBEDDED), GPT_OSS, [], PlanSettings((1,)))
    assert any("64 rows" in note for note in plan.notes)


# Acceptance


@many(60)
@given(st.integers(1, 20), st.floats(0, 1))
def test_a_length_becomes_rates_of_that_length(k: int, share: float) -> None:
    length = 1 + share * k
    curve = from_length(length, k)
    assert curve.length(k) == pytest.approx(length, abs=1e-6)
    assert curve.length(k) == pytest.approx(1 + sum(curve.rates))


@pytest.mark.parametrize("rates", ["0.5,0.6", "1.2", "-0.1", "0.5;0.3", "", "nan", "0.9,inf"])
def test_wrong_rates_are_refused_by_name(rates: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--rates {rates}: must be")):
        from_rates(rates)


def acceptance(**changed: Any) -> AcceptanceRow:
    row = AcceptanceRow(
        "d", "p-eagle", "embedded", "mt_bench", None, None, 0.0, 3, "included", 5, 300, 100, [70, 50, 20]
    )
    return replace(row, **changed)


def test_results_of_eval_become_rates(tmp_path: Path) -> None:
    rows = [
        acceptance(num_speculative_tokens=1, num_accepted_tokens_per_pos=[70]),
        acceptance(looping_responses="excluded"),
        acceptance(
            looping_responses="excluded", dataset="gsm8k", num_drafts=300, num_accepted_tokens_per_pos=[270, 150, 90]
        ),
        acceptance(),
        acceptance(temperature=1.0, num_accepted_tokens_per_pos=[1, 1, 1]),
        acceptance(category="maths", looping_responses="excluded", num_accepted_tokens_per_pos=[0, 0, 0]),
        acceptance(context_range=(0, 512), looping_responses="excluded", num_accepted_tokens_per_pos=[0, 0, 0]),
    ]
    path = tmp_path / "eval.json"
    write_results(path, Results("eval", Provenance.collect("test"), {}, rows))
    curve = from_results(path, "p-eagle")
    assert curve is not None and curve.rates == (340 / 400, 200 / 400, 110 / 400)
    assert from_results(path, "eagle3") is None
    plan = PlanRow(1, 0, "none", 1.0, 1.0, 1, None, True)
    write_results(path, Results("plan", Provenance.collect("test"), {}, [plan]))
    with pytest.raises(UserError, match="of kind plan, acceptance is of kind eval"):
        from_results(path, "p-eagle")


# Wrong input


def test_an_unknown_gpu_is_named_with_the_nearest() -> None:
    for wrong, right in (("h20", "h200"), ("H100-SXM", "h100"), ("a100-80gb", "a100-40gb"), ("b2000", "b200")):
        with pytest.raises(UserError, match=f"--gpu {wrong}: not in the table; did you mean {right}"):
            gpu_by_name(wrong)
    assert gpu_by_name("NVIDIA H200") is H200
    with pytest.raises(UserError, match="--matrix-rate, --memory: needed where no --gpu is named"):
        describe_gpu(None, 1.0, None, None, None, None)
    with pytest.raises(UserError, match="--bandwidth 0.0: must be above 0"):
        describe_gpu("h200", 0.0, None, None, None, None)
    own = describe_gpu("h200", 2.0, None, None, None, 1.0)
    assert own == replace(H200, bandwidth=2e12, price=1.0)


BAD_SHAPES: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "cannot be read as JSON"),
    ("[]", "holds no JSON object"),
    ({"hidden_size": None}, "field 'hidden_size' is missing"),
    ({"num_hidden_layers": "many"}, "field 'num_hidden_layers' is 'many'"),
    ({"num_hidden_layers": 10**9}, "expected a size from 1"),
    ({"kv_lora_rank": 512}, "latent attention"),
    ({"num_experts": 4, "num_experts_per_tok": 8}, "a token goes to 8 of 4 experts"),
    ({"layer_types": ["mamba"] * 32, "sliding_window": 128}, "layer type 'mamba' cannot be planned"),
    ({"quantization_config": {"quant_method": "novel"}}, "give --weight-bits"),
    ({"dtype": "float5"}, "dtype 'float5' is not known"),
]


@pytest.mark.parametrize(("changed", "complaint"), BAD_SHAPES)
def test_shapes_that_cannot_be_read_are_named(changed: dict[str, Any] | str, complaint: str, tmp_path: Path) -> None:
    text = changed if isinstance(changed, str) else json.dumps(CONFIGS["llama-3.1-8b"] | changed)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(complaint)) as found:
        target_shape(str(tmp_path))
    assert "config.json" in str(found.value) and "\n" not in str(found.value)


def test_configs_of_other_kinds_are_read(tmp_path: Path) -> None:
    def read(**changed: Any) -> Shape:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | changed))
        return target_shape(str(tmp_path))

    assert read(quantization_config={"quant_method": "fp8"}).weight_bytes == 1
    assert read(quantization_config={"quant_method": "awq", "bits": 4}).weight_bytes == 0.5
    groups = {"config_groups": {"g": {"weights": {"num_bits": 8}}}, "quant_method": "compressed-tensors"}
    assert read(quantization_config=groups).weight_bytes == 1
    nested = {"text_config": CONFIGS["qwen3-8b"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert target_shape(str(tmp_path)) == replace(
        target_shape("qwen3-8b"), name=str(tmp_path), tie_word_embeddings=True
    )
    windows = target_shape("gpt-oss-20b").windows
    assert windows.count(128) == windows.count(None) == 12
    with pytest.raises(UserError, match="--target lama-3.1-8b: .*did you mean llama-3.1-8b"):
        target_shape("lama-3.1-8b")
    with pytest.raises(UserError, match="is a drafter; it goes to --drafter"):
        target_shape(str(drafter_folder("p-eagle-4")))
    with pytest.raises(UserError, match="was made for a target 64 wide, llama-3.1-8b is 4096 wide"):
        drafter_shape(str(drafter_folder("p-eagle-4")), EIGHT)
    with pytest.raises(UserError, match="--drafter p-eagle:x: behind the colon goes a number"):
        drafter_shape("p-eagle:x", EIGHT)


# The command, and the docs


def peagle(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "peagle", "plan", *args], capture_output=True, text=True, timeout=120)


def test_the_command_prints_tables_and_writes_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = (
        "-t",
        "llama-3.1-8b",
        "--concurrency",
        "1",
        "8,64",
        "--gpu",
        "h200",
        "--rates",
        ",".join(map(str, RATES)),
        "--price",
        "4",
    )
    shown = peagle(*ask)
    assert shown.returncode == 0 and shown.stderr == ""
    assert "Use P-EAGLE with K=7 at 1 request at once (2." in shown.stdout and "$4 an hour" in shown.stdout
    assert "EAGLE-3 is taken to accept as much: give --eagle3-rates" in shown.stdout
    out = tmp_path / "plan.json"
    printed = peagle(*ask, "--json", "--out", str(out), "--eagle3-rates", "0.6,0.3")
    assert printed.returncode == 0 and printed.stderr == ""
    document = read_results(out)
    assert document.kind == "plan" and json.loads(printed.stdout)["rows"] == json.loads(out.read_text())["rows"]
    rows: list[PlanRow] = document.rows
    assert {r.num_speculative_tokens for r in rows} == {0, 1, 2, 3, 4, 5, 7} and {r.concurrency for r in rows} == {
        1,
        8,
        64,
    }
    assert document.settings["rates"]["eagle3"][:3] == [0.6, 0.3, 0.15] and not document.warnings
    wrong = [
        (("-t", "llama-3.1-8b"), "--bandwidth, --matrix-rate, --memory: needed"),
        ((*ask, "--acceptance-length", "3"), "--rates and --acceptance-length: give one of them"),
        ((*ask[:7], "--acceptance-length", "9"), "--acceptance-length 9: must be between 1 and 8"),
        ((*ask, "--concurrency", "1,x"), "--concurrency x: must be a whole number"),
        ((*ask, "--drafts", "0"), "--drafts 0: must be between 1 and 64"),
        ((*ask, "--results", "none.json"), "give one of them"),
        ((*ask[:7], "--results", "none.json"), "none.json: cannot be read"),
    ]
    for asked, complaint in wrong:
        monkeypatch.setattr(sys, "argv", ["peagle", "plan", *asked])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 2 and complaint in said.err and said.err.count("\n") == 1 and not said.out


def test_the_docs_name_every_constant_and_gpu() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    rows = {cells[0]: cells[1:] for cells in ([c.strip() for c in r.strip("|").split("|")] for r in text.splitlines())}
    for name, gpu in GPUS.items():
        figures = [float(cell) for cell in rows[name]]
        told = [gpu.memory / 1e9, gpu.bandwidth / 1e12, gpu.matrix_rate / 1e12, gpu.link / 1e9, gpu.price]
        assert figures == pytest.approx(told), name
    for name, e in ENGINES.items():
        figures = [float(cell.removesuffix(" us")) for cell in rows[name]]
        micros = [s * 1e6 for s in (e.layer_s, e.expert_layer_s, e.pass_s, e.draft_host_s)]
        assert figures == pytest.approx([e.memory_share, e.cache_share, e.matrix_share, e.packed_share, *micros]), name
    assert f"p = {SHARPNESS}" in text
