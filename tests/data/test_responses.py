"""Responses: every row is generated once, and resumed runs write the rows of an uninterrupted one."""

from __future__ import annotations

import gc
import json
import re
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import forks
import pytest
from chats import EOS, TEMPLATE, Canned, by_key, conversations, make_chat, make_target, rows_of, write
from engine_integrity import check_scheduler
from hypothesis import given
from hypothesis import strategies as st
from pairs import TEXT
from support import many
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.cli import main
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings, SamplingParams
from peagle.data.batches import load_responses
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.data.generators import (
    GenerationRequest,
    GenerationResult,
    is_looping,
    is_repeating,
    load_engine_generator,
    num_tokens_before_loop,
)
from peagle.data.prompts import Prompt, PromptSet, read_prompts
from peagle.data.response_file import DataSummary, ResponseFile, sidecar_path
from peagle.data.responses import UNFINISHED_PROMPT, ResponseWriter, response_seed, write_responses
from peagle.engine.llm import LLM
from peagle.errors import UserError

ENGINE = ResponseEngineSettings(device="cpu", dtype="float32", max_num_seqs=4, max_model_len=200)

USER = [{"role": "user", "content": "Really?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return make_chat(tmp_path_factory.mktemp("chat") / "t")


def text_pieces(count: int, length: int = 24) -> list[str]:
    """Pieces of the text that the small target was trained on."""
    text = TEXT.decode().replace("\n", " ")
    step = (len(text) - length) // count
    return [text[i * step : i * step + length + i % 7].strip() + "." for i in range(count)]


def write_prompts(path: Path, count: int) -> str:
    texts = text_pieces(2 * count)
    rows = [{"id": f"p/{i}", "turns": texts[2 * i : 2 * i + 1 + i % 2]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# The engine


def test_progress(
    target: Path, tmp_path: Path, terminal: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar on a terminal, lines elsewhere."""
    prompts, settings = write_prompts(tmp_path / "p.jsonl", 3), ResponseSettings(max_tokens=20)
    for name in ("BAR_INTERVAL_S", "REPORT_INTERVAL_S"):
        monkeypatch.setattr(f"peagle.data.responses.{name}", 0.0)
    write_responses(prompts, tmp_path / "bar.jsonl", str(target), settings, ENGINE)
    assert re.search(r"rows, [\d,]+ tokens/s, \d dropped, 0:00:00 left .*3/3", capsys.readouterr().err)
    monkeypatch.delenv("FORCE_COLOR")
    write_responses(prompts, tmp_path / "lines.jsonl", str(target), settings, ENGINE)
    assert re.search(r"^3 of 3 rows, [\d,]+ tokens/s, \d dropped, 0:00:00 left$", capsys.readouterr().err, re.M)


def test_rows_equal_turn_by_turn_generation(target: Path, tmp_path: Path) -> None:
    settings = ResponseSettings(temperature=0.8, top_p=0.95, max_tokens=20, samples=2, seed=3)
    prompts, out = write_prompts(tmp_path / "p.jsonl", 9), tmp_path / "deep" / "out.jsonl"
    summary = write_responses(prompts, out, str(target), settings, ENGINE, show_progress=False)
    written = by_key(rows_of(out))
    alone = LLM(target, device="cpu", dtype="float32", max_num_seqs=1, max_model_len=200)
    expected = loops = tokens = 0
    for prompt in read_prompts(prompts).rows:
        for sample in range(2):
            ids, spans, texts = list[int](), [], list[str]()
            for turn, request in enumerate(prompt.turns):
                ids += [*request.encode(), ord("\n")]
                params = settings.params(response_seed(3, prompt.id, sample, turn))
                output = alone.generate(ids, params)[0].outputs[0]
                if is_looping(output.token_ids, output.finish_reason == "stop"):
                    loops += 1
                    break
                finish = output.finish_reason
                spans.append([len(ids), len(ids) + len(output.token_ids)])
                texts += [request, output.text]
                ids += output.token_ids
                tokens += len(output.token_ids)
                if finish == "length" and turn + 1 < len(prompt.turns):
                    ids.append(EOS)  # added by the template before the next turn
            if not spans:
                assert (prompt.id, sample) not in written
                continue
            expected += 1
            row = written[prompt.id, sample]
            assert row["token_ids"] == ids[: spans[-1][1]] and row["spans"] == spans
            assert [m["content"] for m in row["messages"]] == texts
            assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(texts) // 2)
            assert row["source"] == "p" and row["finish_reason"] in ("stop", "length")
            assert (row["token_ids"][-1] == EOS) == (row["finish_reason"] == "stop")
    assert len(written) == summary.num_rows == summary.num_new == expected and summary.num_tokens == tokens
    assert summary.num_requested == 18 and summary.complete and not summary.interrupted
    assert 0 < summary.finished_share < 1, "the test needs both finish reasons"


def test_samples_are_greedy_after_their_lead(target: Path, tmp_path: Path) -> None:
    settings = ResponseSettings(temperature=0.0, max_tokens=24, samples=3, seed=3, lead=9)
    prompts, out = write_prompts(tmp_path / "p.jsonl", 8), tmp_path / "out.jsonl"
    write_responses(prompts, out, str(target), settings, ENGINE, show_progress=False)
    alone = LLM(target, device="cpu", dtype="float32", max_num_seqs=1, max_model_len=200)
    leads, others = set[int](), 0
    for row in rows_of(out):
        for turn, (start, end) in enumerate(row["spans"]):
            prompt_ids, output_ids = row["token_ids"][:start], row["token_ids"][start:end]
            seed = response_seed(3, row["id"], row["sample"], turn)
            lead = min(1 + seed % 9, len(output_ids)) if row["sample"] else 0
            if lead:
                free = (
                    alone.generate(prompt_ids, SamplingParams(lead, 1.0, 0, settings.top_p, seed))[0]
                    .outputs[0]
                    .token_ids
                )
                assert output_ids[:lead] == free[:lead]
            greedy = (
                alone.generate(prompt_ids + output_ids[:lead], SamplingParams(24 - lead, 0.0))[0].outputs[0].token_ids
            )
            # a lead may end the response
            went_on = output_ids[lead:] if output_ids[-1] != EOS or len(output_ids) > lead else greedy
            assert went_on == greedy[: len(went_on)] and (len(went_on) == len(greedy) or row["finish_reason"] == "loop")
            leads.add(lead)
            others += (
                bool(lead) and output_ids != alone.generate(prompt_ids, SamplingParams(24, 0.0))[0].outputs[0].token_ids
            )
    assert len(leads) > 5 and others > 3
    again = write_responses(prompts, out, str(target), settings, ENGINE, show_progress=False)
    assert again.num_new == 0
    with pytest.raises(UserError, match="--lead was 9 and is 0"):
        write_responses(
            prompts, out, str(target), ResponseSettings(0.0, max_tokens=24, seed=3), ENGINE, show_progress=False
        )


def test_varied_prompts_start_like_the_given_ones(target: Path, tmp_path: Path) -> None:
    settings = ResponseSettings(temperature=0.0, max_tokens=24, samples=4, seed=3, vary=7)
    prompts, out = write_prompts(tmp_path / "p.jsonl", 8), tmp_path / "out.jsonl"
    write_responses(prompts, out, str(target), settings, ENGINE, show_progress=False)
    dropped = {(d["id"], d["sample"]): d["reason"] for d in rows_of(sidecar_path(out, "dropped"))}
    written, alone = by_key(rows_of(out)), LLM(target, device="cpu", dtype="float32", max_num_seqs=1, max_model_len=200)
    kept, others = set[int](), 0
    for prompt in read_prompts(prompts).rows:
        for sample in range(4):
            row, text = written.get((prompt.id, sample)), prompt.turns[0]
            if sample:
                seed = response_seed(3, prompt.id, sample, -1)
                begun = text[: 1 + seed % 7]  # a token is a character here
                params = SamplingParams(256, 1.0, 0, settings.top_p, seed, stop_token_ids=(ord("\n"),))
                output = alone.generate(list(begun.encode()), params)[0].outputs[0]
                if row is None:
                    assert dropped[prompt.id, sample] == (
                        "loop" if output.finish_reason == "stop" else UNFINISHED_PROMPT
                    )
                    continue
                assert output.finish_reason == "stop"
                kept.add(len(begun))
                made = begun + bytes(output.token_ids[:-1]).decode()
                others, text = others + (made != text), made
                assert len(row["messages"]) == 2  # later turns do not fit the new prompt
            if row is None:
                assert dropped[prompt.id, sample] == "loop"
                continue
            assert row["messages"][0]["content"] == text
            start, end = row["spans"][0]
            ids = [*text.encode(), ord("\n")]
            assert row["token_ids"][:start] == ids
            greedy = alone.generate(ids, SamplingParams(24, 0.0))[0].outputs[0].token_ids
            answer = row["token_ids"][start:end]
            assert answer == greedy[: len(answer)] and (len(answer) == len(greedy) or row["finish_reason"] == "loop")
    assert len(kept) > 4 and others > 8
    assert write_responses(prompts, out, str(target), settings, ENGINE, show_progress=False).num_new == 0
    with pytest.raises(UserError, match="--vary was 7 and is 0"):
        write_responses(
            prompts, out, str(target), ResponseSettings(0.0, max_tokens=24, seed=3), ENGINE, show_progress=False
        )


# Runs the command in child processes and kills each when it has written some rows.
KILLER = """
import os, signal, sys, time
from peagle.cli import main

out, sys.argv = sys.argv[1], ["peagle", *sys.argv[2:]]
def size():
    return os.path.getsize(out) if os.path.exists(out) else 0
for more in (1, 4000):
    had, child = size(), os.fork()
    if not child:
        main()
    while size() < had + more:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it could be killed"
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(out, "ab") as file:  # the result of a kill during a write
        file.write(b'{"id": "p/35", "source": "p", "sample": 0, "messages": [{"role": "us')
main()
"""


def test_killed_runs_write_the_rows_of_one_run(target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 36)
    settings = ResponseSettings(temperature=0.8, max_tokens=40)
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    write_responses(prompts, whole, str(target), settings, ENGINE, show_progress=False)
    args = ["data", prompts, "--out", str(out), "-t", str(target), "--temperature", "0.8", "--max-tokens", "40"]
    args += ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "200", "--json"]
    done = forks.Process("-c", KILLER, str(out), *args)
    assert done.wait(500) == 0, done.stderr()
    summary = json.loads(done.stdout())
    assert by_key(rows_of(out)) == by_key(rows_of(whole))
    assert summary["num_rows"] == len(rows_of(whole)) > summary["num_new"] > 0 and summary["complete"]
    runs = json.loads(sidecar_path(out, "manifest.json").read_text())["runs"]
    assert len(runs) == 3 and "data" in runs[0]["command"] and runs[0]["versions"]["torch"]


# Interruptions and errors, with a response generator without a model


@pytest.fixture(scope="module")
def whole_run(chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataSummary]:
    out = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    return out, write(out, chat, Canned())


@many(40)
@given(cut=st.floats(0, 1), cut_dropped=st.floats(0, 1), order=st.integers(0, 99), room=st.integers(1, 30))
def test_resume_after_truncation_anywhere(
    chat: ChatFormat, whole_run: tuple[Path, DataSummary], cut: float, cut_dropped: float, order: int, room: int
) -> None:
    whole, summary = whole_run
    out = whole.with_name("out.jsonl")
    for path, share in ((whole, cut), (sidecar_path(whole, "dropped"), cut_dropped)):
        data = path.read_bytes()
        assert len(data.splitlines()) > 1
        path.with_name(path.name.replace("whole", "out")).write_bytes(data[: round(len(data) * share)])
    sidecar_path(out, "manifest.json").write_bytes(sidecar_path(whole, "manifest.json").read_bytes())
    left = [path.read_bytes() for path in (out, sidecar_path(out, "dropped"))]
    kept = sum(data.count(b"\n") for data in left)
    source = Canned(order=order, room=room)
    again = write(out, chat, source)
    assert by_key(rows_of(out)) == by_key(rows_of(whole))
    assert by_key(rows_of(sidecar_path(out, "dropped"))) == by_key(rows_of(sidecar_path(whole, "dropped")))
    assert all(
        path.read_bytes().startswith(b[: b.rfind(b"\n") + 1])
        for path, b in zip((out, sidecar_path(out, "dropped")), left, strict=True)
    )
    assert (
        len({q.messages[0]["content"] + str(q.params.seed) for q in source.requests if len(q.messages) == 1})
        == 24 - kept
    )
    assert (again.num_rows, again.num_tokens, again.finished_share, again.dropped) == (
        summary.num_rows,
        summary.num_tokens,
        summary.finished_share,
        summary.dropped,
    )


def test_looping_responses_are_dropped_once(chat: ChatFormat, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = write(out, chat, Canned())
    dropped = by_key(rows_of(sidecar_path(out, "dropped")))
    assert summary.dropped == {"loop": len(dropped)} and len(dropped) > 1
    assert len(dropped) + len(rows_of(out)) == summary.num_requested == 24
    cut = [r for r in rows_of(out) if len(r["spans"]) < len(conversations().rows[int(r["id"][3:])].turns)]
    assert cut, "a loop in a later turn keeps the earlier turns"
    for row in cut:
        assert row["messages"][-1]["role"] == "assistant" and len(row["messages"]) == 2 * len(row["spans"])
    source = Canned()
    again = write(out, chat, source)
    assert source.requests == [] and again.num_new == 0 and again.num_rows == summary.num_rows
    more = write(out, chat, Canned(), ResponseSettings(samples=3, seed=1))
    assert more.num_requested == 36 and more.num_rows + sum(more.dropped.values()) == 36


@pytest.mark.parametrize(
    ("ids", "ended", "loop"),
    [
        ([1, 2, 3, 4] * 10, False, True),
        ([1, 2, 3, 4] * 10, True, False),
        (list(range(40)), False, False),
        ([5] * 7, False, False),  # too short to tell
        ([*range(80), *range(40)], False, False),  # 33 of 113 8-grams repeat: 29%
        ([*range(80), *range(43)], False, True),  # 36 of 116: 31%
    ],
)
def test_is_looping(ids: list[int], ended: bool, loop: bool) -> None:
    assert is_looping(ids, ended) is loop


@pytest.mark.parametrize("kept", [0, 20, 500])
def test_response_is_cut_at_the_start_of_its_loop(chat: ChatFormat, tmp_path: Path, kept: int) -> None:
    """Or `loop_tokens` later, at most at its end."""
    news = list(range(40, 90))
    output_token_ids = news + news[-14:] * 5

    def answer(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.request_id, list(output_token_ids), None, "length")

    out = tmp_path / "out.jsonl"
    settings = ResponseSettings(samples=2, seed=1, loop_tokens=kept)
    summary = write(out, chat, Canned(answer), settings)
    rows = rows_of(out)
    assert summary.num_cut == len(rows) == 24 and not summary.dropped
    for row in rows:
        ((start, end),) = row["spans"]  # no further turn follows a loop
        assert row["token_ids"][start:end] == output_token_ids[: len(news) + kept] and row["finish_reason"] == "loop"
        assert row["messages"][-1]["content"] == bytes(row["token_ids"][start:end]).decode()
    assert write(out, chat, Canned(answer), settings).num_cut == 24


def test_num_tokens_before_loop() -> None:
    assert num_tokens_before_loop([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 8, 9, 3, 4]) == 9
    assert num_tokens_before_loop(list(range(50))) == 50 and num_tokens_before_loop([1] * 3) == 3


@many(60)
@given(
    st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 9)
)
def test_is_repeating(before: list[int], circle: list[int], wrong: int) -> None:
    token_ids = before + circle * (1 + 96 // len(circle))
    if len(circle) <= 32:
        assert is_repeating(token_ids)
    token_ids[-1 - wrong] += 100
    assert not is_repeating(token_ids) and not is_repeating(circle * 3 if len(circle) < 32 else list(range(96)))


def test_repeating_request_is_stopped_early(target: Path) -> None:
    source = load_engine_generator(target, ResponseEngineSettings("cpu", "float32", 2, 200))
    step, written = source.llm.step, list[int]()

    def circles() -> list[Any]:
        requests = step()
        for request in requests:  # the same eleven tokens over and over
            request.output_token_ids[-1] = len(request.output_token_ids) % 11 + 97
            written.append(len(request.output_token_ids))
        return requests

    source.llm.step = circles  # type: ignore[method-assign]
    source.submit(GenerationRequest(7, [], [97, 98], SamplingParams(190, ignore_eos=True)))
    answers = list[GenerationResult]()
    while not answers:
        answers = source.poll()
    assert answers[0].request_id == 7 and answers[0].finish_reason == "loop" and answers[0].token_ids is not None
    assert len(answers[0].token_ids) == 128 == max(written) and source.num_free_slots == source._max_requests
    while source.llm.has_unfinished_requests:
        source.llm.step()
    check_scheduler(source.llm.scheduler)


def test_ctrl_c_keeps_finished_rows(chat: ChatFormat, tmp_path: Path) -> None:
    class Interrupted(Canned):
        def poll(self) -> list[GenerationResult]:
            if len(self.requests) > 12:
                raise KeyboardInterrupt
            return super().poll()

    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    summary = write(out, chat, Interrupted())
    assert summary.interrupted and not summary.complete and 0 < summary.num_rows < 24
    assert "same command" in summary.text()
    write(whole, chat, Canned())
    assert not write(out, chat, Canned()).interrupted
    assert by_key(rows_of(out)) == by_key(rows_of(whole))


def test_spans_when_the_text_encodes_differently(tmp_path: Path) -> None:
    """The next turn's prompt encodes the text again, so the span must be located again."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "Ċ": 3, "d": 4, "?": 5}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    chat = ChatFormat(fast, {4})
    outputs = {1: [0, 1, 4], 3: [0, 1, 0, 1, 4]}  # "abd" and "ababd": a and b as separate tokens, unlike the tokenizer

    def answer(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.request_id, outputs[len(request.messages)], None, "stop")

    prompts = PromptSet("here", (Prompt("x", "s", ("a?", "b?")),), (), 0)
    file = ResponseFile(tmp_path / "o.jsonl", {}, {}, chat.decode_responses)
    ResponseWriter(prompts, ResponseSettings(), chat, file, show_progress=False).run(lambda: Canned(answer))
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert row["token_ids"] == [0, 5, 3, 2, 4, 1, 5, 3, 0, 1, 0, 1, 4]
    assert row["spans"] == [[3, 5], [8, 13]]


def test_file_of_other_settings_is_rejected(chat: ChatFormat, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, chat, Canned(), limit="x")
    before = out.read_bytes()
    with pytest.raises(UserError, match="seed was 1 and is 2"):
        write(out, chat, Canned(), ResponseSettings(samples=2, seed=2), limit="x")
    sidecar_path(out, "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json: damaged"):
        write(out, chat, Canned())
    sidecar_path(out, "manifest.json").unlink()
    with pytest.raises(UserError, match="did not write it"):
        write(out, chat, Canned())
    assert out.read_bytes() == before
    held = ResponseFile(tmp_path / "held.jsonl", {}, {"seed": 1})
    with pytest.raises(UserError, match="another run is writing"):
        write(tmp_path / "held.jsonl", chat, Canned())
    held.close()


def test_full_disk_keeps_earlier_rows(chat: ChatFormat, tmp_path: Path) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    write(whole, chat, Canned())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))  # writes stop at this size
        with pytest.raises(UserError, match="could not be written.*same command"):
            write(out, chat, Canned(room=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.stat().st_size <= 1500 and (not out.stat().st_size or out.read_bytes().endswith(b"}\n"))
    write(out, chat, Canned())
    assert by_key(rows_of(out)) == by_key(rows_of(whole))


# The command line


def test_command_line(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peagle(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peagle", "data", *args])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()  # type: ignore[return-value]

    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "You may not use this"}\n{"prompt": ""}\n{"prompt": "You may not use this"}\n')
    args = (str(prompts), "--out", str(tmp_path / "o.jsonl"), "-t", str(target), "--max-tokens", "8")
    status, output, stderr = peagle(*args, "--max-model-len", "100", "--device", "cpu")
    assert status == 0, stderr
    assert "1 of 1 rows" in output and "1 empty text" in output and "duplicate prompts: 1" in output
    status, _, stderr = peagle(*args)
    assert status == 2 and "--max-model-len was 100 and is None" in stderr and len(stderr.splitlines()) == 1
    other = tmp_path / "other.jsonl"
    again = (str(prompts), "--out", str(other), *args[3:], "--max-model-len", "100", "--device", "cpu")
    status, _, stderr = peagle(*again, "--kv-cache-memory-bytes", "9000")
    assert status == 2 and "raise --kv-cache-memory-bytes" in stderr
    status, _, stderr = peagle(*again, "--kv-cache-memory-bytes", "9000000")
    assert status == 0 and other.read_text() == (tmp_path / "o.jsonl").read_text()
    for wrong, named in (
        (("--samples", "2", "--temperature", "0"), "--samples 2: "),
        (("--lead", "4"), "--lead 4: "),
        (("--lead", "8", "--samples", "2"), "--lead 8: "),
        (("--lead", "4", "--samples", "2", "--endpoint", "http://x"), "--lead 4: "),
        (("--loop-tokens", "-1"), "--loop-tokens -1: "),
        (("--vary", "-1"), "--vary -1: "),
        (("--vary", "4"), "--vary 4: "),
        (("--vary", "4", "--samples", "2", "--endpoint", "http://x"), "--vary 4: "),
        (("--vary", "4", "--samples", "2", "--raw"), "--raw"),
        (("--limit", "0"), "--limit 0"),
        (("--top-p", "2"), "--top-p 2.0"),
        (("--model", "x"), "--endpoint"),
        (("--endpoint", "ftp://x"), "--endpoint ftp://x: "),
        (("--endpoint", "http://x", "--concurrency", "0"), "--concurrency 0"),
    ):
        status, _, stderr = peagle(*args, *wrong)
        assert status == 2 and named in stderr, stderr


def test_target_without_a_chat_template(tmp_path: Path) -> None:
    bare = make_target(tmp_path / "bare", None)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')
    arguments = (str(tmp_path / "p.jsonl"), tmp_path / "o.jsonl", str(bare), ResponseSettings(max_tokens=2), ENGINE)
    with pytest.raises(UserError, match="no chat template: .*--chat-template FILE"):
        write_responses(*arguments, show_progress=False)
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}")
    assert write_responses(*arguments, chat_template=tmp_path / "t.jinja", show_progress=False).num_rows == 1
    with pytest.raises(UserError, match="--chat-template .*none.jinja: cannot be read"):
        write_responses(*arguments, chat_template=tmp_path / "none.jinja", show_progress=False)


def test_raw_prompts(target: Path, tmp_path: Path) -> None:
    """Without a template, responses equal greedy completions of the same text."""
    prompts = [
        *({"prompt": piece} for piece in text_pieces(3)),
        {"turns": ["one", "two"]},
        {"messages": [*SYSTEM, *USER]},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    settings = ResponseSettings(temperature=0.0, max_tokens=8)
    given = (str(tmp_path / "p.jsonl"), tmp_path / "o.jsonl", str(target), settings, ENGINE)
    summary = write_responses(*given, show_progress=False, raw=True)
    assert summary.num_rows == 4 and summary.dropped == {"needs a chat template": 1}
    texts = [*text_pieces(3), "one"]  # only the first of several turns is used
    told = LLM(target, device="cpu", dtype="float32").generate(texts, settings.params(0))
    by_text = {output.prompt: output.outputs[0].token_ids for output in told}
    for row in rows_of(tmp_path / "o.jsonl"):
        text, response = (message["content"] for message in row["messages"])
        assert row["token_ids"] == [*text.encode(), *by_text[text]]
        assert row["spans"] == [[len(text), len(row["token_ids"])]]
        assert response.encode() == bytes(by_text[text]).rstrip(b"d")
    # loading needs the same format; conversations without token ids are encoded with it
    plain = load_chat_format(target, raw=True)
    assert len(load_responses(tmp_path / "o.jsonl", plain)) == 4
    with pytest.raises(UserError, match="this target's chat template .* .and --chat-template FILE or --raw"):
        load_responses(tmp_path / "o.jsonl", load_chat_format(target))
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": [*USER, {"role": "assistant", "content": " yes"}]}))
    [example] = load_responses(tmp_path / "own.jsonl", plain)
    assert bytes(example.token_ids) == b"Really? yes" and example.spans == ((7, 11),)
    with pytest.raises(UserError, match="--raw: .* --chat-template x.jinja"):
        load_chat_format(target, Path("x.jinja"), raw=True)
    with pytest.raises(UserError, match="--raw: .* remove --endpoint http://x"):
        write_responses(*given, endpoint=EndpointSettings("http://x"), show_progress=False, raw=True)


def test_engine_memory_is_released(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def watched(*args: Any) -> Any:
        source = load_engine_generator(*args)
        source.llm.myself = source.llm  # type: ignore[attr-defined]  # a reference cycle, as with CUDA graphs
        gc.freeze()
        held.append(weakref.ref(source.llm.model_runner))
        return source

    monkeypatch.setattr("peagle.data.generators.load_engine_generator", watched)
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    write_responses(
        prompts, tmp_path / "o.jsonl", str(target), ResponseSettings(max_tokens=2), ENGINE, show_progress=False
    )
    assert held[0]() is None


def test_long_prompts_and_templates_that_raise(chat: ChatFormat, tmp_path: Path) -> None:
    source = Canned()
    source.max_model_len = 9  # type: ignore[assignment]
    rows = (Prompt("short", "s", ("hi",)), Prompt("long", "s", ("hi there, you",)), Prompt("sys", "s", ("hi",), "no"))
    strict = ChatFormat(
        chat.tokenizer,
        {EOS},
        _file(
            tmp_path,
            "{% if messages[0]['role'] == 'system' %}"
            "{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}",
        ),
    )
    file = ResponseFile(tmp_path / "o.jsonl", {}, {}, strict.decode_responses)
    summary = ResponseWriter(PromptSet("here", rows, (), 0), ResponseSettings(), strict, file, show_progress=False).run(
        lambda: source
    )
    assert summary.num_rows == 1 and summary.dropped == {"prompt too long": 1, "rejected by the chat template": 1}
    details = {r["id"]: r["detail"] for r in rows_of(sidecar_path(tmp_path / "o.jsonl", "dropped"))}
    assert details["long"] == "13 tokens" and "no system role" in details["sys"]


def _file(folder: Path, text: str) -> Path:
    (folder / "t.jinja").write_text(text)
    return folder / "t.jinja"


def test_response_seeds_are_distinct() -> None:
    seeds = {response_seed(s, p, n, t) for s in range(3) for p in ("a", "b", "1") for n in range(4) for t in range(3)}
    assert len(seeds) == 3 * 3 * 4 * 3 and all(0 <= seed < 2**31 for seed in seeds)
    assert response_seed(0, "a", 0, 0) == 342290959
