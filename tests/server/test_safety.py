"""Security: no checkpoint code runs, no address is fetched, keys compare in constant time, fuzzing finds no 500."""

from __future__ import annotations

import hmac
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import target_folder
from serving_support import PROMPT, LocalServer, small_engine

from peagle.config import ServeSettings
from peagle.engine.llm import LLM


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServer]:
    with LocalServer(lambda: engine_with_tools()) as server:
        yield server
        server.check_engine_idle()
        assert server.request("/health")[2]["restarts"] == 0


def folder_with(name: str, template: str) -> Path:
    folder = engines.home() / name
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    engines.write_tokenizer(folder, 160, template)
    return folder


def engine_of(folder: Path) -> LLM:
    return LLM(folder, None, device="cpu", dtype="float32", threads=1, max_model_len=256, max_num_seqs=4)


def engine_with_tools() -> LLM:
    return engine_of(folder_with("safe", "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}"))


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """A checkpoint with custom classes and a template that tries to escape its sandbox."""
    mark = tmp_path / "run"
    escape = f"cycler.__init__.__globals__.os.system('touch {mark}')"
    folder = folder_with("trap", f"{{{{ {escape} }}}}{{{{ messages[0].content }}}}")
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nOwn = object\n")
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    for file, more in (
        ("config.json", own),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}),
    ):
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**values, "auto_map": more}))
    with LocalServer(lambda: engine_of(folder)) as server:
        assert server.complete()[0] == 200
        status, _, response = server.request("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, response["error"]["param"]) == (400, "messages")
    assert not mark.exists()


def test_schemas_are_not_fetched(served: LocalServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.2)
        schema = {"$ref": f"http://127.0.0.1:{bait.getsockname()[1]}/schema.json"}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for more, param in (
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, "response_format"),
            ({"tools": tools, "tool_choice": "required"}, "tools"),
        ):
            status, _, response = served.request("/v1/chat/completions", {**chat, **more})
            assert (status, response["error"]["param"]) == (400, param)
        with pytest.raises(TimeoutError):
            bait.accept()


def test_keys_compare_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key goes through `hmac.compare_digest`, and nothing else."""
    compared: list[tuple[bytes, bytes]] = []

    def watched(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return hmac_compare(given, key)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("peagle.server.app.hmac.compare_digest", watched)
    with LocalServer(api_key="sk-own") as server:
        sent = ["", "s", "sk-owm", "sk-own", "sk-own-and-more"]
        statuses = [server.request("/v1/models", headers={"authorization": f"Bearer {key}"})[0] for key in sent]
    assert statuses == [401, 401, 401, 200, 401]
    assert compared == [(key.encode(), b"sk-own") for key in sent]


def test_other_hosts_are_refused(served: LocalServer) -> None:
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "localhost@evil.example", "[::2]"):
        for path in ("/", "/health", "/v1/models"):
            status, _, response = served.request(path, headers={"Host": host})
            assert (status, response["error"]["code"]) == (403, "host_not_allowed")
    for host in ("localhost", "LocalHost:1234", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"):
        assert served.request("/health", headers={"Host": host})[0] == 200
    with LocalServer(allowed_hosts=("model.example",)) as server:
        for host, status in (("model.example:443", 200), ("localhost", 200), ("x.model.example", 403)):
            assert server.request("/health", headers={"Host": host})[0] == status
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert ServeSettings(host=host).accepted_hosts is None
        assert "model.example" in (ServeSettings(host=host, allowed_hosts=("model.example",)).accepted_hosts or ())
    assert ServeSettings(allowed_hosts=("*",)).accepted_hosts is None


def test_a_loading_server_is_unready() -> None:
    go_on, loading = threading.Event(), threading.Event()

    def slow_engine() -> LLM:
        loading.set()
        assert go_on.wait(60)
        return small_engine()

    server = LocalServer(slow_engine)
    entering = threading.Thread(target=server.__enter__)
    entering.start()
    try:
        assert loading.wait(60)
        while not getattr(server, "server", None) or not server.server.started:
            assert entering.is_alive()
        assert server.request("/health/live")[0] == 200 and server.request("/version")[0] == 200
        for path, body in (
            ("/health/ready", None),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            status, headers, _ = server.request(path, body)
            assert status == 503 and int(headers["retry-after"]) >= 1
        count = re.search(
            rb'vllm:admission_rejections_total\{.*reason="unready".*\} (\S+)', server.request("/metrics")[2]
        )
        assert count is not None and float(count[1]) == 2
    finally:
        go_on.set()
        entering.join(60)
    assert server.complete()[0] == 200
    server.__exit__(None, None, None)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, {"y": null}]}'}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": -1.5}, "n": 2,
                        "logprobs": 1, "seed": 5, "response_format": {"type": "json_object"}, "stream": True,
                        "stream_options": {"include_usage": True}, "peagle": {"tokens": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                                          {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                          {"role": "tool", "tool_call_id": "1", "content": "b"}],
                             "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                             "tool_choice": "auto", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip
ODD = [
    "",
    "\x00",
    "\ud800",
    "a" * 3000,
    -1,
    0,
    2**63,
    -(2**63),
    10**40,
    1e308,
    -0.0,
    True,
    None,
    [],
    {},
    [[]],
    {"": {}},
]
ANYTHING = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inside in parts:
        yield from paths(inside, (*at, name))


def replace_at(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    if not at:
        return to
    copy = value.copy()
    copy[at[0]] = replace_at(value[at[0]], at[1:], to)
    return copy


@pytest.mark.parametrize("path", GOOD)
def test_a_fuzzer_finds_no_500(served: LocalServer, path: str) -> None:
    """Valid requests with one or two values replaced, or with bytes changed."""
    seen: set[int] = set()

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        body: Any = GOOD[path]
        for _ in range(data.draw(st.integers(0, 2))):
            body = replace_at(body, data.draw(st.sampled_from([*paths(body)])), data.draw(ANYTHING))
        raw = json.dumps(body).encode()
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(raw)))
            raw = raw[:at] + data.draw(st.binary(max_size=4)) + raw[at + data.draw(st.integers(0, 4)) :]
        status, _, response = served.request(path, raw)
        seen.add(status)
        assert status < 500, (raw, response)
        if status >= 400:
            assert response["error"].keys() == {"message", "type", "param", "code"}

    assert served.request(path, GOOD[path])[0] == 200
    fuzz()
    assert {200, 400} <= seen
    assert served.complete()[0] == 200
