"""A server that answers: the rows of the other source, whatever the network does, and whose fault it is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chats import SETTINGS, Canned, by_key, canned, conversations, make_chat, make_target, rows_of, write

from peagle.config import EndpointSettings, ResponseSettings
from peagle.data.chat_format import ChatFormat
from peagle.data.generators import GenerationRequest
from peagle.data.response_file import DataSummary, sidecar_path
from peagle.data.responses import write_responses
from peagle.errors import UserError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return make_chat(tmp_path_factory.mktemp("chat") / "t")


class Server(BaseHTTPRequestHandler):
    """The other side: OpenAI's protocol, with faults on demand."""

    protocol_version = "HTTP/1.1"
    faults: list[str] = []
    gives_ids = True
    knows_ids = True
    models = ["small"]
    seen: list[dict[str, Any]] = []
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, value: Any, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply({"data": [{"id": name} for name in self.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with self.lock:
            self.seen.append(body)
            fault = self.faults.pop(0) if self.faults else ""
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
        elif fault == "slow":
            time.sleep(1.5)
            self.close_connection = True
        elif fault == "rubbish":
            self.reply(b"<html>gateway</html>")
        elif fault == "hollow":
            self.reply({"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]})
        elif fault == "429":
            self.reply({"error": {"message": "slow down"}}, 429, Retry_After="0")
        elif fault.isdigit():
            self.reply({"error": {"message": f"this is a {fault}"}}, int(fault))
        elif body.get("return_token_ids") and not self.knows_ids:
            self.reply({"message": "Unrecognized request argument supplied: return_token_ids"}, 400)
        else:
            self.reply(self.answer(body))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        result = canned(GenerationRequest(0, body["messages"], [], ResponseSettings().params(body["seed"])))
        assert result.token_ids is not None
        text = bytes(result.token_ids).decode().rstrip("d")
        choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": result.finish_reason}
        reply = {"choices": [choice]}
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = result.token_ids
            prompt = "".join(m["content"] + ("d", "\n")[m["role"] == "user"] for m in body["messages"])
            reply["prompt_token_ids"] = list(prompt.encode())
        return reply


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    kind = type("OneServer", (Server,), {"faults": [], "seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}", kind
        http.shutdown()


def ask_server(
    url: str, target: Path, out: Path, retries: int = 6, concurrency: int = 3, **settings: Any
) -> DataSummary:
    prompts = out.with_name("prompts.jsonl")
    rows = [{"id": p.id, "source": p.source, "turns": p.turns} for p in conversations().rows]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoint = EndpointSettings(url, None, concurrency, timeout_s=1.0, retries=retries, backoff_s=0.01, **settings)
    return write_responses(str(prompts), out, str(target), SETTINGS, endpoint=endpoint, show_progress=False)


@pytest.mark.parametrize("ids", ["given", "not given", "not known"])
def test_a_server_with_faults_gives_the_rows_of_one_without(
    server: tuple[str, type[Server]], target: Path, chat: ChatFormat, tmp_path: Path, ids: str
) -> None:
    url, kind = server
    kind.gives_ids, kind.knows_ids = ids == "given", ids != "not known"
    kind.faults += ["500", "reset", "rubbish", "429", "slow", "hollow", "", "503", "reset"]
    summary = ask_server(url, target, tmp_path / "out.jsonl")
    write(tmp_path / "whole.jsonl", chat, Canned())
    assert by_key(rows_of(tmp_path / "out.jsonl")) == by_key(rows_of(tmp_path / "whole.jsonl"))
    assert summary.complete and summary.num_failed == 0 and kind.faults == []
    assert {body["model"] for body in kind.seen} == {"small"}
    assert (kind.seen[-1].get("return_token_ids") is True) == (ids != "not known")


def test_what_a_server_refuses_is_a_rows_fault_or_everyones(
    server: tuple[str, type[Server]], target: Path, tmp_path: Path
) -> None:
    url, kind = server
    kind.faults += ["", "", "400", "422"]
    summary = ask_server(url + "/v1/", target, tmp_path / "a.jsonl", concurrency=1)
    assert summary.dropped["refused by the server (400)"] == 1 and summary.complete
    (row,) = [r for r in rows_of(sidecar_path(tmp_path / "a.jsonl", "dropped")) if "(422)" in r["reason"]]
    assert row["detail"] == "422 this is a 422"
    for status, expected in (("401", "OPENAI_API_KEY"), ("404", "404.*--model")):
        kind.faults[:] = [status]
        with pytest.raises(UserError, match=expected):
            ask_server(url, target, tmp_path / f"{status}.jsonl", concurrency=1)  # none may take the next fault
    kind.faults[:] = ["", *["500"] * 3]  # one row is given up, the others are not
    summary = ask_server(url, target, tmp_path / "b.jsonl", retries=2, concurrency=1)
    assert summary.num_failed == 1 and not summary.complete
    assert ask_server(url, target, tmp_path / "b.jsonl").complete
    kind.faults[:] = ["", *["500"] * 99]
    with pytest.raises(UserError, match="gave up.*500 this is a 500.*same command"):
        ask_server(url, target, tmp_path / "c.jsonl", retries=0, failures=4)
    kind.faults.clear()
    assert ask_server(url, target, tmp_path / "c.jsonl").complete
    kind.models = ["one", "two"]
    with pytest.raises(UserError, match="--model NAME, one of one, two"):
        ask_server(url, target, tmp_path / "d.jsonl")
    with pytest.raises(UserError, match="--endpoint http://127.0.0.1:9: connection refused"):
        ask_server("http://127.0.0.1:9", target, tmp_path / "e.jsonl")


def test_a_server_that_reads_another_prompt_is_found_out(
    server: tuple[str, type[Server]], target: Path, tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }},{% endfor %}")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    with pytest.raises(UserError, match="prompt has.*--chat-template"):
        write_responses(
            str(prompts),
            tmp_path / "o.jsonl",
            str(target),
            SETTINGS,
            endpoint=EndpointSettings(server[0]),
            chat_template=template,
            show_progress=False,
        )
