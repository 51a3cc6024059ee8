"""Invalid requests, disconnects, overload, time limits and engine failures: no leak, and the next request is served."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pairs import TEXT
from serving_support import GIVE_UP_S, PROMPT, LocalServer, StepGate, small_engine, wait_until

from peagle.config import SamplingParams
from peagle.engine.llm import LLM
from peagle.server import server
from peagle.server.engine_client import EngineConnection
from peagle.server.engine_messages import AbortRequest
from peagle.server.server import find_event_loop

MAX_BODY = 1 << 20
LONG = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServer]:
    with LocalServer(max_body_bytes=MAX_BODY) as server:
        yield server
        server.check_engine_idle()


@pytest.fixture(scope="module")
def expected() -> str:
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
def test_an_invalid_body_gets_400(served: LocalServer, name: str, path: str) -> None:
    status, headers, body = served.request(path, BODIES[name])
    assert status == 400 or (name in ("a zero byte", "a long prompt") and path == "/tokenize" and status == 200), body
    assert headers["content-type"] == "application/json"
    if status == 400:
        assert isinstance(body["error"]["message"], str) and len(json.dumps(body)) < 1000


def test_a_valid_request_is_served_after_invalid_ones(served: LocalServer, expected: str) -> None:
    assert served.complete() == (200, expected)
    served.check_engine_idle()
    assert served.request("/health")[2]["restarts"] == 0


def test_a_large_body_gets_413(served: LocalServer, expected: str) -> None:
    ten = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    assert served.request("/v1/completions", ten)[0] == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(served) as one:  # announced, and never sent
        one.sendall(head + b"Content-Length: 9999999999999999\r\n\r\n")
        assert b"HTTP/1.1 413" in one.recv(4096)
    with connect(served) as one:  # unannounced
        one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"x" * 65536
        for _ in range(2 * MAX_BODY // len(piece)):
            one.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        assert b"HTTP/1.1 413" in one.recv(4096)
    assert served.complete() == (200, expected)


@pytest.mark.parametrize(
    "raw_request",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTQ/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(20_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=[
        "bytes",
        "another protocol",
        "negative length",
        "two lengths",
        "long path",
        "many headers",
        "tls",
        "bare LF",
        "long header",
        "length and encoding",
    ],
)
def test_invalid_http_gets_an_error(served: LocalServer, raw_request: bytes) -> None:
    with connect(served) as one:
        answer = b""
        with suppress(ConnectionResetError, BrokenPipeError):  # it did not care to listen to the end
            one.sendall(raw_request + b"\r\n\r\n")
            answer = read_all(one)  # until the connection is closed
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 4") and b'"error"' in answer), answer[:200]
    assert answer.count(b"HTTP/1.1 ") <= 1, "bytes behind a refused request were answered"
    assert served.complete()[0] == 200


def connect(server: LocalServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S)


def read_all(client: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return data


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["reset", "closed", "half closed"])
def test_a_disconnect_aborts_the_request(served: LocalServer, how: str, stream: bool) -> None:
    num_before = served.engine.stats.num_output_tokens
    gate = StepGate(served, num_steps=3)
    with connect(served) as client:
        client.sendall(request({**LONG, "stream": stream}))
        if stream:
            assert b"200 OK" in client.recv(65536)
        else:
            wait_until(lambda: served.engine.stats.num_requests_running)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half closed":
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
    wait_until(lambda: not served.engine.open_streams)
    gate.open()
    served.check_engine_idle()
    assert served.engine.stats.num_output_tokens - num_before < LONG["max_tokens"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_killed_client_aborts_the_request(served: LocalServer) -> None:
    num_before = served.engine.stats.num_output_tokens
    gate = StepGate(served, num_steps=3)
    body = json.dumps({**LONG, "stream": True, "n": 4})
    command = ["curl", "-sN", "-H", "Content-Type: application/json", "-d", body, served.url + "/v1/completions"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.read(200)
    client.kill()
    client.wait()
    client.stdout.close()
    wait_until(lambda: not served.engine.open_streams)
    gate.open()
    served.check_engine_idle()
    assert served.engine.stats.num_output_tokens - num_before < 4 * LONG["max_tokens"]


def test_too_many_open_files_delay_new_connections(served: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def accept_later(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(server, "ACCEPT_RETRY_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    assert served.request("/health")[0] == 200
    assert not errors


def test_idle_and_slow_connections_are_closed(expected: str) -> None:
    """Clients that never finish a header or a body; other requests are served meanwhile."""
    with LocalServer(header_timeout_s=4.0, body_timeout_s=4.0, keep_alive_s=1) as server, ExitStack() as sockets:
        headers = [sockets.enter_context(connect(server)) for _ in range(300)]
        bodies = [sockets.enter_context(connect(server)) for _ in range(50)]
        with suppress(OSError):  # on a slow machine the first ones are closed by now
            for i, client in enumerate(headers):
                client.sendall([b"", b"P", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow"][i % 3])
        for client in bodies:
            with suppress(OSError):
                client.sendall(request(LONG)[:-20])
        assert server.complete() == (200, expected)
        for client in headers:
            assert read_all(client) == b""
        for client in bodies:
            assert read_all(client)[:12] in (b"HTTP/1.1 408", b"")
        # The same limits hold for a second request on a connection.
        with connect(server) as client:
            client.sendall(request({**LONG, "max_tokens": 1}))
            assert b"200 OK" in client.recv(65536)
            with suppress(OSError):
                client.sendall(b"GET / HT")
            read_all(client)
        wait_until(lambda: not server.server.server_state.connections)
        server.check_engine_idle()


def test_a_body_that_never_ends_gets_408() -> None:
    with LocalServer(body_timeout_s=0.5) as server, connect(server) as client:
        client.sendall(request(LONG)[:-20])
        assert b"HTTP/1.1 408" in client.recv(1000)


def test_a_client_that_does_not_read_blocks_no_engine_slot(expected: str) -> None:
    """The engine is done with a request when its last token is made. The connection is closed after the time limit."""
    with LocalServer(request_timeout_s=15.0, max_queued_requests=0, send_buffer=8192) as server:
        body = {**LONG, "max_tokens": 100, "stream": True, "n": 4, "logprobs": 20, "peagle": {"tokens": True}}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request(body))
            wait_until(lambda: server.engine.stats.num_output_tokens == 400)
            assert server.server.server_state.tasks
            assert server.complete() == (200, expected)  # there is no queue, and its four slots were all taken
            server.check_engine_idle()
            wait_until(lambda: not server.server.server_state.tasks)


def test_a_full_queue_refuses_requests(expected: str) -> None:
    build_llm = lambda: small_engine(max_num_seqs=2)  # noqa: E731
    with LocalServer(build_llm, max_queued_requests=3) as server, ThreadPoolExecutor(5) as pool:
        gate = StepGate(server, num_steps=0)
        accepted = [pool.submit(server.request, "/v1/completions", LONG) for _ in range(5)]
        wait_until(lambda: len(server.engine.open_streams) == 5)
        for path, body in (
            ("/v1/completions", {**LONG, "stream": True}),
            ("/v1/completions", LONG),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, headers, response = server.request(path, body)
            error = response["error"]
            assert (status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
            assert int(headers["retry-after"]) >= 1
        assert server.request("/health")[0] == 200
        # Refused before the prompt is tokenized: the result is the same without a tokenizer.
        tokenizer, server.context.tokenizer.tokenizer = server.context.tokenizer.tokenizer, None
        for path, body in (
            ("/v1/completions", {**LONG, "prompt": "a" * 100_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100_000}]}),
        ):
            assert server.request(path, body)[0] == 429
        server.context.tokenizer.tokenizer = tokenizer
        gate.open()
        assert [future.result()[0] for future in accepted] == [200] * 5
        assert server.complete() == (200, expected)
        server.check_engine_idle()


def test_a_request_has_its_place_while_it_is_tokenized() -> None:
    with LocalServer(max_queued_requests=0) as server, ThreadPoolExecutor(5) as pool:
        gate = StepGate(server, num_steps=0)
        tokenizer = server.context.tokenizer.tokenizer
        tokenizing, queue_filled = threading.Event(), threading.Event()

        def tokenize_slowly(*args: Any, **options: Any) -> Any:
            tokenizing.set()
            assert queue_filled.wait(GIVE_UP_S)
            return tokenizer("a few tokens")

        server.context.tokenizer.tokenizer = tokenize_slowly
        large = {"prompt": "a", "max_tokens": 1, "user": "a" * 5000}  # is tokenized in a thread
        early = pool.submit(server.request, "/v1/completions", large)
        assert tokenizing.wait(GIVE_UP_S)
        server.context.tokenizer.tokenizer = tokenizer
        others = [pool.submit(server.request, "/v1/completions", LONG) for _ in range(3)]
        wait_until(lambda: len(server.engine.open_streams) == 3)
        assert server.engine.stats.num_requests_waiting == 4
        status, headers, response = server.request("/v1/completions", LONG)
        assert (status, response["error"]["code"]) == (429, "queue_full") and "retry-after" in headers
        queue_filled.set()
        gate.open()
        assert [future.result()[0] for future in (early, *others)] == [200] * 4


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_time_limit_ends_a_request(num_steps: int) -> None:
    """Before the first token the status is 503; after it the stream carries the error."""
    with LocalServer(request_timeout_s=2.0) as server:
        gate = StepGate(server, num_steps)
        data = server.request("/v1/completions", {**LONG, "stream": True})[2]
        if num_steps:
            assert b'"code":"deadline"' in data and data.endswith(b"data: [DONE]\n\n")
        else:
            assert data["error"]["code"] == "deadline"
        status, headers, response = server.request("/v1/completions", LONG)
        assert (status, response["error"]["code"]) == (503, "deadline") and "retry-after" in headers
        gate.open()
        server.check_engine_idle()


def test_a_stop_string_ends_each_completion_in_the_engine() -> None:
    """The engine knows no text: the front end aborts the completion, also if the others go on."""
    groups: list[Any] = []

    def record_groups(llm: LLM) -> None:
        add = llm.add_request
        llm.add_request = lambda *args, **options: groups.append(add(*args, **options)) or groups[-1]  # type: ignore

    with LocalServer() as server:
        server.call_in_engine(record_groups)
        body = {**LONG, "n": 3, "stop": ["e"], "temperature": 1.0, "seed": 5}
        status, _, response = server.request("/v1/completions", body)
        assert status == 200 and [choice["finish_reason"] for choice in response["choices"]] == ["stop"] * 3
        server.check_engine_idle()
        (group,) = groups
        assert [request.finish_reason for request in group.requests] == ["abort"] * 3
        assert server.engine._engine.core._requests == {}  # type: ignore[union-attr]


class Poison:
    """Fails a decode step that has this prompt in it."""

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


def test_a_command_to_an_engine_that_has_ended_is_dropped() -> None:
    """uvloop's transport raises an error once it is closed; the next engine gets all open requests."""

    async def send_after_the_end() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: EngineConnection(lambda message: None), sock=ours)
        theirs.close()
        await connection.closed.wait()
        for _ in range(3):
            await asyncio.sleep(0)
            connection.send(AbortRequest(1))

    with asyncio.Runner(loop_factory=find_event_loop()) as runner:
        runner.run(send_after_the_end())


