"""Running a server: API keys, CORS, logs, signals, the command line, and --engine vllm."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import engines
import forks
import pytest
from pairs import drafter_folder, target_folder
from serving_support import MODEL, PROMPT, K, LocalServer, ServerProcess, small_engine, wait_until, write_target

from peagle.cli import main
from peagle.cli.serving import parse_speculative_config
from peagle.config import SamplingParams, ServeSettings
from peagle.errors import UserError
from peagle.server.logs import start_logging
from peagle.server.tokenization import ServerTokenizer
from peagle.server.vllm_process import build_vllm_command, build_vllm_environment, supervise

KEY = "sk-very-secret"
SECRET_PROMPT = "the whispered words"


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    """The server's log as JSON lines."""
    kept = [(logger, logger.handlers[:], logger.level) for logger in map(logging.getLogger, ("peagle", "uvicorn"))]
    stream = io.StringIO()
    start_logging(True, stream)
    yield stream
    for logger, handlers, level in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = True


def test_the_api_key_is_required_and_never_logged(log_lines: io.StringIO) -> None:
    with LocalServer(api_key=KEY) as server:
        body = {"prompt": SECRET_PROMPT, "max_tokens": 4, "user": "u"}
        for headers in ({}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer "},
                        {"authorization": f"Bearer {KEY}x"}, {"authorization": "Bearer \xff"}):  # fmt: skip
            for path in ("/v1/completions", "/tokenize", "/peagle/info", "/v1/models", "/nowhere"):
                status, reported, response = server.request(path, body if path != "/v1/models" else None, headers)
                assert (status, response["error"]["code"]) == (401, "invalid_api_key")
                assert reported["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/version", "/metrics", "/"):
            assert server.request(path)[0] == 200
        for scheme in ("Bearer", "bearer"):
            assert server.request("/v1/completions", body, {"authorization": f"{scheme} {KEY}"})[0] == 200
        assert server.request("/healthy")[0] == 401
        seen = (
            json.dumps([server.request(p)[2] for p in ("/health", "/version")]) + server.request("/metrics")[2].decode()
        )
    text = log_lines.getvalue()
    assert KEY not in text and KEY not in seen and KEY not in repr(server.settings)
    assert SECRET_PROMPT not in text and SECRET_PROMPT not in seen
    last = [json.loads(line) for line in text.splitlines() if '"status": 200' in line and "completions" in line][-1]
    assert last["event"] == "request" and last["completion_tokens"] == 4 and last["prompt_tokens"] == len(SECRET_PROMPT)
    assert last.keys() >= {"time", "level", "id", "ms", "ttft_ms", "finish_reason"}


def test_prompts_are_logged_on_request_as_one_line(log_lines: io.StringIO) -> None:
    with LocalServer(log_prompts=True) as server:
        server.complete(prompt="two\nlines")
        server.request("/v1/models/a%0Ab", headers={"x-request-id": "mine-7"})
    entries = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    assert any(entry.get("prompt") == "two\nlines" for entry in entries)
    assert any(entry.get("id") == "mine-7" and entry["path"] == "/v1/models/a\nb" for entry in entries)


def test_cors_origins() -> None:
    origin = {"origin": "https://a.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with LocalServer() as server:
        assert not any("access-control" in name for name in server.request("/v1/models", headers=origin)[1])
        status, headers, _ = server.request("/v1/completions", headers=ask, method="OPTIONS")
        assert status == 405 and not any("access-control" in name for name in headers)
        # what a page may send without asking is not read
        assert server.request("/v1/completions", b'{"prompt": "a"}', {"content-type": "text/plain"})[0] == 415
    with LocalServer(cors_origins=("https://a.example",), api_key=KEY) as server:
        status, headers, _ = server.request("/v1/completions", headers=ask, method="OPTIONS")
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        other = server.request("/health", headers={"origin": "https://b.example"})[1]
        assert "access-control-allow-origin" not in other


# A process of its own


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("served"))


LONG = {"prompt": PROMPT, "max_tokens": 180, "temperature": 0, "ignore_eos": True, "stream": True}


