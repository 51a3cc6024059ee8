"""Runs the commands of the guides in docs/, in order, in a folder with small models.

Every command runs as it is written, with options after it that make it small (`SMALLER`). Commands that need a GPU or
vLLM (`PARSED_ONLY`) are only parsed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pairs
import pytest
import typer
from serving_support import ServerProcess
from support import set_config

from peagle.cli import main
from peagle.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("guide-training", "guide-choosing-k", "checkpoint-format", "how-it-works", "troubleshooting")
OTHER_PROGRAMS = {"torchrun", "vllm"}
PARSED_ONLY = ("--engine vllm", "--vllm-hidden-states")
TINY_RUN = (
    "--steps 2 --batch-tokens 256 --max-seq-len 96 --validation-size 2 --validation-tokens 8 --num-layers 1 "
    "--num-depths 8"
)
SMALLER = {
    "data": "--max-tokens 24",
    "fit": f"--max-tokens 24 {TINY_RUN}",
    "train": TINY_RUN,
    "eval": "--max-tokens 8 --limit 2",
    "tune": "--repeats 1 --max-num-seqs 2 --max-model-len 256 --context-len 16",
    "bench": "--max-tokens 4 --num-prompts 4 --repeats 1 --num-warmups 1",
    "generate": "--max-tokens 8",
    "serve": "--max-num-seqs 4 --max-model-len 512",
}
GUIDE_URL = "http://localhost:8000"


def read_commands(guide: str) -> list[list[str]]:
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    joined = "\n".join(re.sub(r"\\\n\s*", "", block) for block in blocks)
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models, prompts and recipes that the guides assume."""
    model = tmp_path / "my-model"
    shutil.copytree(pairs.target_folder(), model)
    engines.write_tokenizer(model, 145)  # the ids above have no token, so one can be the mask token
    shutil.copytree(pairs.drafter_folder("p-eagle-1"), tmp_path / "my-drafter")
    shutil.copytree(pairs.drafter_folder("eagle3-1"), tmp_path / "my-eagle3")
    for part in (model, tmp_path / "my-drafter", tmp_path / "my-eagle3"):
        set_config(part, max_position_embeddings=4096)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    text = pairs.TEXT.decode()
    for name, first in (("prompts", 300), ("test-prompts", 500)):
        rows = [{"prompt": text[at : at + 24]} for at in range(first, first + 12 * 650, 650)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def write_responses(path: Path) -> None:
    """Writes the responses for a guide that begins after `peagle data`."""
    with path.open("w") as file:
        for at in range(300, 300 + 12 * 650, 650):
            row = {"id": f"r{at}", "sample": 0, "token_ids": list(pairs.TEXT[at : at + 48]), "spans": [[24, 48]]}
            file.write(json.dumps(row) + "\n")


def parse_only(arguments: list[str]) -> None:
    """Parses a command line without running it."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("peagle", list(arguments), resilient_parsing=False)
    _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(arguments[0], rest, parent=context)


def stop(server: ServerProcess) -> None:
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait() == 0, server.process.stderr()


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """The guide's servers; one runs at a time."""
    running: list[ServerProcess] = []
    yield running
    for server in running:
        stop(server)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_runs(
    guide: str,
    folder: Path,
    servers: list[ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if guide == "troubleshooting":
        write_responses(folder / "responses.jsonl")
    commands = read_commands(guide)
    assert sum(words[0] == "peagle" for words in commands) >= 3
    for words in commands:
        line = shlex.join(words)
        if words[0] == "torchrun":
            parse_only(words[words.index("-m") + 2 :])
            continue
        assert words[0] == "peagle" or words[0] in OTHER_PROGRAMS, line
        if words[0] != "peagle":
            continue
        if any(part in line for part in PARSED_ONLY):
            parse_only(words[1:])
            continue
        smaller = [] if "--dry-run" in words else shlex.split(SMALLER.get(words[1], ""))
        arguments = [*words[1:], *smaller]
        if words[1] == "serve":
            while servers:
                stop(servers.pop())
            servers.append(ServerProcess(*arguments[1:]))
            servers[-1].wait_ready()
            continue
        if servers:
            arguments = [word.replace(GUIDE_URL, f"http://127.0.0.1:{servers[-1].port}") for word in arguments]
        monkeypatch.setattr(sys, "argv", ["peagle", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capsys.readouterr()
        assert not exit.value.code, f"{line}: {printed.out}{printed.err}"
        out = words[words.index("--out") + 1] if "--out" in words else None
        assert out is None or "--dry-run" in words or Path(out).exists(), f"{line}: wrote no {out}"