def test_an_engine_failure_fails_only_running_requests(expected: str) -> None:
    """Streamed and whole. The rebuilt engine serves the waiting requests."""
    poisoned = TEXT[3000:3030].decode()
    with LocalServer(lambda: small_engine(max_num_seqs=1)) as server, ThreadPoolExecutor(8) as pool:
        for restarts, stream in enumerate((True, False), 1):
            server.call_in_engine(lambda llm: Poison(llm, poisoned))
            failing = server.call_in_engine(weakref.ref)
            bad = pool.submit(server.request, "/v1/completions", {**LONG, "prompt": poisoned, "stream": stream})
            wait_until(lambda: server.engine.stats.num_requests_running)
            waiting = [pool.submit(server.complete) for _ in range(4)]
            status, _, body = bad.result()
            if stream:
                assert status == 200 and b'"code":"engine_error"' in body and body.endswith(b"data: [DONE]\n\n")
            else:
                assert (status, body["error"]["code"]) == (500, "engine_error")
                assert "astray" not in body["error"]["message"]
            assert [one.result() for one in waiting] == [(200, expected)] * 4
            status, _, health = server.request("/health")
            assert (status, health["status"], health["restarts"]) == (200, "ready", restarts)
            assert health["last_error"] == "RuntimeError: a kernel went astray"
            assert failing() is None, "two engines' memory is held"
        before = server.engine.stats
        assert server.complete() == (200, expected)
        after = server.engine.stats
        assert after.num_output_tokens == before.num_output_tokens + 8  # counters outlive engines
        assert (
            after.num_draft_tokens > before.num_draft_tokens > 0
            and after.num_prefix_cache_queries > before.num_prefix_cache_queries
        )
        server.check_engine_idle()


