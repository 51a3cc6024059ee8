"""Large and hostile requests are refused by field, off the event loop, and cost other clients nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import TEXT
from serving_support import GIVE_UP_S, PROMPT, LocalServer, wait_until

from peagle.engine import grammar
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.server import request_body, server_context
from peagle.server.tokenization import ServerTokenizer
from peagle.server.work_pool import WorkPool

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": ""}


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServer]:
    with LocalServer() as server:
        yield server
        server.check_engine_idle()


def repeat(field: str, item: str, times: int) -> bytes:
    fields = {"prompt": '"a"', "messages": json.dumps([USER])}
    fields[field] = f"[{','.join([item] * times)}]"
    names = ["messages" if field in ("messages", "tools") else "prompt", field]
    return ("{" + ", ".join(f'"{name}": {fields[name]}' for name in dict.fromkeys(names)) + "}").encode()


MANY = {
    "mixed prompt": (COMPLETIONS, "prompt", repeat("prompt", '1,"a"', 400_000)),
    "mixed short prompt": (COMPLETIONS, "prompt", repeat("prompt", '1,"a"', 10)),
    "token ids": (COMPLETIONS, "prompt", repeat("prompt", "1", 2_000_000)),
    "token ids beyond all completions": (COMPLETIONS, "prompt", repeat("prompt", "1", 70_000)),
    "integers as stop": (COMPLETIONS, "stop", repeat("stop", "1", 2_000_000)),
    "stop strings": (COMPLETIONS, "stop", repeat("stop", '"a"', 33)),
    "stop tokens": (COMPLETIONS, "stop_token_ids", repeat("stop_token_ids", "1", 1025)),
    "empty messages": (CHAT, "messages", repeat("messages", json.dumps(USER), 50_000)),
    "2049 messages": (CHAT, "messages", repeat("messages", json.dumps(USER), 2049)),
    "tools": (CHAT, "tools", repeat("tools", "{}", 513)),
    "logit_bias": (COMPLETIONS, "logit_bias",
                   json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(161)}}).encode()),
    "template arguments": (CHAT, "chat_template_kwargs",
                           json.dumps({"messages": [USER], "chat_template_kwargs": dict.fromkeys(map(str, range(65)))})
                           .encode()),
    "text": (COMPLETIONS, "prompt", json.dumps({"prompt": "a, " * 1_000_000}).encode()),
    "a long message": (CHAT, "messages", json.dumps({"messages": [{**USER, "content": "a" * 3_000_000}]}).encode()),
    "tokens": ("/detokenize", "tokens", b'{"tokens": [' + b"1," * 256 + b"1]}"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_too_much_is_refused_by_field(served: LocalServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tokenized, and a large body is not parsed in the event loop."""
    path, field, body = MANY[name]
    threads: list[int] = []

    def parse(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return request_body.parse_json(*args)

    monkeypatch.setattr(server_context, "parse_json", parse)
    monkeypatch.setattr(served.context.tokenizer, "encode", None)
    status, _, response = served.request(path, body)
    assert (status, response["error"]["param"]) == (400, field), response
    assert field in response["error"]["message"]
    if len(body) > 100_000:
        assert threads and threads[0] != served._thread.ident


json_values = st.recursive(
    st.integers() | st.none() | st.text(alphabet='a"\\[{,é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='b"\\,', max_size=3), inner, max_size=3)
    ),
)


@given(json_values, st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_values_are_counted_without_parsing(value: Any, piece_bytes: int, ascii: bool) -> None:
    def count(value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            return 1, 0
        inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
        counts = [count(item) for item in inner]
        num_commas = max(len(value) - 1, 0) if isinstance(value, list | dict) else 0
        return isinstance(value, list | dict) + sum(n for n, _ in counts), num_commas + sum(n for _, n in counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "PIECE_BYTES", piece_bytes)
        *_, last = request_body.count_values(json.dumps(value, ensure_ascii=ascii).encode())
    assert last[1:] == count(value)


def test_large_requests_leave_the_event_loop_free(served: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all large bodies wait to be parsed, others are served; those of clients that left are never parsed."""
    parsing, go_on = threading.Semaphore(0), threading.Event()
    num_parsed = []

    def parse(data: bytes, *args: Any) -> Any:
        if len(data) > 100_000:
            num_parsed.append(1)
            parsing.release()
            assert go_on.wait(GIVE_UP_S)
        return request_body.parse_json(data, *args)

    monkeypatch.setattr(server_context, "parse_json", parse)
    body = repeat("prompt", "1", 2_000_000)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.request, COMPLETIONS, body)
        assert parsing.acquire(timeout=GIVE_UP_S)
        others = [send(served, COMPLETIONS, body) for _ in range(3)]
        wait_until(lambda: served.context._large_pool.num_waiting == 3)
        assert served.request("/health")[0] == 200 and served.complete()[0] == 200
        medium = served.request(COMPLETIONS, {"prompt": "a" * 20_000})[2]
        assert medium["error"]["code"] == "context_length_exceeded"
        for client in others:
            client.close()
        wait_until(lambda: served.context._large_pool.num_waiting == 0)
        go_on.set()
        assert first.result()[0] == 400
    assert len(num_parsed) == 1


def send(server: LocalServer, path: str, body: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def build_tokenizers(folder: Path) -> dict[str, ServerTokenizer]:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kinds: dict[str, tuple[Any, Any, list[str]]] = {
        "byte level": (None, byte_level, []),
        "NFC": (normalizers.NFC(), byte_level, []),
        "byte fallback": (spaces, None, [f"<0x{b:02X}>" for b in range(256)]),
        "lower case": (normalizers.Lowercase(), byte_level, []),
        "strips": (None, byte_level, []),
        "unknown characters": (spaces, None, []),
    }
    built = {}
    for name, (normalizer, pre_tokenizer, tokens) in kinds.items():
        tokenizer = Tokenizer(models.BPE(byte_fallback=bool(tokens), unk_token=None))
        tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)  # type: ignore[call-arg]
        tokenizer.train_from_iterator([TEXT[:20_000].decode(), " " * 40, "éàü" * 10], trainer)
        tokenizer.add_tokens([AddedToken("<word>", rstrip=name == "strips")])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)
        built[name] = ServerTokenizer(folder / name)
    return built


def test_the_lower_bound_of_tokens_is_sound(tmp_path: Path) -> None:
    """No text has fewer tokens. The bound is 0 where text may vanish, and useful elsewhere."""
    tokenizers = build_tokenizers(tmp_path)
    text = TEXT[:20_000].decode()
    for name, tokenizer in tokenizers.items():
        if name in ("lower case", "strips", "unknown characters"):
            assert tokenizer.count_min_tokens(text) == 0
        else:
            assert tokenizer.count_min_tokens(text) > 500

    parts = st.sampled_from(
        [" ", "\n", "é", "e\u0301", "ﬁ", "\x00", "漢", "<word>", "  " * 20, "the ", "一", "\U0001d15e"]
    )

    @given(st.lists(parts | st.text(max_size=3), max_size=30).map("".join))
    @settings(deadline=None, max_examples=300)
    def check(text: str) -> None:
        for tokenizer in tokenizers.values():
            assert tokenizer.count_min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()


def test_clients_take_turns() -> None:
    async def main() -> list[str]:
        pool, order, busy = WorkPool(1), list[str](), threading.Event()
        first = asyncio.ensure_future(pool.run("a", lambda: busy.wait(GIVE_UP_S)))
        await asyncio.sleep(0)
        tasks = {
            name: asyncio.ensure_future(pool.run(name[0], lambda name=name: order.append(name)))  # type: ignore[misc]
            for name in ("a1", "a2", "a3", "b1", "b2", "c1")
        }
        await asyncio.sleep(0)
        assert pool.num_waiting == 6
        tasks["a2"].cancel()
        first.cancel()  # its function still runs, so its thread is not free
        await asyncio.sleep(0)
        assert pool.num_waiting == 5 and not order
        busy.set()
        await asyncio.gather(*(task for name, task in tasks.items() if name != "a2"))
        await asyncio.sleep(0)
        assert pool.num_free == 1
        return order

    assert asyncio.run(main()) == ["a1", "b1", "c1", "a3", "b2"]


@pytest.fixture
def endless_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checks of grammars with 9999 never end. Each leaves a file with its process id as the name."""
    script = (
        f"import os, signal\nif '9999' in job['grammar']:\n    open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w')\n"
    )
    start = "cpu, memory ="
    assert start in grammar.CHECK_SCRIPT
    patched = grammar.CHECK_SCRIPT.replace(start, f"{script}    signal.pause()\n{start}")
    monkeypatch.setattr(grammar, "CHECK_SCRIPT", patched)
    return tmp_path


def with_schema(number: int) -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": number}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {"prompt": "a", "max_tokens": 2, "temperature": 0, "response_format": response_format}


def is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
        return True
    except ProcessLookupError:
        return False


def test_grammar_checks_count_as_waiting_and_end_with_their_client(endless_checks: Path) -> None:
    with LocalServer(max_queued_requests=16) as server:  # beside 4 running ones
        bodies = [json.dumps(with_schema(99990000 + i)).encode() for i in range(20)]
        running = [send(server, COMPLETIONS, body) for body in bodies[:2]]
        wait_until(lambda: len(os.listdir(endless_checks)) == 2)
        waiting = [send(server, COMPLETIONS, body) for body in bodies[2:]]
        wait_until(lambda: server.engine.stats.num_requests_waiting == 20)
        assert server.request(COMPLETIONS, with_schema(2))[2]["error"]["code"] == "queue_full"
        assert server.complete()[1]["error"]["code"] == "queue_full"
        for client in waiting:
            client.close()
        wait_until(lambda: server.engine.stats.num_requests_waiting == 2)
        assert server.complete()[0] == 200
        for client in running:
            client.close()
        assert server.request(COMPLETIONS, with_schema(2))[0] == 200
        pids = os.listdir(endless_checks)
        wait_until(lambda: not any(map(is_running, pids)))
        assert len(pids) == 2, "a check of a client that had left was started"
        server.check_engine_idle()


def test_the_time_limit_ends_a_grammar_check(endless_checks: Path) -> None:
    with LocalServer(request_timeout_s=0.5) as server:
        status, _, response = server.request(COMPLETIONS, with_schema(99991234))
        assert (status, response["error"]["code"]) == (503, "deadline")
        wait_until(lambda: not any(map(is_running, os.listdir(endless_checks))))
    cancelled = threading.Event()
    cancelled.set()
    checked = grammar.json_schema_grammar({"type": "integer", "multipleOf": 99991234})
    with pytest.raises(UserError, match="cancelled"):
        grammar.check_grammar(checked, cancelled)
    assert not grammar.is_checked(checked), "a cancelled check says nothing about the grammar"


def test_the_cache_salt_reaches_the_engine(served: LocalServer) -> None:
    salts: list[str | None] = []

    def record(llm: LLM) -> None:
        add_request = llm.add_request

        def add(prompt: Any, params: Any) -> Any:
            salts.append(params.cache_salt)
            return add_request(prompt, params)

        llm.add_request = add  # type: ignore[method-assign, assignment]

    served.call_in_engine(record)
    for salt in (None, "tenant 1"):
        assert served.complete(cache_salt=salt)[0] == 200
    assert salts == [None, "tenant 1"]
    assert served.request(COMPLETIONS, {"prompt": PROMPT, "cache_salt": ""})[2]["error"]["param"] == "cache_salt"
