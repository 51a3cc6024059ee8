"""Plans for GPUs that are not here: against what was measured on one, against published sizes, and by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pairs
import published_heads
import pytest
import runs
from transformers import GptOssConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from peagle.checkpoints.target import load_decoder
from peagle.cli.app import app
from peagle.config import TrainConfig
from peagle.errors import UserError
from peagle.planning import training_scale
from peagle.planning.gpus import GPUS
from peagle.planning.training_scale import Cluster, assumed_data, on_paper, target_on_paper
from peagle.training import resource_plan as plan
from peagle.training.recipe import make_recipe

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "h200-training-step.json").read_text())["records"]
OURS = {record["tokens"]: record for record in MEASURED if record["variant"] == "ours"}
RECIPES = {name: ROOT / "recipes" / f"{name}-p-eagle.toml" for name in published_heads.HEADS}


@pytest.fixture(scope="module")
def variants() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("training_variants", ROOT / "benchmarks" / "training_variants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("tokens", OURS)
def test_a_plan_of_what_was_measured(variants: ModuleType, tokens: int) -> None:
    """Operations as the benchmark counted them, its time and its memory, without target and optimizer."""
    shape, record = variants.SHAPES["8b"], OURS[tokens]
    cfg = TrainConfig(batch_tokens=tokens, max_length=1, vllm_states="there", init="random", held_out=0)
    target, data = shape.target(shape.target_layers), plan.DatasetStats(tokens, 1.0, float(tokens))
    flops = plan.flops_per_token(cfg, target, shape.drafter, data)
    assert tokens * flops.attention == pytest.approx(record["attention_flops"], rel=0.01)
    assert tokens * flops.total == pytest.approx(record["flops"], rel=0.01) and flops.target == 0
    seconds = plan.step_seconds(cfg, target, shape.drafter, flops, Cluster(GPUS["h200"], 1).machine, 2)
    del seconds["optimizer"]
    assert sum(seconds.values()) == pytest.approx(record["ms"] / 1e3, rel=0.06 if 4096 <= tokens <= 32768 else 0.11)
    sizes = plan.memory(cfg, target, shape.drafter, data, 1, 2, record["chunk_rows"])
    del sizes["masters, gradients, moments"]
    assert sum(sizes.values()) == pytest.approx(record["peak_gb"] * 1e9, rel=0.07 if tokens >= 4096 else 0.13)


def test_rates_are_the_measured_ones() -> None:
    record = OURS[20480]
    attention_s = record["kernels_ms"]["attention"] / 1e3
    rest = (record["flops"] - record["attention_flops"]) / (record["ms"] / 1e3 - attention_s)
    assert training_scale.ATTENTION == pytest.approx(record["attention_flops"] / attention_s, rel=0.005)
    assert training_scale.PRODUCTS == pytest.approx(rest, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("openai/gpt-oss-20b", 20.91),
        ("openai/gpt-oss-120b", 116.83),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.53),
        ("google/gemma-4-31B-it", 30.70),
    ],
)
def test_targets_by_name_have_their_published_sizes(name: str, billions: float) -> None:
    assert plan.decoder_parameters(target_on_paper(name)) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    """And says what the known name says; a folder's target need not be one that runs here."""
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    qwen = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    qwen |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    given: dict[str, Any] = {
        "gpt-oss-120b": GptOssConfig(architectures=["GptOssForCausalLM"]).to_dict() | quantized,
        "qwen3-coder-30b-a3b": Qwen3MoeConfig(**qwen, architectures=["Qwen3MoeForCausalLM"]).to_dict(),
        "qwen3-8b": {**training_scale.KNOWN_MODELS["qwen3-8b"], "architectures": ["SomethingNew"]},
    }
    for name, config in given.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        alone, known = target_on_paper(str(folder)), target_on_paper(name)
        assert plan.decoder_parameters(alone) == pytest.approx(plan.decoder_parameters(known), rel=0.002)
        assert alone.windows == known.windows and alone.vocab_size == known.vocab_size
        mine, theirs = (cfg.layer.experts for cfg in (alone, known))
        assert (mine is None) == (theirs is None) == (name == "qwen3-8b")
        assert (
            mine is None
            or theirs is None
            or (mine.num_experts, mine.num_experts_per_tok) == (theirs.num_experts, theirs.num_experts_per_tok)
        )
    with pytest.raises(UserError, match="did you mean gpt-oss-20b"):
        target_on_paper("openai/gpt-oss-21b")