def test_a_request_that_cannot_be_added_fails_alone(expected: str) -> None:
    def break_add(llm: LLM) -> None:
        add = llm.add_request

        def broken(prompt: Any, params: Any = None, stream: bool = False) -> Any:
            if len(prompt) == 3:
                raise RuntimeError("no three")
            return add(prompt, params, stream)

        llm.add_request = broken  # type: ignore[method-assign]

    with LocalServer() as server, ThreadPoolExecutor(2) as pool:
        server.call_in_engine(break_add)
        other = pool.submit(server.request, "/v1/completions", LONG)
        assert server.request("/v1/completions", {"prompt": "abc"})[0] == 500
        assert server.request("/v1/completions", {"prompt": "abc", "stream": True})[0] == 500
        assert other.result()[2]["usage"]["completion_tokens"] == 200
        assert server.complete() == (200, expected)
        assert server.request("/health")[2]["restarts"] == 0
        server.check_engine_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_nan_logits_are_an_error(expected: str, stream: bool) -> None:
    def break_logits(llm: LLM) -> None:
        compute = llm.model_runner.sampler.sample_and_accept

        def broken(inputs: Any, slots: Any, logits: Any) -> Any:
            return compute(inputs, slots, logits * float("nan"))

        llm.model_runner.sampler.sample_and_accept = broken  # type: ignore[method-assign]

    with LocalServer() as server:
        assert server.complete() == (200, expected)
        server.call_in_engine(break_logits)
        status, _, body = server.request("/v1/completions", {**LONG, "stream": stream})
        if stream:
            assert status == 200 and b'"code":"engine_error"' in body and body.endswith(b"data: [DONE]\n\n")
        else:
            assert (status, body["error"]["code"]) == (500, "engine_error")
        server.check_engine_idle()


