"""The guides in docs/: their commands are run, in order, in a folder with the small models they name; figures, errors,
fields, tensors and links in them are those of the results, the code, the format and the files.

Commands are run as they are written, with a few words behind them that make them small (`SMALLER`). What needs a
GPU's memory, several of them, vLLM or states that vLLM wrote (`ELSEWHERE`) is read by the command's own parser and not
run; of other programs only those in `OTHERS` may be named.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import engines
import forks
import pairs
import pytest
import torch
import typer
from support import edit_weights, set_config

from peagle.checkpoints.drafter import build_drafter_config, drafter_layout, plain_tensor_name
from peagle.checkpoints.speculators import OWN_FIELDS, plain_to_speculators
from peagle.cli import main
from peagle.cli.app import app
from peagle.config import MASK_TOKEN_ID_KEYS, RopeConfig, SamplingParams
from peagle.engine.llm import LLM

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = ("guide-training", "guide-choosing-k", "checkpoint-format", "how-it-works", "troubleshooting")
OTHERS = {"torchrun", "tensorboard", "vllm"}
ELSEWHERE = ("--engine vllm", "--vllm-states")
TINY_RUN = "--steps 2 --batch-tokens 256 --max-length 96 --held-out 2 --measure-tokens 8 --layers 1 --depths 8"
SMALLER = {
    "data": "--max-tokens 24",
    "fit": f"--max-tokens 24 {TINY_RUN}",
    "train": TINY_RUN,
    "eval": "--max-tokens 8 --limit 2",
    "tune": "--repeats 1 --max-num-seqs 2 --max-model-len 256 --context-len 16",
    "bench": "--max-tokens 4 --requests 4 --repeats 1 --warmup 1",
    "generate": "--max-tokens 8",
    "serve": "--max-num-seqs 4 --max-model-len 512",
}
ADDRESS = "http://localhost:8000"


def text_of(guide: str) -> str:
    return (DOCS / f"{guide}.md").read_text(encoding="utf-8")


def blocks(guide: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text_of(guide), re.MULTILINE | re.DOTALL)


def commands(guide: str) -> list[list[str]]:
    whole = "\n".join(re.sub(r"\\\n\s*", "", block) for block in blocks(guide, "sh"))
    return [shlex.split(line, comments=True) for line in whole.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that the guides take for granted."""
    model = tmp_path / "my-model"
    shutil.copytree(pairs.target_folder(), model)
    engines.write_tokenizer(model, 145)  # the ids behind these are nobody's, so one can be the mask token
    shutil.copytree(pairs.drafter_folder("p-eagle-1"), tmp_path / "my-drafter")
    shutil.copytree(pairs.drafter_folder("eagle3-1"), tmp_path / "my-eagle3")
    for part in (model, tmp_path / "my-drafter", tmp_path / "my-eagle3"):
        set_config(part, max_position_embeddings=4096)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    said = pairs.TEXT.decode()
    for name, first in (("prompts", 300), ("test-prompts", 500)):
        rows = [{"prompt": said[at : at + 24]} for at in range(first, first + 12 * 650, 650)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peagle.engine.loader.usable_cores", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def write_responses(path: Path) -> None:
    """For a guide that begins after `peagle data`."""
    text = pairs.TEXT
    with path.open("w") as file:
        for at in range(300, 300 + 12 * 650, 650):
            row = {"id": f"r{at}", "sample": 0, "token_ids": list(text[at : at + 48]), "spans": [[24, 48]]}
            file.write(json.dumps(row) + "\n")


def parsed(words: list[str]) -> None:
    """The command takes these words; nothing is run."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("peagle", list(words), resilient_parsing=False)
    _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(words[0], rest, parent=context)


class Server:
    """`peagle serve`, in a process of its own, at a port that is free."""

    def __init__(self, words: list[str]) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = forks.Process("-m", "peagle", *words, "--port", str(port))
        ends = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.pid and time.monotonic() < ends, self.process.complaints()
                time.sleep(0.1)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)
        assert self.process.wait(60) == 0, self.process.complaints()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """The guide's servers; one runs at a time."""
    running: list[Server] = []
    yield running
    for server in running:
        server.stop()


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_runs(
    guide: str,
    folder: Path,
    servers: list[Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if guide == "troubleshooting":
        write_responses(folder / "responses.jsonl")
    found = commands(guide)
    assert sum(words[0] == "peagle" for words in found) >= 3
    for words in found:
        line = shlex.join(words)
        if words[0] == "torchrun":
            parsed(words[words.index("-m") + 2 :])
            continue
        assert words[0] == "peagle" or words[0] in OTHERS, line
        if words[0] != "peagle":
            continue
        if any(part in line for part in ELSEWHERE):
            parsed(words[1:])
            continue
        smaller = [] if "--dry-run" in words else shlex.split(SMALLER.get(words[1], ""))
        asked = [*words[1:], *smaller]
        if words[1] == "serve":
            while servers:
                servers.pop().stop()
            servers.append(Server(asked))
            continue
        if servers:
            asked = [word.replace(ADDRESS, servers[-1].url) for word in asked]
        monkeypatch.setattr(sys, "argv", ["peagle", *asked])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, f"{line}: {said.out}{said.err}"
        out = words[words.index("--out") + 1] if "--out" in words else None
        assert out is None or "--dry-run" in words or Path(out).exists(), f"{line}: wrote no {out}"


# What is said about results, errors and the format


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells(*values: float, places: int = 0) -> str:
    return " | ".join(f"{value:,.{places}f}" for value in values)


def test_acceptance_and_speed_are_those_of_the_results() -> None:
    guide = text_of("guide-choosing-k")
    lengths = {
        (r["dataset"], r["method"], r["temperature"], r["k"]): r["acceptance_length"]
        for r in results("h200-acceptance")["rows"]
        if r["loops"] == "excluded" and r["category"] is None and r["context"] is None
    }
    for label, dataset, method, temperature in (
        ("MT-Bench, P-EAGLE", "mt_bench", "p-eagle", 0.0),
        ("MT-Bench, EAGLE-3", "mt_bench", "eagle3", 0.0),
        ("HumanEval, P-EAGLE", "humaneval", "p-eagle", 0.0),
        ("HumanEval, EAGLE-3", "humaneval", "eagle3", 0.0),
        ("MT-Bench, P-EAGLE, temperature 1", "mt_bench", "p-eagle", 1.0),
    ):
        row = [lengths[dataset, method, temperature, k] for k in (1, 3, 5, 7, 10)]
        assert f"| {label} | {cells(*row, places=2)} |" in guide
    speeds = {
        (r["method"], r["k"], r["concurrency"]): r["output_tokens_per_second"]
        for r in results("h200-speed")["rows"]
        if r["engine"] == "embedded"
    }
    for label, method, k in (
        ("no drafter", "none", None),
        ("EAGLE-3, K=3", "eagle3", 3),
        ("EAGLE-3, K=5", "eagle3", 5),
        ("EAGLE-3, K=7", "eagle3", 7),
        ("P-EAGLE, K=3", "p-eagle", 3),
        ("P-EAGLE, K=7", "p-eagle", 7),
        ("P-EAGLE, K=9", "p-eagle", 9),
        ("P-EAGLE, K auto", "p-eagle", "auto"),
    ):
        assert f"| {label} | {cells(*(speeds[method, k, c] for c in (1, 8, 64)))} |" in guide


def best(name: str, engine: str, method: str, load: int, auto: bool = False) -> float:
    """Tokens/s of results at the best K, or with K auto."""
    found = [
        r["output_tokens_per_second"]
        for r in results(name)["rows"]
        if (r["engine"], r["method"], r["concurrency"]) == (engine, method, load) and (r["k"] == "auto") == auto
    ]
    return float(max(found))


def ahead(name: str, load: int, auto: bool = False) -> float:
    """P-EAGLE over EAGLE-3."""
    return best(name, "embedded", "p-eagle", load, auto) / best(name, "embedded", "eagle3", load)


LOADS, METHODS = (1, 8, 64), ("none", "eagle3", "p-eagle")


def test_the_readmes_speeds_are_the_best_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text().replace("**", "")
    for label, engine in (("vLLM", "vllm"), ("peagle", "embedded")):
        told = [" / ".join(f"{best('h200-speed', engine, m, load):,.0f}" for m in METHODS) for load in LOADS]
        assert f"| {label} | {' | '.join(told)} |" in readme

    def over(name: str) -> list[float]:
        ours, theirs = ([max(best(name, e, m, c) for m in METHODS) for c in LOADS] for e in ("embedded", "vllm"))
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    assert "| the best of each | {:.1f}x | {:.1f}x | {:.1f}x |".format(*over("h200-speed")) in readme
    ratios = [ahead("h200-speed", c) for c in LOADS]
    assert "| P-EAGLE over EAGLE-3, peagle | {:.2f}x | {:.2f}x | {:.2f}x |".format(*ratios) in readme
    prose = " ".join(readme.split())
    assert (
        "P-EAGLE is {:.2f}x, {:.2f}x and {:.2f}x EAGLE-3".format(*(ahead("h200-speed-without-loops", c) for c in LOADS))
        in prose
    )
    assert (
        "256 tokens {:.2f}x, {:.2f}x and {:.2f}x, and {:.1f}, {:.1f} and {:.1f} times vLLM".format(
            *(ahead("h200-speed-256", c) for c in LOADS), *over("h200-speed-256")
        )
        in prose
    )


def test_what_is_said_of_both_drafters_elsewhere_is_of_the_same_results() -> None:
    performance, speed = text_of("performance").replace("**", ""), "h200-speed"
    for engine, side in (("vllm", "vLLM"), ("embedded", "peagle")):
        for method, label in (("none", "no drafter"), ("eagle3", "EAGLE-3"), ("p-eagle", "P-EAGLE")):
            row = next(line for line in performance.splitlines() if line.startswith(f"| {side}, {label} | "))
            told = [re.sub(r" \(K=\d\)$", "", cell) for cell in row.strip("| ").split(" | ")[1:]]
            assert told == [f"{best(speed, engine, method, c):,.0f}" for c in LOADS]
    rates = {(r["engine"], r["method"], r["k"], r["concurrency"]): r for r in results(speed)["rows"]}
    for method, label in (("eagle3", "EAGLE-3"), ("p-eagle", "P-EAGLE")):
        found = [[rates["embedded", method, k, c]["output_tokens_per_second"] for k in (3, 5, 7, 9)] for c in LOADS]
        told = [" / ".join(f"{rate:,.0f}" for rate in at_load) for at_load in found]
        assert f"| {label} | {' | '.join(told)} |" in performance
    auto = cells(*(best(speed, "embedded", "p-eagle", c, auto=True) for c in LOADS))
    assert f"| peagle, P-EAGLE, K auto | {auto} |" in performance
    for name in (speed, "h200-speed-one", "h200-speed-without-loops", "h200-speed-256", "h200-speed-one-256"):
        loads = {r["concurrency"] for r in results(name)["rows"]}
        told = [f"{ahead(name, 1):.2f}x", f"{ahead(name, 1, auto=True):.2f}x"]
        told += [f"{ahead(name, c):.2f}x" if c in loads else "" for c in (8, 64)]
        label = "the table above" if name == speed else f"(results/{name}.json)"
        assert f"{label} | {' | '.join(told)} |".replace("  ", " ") in performance
    loops = results("h200-loops")
    asked = sum(found["prompts"] for found in loops["sets"].values())
    assert f"of the {asked} first turns {asked - loops['left']} end" in performance
    assert results("h200-speed-without-loops")["settings"]["requests"] == loops["left"]
    ratios = [ahead(speed, c) for c in LOADS]
    guide = " ".join(text_of("guide-training").split())
    assert "{:.2f} times as fast at one request, {:.2f} times at 8 and {:.2f} times at 64".format(*ratios) in guide
    training = " ".join(text_of("training").split())
    assert "{:.2f}x as fast at one request, {:.2f}x at 8 and {:.2f}x at 64".format(*ratios) in training


def test_rounds_and_vllm_are_those_of_the_results() -> None:
    guide = text_of("guide-choosing-k")
    rates = [0.72, 0.52, 0.38, 0.28, 0.21, 0.16, 0.13]
    milliseconds = {(r["batch"], r["drafts"]): r["ms"] for r in results("h200-round-8b")["rows"]}
    for batch in (1, 8, 64):
        row = [milliseconds[batch, k] for k in (1, 3, 7)]
        speeds = [1e3 * batch * (1 + sum(rates[:k])) / ms for k, ms in zip((1, 3, 7), row, strict=True)]
        told = " / ".join(f"{speed:,.0f}" for speed in speeds)
        assert f"| {batch} | {cells(*row, places=2)} | {told} |" in guide
    measured = results("h200-serving")["measurements"]
    named = [measured[f"vllm/8b-{kind}"]["c64"]["tok_s"] for kind in ("none", "p3", "p5", "p7", "e3")]
    assert f"| {cells(*named)} |" in guide
    none, three, _, seven, _ = (f"{value:,.0f}" for value in named)
    assert f"{seven} tokens/s in stock vLLM, without a drafter {none} and with K=3 {three}" in " ".join(
        text_of("troubleshooting").split()
    )
    curves = {r["run"]: r["curve"] for r in results("h200-training-smollm2")["runs"] if r["method"] == "p-eagle"}
    lengths = [f"{point['acceptance_length']:.2f}" for run in ("first", "second") for point in curves[run]]
    training = " ".join(text_of("guide-training").split())
    assert "{} tokens a round at 33 million tokens and {} at 43 million".format(*lengths[:2]) in training
    assert "{}, {}, {} and {} on the way and {} at its end".format(*lengths[2:]) in training


def options(command: Any) -> Iterator[str]:
    """Every flag of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from options(below)


@pytest.mark.parametrize("guide", GUIDES)
def test_flags_that_are_mentioned_are_there(guide: str) -> None:
    """In the text; those of commands are found by running them."""
    prose = re.sub(r"^```.*?^```", "", text_of(guide), flags=re.MULTILINE | re.DOTALL)
    named = {flag for code in re.findall(r"`([^`]+)`", prose) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    assert named - {"--logdir"} <= set(options(typer.main.get_command(app)))


def zeroed(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, lambda tensors: tensors[name].zero_())


def as_eagle3(folder: Path) -> None:
    set_config(folder, **dict.fromkeys(MASK_TOKEN_ID_KEYS))
    edit_weights(folder, lambda tensors: tensors.pop("mask_hidden"))


def reordered(folder: Path) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, 1)[::-1], 1)

    edit_weights(folder, turn)


FAULTS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda folder: None,
    "P-EAGLE run as EAGLE-3": as_eagle3,
    "the mask's hidden state": zeroed("mask_hidden"),
    "another mask id": lambda folder: set_config(folder, **dict.fromkeys(MASK_TOKEN_ID_KEYS, ord("e"))),
    "a norm on the other side": lambda folder: set_config(folder, norm_before_residual=True),
    "other layers aux_hidden_states": lambda folder: set_config(folder, eagle_aux_hidden_state_layer_ids=[0, 3, 5]),
    "aux_hidden_states in another order": reordered,
    "`fc.weight` lost": zeroed("fc.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_look_as_they_are_told(fault: str, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(pairs.drafter_folder("p-eagle-4"), drafter)
    FAULTS[fault](drafter)
    llm = LLM(engines.target(), drafter, 5, device="cpu", dtype="float32", threads=1, max_model_len=128, max_num_seqs=8)
    asked = SamplingParams(max_tokens=40, ignore_eos=True)
    outs = [answer.outputs[0] for answer in llm.generate(pairs.prompts(8), asked)]
    rounds = sum(out.num_drafts for out in outs)
    shares = [100 * sum(out.num_accepted_tokens_per_pos[i] for out in outs) / rounds for i in range(5)]
    row = re.search(rf"^\| {re.escape(fault)}.* \| ([\d ]+)% \|$", text_of("troubleshooting"), re.MULTILINE)
    assert row is not None and shares == pytest.approx([int(share) for share in row[1].split()], abs=3)


@cache
def source_texts() -> list[str]:
    """Every text in the package, with a mark where a value is put into it."""
    found = []
    for path in (ROOT / "peagle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
    return found


def test_errors_are_the_ones_that_the_code_says() -> None:
    told = [line for block in blocks("troubleshooting", "text") for line in block.splitlines() if line.strip()]
    assert len(told) > 30
    for line in told:
        # a flag in front may come from elsewhere in the code than the sentence behind it
        pieces = [p for p in line.split("...") if len(p.strip(" .:;,()")) > 1 and not re.fullmatch(r"--[\w-]+ ", p)]
        pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        assert any(pattern.search(text) for text in source_texts()), f"nothing in peagle says: {line}"


def test_the_format_is_told_whole() -> None:
    prose = re.sub(r"^```.*?^```", "", text_of("checkpoint-format"), flags=re.MULTILINE | re.DOTALL)
    told = set(re.findall(r"`([^`]+)`", prose))
    layer = replace(pairs.BASE.layer, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True)
    rope = RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=64)
    own: dict[str, Any] = {
        "own_embeddings": True,
        "own_head": True,
        "draft_vocab_size": 28,
        "windows": (None, 16),
        "rope": rope,
    }
    cfg = replace(
        pairs.BASE,
        num_layers=2,
        mask_token_id=1,
        layer=layer,
        fc_norm=True,
        norm_before_fc=True,
        aux_layer_ids=(1, 2),
        **own,
    )
    values = build_drafter_config(cfg, torch.bfloat16)
    assert set(values) <= told
    for name in drafter_layout(cfg):
        plain = plain_tensor_name(name)
        if not plain.startswith("layers.1.") and not plain.endswith(".bias"):
            assert plain in told or re.sub(r"^midlayer\.(?=self_attn\.[qk]_norm)", "", plain) in told, plain
    assert set(OWN_FIELDS) <= told
    assert (
        set(plain_to_speculators({**values, "fc_norm": False}, "t", [], 7)) - {"speculators_version", *values} <= told
    )


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere_and_every_page_is_listed() -> None:
    for page in sorted(DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            aim = page.parent / name if name else page
            assert aim.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(aim), f"{page.name}: {link}"
    listed = text_of("README")
    assert all(f"({page.name})" in listed for page in DOCS.glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("name", ("round", "drafter", "cache", "graph", "rows"))
def test_pictures_stand_alone_and_have_two_schemes(name: str) -> None:
    path = DOCS / "images" / f"{name}.svg"
    assert f"(images/{name}.svg)" in text_of("how-it-works")
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert all((root.findtext(f"{space}{part}") or "").strip() for part in ("title", "desc")), "for who cannot see it"
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href=|url\((?!#)|<script|<image", text), "it asks for nothing else"
    used = {word for node in root.iter() for word in node.get("class", "").split()}
    light, dark = text.split("@media", 1)
    for style in used - {"head", "mid", "end"}:  # these have no colour
        assert f".{style} " in light and f".{style} " in dark, style
