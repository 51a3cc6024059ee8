"""`peagle chat`: responses, statistics and shading equal the reference's; Ctrl-C in a terminal.

Piped output is compared as a whole. The terminal is a pseudo-terminal with SmolLM2.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import engines
import forks
import pytest
from pairs import EOS_ID, TEXT, drafter_folder
from serving_support import K, LocalServer, wait_until
from streaming import FAULTS, StreamServer

from peagle.cli import main
from peagle.cli.chat_server import ServerBackend
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.speculative.reference import Generation, generate

TOKENS, MAX_K = 16, 5
DRAFTER = "p-eagle-4"
FOLDERS_EOS = frozenset({EOS_ID})  # as the target's folder has it; engines that tests make end at a comma too
QUESTIONS = [TEXT[at : at + 18].decode().replace("\n", " ").strip() for at in (600, 1500, 2500, 4000)]


def chat(*lines: str, flags: tuple[str, ...] = (), **env: str) -> tuple[int, str, str]:
    run = forks.Process("-m", "peagle", "chat", *flags, stdin="".join(f"{x}\n" for x in lines).encode(), env=env)
    return run.wait(), run.stdout(), run.stderr()


def local() -> tuple[str, ...]:
    own = ("-t", str(engines.target().folder), "-d", str(drafter_folder(DRAFTER)), "-k", str(MAX_K))
    return (*own, "--max-tokens", str(TOKENS), "--device", "cpu", "--dtype", "float32")


@cache
def reference_response(k: int, *talk: str, name: str = DRAFTER, eos: frozenset[int] = FOLDERS_EOS) -> Generation:
    """The reference's response to a conversation; the chat template joins messages with a space."""
    prompt = list(" ".join(talk).encode())
    own = engines.drafter(name) if k else None
    return generate(engines.target().model, prompt, SamplingParams(max_tokens=TOKENS), eos, own, k, 256)


def text(one: Generation) -> str:
    return engines.decode(one.token_ids[: len(one.token_ids) - (one.finish_reason == "stop")])


def stats_pattern(answers: list[Generation]) -> str:
    """The expected output of /stats, as a pattern: the speed varies."""
    tokens, steps = sum(len(a.token_ids) for a in answers), sum(len(a.steps) for a in answers)
    line = rf"responses: {len(answers)}; {tokens} tokens in {steps} decode steps, [\d.]+ tokens/s"
    if drafts := sum(a.num_drafts for a in answers):
        kept = sum(sum(a.num_accepted_tokens_per_pos) for a in answers)
        line += re.escape(f"; acceptance length {1 + kept / drafts:.2f}")
    return line + "\n"


def conversation(max_k: int, **how: Any) -> tuple[list[str], str]:
    """The typed lines, and a pattern of the whole output."""
    a, b, c, d = QUESTIONS
    first = reference_response(max_k, a, **how)
    second = reference_response(2, a, text(first), b, **how)
    third = reference_response(0, a, text(first), b, text(second), c, **how)
    fresh = reference_response(max_k, d, **how)
    typed = [a, "/stats", "/k 2", "", b, "/off", c, "/stats", "/reset", "/stats", "/on", f"/k {max_k}", d, "/stats"]
    output = [re.escape(text(first) + "\n"), stats_pattern([first]), re.escape(text(second) + "\n")]
    output += [
        re.escape(text(third) + "\n"),
        stats_pattern([first, second, third]),
        r"No responses yet\.\n",
    ]
    output += [re.escape(text(fresh) + "\n"), stats_pattern([fresh])]
    assert (
        any(first.is_draft_token)
        and sum(second.num_accepted_tokens_per_pos)
        and len(third.steps) == len(third.token_ids) - 1
    )
    return typed, "".join(output)


def test_a_piped_conversation_equals_the_references() -> None:
    typed, expected = conversation(MAX_K)
    status, output, complaints = chat(*typed, "/exit", "never asked", flags=local())
    assert (status, complaints) == (0, "")
    assert re.fullmatch(expected, output), (output, expected)


def test_a_server_gives_the_same_output() -> None:
    typed, expected = conversation(K, name="p-eagle-1", eos=engines.EOS)
    with LocalServer(api_key="sesame") as server:
        flags = ("--url", server.url, "--max-tokens", str(TOKENS))
        status, output, complaints = chat(*typed, flags=flags, OPENAI_API_KEY="sesame")
        assert (status, complaints) == (0, "")
        assert re.fullmatch(expected, output), (output, expected)
        status, output, complaints = chat("hello", flags=flags)
        assert (status, output) == (2, "") and "OPENAI_API_KEY" in complaints and "sesame" not in complaints
        server.check_engine_idle()


def test_accepted_draft_tokens_are_shaded() -> None:
    question = QUESTIONS[1]
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"}
    _, output, _ = chat(question, flags=local(), **colours)
    shaded, plain, now = [], "", False
    for code, letter in re.findall(r"\x1b\[([\d;]*)m|([^\x1b])", output):
        if letter:
            plain += letter
            shaded.append(now)
        else:
            now = "48;5" in code
    want = reference_response(MAX_K, question)
    assert plain == text(want) + "\n"
    letters = [i for i, letter in enumerate(text(want)) if letter != "\n"]  # an end of line has no shade
    assert [shaded[i] for i in letters] == [want.is_draft_token[i] for i in letters] and any(want.is_draft_token)


