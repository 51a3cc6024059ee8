"""Shapes and random weights of the comparison with vLLM, and a toy run of the script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from published_heads import HEADS, full, head_shapes
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.random_weights import random_weights
from benchmarks.shapes import SHAPES, spread_weights, write_checkpoints
from peagle import LLM, SamplingParams
from peagle.checkpoints.drafter import find_fit_problems, find_tensor_problems, read_drafter_config
from peagle.checkpoints.files import SafetensorsFolder
from peagle.checkpoints.target import Target, read_target_config
from peagle.models import layers
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_vllm.py"
PUBLISHED_HEADS = {"gpt-oss-20b": "gpt-oss-20b", "qwen3-coder-30b-a3b": "qwen3-coder-30b"}
PARAMETERS = {"llama-8b": 8.03e9, "gpt-oss-20b": 20.9e9, "qwen3-coder-30b-a3b": 30.5e9}
K = 7


@pytest.mark.parametrize("name", SHAPES)
def test_target_has_the_published_parameter_count(name: str, tmp_path: Path) -> None:
    folder = Path(write_checkpoints(name, False, tmp_path)["target"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_HEADS)
def test_drafters_have_the_published_shapes(name: str, tmp_path: Path) -> None:
    folders = {key: Path(folder) for key, folder in write_checkpoints(name, False, tmp_path).items()}
    for method in ("p-eagle", "eagle3"):
        cfg = read_drafter_config(folders[method])
        assert find_tensor_problems(cfg, SafetensorsFolder(folders[method]).shapes) == []
        assert find_fit_problems(cfg, read_target_config(folders["target"])) == []
    published = full(HEADS[PUBLISHED_HEADS[name]])
    expected = head_shapes(replace(published, mlp=SHAPES[name].drafter_mlp))
    assert SafetensorsFolder(folders["p-eagle"]).shapes == expected
    assert read_drafter_config(folders["p-eagle"]).mask_token_id == published.mask_id
    one_layer = {n: shape for n, shape in expected.items() if not n.startswith("layers.") and n != "mask_hidden"}
    assert SafetensorsFolder(folders["eagle3"]).shapes == one_layer


@pytest.mark.parametrize("name", SHAPES)
def test_acceptance_rates_fall_and_give_the_published_lengths(name: str) -> None:
    shape = SHAPES[name]
    for k in {3, 5, 7, *shape.published_lengths}:
        rates = shape.acceptance_rates(k)
        assert len(rates) == k and all(1 > a > b > 0 for a, b in zip(rates, rates[1:], strict=False))
        if k in shape.published_lengths:
            assert 1 + sum(rates) == pytest.approx(shape.published_lengths[k], abs=1e-6)


@pytest.mark.parametrize("name", PUBLISHED_HEADS)
def test_rows_use_as_many_experts_as_different_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """R rows that each choose a of E experts at random use E (1 - (1 - a/E)^R) of them; plain noise uses far fewer."""
    monkeypatch.setitem(SHAPES[name].tiny, "vocab_size", 5000)
    folders = {key: Path(folder) for key, folder in write_checkpoints(name, True, tmp_path).items()}
    values = json.loads((folders["target"] / "config.json").read_text())
    many = {"num_local_experts": 32, "num_experts": 32, "num_experts_per_tok": 4}
    (folders["target"] / "config.json").write_text(json.dumps(values | {k: v for k, v in many.items() if k in values}))
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    model = random_weights(Decoder, read_target_config(folders["target"]), torch.float32, cpu)
    drafter = random_weights(Drafter, read_drafter_config(folders["p-eagle"]), torch.float32, cpu).share_weights(model)
    used: list[int] = []
    route = layers.route

    def counted(*given: Any) -> Any:
        weight_TC, expert_TC = route(*given)
        if len(expert_TC) == K + 1:
            used.append(len(expert_TC.unique()))
        return weight_TC, expert_TC

    monkeypatch.setattr(layers, "route", counted)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 256}
    settings |= {"synthetic_acceptance_rates": list(SHAPES[name].acceptance_rates(K)), "tokenizer": False}
    llm = LLM(Target(folders["target"], model, frozenset()), drafter, K, max_num_seqs=2, **settings)

    def mean_experts() -> float:
        used.clear()
        for seed in range(3):
            prompt = torch.randint(5000, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
            llm.generate([prompt], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, seed=seed))
        return sum(used) / len(used)

    at_random = 32 * (1 - (1 - 4 / 32) ** (K + 1))
    assert mean_experts() < 0.7 * at_random, "plain noise already spreads rows over experts"
    spread_weights(drafter, is_drafter=True)
    spread_weights(model)
    assert mean_experts() == pytest.approx(at_random, rel=0.1)


def run_script(*arguments: str) -> dict[str, Any]:
    command = [str(SCRIPT), "--tiny", "--engines", "peagle", "--model", "llama-8b", "-k", str(K)]
    process = forks.Process(*command, "--measure-seconds", "0.01", "--seconds", "500", *arguments)
    assert process.wait(500) == 0, process.stdout() + process.stderr()
    return json.loads(process.stdout().splitlines()[-1])


def test_toy_run_resumes(tmp_path: Path) -> None:
    """A second run measures only what the file lacks."""
    out = tmp_path / "out.json"
    first = run_script("--concurrency", "1", "4", "--out", str(out))
    assert not first["notes"]
    assert set(first["measurements"]) == {f"peagle-{c}" for c in ("none", "eagle3-k3", "p-eagle-k7", "p-eagle-kauto")}
    assert all(m[c]["output_tokens_per_second"] > 0 for m in first["measurements"].values() for c in ("1", "4"))
    assert 2 < first["measurements"]["peagle-p-eagle-k7"]["4"]["acceptance_length"] < K + 1
    del first["measurements"]["peagle-eagle3-k3"]["4"]
    out.write_text(json.dumps(first))
    both = run_script("--concurrency", "1", "4", "--resume", "--out", str(out))
    assert both["measurements"]["peagle-eagle3-k3"].pop("4")["output_tokens_per_second"] > 0
    assert both["measurements"] == first["measurements"] and len(both["calls"]) == 2
