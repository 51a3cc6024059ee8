"""The API returns the engine's outputs, token for token, and refuses unsupported fields by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import engines
import pytest
from pairs import TEXT
from serving_support import MAX_MODEL_LEN, MODEL, PROMPT, LocalServer, small_engine

from peagle.config import SamplingParams
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from peagle.server import engine_client

IDS = list(PROMPT.encode())


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServer]:
    with LocalServer() as server:
        yield server
        server.check_engine_idle()


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same engine without a server."""
    return small_engine()


# fields of a request, and the equivalent SamplingParams
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 1e-9}, {}),
    ({"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5}),
    ({"temperature": None, "seed": 6}, {"temperature": 1.0, "seed": 6}),
    (
        {"temperature": 1.2, "seed": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "n": 3},
        {"temperature": 1.2, "seed": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "n": 3},
    ),
    ({"top_k": -1, "stop": "se"}, {"stop": "se"}),
    ({"stop": ["zzz", "r"]}, {"stop": ["zzz", "r"]}),
    ({"stop_token_ids": [ord("o")]}, {"stop_token_ids": [ord("o")]}),
    ({"ignore_eos": True, "max_tokens": 60}, {"ignore_eos": True, "max_tokens": 60}),
    ({"min_tokens": 30, "max_tokens": 40}, {"min_tokens": 30, "max_tokens": 40}),
    (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    ),
    ({"logit_bias": {str(ord("Y")): -100, "111": 5.5}}, {"logit_bias": {ord("Y"): -100.0, 111: 5.5}}),
    ({"allowed_token_ids": [*b"fghe "]}, {"allowed_token_ids": [*b"fghe "]}),
    ({"bad_words": ["th", "o"], "max_tokens": 40}, {"bad_words": ["th", "o"], "max_tokens": 40}),
    ({"logprobs": 3}, {"logprobs": 3}),
    ({"peagle": {"num_speculative_tokens": 1}}, {}),
    ({"peagle": {"speculation": False}}, {}),
]


def generate_directly(llm: LLM, **fields: Any) -> list[CompletionOutput]:
    return llm.generate(IDS, SamplingParams(**{"max_tokens": 24, **fields}))[0].outputs


def parse_events(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize(("fields", "meant"), REQUESTS, ids=lambda value: "-".join(value) or "plain")
def test_completions_equal_the_engines(
    served: LocalServer, alone: LLM, fields: dict[str, Any], meant: dict[str, Any]
) -> None:
    """Whole and streamed, as text and as chat: the same tokens, texts and finish reasons."""
    expected = generate_directly(alone, **meant)
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0, **fields}
    body["peagle"] = {"tokens": True, **fields.get("peagle", {})}
    chat = {k: v for k, v in body.items() if k != "logprobs"} | {"messages": [{"role": "user", "content": PROMPT}]}
    if "logprobs" in fields:
        chat |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    for path, ask in (("/v1/completions", {**body, "prompt": PROMPT}), ("/v1/chat/completions", chat)):
        status, _, whole = served.request(path, ask)
        assert status == 200, whole
        _, headers, data = served.request(path, {**ask, "stream": True, "stream_options": {"include_usage": True}})
        assert headers["content-type"].startswith("text/event-stream")
        chunks = parse_events(data)
        assert len(whole["choices"]) == len(expected)
        for choice, output in zip(whole["choices"], expected, strict=True):
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            reason = (choice["finish_reason"], choice["stop_reason"])
            assert (text, choice["peagle"]["token_ids"]) == (output.text, output.token_ids)
            assert reason == (output.finish_reason, output.stop_reason)
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices) == output.text
            assert [t for c in choices if "peagle" in c for t in c["peagle"]["token_ids"]] == output.token_ids
            flags = [d for c in choices if "peagle" in c for d in c["peagle"]["is_draft_token"]]
            if fields.get("peagle") is None:
                assert flags == choice["peagle"]["is_draft_token"] == output.is_draft_token
            assert [c["finish_reason"] for c in choices][-1] == output.finish_reason
            assert all(c["finish_reason"] is None for c in choices[:-1])
        tokens = sum(len(o.token_ids) for o in expected)
        usage = {"prompt_tokens": len(IDS), "completion_tokens": tokens, "total_tokens": len(IDS) + tokens}
        assert whole["usage"] == chunks[-1]["usage"] == usage
        assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
        stats = whole["peagle"]
        if fields.get("peagle") is None:
            assert stats["num_decode_steps"] == sum(o.num_decode_steps for o in expected)
            assert stats["num_accepted_tokens_per_pos"] == [
                sum(c) for c in zip(*(o.num_accepted_tokens_per_pos for o in expected), strict=True)
            ]
        else:
            max_k = fields["peagle"].get("num_speculative_tokens", 0)
            assert stats["num_speculative_tokens"] == max_k and not any(stats["num_accepted_tokens_per_pos"][max_k:])
            assert (stats["num_drafts"] > 0) == (max_k > 0)


