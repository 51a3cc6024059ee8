"""`peagle demo`: the engines' outputs equal the reference's, and the panes show them."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from pairs import TEXT, drafter_folder, target_folder
from rich.cells import cell_len
from rich.console import Console

from peagle import SamplingParams
from peagle.checkpoints.target import Target, load_target
from peagle.cli import demo, main
from peagle.cli.demo import DemoEngine, DemoPane, DemoResult, render_panes, run_in_turns
from peagle.display import DRAFT_STYLE
from peagle.engine.llm import LLM
from peagle.hub import resolve as hub
from peagle.speculative.reference import generate

K, TOKENS = 3, 40
PROMPTS = [[*TEXT[at : at + 40]] for at in (600, 2900)]


def letters(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def engine(target: Target, drafter: str | None) -> LLM:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "max_num_seqs": 1, "max_model_len": 128}
    options["tokenizer"] = False
    return LLM(target, drafter_folder(drafter) if drafter else None, K if drafter else "auto", **options)


def engines() -> list[DemoEngine]:
    """The small trained pairs."""
    target = load_target(target_folder())
    ways = (("alone", None), ("EAGLE-3", "eagle3-1"), ("P-EAGLE", "p-eagle-1"))
    return [DemoEngine(name, drafter, engine(target, drafter)) for name, drafter in ways]


def one_of_them_changed() -> list[DemoEngine]:
    target, found = load_target(target_folder()), engines()
    target.model.lm_head.weight.data[ord("e")] = 0
    found[0].llm = engine(target, None)
    return found


@pytest.fixture(scope="module")
def engines_by_method() -> list[DemoEngine]:
    return engines()


def test_outputs_equal_the_reference_and_turns_are_fair(engines_by_method: list[DemoEngine]) -> None:
    params = SamplingParams(max_tokens=TOKENS)
    model, eos = engines_by_method[0].llm.target.model, engines_by_method[0].llm.target.eos_ids
    by_prompt = []
    for ids in PROMPTS:
        moments = [[(0.0, False)] * len(engines_by_method)]
        for engine_of_method in engines_by_method:
            engine_of_method.start_request(ids, params)
        run_in_turns(
            engines_by_method,
            lambda seen=moments: seen.append([(r.seconds[-1], r.finished) for r in engines_by_method]),
        )
        for before, after in pairwise(moments):
            (mover,) = (i for i in range(len(engines_by_method)) if before[i] != after[i])
            assert before[mover][0] == min(seconds for seconds, done in before if not done), "it was not its turn"
        runs = [engine_of_method.result() for engine_of_method in engines_by_method]
        for run, engine_of_method in zip(runs, engines_by_method, strict=True):
            drafter = engine_of_method.llm.drafter
            want = generate(model, ids, params, eos, drafter, K if drafter else 0, max_model_len=128)
            assert run.token_ids == want.token_ids and run.num_forward_passes == 1 + len(want.steps)
            if drafter is not None:
                kept = [sum(step.num_accepted_tokens > i for step in want.steps) for i in range(K)]
                assert run.num_accepted_tokens_per_pos == kept and run.num_drafts == want.num_drafts
        by_prompt.append(runs)
    for engine_of_method, runs in zip(engines_by_method, zip(*by_prompt, strict=True), strict=True):
        whole = engine_of_method.result(-2)
        assert whole.token_ids == runs[0].token_ids + runs[1].token_ids
        assert whole.seconds == runs[0].seconds + runs[1].seconds > 0
        assert whole.num_forward_passes == runs[0].num_forward_passes + runs[1].num_forward_passes


def fake_engine(name: str, drafter: str | None, text: str, drafted: list[bool], done: bool = True) -> Any:
    """A fake engine with this output, one token per byte."""
    run = DemoResult([*text.encode()], 10, 9, [6, 3, 1], 1.0)
    request = SimpleNamespace(output_token_ids=run.token_ids, is_draft_token=drafted)
    return SimpleNamespace(name=name, drafter=drafter, result=lambda: run, finished=done, requests=[request])


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 40), (119, 10), (60, 18)])
def test_panes_fit_the_terminal_and_shade_draft_tokens(size: tuple[int, int]) -> None:
    text = "def f(n):\n    return [bold]\n\n" + " ".join(f"word{i}" for i in range(60)) + " 終\ttail"
    data = text.encode()
    drafted = [i % 5 in (1, 2) for i in range(len(data))]
    panes = [
        DemoPane(fake_engine(name, drafter, text, drafted if drafter else [False] * len(data)), letters)
        for name, drafter in demo.METHODS
    ]
    for pane in panes:
        pane.update()
    width, height = size
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, height=height)
    lines = screen.render_lines(render_panes(screen, panes, DRAFT_STYLE), pad=False)
    plain = ["".join(s.text for s in line) for line in lines]
    assert all(cell_len(line) <= width for line in plain)
    assert len(plain) < height or height < 14, "it would scroll away under the cursor"
    assert "\n".join(plain).count("word59") == 3 and "1.00x" in "\n".join(plain)
    shaded = "".join(s.text for line in lines for s in line if s.style is not None and s.style.bgcolor is not None)
    kept = [t for t, was in panes[2].parts if was]
    assert shaded.strip() and set(shaded) <= set("".join(kept)) | {" "}
    if width >= 120:  # the whole text is there, so all that was drafted is, twice, but for what wrapping took away
        count = {c: "".join(kept).count(c) for c in "wordtail"}
        assert {c: shaded.count(c) for c in "wordtail"} == {c: 2 * n for c, n in count.items()}


def with_small_engines(monkeypatch: pytest.MonkeyPatch, engines_by_method: list[DemoEngine], *args: str) -> int:
    monkeypatch.setattr(demo, "_build_engines", lambda settings, *rest: (PROMPTS, letters, engines_by_method))
    monkeypatch.setattr(sys, "argv", ["peagle", "demo", "first", "second", "--max-tokens", str(TOKENS), *args])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_plain_lines(
    engines_by_method: list[DemoEngine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, eos = engines_by_method[0].llm.target.model, engines_by_method[0].llm.target.eos_ids
    params = SamplingParams(max_tokens=TOKENS)
    want = [generate(model, ids, params, eos, max_model_len=128).token_ids for ids in PROMPTS]
    assert with_small_engines(monkeypatch, engines_by_method) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err, "no terminal, no colours"
    assert [out.count(letters(ids)) for ids in want] == [1, 1], "equal texts are shown once"
    assert "All outputs are equal" in out and "speedup" in out


def test_different_outputs_are_an_error_in_float32_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    others = one_of_them_changed()
    output = []
    for ids in PROMPTS:
        for engine_of_method in others:
            engine_of_method.start_request(ids, SamplingParams(max_tokens=TOKENS))
        run_in_turns(others, lambda: None)
        output.append([engine_of_method.result().token_ids for engine_of_method in others])
    number = next(i for i, texts in enumerate(output, 1) if texts[0] != texts[1])
    where = f"outputs of prompt {number} differ: "
    assert with_small_engines(monkeypatch, others) == 2
    out, err = capfd.readouterr()
    assert "All outputs are equal" not in out
    assert err.startswith(f"peagle: error: the {where}") and err.count("\n") == 1
    monkeypatch.setattr(LLM, "dtype", "bfloat16")
    assert with_small_engines(monkeypatch, others) == 0
    out, err = capfd.readouterr()
    assert err == "" and f"The {where}in bfloat16" in out and "All outputs are equal" not in out


def test_invalid_input_is_reported_before_loading(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for args, expected in ((["  "], "empty"), (["hi", "-k", "none"], "-k none"), (["hi", "--max-tokens", "0"], "0")):
        monkeypatch.setattr(sys, "argv", ["peagle", "demo", *args])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert left.value.code == 2 and out == "" and err.count("\n") == 1 and expected in err


class Terminal:
    def __init__(self, *command: str, columns: int = 80, lines: int = 24) -> None:
        self.handle, theirs = pty.openpty()
        env = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
        self.process = forks.Process("-m", "peagle", "demo", *command, env=env, terminal=theirs)
        os.close(theirs)
        self.output = ""

    def until(self, enough: str | None, seconds: float = 240) -> str:
        """Returns the output once it contains `enough`, or, if that is None, once the process has ended."""
        ends = time.monotonic() + seconds
        while enough is None or enough not in self.output:
            ready, _, _ = select.select([self.handle], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"it waits: {self.output!r}"
            try:
                new = os.read(self.handle, 65536)
            except OSError:
                new = b""
            if not new:
                assert enough is None, self.output
                break
            self.output += new.decode(errors="replace")
        return self.output

    def close(self) -> None:
        self.process.end()
        os.close(self.handle)


@pytest.mark.usefixtures("smollm2")
def test_on_a_terminal_with_the_real_model() -> None:
    """Runs to the end; then Ctrl-C restores the cursor."""
    assert hub.shipped_drafters() == [hub.EAGLE3_DRAFTER, hub.DEFAULT_DRAFTER]
    screen = Terminal("What is the capital of France?", "--max-tokens", "12", "-k", "3")
    try:
        output = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.until(None))
        assert screen.process.wait(60) == 0, output
        assert "The capital of France is Paris." in output and "with EAGLE-3" in output and "with P-EAGLE" in output
        assert "All outputs are equal" in output and "speedup" in output
    finally:
        screen.close()
    screen = Terminal("Tell me a long story.", "--max-tokens", "900", "-k", "2")
    try:
        screen.until("tokens, ")
        screen.process.kill(signal.SIGINT)
        output = screen.until(None)
        assert screen.process.wait(60) == 130 and "Traceback" not in output
        assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l"), "the cursor is back"
    finally:
        screen.close()