def test_a_server_from_start_to_shutdown(target: Path) -> None:
    """On SIGTERM running requests finish, new ones get 503, and the exit status is 0."""
    config = json.dumps(
        {"method": "eagle3", "model": str(drafter_folder("p-eagle-1")), "num_speculative_tokens": K,
         "parallel_drafting": True}
    )  # fmt: skip
    server = ServerProcess(
        str(target), "--speculative-config", config, "--served-model-name", MODEL, "--log-json", PEAGLE_API_KEY=KEY
    )
    server.wait_ready()
    assert server.request("/v1/models")[0] == 401
    status, response = server.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, KEY)
    expected = small_engine().generate(list(PROMPT.encode()), SamplingParams(max_tokens=8))[0].outputs[0].text
    # (the pair in memory also ends at a comma; this text has none so early)
    assert status == 200 and json.loads(response)["choices"][0]["text"] == expected
    client = server.open_stream(LONG, KEY)
    received = client.recv(1024)
    os.kill(server.process.pid, signal.SIGTERM)
    refused = None
    while refused is None or refused[0] == 200:
        refused = server.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, KEY)
    assert refused[0] == 503 and json.loads(refused[1])["error"]["code"] == "unavailable"
    assert server.request("/health/ready")[0] == 503 and server.request("/health/live")[0] == 200
    while piece := client.recv(65536):
        received += piece
    assert b'"finish_reason":"length"' in received and b"data: [DONE]" in received
    assert server.process.wait() == 0
    entries = [json.loads(line) for line in server.process.stderr().splitlines()]
    ready = next(entry["event"] for entry in entries if entry["event"].startswith("ready: "))
    for fact in (
        MODEL,
        "p-eagle-1",
        "p-eagle, K 4",
        "float32 on cpu",
        "weights",
        "cache",
        f"http://127.0.0.1:{server.port}",
    ):
        assert fact in ready
    assert [e["event"] for e in entries if e["event"] in ("draining", "stopping")] == ["draining", "stopping"]
    assert KEY not in server.process.stderr() and PROMPT not in server.process.stderr()
    assert server.process.stdout() == ""


def test_the_shutdown_timeout_aborts_requests(target: Path) -> None:
    server = ServerProcess(str(target), "--shutdown-timeout", "0")
    server.wait_ready()
    with server.open_stream({**LONG, "n": 4}) as client:
        received = client.recv(1024)
        os.kill(server.process.pid, signal.SIGTERM)
        while piece := client.recv(65536):
            received += piece
    assert b'"code":"unavailable"' in received
    assert server.process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (("nowhere/at-all-here/x",), "nowhere"),
        (("TARGET", "-k", "3"), "-k 3"),
        (("TARGET", "-k", "many"), "-k many"),
        (("TARGET", "--port", "70000"), "--port"),
        (("TARGET", "--host", "256.1.1.1"), "--host"),
        (("TARGET", "--engine", "other"), "--engine"),
        (("TARGET", "--vllm-command", "vllm serve"), "--vllm-command"),
        (("TARGET", "--engine", "vllm", "--vllm-command", "no-such-command serve"), "no-such-command"),
        (("TARGET", "--engine", "vllm", "--vllm-command", "true serve", "--port", "0"), "--port 0"),
        (("TARGET", "--tool-call-parser", "xml"), "--tool-call-parser xml"),
        (("TARGET", "--max-queued-requests", "-1"), "--max-queued-requests"),
        (("TARGET", "--max-body-bytes", "0"), "--max-body-bytes"),
        (("TARGET", "--request-timeout", "0"), "--request-timeout"),
        (("TARGET", "--speculative-config", "{"), "--speculative-config"),
        (("TARGET", "--speculative-config", '{"method": "ngram"}'), "ngram"),
        (("BARE",), "tokenizer"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(
    target: Path,
    arguments: tuple[str, ...],
    mentioned: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [{"TARGET": str(target), "BARE": str(target_folder())}.get(a, a) for a in arguments]
    port = () if "--port" in given else ("--port", "0")
    monkeypatch.setattr(sys, "argv", ["peagle", "serve", *given, *port])
    with pytest.raises(SystemExit) as ended:
        main()
    response = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert response.startswith("peagle: error:") and len(response.splitlines()) == 1 and mentioned in response


def test_a_load_error_ends_the_server(target: Path) -> None:
    process = forks.Process("-m", "peagle", "serve", str(target), "--port", "0", "--max-model-len", "100000")
    assert process.wait() == 2
    assert process.stderr().strip().splitlines()[-1].startswith("peagle: error: --max-model-len 100000")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages | nothing }}", "TemplateAssertionError"),
        ("{{ nothing.more }}", "UndefinedError"),
        ("{{ raise_exception('no user messages') }}", None),
        (None, None),
    ],
)
def test_a_broken_chat_template_is_found(template: str | None, problem: str | None, tmp_path: Path) -> None:
    engines.write_tokenizer(tmp_path, 160, template)
    tokenizer = ServerTokenizer(tmp_path)
    if problem is None:
        tokenizer.check_chat_template()
    else:
        with pytest.raises(UserError, match=problem):
            tokenizer.check_chat_template()