def test_repeated_engine_failures_make_the_server_unhealthy(expected: str) -> None:
    """/health/live and requests get 503."""

    def make() -> LLM:
        llm = small_engine()
        Poison(llm, PROMPT, times=1000)
        return llm

    with LocalServer(make, max_consecutive_failures=3) as server:
        for _ in range(3):
            assert server.request("/v1/completions", LONG)[0] == 500
        wait_until(lambda: server.request("/health/live")[0] != 200)
        status, _, health = server.request("/health/live")
        assert (status, health["status"]) == (503, "failed") and "astray" in health["last_error"]
        status, headers, body = server.request("/v1/completions", LONG)
        assert (status, body["error"]["code"]) == (503, "unavailable") and "retry-after" in headers
        assert server.request("/metrics")[0] == 200


def test_a_schema_fuzzer_finds_no_500(served: LocalServer, expected: str) -> None:
    """Valid and invalid requests generated from /openapi.json."""
    schemathesis = pytest.importorskip("schemathesis")
    description = served.request("/openapi.json")[2]
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
                    response = case.call(timeout=60)
                    seen.add(response.status_code)
                    assert response.status_code < 500, (case.body, response.text)
                    if response.status_code >= 400:
                        assert response.json()["error"].keys() == {"message", "type", "param", "code"}

                fuzz()
            except schemathesis.errors.SchemathesisError:
                assert mode == "negative"  # nothing wrong can be made of a path without parameters
    assert {200, 400} <= seen
    assert served.complete() == (200, expected)
    served.check_engine_idle()