@pytest.mark.parametrize("name", published_heads.HEADS)
def test_recipes_make_heads_like_the_published(name: str) -> None:
    """With the target's head, and without EAGLE-3.1's norms, as many parameters as AWS's; Qwen's has another MLP."""
    recipe, head = make_recipe(RECIPES[name], {}), published_heads.HEADS[name]
    cfg = replace(recipe.train, fc_norm=False)
    target = target_on_paper(recipe.target)
    shape = training_scale.plan_drafter_config(cfg, target)
    wanted = published_heads.full(head)
    if name.startswith("qwen3"):
        wanted = replace(wanted, mlp=8 * 768)
    sizes = [published_heads.head_shapes(wanted)[tensor] for tensor in published_heads.head_shapes(wanted)]
    total = sum(size[0] * (size[-1] if len(size) > 1 else 1) for size in sizes)
    assert plan.trainable(shape) + plan.shared(shape, target) == total
    assert list(shape.aux_layer_ids) == head.aux_layer_ids and cfg.max_length >= 20480
    assert cfg.num_depths >= head.draft_tokens
    made = on_paper(recipe, Cluster(GPUS["h200"], 8), assumed_data(recipe, 10**9, None))
    assert made.fits and made.tokens_per_step == 8 * cfg.batch_tokens
    comments = RECIPES[name].read_text()
    told = re.search(r"A plan.*?: (\d+) GiB of", comments)
    assert told is not None and int(told[1]) == round(sum(made.memory.values()) / 2**30)
    for command in ("vllm serve", "peagle data", "--endpoint", "--dry-run", "deploy/"):
        assert command in comments
    assert ("peagle states" in comments) == (cfg.vllm_states is not None) == cfg.tables_only


def test_parts_of_a_plan_by_hand() -> None:
    """GPT-OSS-120B on 4 nodes of 8: states of 3 aux states and the last, a ring of 32 between nodes of 400 GB/s."""
    recipe = make_recipe(RECIPES["gpt-oss-120b"], {"epochs": 2.0})
    made = on_paper(recipe, Cluster(GPUS["h200"], 8, 4), assumed_data(recipe, 10**9, None))
    assert made.state_bytes_per_token == 4 * 2880 * 2 and made.disk["states"] == 1e9 * 4 * 2880 * 2
    assert made.step_seconds["summing gradients"] == pytest.approx(2 * 31 / 32 * 4 * made.trainable / 400e9)
    assert made.tokens_per_step == 32 * 20480
    assert made.tokens_per_second == pytest.approx(made.tokens_per_step / sum(made.step_seconds.values()))
    assert made.seconds == pytest.approx(2e9 / made.tokens_per_second, rel=1e-3)
    assert made.read_per_second == pytest.approx(made.tokens_per_second * 23040)
    assert made.memory["target"] == 2 * (2 * 201088 * 2880 + 2880)  # its tables and a norm, bf16
    assert made.flops.target == 0 and made.host_bytes == 0 and made.target_seconds > 0
    # in-process it does not fit, unless it is spread: a 64th of the layers, and two that are whole for a moment
    inside = replace(recipe, train=replace(recipe.train, vllm_states=None))
    alone = on_paper(inside, Cluster(GPUS["h200"], 8), assumed_data(inside, 10**9, None))
    assert not alone.fits and "DOES NOT FIT" in alone.text() and alone.flops.target > 0
    spread = replace(inside, train=replace(inside.train, shard_target=True))
    made = on_paper(spread, Cluster(GPUS["h200"], 8, 8), assumed_data(spread, 10**9, None))
    layers = plan.layers_parameters(target_on_paper(recipe.target))
    tables = 2 * 201088 * 2880 + 2880
    assert made.fits and made.memory["target"] == pytest.approx(2 * (layers * (1 / 64 + 2 / 36) + tables))
    assert made.host_bytes == 8 * 2 * (layers + tables)
    gathering = 63 / 64 * 2 * layers / 400e9
    assert made.step_seconds["target"] == pytest.approx(
        max(gathering, 20480 * made.flops.target / (0.35 * training_scale.MATRIX_RATE))
    )


