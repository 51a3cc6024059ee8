"""`peagle eval`: the replay for all K against the reference, servers' counters, failures, resuming."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import forks
import numpy as np
import pairs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many, set_config

from peagle.cli import main
from peagle.config import EvalServerSettings, EvalSettings, SamplingParams
from peagle.data.prompts import Prompt
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from peagle.errors import UserError
from peagle.eval.acceptance import EvalEngine, Evaluation, open_drafters
from peagle.eval.conversations import EvalRequest, EvalResponse
from peagle.eval.counters import UNEXPLAINED, ServerEvaluator
from peagle.eval.datasets import EvalDataset, open_datasets
from peagle.eval.samples import (
    AcceptanceSample,
    DraftResult,
    bootstrap_interval,
    build_rows,
    build_sample,
    replay_drafts,
)
from peagle.results.files import read_results
from peagle.results.schema import AcceptanceRow, Results

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = ord(",")
KS = (1, 4, 5)
SETTINGS = EvalSettings(num_speculative_tokens=KS, max_tokens=24, max_model_len=160, min_drafts=1, context_bounds=(64,))
HERE = EvalEngine("embedded", "cpu", "float32", threads=1)


@cache
def target() -> Path:
    folder = engines.home() / "eval-target"
    shutil.copytree(pairs.target_folder(), folder)
    engines.write_tokenizer(folder, pairs.VOCAB)
    set_config(folder, eos_token_id=EOS)
    return folder


def rows(count: int = 5, turns: int = 2) -> list[dict[str, Any]]:
    text = pairs.TEXT.decode()
    starts = range(700, 700 + 701 * count, 701)
    return [
        {"turns": [text[s + 90 * t : s + 90 * t + 20 + s % 7] for t in range(turns)], "category": "ab"[s % 2]}
        for s in starts
    ]


def write(path: Path, given: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


@pytest.fixture
def data(tmp_path: Path) -> list[EvalDataset]:
    return open_datasets([str(write(tmp_path / "text.jsonl", rows()))])


def evaluation(data: list[EvalDataset], *names: str, **changes: Any) -> Evaluation:
    drafters = open_drafters([str(pairs.drafter_folder(name)) for name in names], target())
    given: dict[str, Any] = {"settings": SETTINGS, "engine": HERE, **changes}
    return Evaluation(str(target()), drafters, data, **given)


def counts(results: Results) -> dict[Any, Any]:
    return {
        (
            r.drafter,
            r.dataset,
            r.temperature,
            r.num_speculative_tokens,
            r.category,
            r.context_range,
            r.looping_responses,
        ): (
            r.num_responses,
            r.num_output_tokens,
            r.num_drafts,
            r.num_accepted_tokens_per_pos,
            r.acceptance_length_ci95,
        )
        for r in results.rows
    }


# The counts


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("p-eagle-4-reduced", {}),
        ("eagle3-4-reduced", {}),
        ("eagle3-1", {}),
        ("p-eagle-1", {"max_model_len": 75, "max_tokens": 100}),  # answers run into the end of the context
        ("p-eagle-1-wide", {"replay_tokens": 64, "replay_rows": 7, "replay_logits": 500}),  # odd pieces
    ],
)
def test_replay_matches_the_reference(name: str, changes: dict[str, Any], data: list[EvalDataset]) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    one = evaluation(data, name, settings=settings).run()
    each = evaluation(data, name, settings=settings, engine=EvalEngine("reference", "cpu")).run()
    assert counts(one) == counts(each)
    assert {r.engine for r in each.rows} == {"reference"}
    shown = [r for r in one.rows if r.is_whole_dataset]
    assert [r.num_speculative_tokens for r in shown] == list(KS)
    assert all(0 < r.num_accepted_tokens_per_pos[0] < r.num_drafts for r in shown), (
        "an untrained drafter would prove nothing"
    )
    assert one.warnings == each.warnings


def test_rows_add_up(data: list[EvalDataset]) -> None:
    results = evaluation(data, "p-eagle-1").run()
    assert {r.method for r in results.rows} == {"p-eagle"}
    for k in KS:
        all_rows = [r for r in results.rows if r.num_speculative_tokens == k]
        total = next(r for r in all_rows if r.is_whole_dataset)
        categories = [r for r in all_rows if r.category is not None]
        contexts = [r for r in all_rows if r.context_range is not None]
        assert [r.category for r in categories] == ["a", "b"] and total.num_responses == 10
        assert [r.context_range for r in contexts] == [(0, 64), (64, 128)]
        for parts in (categories, contexts):
            assert sum(r.num_drafts for r in parts) == total.num_drafts
            assert [
                sum(c) for c in zip(*(r.num_accepted_tokens_per_pos for r in parts), strict=True)
            ] == total.num_accepted_tokens_per_pos
        assert sum(r.num_output_tokens for r in categories) == total.num_output_tokens
        assert (
            sum(r.num_output_tokens for r in contexts) == total.num_output_tokens - total.num_responses
        )  # the first comes with the prompt
        assert total.acceptance_length_ci95 is not None and total.acceptance_length is not None
        assert total.acceptance_length_ci95[0] < total.acceptance_length < total.acceptance_length_ci95[1]


def plain_rounds(right: list[list[bool]], prompt: int, answer: int, k: int, longest: int) -> list[tuple[int, int]]:
    """Round by round, draft by draft: `right[n][i]` says whether the i-th draft at n known tokens is the text's."""
    found, known = [], prompt + 1
    while known < prompt + answer:
        accepted = offered = 0
        for i in range(k):
            if known + i + 2 > longest:
                break
            offered += 1
            if not right[known][i]:
                break
            accepted += 1
        if offered:
            found.append((known, accepted))
        known += accepted + 1
    return found


