"""The benchmark of the published targets in their full shapes: what it writes is what is published, its weights keep
tokens apart, its waves fit the GPU, and it runs from end to end in its toy size."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import HEADS, full, head_shapes
from test_families import COUNTED, PUBLISHED
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import full_shapes
from benchmarks.full_shapes import (
    DRAFTING,
    HEAD_LAYERS,
    MODELS,
    FullShapes,
    distinct_share,
    wanted_engines,
    write_models,
)
from benchmarks.spread_weights import spread_model
from peagle import LLM, SamplingParams
from peagle.checkpoints.drafter import fit_problems, read_drafter_config, tensor_problems
from peagle.checkpoints.files import Weights
from peagle.checkpoints.target import Target, read_target_config
from peagle.checkpoints.validate import inspect_drafter
from peagle.checkpoints.weight_conversion import unpacked_mxfp4
from peagle.engine.loader import random_weights
from peagle.models import moe as experts
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.resource_plan import decoder_parameters

SCRIPT = Path(full_shapes.__file__)
AS_AWS = {"gpt-oss-20b": "gpt-oss-20b", "qwen3-coder-30b-a3b": "qwen3-coder-30b"}
K = 7


@pytest.mark.parametrize("name", MODELS)
def test_targets_have_the_published_shapes(name: str, tmp_path: Path) -> None:
    folder = Path(write_models([name], False, tmp_path)[name])
    values = json.loads((folder / "config.json").read_text())
    packing = "quantization_config"
    assert {n: values[n] for n in PUBLISHED[name] if n != packing} | {packing: 0} == PUBLISHED[name] | {packing: 0}
    assert decoder_parameters(read_target_config(folder)) == pytest.approx(COUNTED[name], rel=0.002)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert decoder_parameters(read_target_config(folder)) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_heads_have_the_published_shapes(name: str, tmp_path: Path) -> None:
    folders = {key: Path(folder) for key, folder in write_models([name], False, tmp_path).items()}
    parallel, serial = folders[f"{name}-p-eagle"], folders[f"{name}-eagle3"]
    for folder in (parallel, serial):
        cfg = read_drafter_config(folder)
        assert tensor_problems(cfg, Weights(folder).shapes) == []
        assert fit_problems(cfg, read_target_config(folders[name])) == []
        assert cfg.aux_layer_ids == tuple(HEADS[AS_AWS[name]].aux_layer_ids)
    published = full(HEADS[AS_AWS[name]])
    wanted = head_shapes(replace(published, mlp=MODELS[name].head_mlp))
    assert Weights(parallel).shapes == wanted
    assert read_drafter_config(parallel).mask_token_id == published.mask_id
    one_layer = {n: shape for n, shape in wanted.items() if not n.startswith("layers.") and n != "mask_hidden"}
    assert Weights(serial).shapes == one_layer


@pytest.mark.parametrize("name", MODELS)
def test_the_validator_misses_nothing_but_weights(name: str, tmp_path: Path) -> None:
    """Of the toys, as it reads every byte."""
    folders = {key: Path(folder) for key, folder in write_models([name], True, tmp_path).items()}
    for head in HEAD_LAYERS:
        folder = folders[f"{name}-{head}"]
        report = inspect_drafter(folder, folder.name, folders[name], draft_tokens=K)
        assert len(report.findings) == len(Weights(folder).names())
        assert all(text.endswith(" is all zeros") for text in report.findings)


@pytest.mark.parametrize("name", MODELS)
def test_rates_fall_and_give_the_published_lengths(name: str) -> None:
    model = MODELS[name]
    for k in {one.k for one in DRAFTING.values()} | set(model.lengths):
        rates = model.rates(k)
        assert len(rates) == k and all(1 > a > b > 0 for a, b in zip(rates, rates[1:], strict=False))
        if k in model.lengths:
            assert 1 + sum(rates) == pytest.approx(model.lengths[k], abs=1e-6)
            assert 1 + sum(model.curve(model.reach, k)) == pytest.approx(model.lengths[k], abs=0.1), "the curve itself"


def test_waves_fit_the_gpu(tmp_path: Path) -> None:
    """Qwen's in pairs, vLLM's before peagle's same ones; vLLM's GPT-OSS, whose experts are packed, at once."""
    args = argparse.Namespace(
        vllm_path=None, tiny=False, seconds=1, scratch=tmp_path, out=None, resume=False, parallel=7
    )
    session = FullShapes(args)
    session.machine = {"memory_gb": 150.1}
    queue = session.write_inputs(wanted_engines(list(MODELS), list(DRAFTING), ["c1"], ["vllm", "peagle"], False))
    assert len({e.key for e in queue}) == 2 * (5 + 6)
    waves: list[list[str]] = []
    while queue:
        wave = session.next_wave(queue)
        assert sum(e.gpu_gb for e in wave) < 0.95 * 150.1
        waves, queue = [*waves, [e.key for e in wave]], queue[len(wave) :]
    assert waves[0] == [f"vllm/gpt-oss-20b-{key}" for key in MODELS["gpt-oss-20b"].drafting]
    qwen = [wave for wave in waves if "qwen" in wave[0]]
    assert [len(wave) for wave in qwen] == [2] * 6
    assert [[key.replace("vllm", "peagle") for key in wave] for wave in qwen[::2]] == qwen[1::2]


@pytest.mark.parametrize("name", MODELS)
def test_rows_read_as_many_experts_as_different_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """By lot, R rows that choose a of E experts each read E (1 - (1 - a/E)^R) of them. Plain noise reads far fewer."""
    monkeypatch.setitem(MODELS[name].tiny, "vocab_size", 5000)
    folders = {key: Path(folder) for key, folder in write_models([name], True, tmp_path).items()}
    values = json.loads((folders[name] / "config.json").read_text())
    many = {"num_local_experts": 32, "num_experts": 32, "num_experts_per_tok": 4}
    (folders[name] / "config.json").write_text(json.dumps(values | {k: v for k, v in many.items() if k in values}))
    cfg, draft_cfg = read_target_config(folders[name]), read_drafter_config(folders[f"{name}-p-eagle"])
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    model = random_weights(Decoder, cfg, torch.float32, cpu)
    drafter = random_weights(Drafter, draft_cfg, torch.float32, cpu).share(model)
    read: list[int] = []
    route = experts.route

    def counted(*given: Any) -> Any:
        weight_TC, expert_TC = route(*given)
        if len(expert_TC) == K + 1:
            read.append(len(expert_TC.unique()))
        return weight_TC, expert_TC

    monkeypatch.setattr(experts, "route", counted)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 256}
    settings |= {"synthetic_acceptance_rates": list(MODELS[name].rates(K)), "tokenizer": False, "max_num_seqs": 2}
    llm = LLM(Target(folders[name], model, frozenset()), drafter, K, **settings)

    def run() -> tuple[float, float]:
        read.clear()
        texts = []
        for seed in range(3):
            prompt = torch.randint(5000, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
            params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, seed=seed)
            texts.append(list(llm.generate([prompt], params)[0].outputs[0].token_ids))
        share = distinct_share(texts)
        assert share is not None
        return sum(read) / len(read), share

    by_lot = 32 * (1 - (1 - 4 / 32) ** (K + 1))
    plain, repeated = run()
    assert plain < 0.7 * by_lot and repeated < 0.7, "with plain noise there is nothing to mend"
    full_shapes.spread_peagle(llm)
    spread, apart = run()
    assert spread == pytest.approx(by_lot, rel=0.1) and apart > 0.9


def test_packed_weights_are_noise_too() -> None:
    """As vLLM keeps MXFP4 for most of its kernels; what it keeps otherwise is counted, and left alone."""
    layer = torch.nn.Module()
    for name, shape in (("w13_weight", (4, 64, 32)), ("w13_weight_scale", (4, 64, 2)), ("sorted", (4,))):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(ValueError, match="w13_weight.* alike"):
        spread_model(layer)
    layer.embedding = torch.nn.Embedding(64, 64)  # so called by vLLM in GPT-OSS
    assert spread_model(layer) == {"set": 3, "left": 1}
    assert 0.95 < layer.embedding.weight.std() < 1.05
    packed = layer.w13_weight.unflatten(-1, (2, 16)).flatten(0, 1)
    numbers = unpacked_mxfp4(packed, layer.w13_weight_scale.flatten(0, 1)).float()
    assert abs(numbers.mean()) < 0.001 and 0.02 < numbers.std() < 0.03 and not layer.sorted.any()


def script(*more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--sides", "peagle", "--rows", "c1,c64", "--drafting", "p7", *more],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stdout}


def test_toy_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out.json"), "--scratch", str(tmp_path / "scratch")]
    first = script("--targets", "gpt-oss-20b", *out)
    assert not first["notes"], first["log"]
    rows = [row["row"] for row in first["rows"]]
    assert rows == [f"toy GPT-OSS-20B, P-EAGLE K=7, c={c}" for c in (1, 64)]
    both = script("--resume", *out)
    assert "starting peagle/qwen3-coder-30b-a3b-p7\n" in both["log"] and len(both["calls"]) == 2
    assert both["rows"][:2] == first["rows"] and len(both["rows"]) == 4
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["rows"] == both["rows"] and not kept["notes"]
    for engine in kept["measurements"].values():
        assert engine["c64"]["distinct_share"] > 0.7 and 2 < engine["c64"]["al"] < K + 1
        assert engine["c64"]["turns"][0]["tokens"] == 4 * 16
