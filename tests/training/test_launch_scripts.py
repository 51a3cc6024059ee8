"""Runs the launch scripts as two nodes on this machine and compares with one process.

`srun` and `scontrol` are replaced by small scripts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pairs
import pytest
import runs
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from peagle.training.recipe import Recipe, make_recipe
from peagle.training.resume import RunFolder

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "deploy" / "torchrun.sh", ROOT / "deploy" / "slurm" / "peagle-train.sbatch"]
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames gone[1-2]" ]] && printf '127.0.0.1\\nelsewhere\\n'
"""
SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 64
shift
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & nodes[node]=$!; done
for node in "${nodes[@]}"; do wait "$node" || exit 1; done
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def target_with_experts(home: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=pairs.VOCAB, num_hidden_layers=4, **shape, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(home / "target")
    return home / "target"


def recipe(home: Path, **settings: object) -> Recipe:
    usual = {
        "target": str(home / "target"),
        "data": (str(home / "responses.jsonl"),),
        "num_layers": 1,
        "aux_layer_ids": (1, 2, 3),
        "init": "random",
        "mask_token": str(pairs.MASK_ID),
        "num_depths": 3,
        "batch_tokens": 96,
        "max_seq_len": 64,
        "steps": 3,
        "validation_size": 0,
        "log_every": 1,
        "chunk_size": 16,
        "lr": 2e-3,
    }
    return make_recipe(None, usual | settings)


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def test_two_slurm_nodes_equal_one_process(tmp_path: Path, one_thread: None) -> None:
    """The target has experts and is sharded over the nodes."""
    target_with_experts(tmp_path)
    runs.data_file(tmp_path)
    (tmp_path / "two.toml").write_text(recipe(tmp_path, shard_target=True).toml())
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job_id = next(i for i in range(os.getpid() % 10000, 20000) if is_free(20000 + i))  # its port, by the job file
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_NODELIST": "gone[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
        "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun's own: what a machine calls itself may not be found here
        "OMP_NUM_THREADS": "1",
    }
    job = [str(SCRIPTS[1]), "--recipe", str(tmp_path / "two.toml"), "--out", str(tmp_path / "two"), "--device", "cpu"]
    done = subprocess.run(job, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished after 3 steps") == 1, done.stdout  # one of the two tells

    alone = runs.start(recipe(tmp_path, gradient_accumulation_steps=2), tmp_path / "alone")
    assert alone.wait() == 0, alone.stderr()
    got, want = runs.saved(tmp_path / "two"), runs.saved(tmp_path / "alone")
    assert got.keys() == want.keys() and RunFolder(tmp_path / "two").read_state().batches == 6
    for name in ("masters", "exp_avg", "exp_avg_sq"):
        largest = float(want[name].abs().max())
        assert largest > 0 and torch.allclose(got[name], want[name], rtol=1e-3, atol=1e-5 * largest), name
    assert [line["loss"] for line in runs.lines(tmp_path / "two")] == pytest.approx(
        [line["loss"] for line in runs.lines(tmp_path / "alone")], rel=1e-5
    )


def test_job_without_time_to_save_is_refused(tmp_path: Path) -> None:
    for name, text in (("srun", "#!/bin/sh\nexit 3\n"), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "SLURM_JOB_NODELIST": "gone[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 300),
    }
    done = subprocess.run([str(SCRIPTS[1])], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "MARGIN_MINUTES=10" in done.stderr