def test_windows_and_length_bound_attention() -> None:
    recipe = make_recipe(RECIPES["gpt-oss-20b"], {})
    target = target_on_paper(recipe.target)
    long, short = (plan.target_flops(target, plan.DatasetStats(1, 1.0, float(n))) for n in (20480, 4096))
    assert long - short == 4 * 64 * 64 * 12 * (10240 - 2048)  # every second layer sees 128 tokens either way


def test_what_is_loaded_and_saved_is_what_was_planned(tmp_path: Path) -> None:
    target = pairs.load_pair("p-eagle-1")[0]
    tables = load_decoder(pairs.target_folder(), skip_layers=True)
    assert sum(p.numel() for p in tables.parameters()) == plan.table_parameters(target.cfg)
    assert tables.cfg == target.cfg and not len(tables.layers)
    recipe = runs.recipe(tmp_path, steps=1)
    process = runs.start(recipe, tmp_path / "run")
    assert process.wait() == 0
    shape = training_scale.plan_drafter_config(recipe.train, target.cfg)
    saved = runs.saved(tmp_path / "run")
    moved = sum(tensor.nbytes for name, tensor in saved.items() if name != "unlogged")
    planned = plan.saved_bytes(recipe.train, shape, 4)
    assert planned <= moved <= 1.01 * planned  # pieces are padded


def peagle(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_the_command(tmp_path: Path) -> None:
    recipe = ("train", "--recipe", str(RECIPES["gpt-oss-120b"]), "--out", str(tmp_path / "none"))
    data = ("--data-tokens", "1000000000")
    status, said = peagle(*recipe, "--dry-run", *data, "--nodes", "4", "--json")
    found = json.loads(said)
    assert status == 0 and found["world"] == 32 and found["fits"] and found["disk"]["states"] == 23.04e12
    assert "measured on an H200" in found["rate_from"]
    status, said = peagle(*recipe, "--dry-run", *data, "--gpu", "h100", "--gpus", "4", "--tokens-per-second", "50000")
    assert status == 0 and "at 50,000 tokens/s (as logged or given)" in said and "on 4 GPUs" in said
    assert "23.04 TB" in said and "1.15 GB/s while training" in said
    files = ("--out", str(tmp_path / "none"), "-t", "gpt-oss-20b", "--nodes", "1", "--dry-run", "--json")
    status, said = peagle("train", str(runs.data_file(tmp_path)), *files)
    assert status == 0 and json.loads(said)["flops"]["target"] > 1e9
    for flags, complaint in (
        (("--nodes", "4"), "--nodes 4: is for --dry-run"),
        (("--dry-run", *data, "--gpus", "0"), "--gpus 0: must be at least 1"),
        (("--dry-run", "--mean-length", "9"), "give --data-tokens too"),
        (("--dry-run", *data, "--mean-length", "99999"), "--mean-length 99999: must be from 1 to --max-length, 20480"),
        (("--dry-run", *data, "--gpu", "abacus"), "--gpu abacus: not in the table"),
    ):
        status, said = peagle(*recipe, *flags)
        assert status == 1 and complaint in said, said
    assert not (tmp_path / "none").exists()


def test_the_table_in_the_docs_is_the_one_that_is_computed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location("training_scale_script", ROOT / "benchmarks" / "training_scale.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["training_scale.py"])
    script.main()
    *table, found = capsys.readouterr().out.strip().splitlines()
    assert "\n".join(table) in (ROOT / "docs" / "training.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "training-scale.json").read_text())
    assert json.loads(found)["lines"] == kept["lines"] and len(kept["lines"]) == 16