@many(200)
@given(st.data())
def test_replay_drafts_matches_a_plain_loop(data: st.DataObject) -> None:
    prompt, answer = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    longest = prompt + answer + data.draw(st.integers(0, 6))
    flags = st.lists(st.booleans(), min_size=5, max_size=5)
    right = data.draw(st.lists(flags, min_size=longest + 1, max_size=longest + 1))
    runs = [([*row, False]).index(False) for row in right]
    for k in range(1, 6):
        rounds = replay_drafts(prompt, answer, runs, k, longest)
        assert [(r.num_known_tokens, r.num_accepted_tokens) for r in rounds] == plain_rounds(
            right, prompt, answer, k, longest
        )
        assert sum(r.num_output_tokens for r in rounds) <= answer - 1


def test_worked_example_of_replay_drafts() -> None:
    runs = {4: 2, 5: 0, 6: 1, 7: 3, 8: 0}
    assert [
        (r.num_known_tokens, r.num_accepted_tokens, r.num_output_tokens) for r in replay_drafts(3, 6, runs, 1, 99)
    ] == [(4, 1, 2), (6, 1, 2), (8, 0, 1)]
    assert [
        (r.num_known_tokens, r.num_accepted_tokens, r.num_output_tokens) for r in replay_drafts(3, 6, runs, 3, 99)
    ] == [(4, 2, 3), (7, 3, 2)]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Answers of a known kind, drawn anew 200 times: about 95% of the intervals hold the true length."""
    rng = np.random.default_rng(1)
    settings = dataclasses.replace(SETTINGS, bootstrap_samples=400)
    held = 0
    for _ in range(200):
        samples = [AcceptanceSample(None, 1, 60, 20, (int(rng.binomial(20, 0.6)),), False) for _ in range(40)]
        found = bootstrap_interval(samples, settings)
        assert found is not None and found == bootstrap_interval(samples, settings)
        held += found[0] <= 1.6 <= found[1]
    assert 180 <= held <= 198
    assert bootstrap_interval(samples[:4], settings) is None


def test_looping_responses_are_excluded_in_a_second_row() -> None:
    calm = build_sample("a", 10, False, [DraftResult(5, 1, 2), DraftResult(7, 0, 1)], 2)
    loop = build_sample("a", 30, True, [DraftResult(5, 2, 3)] * 9, 2)
    labels = {"drafter": "d", "method": "p-eagle", "engine": "embedded", "dataset": "s", "temperature": 0.0}
    found = build_rows([calm, loop], 2, SETTINGS, labels)
    assert [
        (r.looping_responses, r.category, r.num_responses, r.num_drafts, r.num_accepted_tokens_per_pos) for r in found
    ] == [
        ("included", None, 2, 11, [10, 9]),
        ("excluded", None, 1, 2, [1, 0]),
    ]
    # sums over several answers tell nothing of loops
    together = dataclasses.replace(loop, num_responses=2, is_looping=None, drafts=None)
    assert [r.looping_responses for r in build_rows([calm, together], 2, SETTINGS, labels)] == ["included"]


# Data sets


def test_datasets_by_name_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "spec_bench").mkdir()
    write(tmp_path / "eval" / "gsm8k.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    write(tmp_path / "spec_bench" / "question.jsonl", [{"turns": ["a", "b"], "category": "math"}])
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(
        gzip.compress(b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n')
    )
    monkeypatch.setenv("PEAGLE_DATA", str(tmp_path))
    named, spec, own = open_datasets(["gsm8k", "spec_bench", str(packed)], limit=1)
    assert (named.name, len(named.prompts.rows)) == ("gsm8k", 1)
    assert spec.prompts.rows[0].category == "math" and spec.prompts.rows[0].turns == ("a", "b")
    assert own.name == "own" and own.prompts.rows[0].system == "s"
    twin = write(tmp_path / "gsm8k.jsonl", [{"prompt": "other"}])
    both = open_datasets([str(twin), str(tmp_path / "eval" / "gsm8k.jsonl")])
    assert len({d.name for d in both}) == 2
    for names, words in (
        (["mt_bench"], "no mt_bench.jsonl in"),
        (["speed_bench"], "prepare.py"),
        (["nowhere.jsonl"], "no such file"),
        ([str(packed), str(packed)], "twice"),
    ):
        with pytest.raises(UserError, match=words):
            open_datasets(names)


def test_invalid_rows_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"prompt": "ok"}\n{"prompt": \n[1]\n\n{"prompt": ""}\n{"other": 1}\n{"turns": ["a", 3]}\n{"prompt": 7}\n'
    )
    with pytest.raises(UserError) as caught:
        open_datasets([str(path)])
    told = str(caught.value)
    assert "6 of its rows" in told and "--skip-bad-rows" in told and "and 1 more" in told
    assert [f"line {n}:" in told for n in (2, 3, 5, 6, 7)] == [True] * 5 and "line 1:" not in told
    assert len(open_datasets([str(path)], skip_bad_rows=True)[0].prompts.rows) == 1


# Keeping and going on


def test_interrupted_run_resumes(data: list[EvalDataset], tmp_path: Path) -> None:
    out = tmp_path / "e.json"
    full = evaluation(data, "p-eagle-1", "eagle3-1").run()

    def stop(rows: list[AcceptanceRow]) -> None:
        raise KeyboardInterrupt

    torn = evaluation(data, "p-eagle-1", "eagle3-1", out=out, on_rows=stop).run()
    assert not torn.finished and len([r for r in torn.rows if r.is_whole_dataset]) == 1
    kept = read_results(out)
    assert kept.rows == torn.rows and not kept.finished
    seen: list[tuple[str, int]] = []
    again = evaluation(
        data,
        "p-eagle-1",
        "eagle3-1",
        out=out,
        on_rows=lambda rows: seen.append((rows[0].drafter, rows[0].num_speculative_tokens)),
    ).run()
    assert seen == [("p-eagle-1", k) for k in KS[1:]] + [("eagle3-1", k) for k in KS]
    assert again.finished and counts(again) == counts(full)
    assert again.provenance.duration >= kept.provenance.duration
    # nothing is left, and nothing is loaded for it
    assert counts(evaluation(data, "p-eagle-1", "eagle3-1", out=out).run()) == counts(full)
    for changes, words in (
        ({"max_tokens": 25}, "started with max_tokens 24, now it is 25"),
        ({"seed": 1}, "seed 0"),
    ):
        with pytest.raises(UserError, match=words):
            evaluation(data, "p-eagle-1", out=out, settings=dataclasses.replace(SETTINGS, **changes))
    with pytest.raises(UserError, match="engine embedded"):
        evaluation(data, "p-eagle-1", out=out, engine=EvalEngine("reference"))
    other = open_datasets([str(write(tmp_path / "text.jsonl", rows(4)))])
    with pytest.raises(UserError, match="other prompts in text"):
        evaluation(other, "p-eagle-1", out=out)


# A server with vLLM's counters


@cache
def server_engine() -> LLM:
    own = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 1, "max_model_len": 160}
    return LLM(target(), pairs.drafter_folder("p-eagle-1"), 4, **own)


@cache
def answer(prompt: tuple[int, ...], max_tokens: int, temperature: float, seed: int) -> CompletionOutput:
    params = SamplingParams(max_tokens, temperature, seed=seed)
    return server_engine().generate([list(prompt)], params)[0].outputs[0]


class Metered(BaseHTTPRequestHandler):
    """The embedded engine behind OpenAI's protocol, counting as vLLM does; with faults on demand."""

    faults: list[str] = []
    drafts = generated = 0
    accepted = [0] * 4
    knows_ids = True
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass  # the client closed the connection

    def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.reply(b'{"data": [{"id": "small"}]}')
        if self.path != "/metrics":
            return self.reply(b"no", 404)
        cls = type(self)
        whose = 'engine="0",model_name="small"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            f"vllm:spec_decode_num_drafts_total{{{whose}}} {cls.drafts}.0",
            f"vllm:spec_decode_num_drafts_created{{{whose}}} 1.7e9",
            f"vllm:generation_tokens_total{{{whose}}} {cls.generated}.0",
            'vllm:generation_tokens_total{engine="0",model_name="another"} 77.0',
            f"vllm:num_requests_running{{{whose}}} 0.0",
        ]
        place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{place}{{{whose},position="{i}"}} {n}.0' for i, n in enumerate(cls.accepted)]
        self.reply("\n".join(lines).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        with cls.lock:
            fault = cls.faults.pop(0) if cls.faults else ""
        if fault == "429":
            return self.reply(b"{}", 429, Retry_After="0")
        if not cls.knows_ids and "return_token_ids" in body:
            return self.reply(b'{"error": {"message": "unknown field return_token_ids"}}', 400)
        with cls.lock:
            out = answer(tuple(body["prompt"]), body["max_tokens"], body["temperature"], body["seed"])
            cls.drafts += out.num_drafts
            cls.accepted = [a + b for a, b in zip(cls.accepted, out.num_accepted_tokens_per_pos, strict=True)]
            cls.generated += len(out.token_ids)
            if fault == "others":
                cls.drafts, cls.generated = cls.drafts + 5, cls.generated + 9
            if fault == "restart":
                cls.drafts, cls.generated, cls.accepted = 0, 0, [0] * 4
        if fault == "reset":
            return self.connection.close()
        if fault == "500":
            return self.reply(b"oh", 500)
        if fault == "rubbish":
            return self.reply(b"<html>")
        if fault == "nonsense":
            return self.reply(b'{"choices": []}')
        if fault in ("slow", "think"):
            time.sleep(3.5 if fault == "slow" else 120)
        choice: dict[str, Any] = {"text": out.text, "finish_reason": out.finish_reason}
        if "return_token_ids" in body:
            choice["token_ids"] = out.token_ids
        usage = {"completion_tokens": len(out.token_ids)}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        if fault != "drip":
            return self.reply(data)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for i in range(12):  # slower than a whole request may be, faster than a single read may
            self.wfile.write(data[i : i + 1])
            self.wfile.flush()
            time.sleep(0.3)


@pytest.fixture
def server() -> Iterator[tuple[type[Metered], str]]:
    handler = type("Here", (Metered,), {"faults": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def served(url: str, data: list[EvalDataset], temperature: float = 0.0, **changes: Any) -> Results:
    quick = {"timeout_s": 20.0, "backoff_s": 0.01, "retries": 2, "settle_s": 0.2, "concurrency": 3}
    where = EvalEngine(url, server=EvalServerSettings(url, **{**quick, **changes}))
    ks = EvalSettings.num_speculative_tokens
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=ks, temperatures=(temperature,))
    return evaluation(data, "p-eagle-1", engine=where, settings=settings).run()


@cache
def truth(temperature: float = 0.0) -> Results:
    path = write(engines.home() / "text.jsonl", rows())
    settings = dataclasses.replace(SETTINGS, temperatures=(temperature,))
    return evaluation(open_datasets([str(path)]), "p-eagle-1", settings=settings).run()


def sums(results: Results) -> dict[Any, Any]:
    """What counters can tell, of K = 4."""
    return {
        r.category: (r.num_responses, r.num_output_tokens, r.num_drafts, r.num_accepted_tokens_per_pos)
        for r in results.rows
        if r.num_speculative_tokens == 4 and r.context_range is None and r.looping_responses == "included"
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_server_counters_match_the_replay(temperature: float, server: Any, data: list[EvalDataset]) -> None:
    """The engine behind the server decodes with K draft tokens; a sampled text is the same with any K."""
    handler, url = server
    ours = truth(temperature)
    together = served(url, data, temperature)
    assert sums(together) == sums(ours) and not together.warnings
    assert {r.looping_responses for r in together.rows} == {"included"} and {r.engine for r in together.rows} == {url}
    # one at a time, every answer is told apart: loops and intervals are there, as of our own engine
    handler.knows_ids = False
    alone = served(f"{url}/v1", data, temperature, concurrency=1)

    def told(results: Results) -> list[Any]:
        return [
            (r.category, r.looping_responses, r.num_drafts, r.num_accepted_tokens_per_pos, r.acceptance_length_ci95)
            for r in results.rows
            if r.num_speculative_tokens == 4 and not r.context_range
        ]

    assert told(alone) == told(ours)


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        (["429", "429"], "again: status 429"),
        (["reset"], "again: connection closed"),
        (["", "500"], "again: status 500"),
        (["rubbish", "nonsense"], "again: invalid response"),
        (["slow"], "again: timed out"),
        (["drip"], "again: timed out"),
        (["", "", "", "restart"], "counters decreased"),
    ],
)
def test_failures_are_retried_and_named(faults: list[str], named: str, server: Any, data: list[EvalDataset]) -> None:
    """The counts are those without faults: what a failed group added to the counters is not counted."""
    handler, url = server
    served(url, data)  # from here on the server answers at once, however busy the machine is
    handler.faults = list(faults)
    results = served(url, data, timeout_s=2.5 if faults in (["slow"], ["drip"]) else 20.0)
    assert sums(results) == sums(truth())
    assert any(named in warning for warning in results.warnings), results.warnings


def test_other_clients_are_noticed(server: Any, data: list[EvalDataset]) -> None:
    handler, url = server
    handler.faults = ["", "others"]
    assert any(UNEXPLAINED in warning for warning in served(url, data).warnings)


def test_gives_up_on_a_failing_server(server: Any, data: list[EvalDataset]) -> None:
    handler, url = server
    handler.faults = ["500"] * 1000
    with pytest.raises(UserError, match="gave up after 3 tries of a group.*status 500"):
        served(url, data)
    handler.faults = []
    with pytest.raises(UserError, match="-k 3: this server uses 4"):
        where = EvalEngine(url, server=EvalServerSettings(url))
        evaluation(
            data, "p-eagle-1", engine=where, settings=dataclasses.replace(SETTINGS, num_speculative_tokens=(3,))
        ).run()
    with pytest.raises(UserError, match="connection refused"):
        served("http://127.0.0.1:9", data)


def test_ctrl_c_does_not_wait_for_the_server(server: Any, data: list[EvalDataset], tmp_path: Path) -> None:
    """The command in a process of its own, interrupted while the server thinks."""
    handler, url = server
    handler.faults = ["", *["think"] * 101]
    out = tmp_path / "e.json"
    command = ["-m", "peagle", "eval", str(target()), "-d", str(pairs.drafter_folder("p-eagle-1"))]
    command += ["--data", data[0].source, "--engine", url, "--max-tokens", "24", "--max-model-len", "160"]
    process = forks.Process(*command, "--out", str(out))
    process.wait_until(lambda: len(handler.faults) <= 100)
    process.kill(signal.SIGINT)
    assert process.wait(60) == 130 and "the same command resumes" in process.stderr()
    assert not read_results(out).finished
    handler.faults = []
    where = EvalEngine(url, server=EvalServerSettings(url))
    settings = EvalSettings(max_tokens=24, max_model_len=160)
    again = evaluation(data, "p-eagle-1", engine=where, out=out, settings=settings).run()
    assert again.finished and sums(again) == sums(truth())


def test_ctrl_c_ends_connections_still_being_made(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is established only after Ctrl-C closed the others is closed too."""
    handler, url = server
    handler.faults = ["think"]
    evaluator = ServerEvaluator(
        EvalServerSettings(url, timeout_s=30.0),
        SimpleNamespace(max_model_len=160, warnings=[], settings=SETTINGS, on_progress=None),  # type: ignore[arg-type]
        [],
    )
    connect, complete, connecting = socket.create_connection, evaluator._complete_one, threading.Event()
    close, closed = evaluator._http.close, threading.Event()

    def connect_late(*args: Any, **options: Any) -> socket.socket:
        connecting.set()
        assert closed.wait(20)
        return connect(*args, **options)

    def interrupt(request: EvalRequest) -> EvalResponse:
        if request.turn == 1:
            return complete(request)
        assert connecting.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluator._http, "close", lambda: (close(), closed.set()))
    monkeypatch.setattr(socket, "create_connection", connect_late)
    monkeypatch.setattr(evaluator, "_complete_one", interrupt)
    row = Prompt("a", "b", ("c",))
    with pytest.raises(KeyboardInterrupt):
        evaluator.complete([EvalRequest(row, turn, [1, 2], SamplingParams(max_tokens=8)) for turn in (0, 1)])
    assert handler.faults == ["think"]


# The command


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["peagle", "eval", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: list[EvalDataset]
) -> None:
    drafters = [str(pairs.drafter_folder(name)) for name in ("p-eagle-1", "eagle3-1")]
    common = [str(target()), "-d", *drafters, "--data", data[0].source, "--max-tokens", "24", "--max-model-len", "160"]
    common += ["--device", "cpu", "--dtype", "float32", "--context-bounds", "64"]
    out = tmp_path / "e.json"
    assert run(monkeypatch, *common, "-k", "1", "4", "--temperature", "0", "--out", str(out), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(out.read_text()) and shown["finished"]
    found = read_results(out)
    want = evaluation(
        data, "p-eagle-1", "eagle3-1", settings=dataclasses.replace(SETTINGS, num_speculative_tokens=(1, 4))
    ).run()
    assert counts(found) == counts(want)
    assert run(monkeypatch, *common, "-k", "1,4", "--out", str(out)) == 0
    text, told = capsys.readouterr()
    row = next(
        r for r in found.rows if r.is_whole_dataset and r.num_speculative_tokens == 4 and r.drafter == "eagle3-1"
    )
    assert f"{row.acceptance_length:.2f}" in text and "by category" in text and "by context" in text
    assert "warning: too few drafts" in told
    for words, expected in (
        ((*common, "-k", "x"), "-k x: must be an integer"),
        ((*common, "-k", "99"), "-k 99"),
        ((*common, "--engine", "abacus"), "--engine abacus: must be embedded, reference, vllm"),
        ((*common, "--temperature", "-1"), "--temperature"),
        ((*common, "--context-bounds", "x"), "--context-bounds x: must be an integer"),
        ((str(target()), "--data", data[0].source), "--drafter: give at least one"),
        ((str(target()), "-d", drafters[0]), "--data: give"),
        ((*common, "--engine", "http://127.0.0.1:9"), "--drafter"),
    ):
        capsys.readouterr()
        assert run(monkeypatch, *words) == 2, words
        assert expected in capsys.readouterr().err