def test_an_error_is_one_line_and_ends_a_piped_chat(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, through the same `main`."""
    cases: list[tuple[str, tuple[str, ...], str]] = [
        ("/frobnicate", (), "/frobnicate: no such command"),
        ("/k", (), "/k: must be a number from 0 to 5"),
        ("/k 6", (), "/k 6: must be a number from 0 to 5"),
        ("/k -1", (), "/k -1: must be"),
        ("x" * 300, (), "300 tokens"),
        ("hello", ("--max-tokens", "0"), "--max-tokens 0"),
        ("hello", ("-k", "many"), "-k many"),
        ("hello", ("--url", "ftp://nowhere"), "--url ftp://nowhere"),
        ("hello", ("--url", "http://127.0.0.1:9"), "is the server running?"),
    ]
    for typed, flags, expected in cases:
        monkeypatch.setattr(sys, "argv", ["peagle", "chat", *local(), *flags])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{typed}\n/exit\n"))
        with pytest.raises(SystemExit) as exit:
            main()
        output, complaints = capfd.readouterr()
        assert exit.value.code == 2 and output == "", (typed, output, complaints)
        assert complaints.count("\n") == 1 and expected in complaints, (typed, complaints)


def test_speculation_needs_a_drafter() -> None:
    flags = ("-t", str(engines.target().folder), "--max-tokens", str(TOKENS), "--device", "cpu", "--dtype", "float32")
    status, output, complaints = chat(QUESTIONS[0], "/off", "/stats", "/on", flags=flags)
    assert status == 2 and "no drafter" in complaints
    assert re.fullmatch(
        re.escape(text(reference_response(0, QUESTIONS[0])) + "\n")
        + stats_pattern([reference_response(0, QUESTIONS[0])]),
        output,
    )


def test_other_servers_and_their_faults() -> None:
    with StreamServer() as server:
        status, output, complaints = chat(
            "as:usage in the last.", "/stats", flags=("--url", server.url, "--max-tokens", "4")
        )
        assert (status, output, complaints) == (
            0,
            "word word word word \nThis server does not report its tokens.\n",
            "",
        )
        assert "peagle" not in server.answered[0].body, "a stranger might refuse what it does not know"
        backend = ServerBackend(server.url)
        slow = ("silent", "stalls", "drips", "no usage", "rubbish usage", "nothing")
        for fault in set(FAULTS) - set(slow):
            with pytest.raises(UserError, match=f"--url {server.url}: ") as error:
                list(backend.respond([{"role": "user", "content": f"fault:{fault}."}], SamplingParams()))
            if fault == "429":
                assert "429" in str(error.value) and str(error.value).endswith("this is a 429; try again in 1 s")


class Terminal:
    """A pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.handle, theirs = pty.openpty()
        env = {"TERM": "xterm-256color", "COLUMNS": "200"}
        self.process = forks.Process("-m", "peagle", *command, env=env, terminal=theirs)
        os.close(theirs)
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self.handle, line.encode())

    def press_ctrl_c(self) -> None:
        time.sleep(0.3)  # nobody presses it between a prompt and the reading behind it, where it would wait for a key
        self.process.kill(signal.SIGINT)

    def until(self, done: Callable[[str], object], seconds: float = 300) -> str:
        """What came since the last time, as soon as it is enough."""
        ends, new = time.monotonic() + seconds, ""
        while not done(new):
            ready, _, _ = select.select([self.handle], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"it waits: {new!r}"
            new += os.read(self.handle, 4096).decode(errors="replace")
        return new


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    one = Terminal(*command)
    try:
        yield one
    finally:
        one.process.end()
        os.close(one.handle)


@pytest.mark.usefixtures("smollm2")
def test_ctrl_c_stops_the_response_then_the_chat() -> None:
    def prompt(output: str) -> bool:
        return output.endswith("> ")

    with terminal("chat", "--max-tokens", "400") as screen:
        assert "/help" in screen.until(prompt)
        screen.type("Tell me a long story about a fox.\n")
        screen.until(lambda output: output.count("\x1b[") > 8)  # it is at it
        screen.press_ctrl_c()
        stopped = screen.until(prompt)
        assert "; stopped" in stopped and "Traceback" not in stopped
        screen.type("/nonsense\n")
        assert "no such command" in screen.until(prompt)
        screen.type("/reset\n")
        screen.until(prompt)
        screen.type("What is the capital of France?\n")
        again = re.sub(r"\x1b\[[\d;?]*[a-z]", "", screen.until(prompt))
        assert "The capital of France is Paris." in again and "acceptance length" in again
        screen.press_ctrl_c()
        assert "Ctrl-C again" in screen.until(prompt)
        screen.press_ctrl_c()
        assert screen.process.wait(300) == 130


def test_ctrl_c_aborts_the_request_of_a_server() -> None:
    with StreamServer(each_s=0.05) as server, terminal("chat", "--url", server.url) as screen:
        screen.until(lambda output: output.endswith("> "))
        screen.type("as:usage in the last.\n")
        screen.until(lambda output: "word" in output)
        screen.press_ctrl_c()
        assert "; stopped" in screen.until(lambda output: output.endswith("> "))
        wait_until(lambda: not server.running)
        screen.type("/exit\n")
        assert screen.process.wait(300) == 0