def test_a_broken_chat_template_ends_the_server(tmp_path: Path) -> None:
    target = write_target(tmp_path)
    engines.write_tokenizer(target, 160, "{% for m in messages %}")
    process = forks.Process("-m", "peagle", "serve", str(target), "--port", "0", "--device", "cpu")
    assert process.wait() == 2
    error = process.stderr().strip().splitlines()[-1]
    assert error.startswith("peagle: error: the chat template") and str(target) in error and "endfor" in error


def test_a_used_port_is_reported_before_loading(target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = forks.Process("-m", "peagle", "serve", str(target), "--port", str(taken.getsockname()[1]))
        assert process.wait() == 2 and "in use" in process.stderr()


# vLLM's words


def test_parse_speculative_config() -> None:
    text = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 5, "parallel_drafting": true}'
    assert parse_speculative_config(text) == ("d", 5, True)
    assert parse_speculative_config('{"model": "d", "num_speculative_tokens": 5}') == ("d", 5, None)
    for wrong, mentioned in [
        ("[]", "object"),
        ('{"model": "d", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size"),
        ('{"num_speculative_tokens": 5}', "model"),
        ('{"model": "d", "num_speculative_tokens": true}', "num_speculative_tokens"),
        ('{"model": "d", "num_speculative_tokens": 99}', "99"),
        ('{"model": "d", "num_speculative_tokens": 5, "parallel_drafting": 1}', "parallel_drafting"),
    ]:
        with pytest.raises(UserError, match=mentioned):
            parse_speculative_config(wrong)


def test_vllm_command_and_environment() -> None:
    settings = ServeSettings(
        host="0.0.0.0",
        port=9,
        served_model_name="m",
        api_key=KEY,
        cors_origins=("https://a.example",),
        shutdown_timeout_s=12,
    )
    speculative = {"method": "eagle3", "model": "d", "num_speculative_tokens": 7, "parallel_drafting": True}
    options = {"max_model_len": 2048, "max_num_seqs": 8, "dtype": None, "gpu_memory_utilization": 0.5}
    command = ["/bin/vllm", "serve"]
    assert build_vllm_command(command, "org/t", settings, speculative_config=speculative, **options) == [
        *("/bin/vllm", "serve", "org/t", "--host", "0.0.0.0", "--port", "9", "--served-model-name", "m"),
        "--speculative-config",
        '{"method":"eagle3","model":"d","num_speculative_tokens":7,"parallel_drafting":true}',
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.5"),
        *("--allowed-origins", '["https://a.example"]', "--shutdown-timeout", "12"),
    ]
    around = {"HOME": "/h", "PEAGLE_API_KEY": KEY, "VLLM_API_KEY": "old"}
    assert build_vllm_environment(settings, around) == {"HOME": "/h", "VLLM_API_KEY": KEY}
    assert build_vllm_environment(ServeSettings(), around) == {"HOME": "/h"}
    module = ["/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    plain = build_vllm_command(module, "t", ServeSettings(served_model_name="t", tool_call_parser="llama3"))
    assert plain[:6] == [*module, "--model", "t"]
    more = build_vllm_command(["vllm", "serve", "--enforce-eager"], "t", ServeSettings(served_model_name="t"))
    assert more[:4] == ["vllm", "serve", "t", "--enforce-eager"]
    assert "--served-model-name" not in plain and "--speculative-config" not in plain
    assert plain[plain.index("--enable-auto-tool-choice") + 1 :][:2] == ["--tool-call-parser", "llama3_json"]
    for own in (
        {"allowed_hosts": ("a",)},
        {"max_queued_requests": 5},
        {"max_body_bytes": 5},
        {"request_timeout_s": 5.0},
        {"log_json": True},
    ):
        with pytest.raises(UserError, match="--" + next(iter(own)).removesuffix("_s").replace("_", "-")):
            build_vllm_command(["vllm", "serve"], "t", ServeSettings(**own))  # type: ignore[arg-type]


def script(folder: Path, text: str) -> Path:
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.mark.usefixtures("log_lines")
@pytest.mark.parametrize(
    ("template", "more", "response", "warning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "", ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], ""),
        ('{"name": n, "parameters": p}', "", ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"], ""),
        ("{{ tools }}<tool_call><function=", "", [], "--tool-call-parser"),
        ("{{ messages }}", "", [], ""),
        (None, "", [], ""),
        ("<tool_call>", " --tool_call_parser=xlam", ["--tool_call_parser=xlam"], ""),
    ],
)
def test_vllm_gets_the_call_parser_of_the_template(
    template: str | None,
    more: str,
    response: list[str],
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    shutil.copy(target_folder() / "config.json", folder)
    engines.write_tokenizer(folder, 160, template)
    vllm = script(tmp_path, f"import sys; open({str(tmp_path / 'told')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n")
    words = ["serve", str(folder), "--engine", "vllm", "--vllm-command", f"{vllm} serve{more}"]
    monkeypatch.setattr(sys, "argv", ["peagle", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    reported = (tmp_path / "told").read_text().splitlines()
    assert ended.value.code == 0 and reported[:2] == ["serve", str(folder)]
    assert [word for word in reported if "tool" in word or word in response] == response
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == bool(warning) and all(warning in line for line in warnings)


def test_vllm_is_started_and_stopped(tmp_path: Path, target: Path) -> None:
    """A fake vLLM that records its arguments and exits on SIGTERM."""
    script(
        tmp_path,
        "import json, os, signal, sys, time\n"
        f"told = {str(tmp_path / 'told.json')!r}\n"
        "def leave(*_):\n    open(told + '.stopped', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "key = os.environ.get('VLLM_API_KEY')\n"
        "open(told + '.part', 'w').write(json.dumps([sys.argv[1:], key])); os.rename(told + '.part', told)\n"
        "time.sleep(60)\n",
    )
    arguments = ("serve", str(target), "-d", str(drafter_folder("eagle3-1")), "--engine", "vllm", "--port", "1234")
    arguments += ("--kv-cache-dtype", "fp8", "--quantization", "fp8")
    process = forks.Process(
        *("-m", "peagle", *arguments), env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PEAGLE_API_KEY": KEY}
    )
    wait_until((tmp_path / "told.json").exists)
    reported, key = json.loads((tmp_path / "told.json").read_text())
    assert key == KEY and reported[:2] == ["serve", str(target)] and "1234" in reported
    assert [reported[reported.index(flag) + 1] for flag in ("--kv-cache-dtype", "--quantization")] == ["fp8", "fp8"]
    config = json.loads(reported[reported.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(drafter_folder("eagle3-1")), "num_speculative_tokens": 3}
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert (tmp_path / "told.json.stopped").exists()


def test_the_exit_status_of_a_vllm_that_never_served(tmp_path: Path) -> None:
    nowhere = ("127.0.0.1", 1)
    path = script(tmp_path, "import sys; sys.exit(7)\n")
    assert supervise([str(path)], dict(os.environ), nowhere) == 7
    path = script(tmp_path, "import os; os.kill(os.getpid(), 9)\n")
    assert supervise([str(path)], dict(os.environ), nowhere) == 128 + 9


def test_a_vllm_that_dies_after_serving_is_restarted(tmp_path: Path, target: Path) -> None:
    """A fake vLLM that reports healthy, records its process ids, and dies; the second one stays."""
    script(
        tmp_path,
        "import http.server, os, subprocess, sys\n"
        f"told = {str(tmp_path / 'lives')!r}\n"
        "class Health(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200); self.end_headers()\n"
        "server = http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Health)\n"
        "own = subprocess.Popen(['sleep', '100'])\n"
        "open(told, 'a').write(f'{os.getpid()} {own.pid}\\n')\n"
        "server.handle_request()\n"
        "if len(open(told).readlines()) == 1: sys.exit(3)\n"
        "server.serve_forever()\n",
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = forks.Process(
        *("-m", "peagle", "serve", str(target), "--engine", "vllm", "--port", str(port)),
        *("--vllm-command", f"{tmp_path / 'vllm'} serve"),
    )
    wait_until(lambda: process.stderr().count("vllm ready") == 2)
    response = process.stderr()
    assert [response.count(words) for words in ("vllm started", "vllm ready", "vllm died, restarting status=3")] == [
        2,
        2,
        1,
    ]
    (_, orphan), (second, child) = (map(int, line.split()) for line in (tmp_path / "lives").read_text().splitlines())
    assert not alive(orphan) and alive(second) and alive(child)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert not alive(second) and not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_missing_vllm_is_an_error(target: Path, tmp_path: Path) -> None:
    process = forks.Process("-m", "peagle", "serve", str(target), "--engine", "vllm", env={"PATH": str(tmp_path)})
    assert process.wait() == 2 and "`vllm`" in process.stderr()