def test_requests_with_different_k_share_a_batch(served: LocalServer, alone: LLM) -> None:
    """Requests with 0, 2 and K draft tokens in the same decode steps."""
    from concurrent.futures import ThreadPoolExecutor

    expected = generate_directly(alone, max_tokens=60, ignore_eos=True)[0]

    def ask(k: int | None) -> Any:
        extra = {"tokens": True} if k is None else {"tokens": True, "num_speculative_tokens": k}
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "peagle": extra}
        return served.request("/v1/completions", body)[2]

    with ThreadPoolExecutor(4) as pool:
        for k, response in zip((0, 2, None, 0), pool.map(ask, (0, 2, None, 0)), strict=True):
            assert response["choices"][0]["peagle"]["token_ids"] == expected.token_ids
            accepted = response["peagle"]["num_accepted_tokens_per_pos"]
            assert k is None or not any(accepted[k:])
            assert (response["peagle"]["num_drafts"] == 0) == (k == 0)


def test_logprobs_of_both_apis(served: LocalServer, alone: LLM) -> None:
    rows = generate_directly(alone, logprobs=2, max_tokens=6)[0]
    assert rows.logprobs is not None
    body = {"max_tokens": 6, "temperature": 0}
    response = served.request("/v1/completions", {**body, "prompt": PROMPT, "logprobs": 2})[2]["choices"][0]
    shown = response["logprobs"]
    assert "".join(shown["tokens"]) == response["text"]
    assert shown["text_offset"] == list(range(6))
    messages = [{"role": "user", "content": PROMPT}]
    fields = {**body, "messages": messages, "logprobs": True, "top_logprobs": 2}
    content = served.request("/v1/chat/completions", fields)[2]["choices"][0]["logprobs"]["content"]
    for i, (token, row) in enumerate(zip(rows.token_ids, rows.logprobs, strict=True)):
        best = sorted(row.values(), reverse=True)[:2]
        assert shown["token_logprobs"][i] == pytest.approx(row[token], abs=1e-4)
        assert sorted(shown["top_logprobs"][i].values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)
        assert content[i]["logprob"] == pytest.approx(row[token], abs=1e-4)
        assert content[i]["token"] == chr(token) and content[i]["bytes"] == [token]
        assert [t["logprob"] for t in content[i]["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    none = served.request("/v1/chat/completions", {**body, "messages": messages, "logprobs": True})[2]["choices"][0]
    assert [t["top_logprobs"] for t in none["logprobs"]["content"]] == [[]] * 6
    assert served.request("/v1/completions", {**body, "prompt": PROMPT})[2]["choices"][0]["logprobs"] is None


def test_a_busy_server_merges_deltas(served: LocalServer, alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token and the end of a stream never wait; all tokens between them arrive with the end."""
    monkeypatch.setattr(engine_client, "STREAM_INTERVAL_S", 1e4)
    (expected,) = generate_directly(alone, max_tokens=60, ignore_eos=True)
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "peagle": {"tokens": True}}
    chunks = parse_events(served.request("/v1/completions", {**body, "stream": True})[2])
    first, last = (chunk["choices"][0] for chunk in chunks)
    assert first["peagle"]["token_ids"] + last["peagle"]["token_ids"] == expected.token_ids
    assert (first["text"] + last["text"], last["finish_reason"]) == (expected.text, "length")
    assert len(first["peagle"]["token_ids"]) == 1 and "peagle" in chunks[-1]


def test_several_prompts_keep_their_order(served: LocalServer, alone: LLM) -> None:
    prompts = [TEXT[i : i + 30].decode() for i in (500, 2000, 4000)]
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=1, n=2)
    expected = [o.text for out in alone.generate([list(s.encode()) for s in prompts], params) for o in out.outputs]
    body = {"prompt": prompts, "max_tokens": 10, "temperature": 0.8, "seed": 1, "n": 2}
    response = served.request("/v1/completions", body)[2]
    assert [c["text"] for c in response["choices"]] == expected
    assert [c["index"] for c in response["choices"]] == list(range(6))
    body["prompt"] = [list(s.encode()) for s in prompts]
    texts = dict.fromkeys(range(6), "")
    for chunk in parse_events(served.request("/v1/completions", {**body, "stream": True})[2]):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == expected


def test_defaults_are_openais(served: LocalServer) -> None:
    """16 tokens for a completion, the rest of the context for a chat."""
    response = served.request("/v1/completions", {"prompt": PROMPT, "ignore_eos": True})[2]
    assert response["usage"]["completion_tokens"] == 16
    messages = [{"role": "user", "content": PROMPT}]
    response = served.request("/v1/chat/completions", {"messages": messages, "ignore_eos": True})[2]
    assert response["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert response["choices"][0]["finish_reason"] == "length"


CHAT = {"messages": [{"role": "user", "content": "a"}]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "a", "echo": True}, "echo"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("completions", {"prompt": "a", "novelty": None}, "novelty"),
    ("completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
    ("completions", {"prompt": "a", "n": 0}, "n"),
    ("completions", {"prompt": "a", "n": 129}, "n"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 256}, "max_tokens"),
    ("completions", {"prompt": "a" * 300}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a"] * 300}, "prompt"),
    ("completions", {"prompt": [1, 2, 999]}, "prompt"),
    ("completions", {"prompt": [1, -2]}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": "a", "temperature": -0.1}, "temperature"),
    ("completions", {"prompt": "a", "temperature": "1"}, "temperature"),
    ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
    ("completions", {"prompt": "a", "top_p": 1.01}, "top_p"),
    ("completions", {"prompt": "a", "top_k": -5}, "top_k"),
    ("completions", {"prompt": "a", "top_k": 10**30}, "top_k"),
    ("completions", {"prompt": "a", "seed": -1}, "seed"),
    ("completions", {"prompt": "a", "seed": 2**63}, "seed"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop"),
    ("completions", {"prompt": "a", "stop": ["a"] * 100}, "stop"),
    ("completions", {"prompt": "a", "stop": "a" * 5000}, "stop"),
    ("completions", {"prompt": "a", "stop_token_ids": [160]}, "stop_token_ids"),
    ("completions", {"prompt": "a", "logit_bias": {"160": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ("completions", {"prompt": "a", "allowed_token_ids": [160]}, "allowed_token_ids"),
    ("completions", {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ("completions", {"prompt": "a", "bad_words": ["a much longer text"]}, "bad_words"),
    ("completions", {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ("completions", {"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("completions", {"prompt": "a", "peagle": {"num_speculative_tokens": 9}}, "peagle.num_speculative_tokens"),
    (
        "completions",
        {"prompt": "a", "peagle": {"num_speculative_tokens": 2, "speculation": False}},
        "peagle.num_speculative_tokens",
    ),
    ("completions", {"prompt": "a", "response_format": {"type": "yaml"}}, "response_format.type"),
    ("completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": 2}, "logprobs"),
    ("chat/completions", {**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("chat/completions", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
    ("chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_unsupported_fields_are_refused_by_name(
    served: LocalServer, path: str, body: dict[str, Any], param: str
) -> None:
    for stream in ({}, {"stream": True}) if "stream_options" not in body else ({},):
        status, _, response = served.request(f"/v1/{path}", {**body, **stream})
        assert status == 400, response
        assert response.keys() == {"error"} and response["error"].keys() == {"message", "type", "param", "code"}
        assert response["error"]["param"] == param and response["error"]["type"] == "invalid_request_error"
        assert response["error"]["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_media_is_refused_and_its_address_not_opened(served: LocalServer, kind: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.2)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"
        content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": url}}]
        status, _, response = served.request(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
        )
        assert status == 400 and kind in response["error"]["message"]
        with pytest.raises(TimeoutError):
            bait.accept()


def test_the_model_name_is_checked(served: LocalServer) -> None:
    assert served.request("/v1/models")[2]["data"][0]["id"] == MODEL
    assert served.request(f"/v1/models/{MODEL}")[0] == 200
    for name in ("other", "../../etc/passwd", "http://127.0.0.1/x", ""):
        status, _, response = served.request("/v1/completions", {"model": name, "prompt": "a"})
        assert (status, response["error"]["code"]) == (404, "model_not_found")
    for path in ("/v1/models/../../etc/passwd", "/..%2f..%2fetc/passwd", "/static/index.html", "//etc/passwd"):
        assert served.request(path)[0] == 404
    assert served.request("/v1/completions", method="GET")[0] == 405
    assert served.request("/nowhere")[2]["error"]["type"] == "not_found_error"


def test_tokenize_and_detokenize(served: LocalServer) -> None:
    response = served.request("/tokenize", {"prompt": "Hé!", "return_token_strs": True})[2]
    assert response["tokens"] == list("Hé!".encode())[:1] + response["tokens"][1:] and response["count"] == len(
        response["tokens"]
    )
    response = served.request(
        "/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    )[2]
    assert response["tokens"] == list(b"Hi") and response["max_model_len"] == MAX_MODEL_LEN
    assert served.request("/detokenize", {"tokens": list(b"Hi")})[2] == {"prompt": "Hi"}
    assert served.request("/detokenize", {"tokens": [160]})[2]["error"]["param"] == "tokens"
    assert served.request("/tokenize", {"prompt": "a", "messages": []})[0] == 400


def test_tools_reach_the_template(alone: LLM) -> None:
    """Calls and their results go back into the template as values."""
    template = (
        "{% if tools %}{{ tools[0].function.name }}:{{ tools[0].function.parameters | tojson }} {% endif %}"
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}<{{ c.function.arguments.x }}>{% endfor %}"
        "={{ m.content }};{% endfor %}"
    )

    def make() -> LLM:
        folder = engines.home() / "tools"
        if not folder.exists():
            import shutil

            shutil.copytree(engines.target().folder, folder)
            engines.write_tokenizer(folder, 160, template)
        from dataclasses import replace

        target = replace(engines.target(), folder=folder)
        return LLM(target, None, device="cpu", dtype="float32", threads=1, max_model_len=MAX_MODEL_LEN, max_num_seqs=2)

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "8", "tool_call_id": "1"},
    ]
    with LocalServer(make) as server:
        response = server.request("/tokenize", {"messages": messages, "tools": tools})[2]
        assert bytes(response["tokens"]).decode() == 'add:{"type": "object"} user=go;assistant<7>=;tool=8;'
        body = {"messages": messages, "tools": tools, "max_tokens": 4}
        counts = {c: server.request("/v1/chat/completions", {**body, "tool_choice": c})[2]["usage"]["prompt_tokens"]
                  for c in ("auto", "none")}  # fmt: skip
        assert counts == {"auto": response["count"], "none": response["count"] - len('add:{"type": "object"} ')}


def test_health_version_metrics_and_playground(served: LocalServer) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        status, _, response = served.request(path)
        assert (status, response["status"], response["restarts"]) == (200, "ready", 0)
    assert served.request("/version")[2].keys() == {"version"}
    info = served.request("/peagle/info")[2]
    assert info.keys() == {
        *("model", "drafter", "method", "num_speculative_tokens"),
        *("max_speculative_tokens", "max_model_len", "version"),
    }
    assert (info["method"], info["max_speculative_tokens"], info["max_model_len"]) == ("p-eagle", 4, MAX_MODEL_LEN)
    before = _counters(served)
    served.complete(max_tokens=20, ignore_eos=True)
    after = _counters(served)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 20
    assert after["vllm:spec_decode_num_drafts_total"] > before["vllm:spec_decode_num_drafts_total"]
    page = served.request("/")
    assert page[0] == 200 and page[1]["content-type"].startswith("text/html")


def _counters(served: LocalServer) -> dict[str, float]:
    text = served.request("/metrics")[2].decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}
