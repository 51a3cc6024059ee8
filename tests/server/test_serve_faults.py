"""Whatever clients send or stop sending, and whatever breaks inside: no 500 that is not the engine's own, nothing
leaked, and the next good request is served."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pairs import TEXT
from serving_support import PROMPT, Served, small_engine

from peagle.config import SamplingParams
from peagle.engine.llm import LLM

MAX_BODY = 1 << 20
LONG = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(max_body=MAX_BODY) as server:
        yield server
        server.check_nothing_left()


@pytest.fixture(scope="module")
def wanted() -> str:
    return small_engine().generate(list(PROMPT.encode()), SamplingParams(max_tokens=8))[0].outputs[0].text


def deep(levels: int) -> bytes:
    return b'{"prompt": "a", "logit_bias": ' + b'{"a":' * levels + b"1" + b"}" * levels + b"}"


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"prompt": "a"',
    "a list": b"[]",
    "a word": b"hello",
    "null": b"null",
    "a number": b"1e999",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a pair as a name": b'{"prompt": "a", "\\udfff": 1}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a zero byte": b'{"prompt": "a\x00b"}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "minus infinite": b'{"prompt": "a", "logit_bias": {"1": -Infinity}}',
    "5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "huge max_tokens": b'{"prompt": "a", "max_tokens": 99999999999999999999}',
    "negative max_tokens": b'{"prompt": "a", "max_tokens": -1}',
    "huge n": b'{"prompt": "a", "n": 1000000000}',
    "huge token": b'{"prompt": [1, 2, 99999999999999999999]}',
    "negative token": b'{"prompt": [-1]}',
    "true for a number": b'{"prompt": "a", "max_tokens": true}',
    "a fraction for a number": b'{"prompt": "a", "max_tokens": 1.5}',
    "text for a list": b'{"prompt": "a", "stop_token_ids": "12"}',
    "mixed prompts": b'{"prompt": ["a", [1]]}',
    "nested prompts": b'{"prompt": [[[1]]]}',
    "empty prompts": b'{"prompt": [[]]}',
    "deep": deep(200),
    "very deep": deep(100_000),
    "deep lists": b"[" * 100_000,
    "a long prompt": b'{"prompt": "' + b"a" * (MAX_BODY - 20) + b'"}',
    "many stops": b'{"prompt": "a", "stop": [' + b",".join(b'"x"' for _ in range(1000)) + b"]}",
    "no schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}',
    **{
        f"schema {number}": json.dumps(
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        ).encode()
        for number, schema in enumerate(
            [
                {"type": "nothing known"},
                {"type": "object", "properties": 5},
                {"type": "string", "pattern": "(((("},
                {"$ref": "http://127.0.0.1:9/schema.json"},
                {"$ref": "#/nowhere"},
                {"enum": []},
            ]
        )
    },
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_bad_body_is_the_clients_fault(served: Served, name: str, path: str) -> None:
    status, headers, said = served.ask(path, BODIES[name])
    assert status == 400 or (name in ("a zero byte", "a long prompt") and path == "/tokenize" and status == 200), said
    assert headers["content-type"] == "application/json"
    if status == 400:
        assert isinstance(said["error"]["message"], str) and len(json.dumps(said)) < 1000


def test_after_all_that_the_next_is_served(served: Served, wanted: str) -> None:
    assert served.good() == (200, wanted)
    served.check_nothing_left()
    assert served.ask("/health")[2]["restarts"] == 0


def test_more_than_a_body_may_have_is_refused_unread(served: Served, wanted: str) -> None:
    ten = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    assert served.ask("/v1/completions", ten)[0] == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with raw(served) as one:  # announced, and never sent
        one.sendall(head + b"Content-Length: 99999999999999999999\r\n\r\n")
        assert b"HTTP/1.1 413" in one.recv(4096)
    with raw(served) as one:  # unannounced
        one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"x" * 65536
        for _ in range(2 * MAX_BODY // len(piece)):
            one.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        assert b"HTTP/1.1 413" in one.recv(4096)
    assert served.good() == (200, wanted)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTQ/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(20_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
    ],
    ids=["bytes", "another protocol", "negative length", "two lengths", "long path", "many headers", "tls"],
)
def test_what_is_not_http_is_told_so(served: Served, said: bytes) -> None:
    with raw(served) as one:
        try:
            one.sendall(said + b"\r\n\r\n")
            answer = one.recv(65536)
            while answer and b'"error"' not in answer and (more := one.recv(65536)):  # head and body may come apart
                answer += more
        except (ConnectionResetError, BrokenPipeError):
            answer = b""  # it did not care to listen to the end
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 4") and b'"error"' in answer), answer[:200]
    assert served.good()[0] == 200


def raw(served: Served, timeout: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=timeout)


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["reset", "closed", "half closed"])
def test_a_client_that_leaves_frees_what_it_held(served: Served, how: str, stream: bool) -> None:
    before = served.engine.stats().generated_tokens
    with raw(served) as one:
        one.sendall(request({**LONG, "stream": stream}))
        if stream:
            assert b"200 OK" in one.recv(65536)
        else:
            until = time.monotonic() + 10
            while served.engine.stats().running == 0 and time.monotonic() < until:
                time.sleep(0.005)
        if how == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half closed":
            one.shutdown(socket.SHUT_WR)
            while one.recv(65536):
                pass
    served.check_nothing_left()
    assert served.engine.stats().generated_tokens - before < 200, "it went on to the end for nobody"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_a_client_that_is_killed(served: Served) -> None:
    before = served.engine.stats().generated_tokens
    body = json.dumps({**LONG, "stream": True, "n": 4})
    command = ["curl", "-sN", "-H", "Content-Type: application/json", "-d", body, served.url + "/v1/completions"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.read(200)
    client.kill()
    client.wait()
    client.stdout.close()
    served.check_nothing_left()
    assert served.engine.stats().generated_tokens - before < 800


def test_idle_and_slow_connections_hold_nobody_up(wanted: str) -> None:
    """900 that never finish a head, 100 that never finish a body; they are closed in time, others do not notice."""
    with Served(head_s=8.0, body_s=8.0, keep_alive_s=1) as server, ExitStack() as sockets:
        heads = [sockets.enter_context(raw(server)) for _ in range(900)]
        for i, one in enumerate(heads):
            one.sendall([b"", b"P", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow"][i % 3])
        bodies = [sockets.enter_context(raw(server)) for _ in range(100)]
        for one in bodies:
            one.sendall(request(LONG)[:-20])
        began = time.monotonic()
        assert server.good() == (200, wanted)
        assert time.monotonic() - began < 8
        for one in heads:
            assert one.recv(1000) == b""
        for one in bodies:
            assert b"HTTP/1.1 408" in one.recv(1000)
        # a second request on a connection that was good for one is not waited for either
        with raw(server) as one:
            one.sendall(request({**LONG, "max_tokens": 1}))
            assert b"200 OK" in one.recv(65536)
            one.sendall(b"GET / HT")
            while one.recv(65536):
                pass
        until = time.monotonic() + 10
        while server.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.server.server_state.connections
        server.check_nothing_left()


def test_a_client_that_does_not_read_holds_nothing(wanted: str) -> None:
    """The engine is done with it when the answer is made, and the connection is closed when its time is over."""
    with Served(deadline_s=8.0, max_queue=0, send_buffer=8192) as server:
        body = {**LONG, "max_tokens": 100, "stream": True, "n": 4, "logprobs": 20, "peagle": {"tokens": True}}
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.port))
            one.sendall(request(body))
            until = time.monotonic() + 20
            while not server.engine.stats().generated_tokens >= 400 and time.monotonic() < until:
                time.sleep(0.01)
            assert server.engine.stats().generated_tokens == 400 and server.server.server_state.tasks
            assert server.good() == (200, wanted)  # though there is no queue, and its four places were all taken
            server.check_nothing_left()
            while server.server.server_state.tasks and time.monotonic() < until:
                time.sleep(0.02)
            assert not server.server.server_state.tasks


def test_overload_is_told_at_once_and_passes(wanted: str) -> None:
    with Served(lambda: small_engine(max_num_seqs=2), max_queue=3) as server, ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(server.ask, "/v1/completions", {**LONG, "n": 1}) for _ in range(5)]
        until = time.monotonic() + 10
        while len(server.engine.open) < 5 and time.monotonic() < until:
            time.sleep(0.005)
        for path, body in (
            ("/v1/completions", {**LONG, "stream": True}),
            ("/v1/completions", LONG),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            began = time.monotonic()
            status, headers, said = server.ask(path, body)
            assert (status, said["error"]["code"], said["error"]["type"]) == (429, "queue_full", "rate_limit_error")
            assert int(headers["retry-after"]) >= 1
            assert time.monotonic() - began < 1
        assert server.ask("/health")[0] == 200
        # nothing was put into those: without a tokenizer they are refused just the same
        prompts = server.context.prompts
        tokenizer, prompts.tokenizer = prompts.tokenizer, None
        for path, body in (
            ("/v1/completions", {**LONG, "prompt": "a" * 100_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100_000}]}),
        ):
            assert server.ask(path, body)[0] == 429
        prompts.tokenizer = tokenizer
        assert [one.result()[0] for one in asked] == [200] * 5
        assert server.good() == (200, wanted)
        server.check_nothing_left()


def test_a_queue_that_fills_while_a_prompt_is_read_is_full() -> None:
    """Room is looked for before a prompt is tokenized and again behind it."""
    with Served(max_queue=0) as server, ThreadPoolExecutor(5) as pool:
        server.inspect(lambda llm: setattr(llm, "step", slowed(llm.step)))
        prompts = server.context.prompts
        read, reading, filled = prompts.tokenizer, threading.Event(), threading.Event()

        def slowly(*args: Any, **options: Any) -> Any:
            reading.set()
            assert filled.wait(20)
            return read("a few tokens")  # as a tokenizer of whole words would make of it

        prompts.tokenizer = slowly
        late = pool.submit(server.ask, "/v1/completions", {"prompt": "a " * 5000, "max_tokens": 1})
        assert reading.wait(20)  # it had its place
        prompts.tokenizer = read
        others = [pool.submit(server.ask, "/v1/completions", LONG) for _ in range(4)]
        until = time.monotonic() + 10
        while len(server.engine.open) < 4 and time.monotonic() < until:
            time.sleep(0.005)
        filled.set()
        status, headers, said = late.result()
        assert (status, said["error"]["code"]) == (429, "queue_full") and "retry-after" in headers
        assert [one.result()[0] for one in others] == [200] * 4


def test_a_deadline_ends_what_takes_too_long() -> None:
    with Served(deadline_s=0.3) as server:
        server.inspect(lambda llm: setattr(llm, "step", slowed(llm.step)))
        status, headers, said = server.ask("/v1/completions", LONG)
        assert (status, said["error"]["code"]) == (503, "deadline") and "retry-after" in headers
        data = server.ask("/v1/completions", {**LONG, "stream": True})[2].decode()
        assert '"code":"deadline"' in data and data.endswith("data: [DONE]\n\n")
        server.check_nothing_left()


def slowed(step: Any) -> Any:
    def slower() -> Any:
        time.sleep(0.02)
        return step()

    return slower


class Poison:
    """Breaks the runner in the middle of a round that has this prompt in it."""

    def __init__(self, llm: LLM, prompt: str, times: int = 1) -> None:
        self.launch, self.ids, self.times = llm.model_runner.launch, list(prompt.encode()), times
        llm.model_runner.launch = self  # type: ignore[method-assign, assignment]

    def __call__(self, plan: Any, moved: Any) -> Any:
        if self.times and any(
            r.prompt_token_ids == self.ids and len(r.output_token_ids) > 5 for r in plan.decode_requests
        ):
            self.times -= 1
            raise RuntimeError("a kernel went astray")
        return self.launch(plan, moved)


def test_an_engine_that_fails_takes_only_what_it_was_at(wanted: str) -> None:
    """One runs and fails, in its stream and whole; those in the queue are answered by the engine that follows."""
    poisoned = TEXT[3000:3030].decode()
    with Served(lambda: small_engine(max_num_seqs=1)) as server, ThreadPoolExecutor(8) as pool:
        for restarts, stream in enumerate((True, False), 1):
            server.inspect(lambda llm: Poison(llm, poisoned))
            failing = server.inspect(weakref.ref)
            bad = pool.submit(server.ask, "/v1/completions", {**LONG, "prompt": poisoned, "stream": stream})
            until = time.monotonic() + 10
            while server.engine.stats().running == 0 and time.monotonic() < until:
                time.sleep(0.002)
            waiting = [pool.submit(server.good) for _ in range(4)]
            status, _, said = bad.result()
            if stream:
                assert status == 200 and b'"code":"engine_error"' in said and said.endswith(b"data: [DONE]\n\n")
            else:
                assert (status, said["error"]["code"]) == (500, "engine_error")
                assert "astray" not in said["error"]["message"]
            assert [one.result() for one in waiting] == [(200, wanted)] * 4
            status, _, health = server.ask("/health")
            assert (status, health["status"], health["restarts"]) == (200, "ready", restarts)
            assert health["last_error"] == "RuntimeError: a kernel went astray"
            assert failing() is None, "two engines' memory is held"
        before = server.engine.stats()
        assert server.good() == (200, wanted)
        after = server.engine.stats()
        assert after.generated_tokens == before.generated_tokens + 8  # counters outlive engines
        assert after.drafts > before.drafts > 0 and after.prefix_queries > before.prefix_queries
        server.check_nothing_left()


def test_a_request_that_cannot_be_begun_fails_alone(wanted: str) -> None:
    def break_add(llm: LLM) -> None:
        add = llm.add_request

        def broken(prompt: Any, params: Any = None, stream: bool = False) -> Any:
            if len(prompt) == 3:
                raise RuntimeError("no three")
            return add(prompt, params, stream)

        llm.add_request = broken  # type: ignore[method-assign]

    with Served() as server, ThreadPoolExecutor(2) as pool:
        server.inspect(break_add)
        other = pool.submit(server.ask, "/v1/completions", LONG)
        assert server.ask("/v1/completions", {"prompt": "abc"})[0] == 500
        assert server.ask("/v1/completions", {"prompt": "abc", "stream": True})[0] == 500
        assert other.result()[2]["usage"]["completion_tokens"] == 200
        assert server.good() == (200, wanted)
        assert server.ask("/health")[2]["restarts"] == 0
        server.check_nothing_left()


def test_an_engine_that_always_fails_is_given_up(wanted: str) -> None:
    """/health/live says that only a new process will help; requests get 503, none hangs."""

    def make() -> LLM:
        llm = small_engine()
        Poison(llm, PROMPT, times=1000)
        return llm

    with Served(make, failures=3) as server:
        for _ in range(3):
            assert server.ask("/v1/completions", LONG)[0] == 500
        until = time.monotonic() + 10
        while server.ask("/health/live")[0] == 200 and time.monotonic() < until:
            time.sleep(0.01)
        status, _, health = server.ask("/health/live")
        assert (status, health["status"]) == (503, "failed") and "astray" in health["last_error"]
        status, headers, said = server.ask("/v1/completions", LONG)
        assert (status, said["error"]["code"]) == (503, "unavailable") and "retry-after" in headers
        assert server.ask("/metrics")[0] == 200


def test_a_schema_fuzzer_finds_no_500(served: Served, wanted: str) -> None:
    """Requests made from our own description, right ones and wrong ones."""
    schemathesis = pytest.importorskip("schemathesis")
    description = served.ask("/openapi.json")[2]
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=served.url)
    seen: set[int] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in ("positive", "negative"):
            kind = getattr(schemathesis.GenerationMode, mode.upper())
            if operation.method == "get" and mode == "negative":
                continue
            try:
                strategy = operation.as_strategy(generation_mode=kind)

                @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
                @given(case=strategy)
                def fuzz(case: Any) -> None:
                    said = case.call(timeout=60)
                    seen.add(said.status_code)
                    assert said.status_code < 500, (case.body, said.text)
                    if said.status_code >= 400:
                        assert said.json()["error"].keys() == {"message", "type", "param", "code"}

                fuzz()
            except schemathesis.errors.SchemathesisError:
                assert mode == "negative"  # nothing wrong can be made of a path without parameters
    assert {200, 400} <= seen
    assert served.good() == (200, wanted)
    served.check_nothing_left()
