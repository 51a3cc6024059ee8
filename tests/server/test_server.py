"""Running a server: keys, origins, logs, signals, the command line, and vLLM in its place."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import engines
import forks
import pytest
from pairs import drafter_folder, target_folder
from serving_support import MODEL, PROMPT, K, LocalServer, ServerProcess, small_engine, wait_until

from peagle.cli import main
from peagle.cli.serve import DrafterChoice, parse_speculative_config
from peagle.config import SamplingParams, ServeSettings
from peagle.errors import UserError
from peagle.server.logs import LOGGER, start_logging
from peagle.server.vllm_process import VllmOptions, build_vllm_command, build_vllm_environment, supervise

KEY = "sk-very-secret"
SECRET_PROMPT = "the whispered words"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a server logs, as JSON lines."""
    kept = [(logger, logger.handlers[:], logger.level) for logger in (LOGGER, logging.getLogger("uvicorn"))]
    stream = io.StringIO()
    start_logging(True, stream)
    yield stream
    for logger, handlers, level in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = True


def test_the_key_is_asked_for_and_told_to_nobody(lines: io.StringIO) -> None:
    with LocalServer(api_key=KEY) as server:
        body = {"prompt": SECRET_PROMPT, "max_tokens": 4, "user": "u"}
        for headers in ({}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer "},
                        {"authorization": f"Bearer {KEY}x"}, {"authorization": "Bearer \xff"}):  # fmt: skip
            for path in ("/v1/completions", "/tokenize", "/peagle/info", "/v1/models", "/nowhere"):
                status, told, said = server.request(path, body if path != "/v1/models" else None, headers)
                assert (status, said["error"]["code"]) == (401, "invalid_api_key")
                assert told["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/version", "/metrics", "/"):
            assert server.request(path)[0] == 200
        for scheme in ("Bearer", "bearer"):
            assert server.request("/v1/completions", body, {"authorization": f"{scheme} {KEY}"})[0] == 200
        assert server.request("/healthy")[0] == 401
        seen = (
            json.dumps([server.request(p)[2] for p in ("/health", "/version")]) + server.request("/metrics")[2].decode()
        )
    text = lines.getvalue()
    assert KEY not in text and KEY not in seen and KEY not in repr(server.settings)
    assert SECRET_PROMPT not in text and SECRET_PROMPT not in seen
    last = [json.loads(line) for line in text.splitlines() if '"status": 200' in line and "completions" in line][-1]
    assert last["event"] == "request" and last["completion_tokens"] == 4 and last["prompt_tokens"] == len(SECRET_PROMPT)
    assert last.keys() >= {"time", "level", "id", "ms", "ttft_ms", "finish_reason"}


def test_prompts_are_logged_where_that_is_asked_for_and_a_line_stays_a_line(lines: io.StringIO) -> None:
    with LocalServer(log_prompts=True) as server:
        server.complete(prompt="two\nlines")
        server.request("/v1/models/a%0Ab", headers={"x-request-id": "mine-7"})
    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert any(entry.get("prompt") == "two\nlines" for entry in entries)
    assert any(entry.get("id") == "mine-7" and entry["path"] == "/v1/models/a\nb" for entry in entries)


def test_other_origins_are_let_in_only_where_named() -> None:
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
    folder = tmp_path_factory.mktemp("served") / "t"
    shutil.copytree(target_folder(), folder)
    engines.write_tokenizer(folder, 160)
    return folder


LONG = {"prompt": PROMPT, "max_tokens": 180, "temperature": 0, "ignore_eos": True, "stream": True}


def test_a_server_from_its_first_line_to_its_last(target: Path) -> None:
    """A key from the environment, a summary, an answer, and on SIGTERM: what is under way is finished, what comes
    later is refused, and the exit is clean."""
    config = json.dumps(
        {"method": "eagle3", "model": str(drafter_folder("p-eagle-1")), "num_speculative_tokens": K,
         "parallel_drafting": True}
    )  # fmt: skip
    server = ServerProcess(
        str(target), "--speculative-config", config, "--served-model-name", MODEL, "--log-json", PEAGLE_API_KEY=KEY
    )
    server.wait_ready()
    assert server.request("/v1/models")[0] == 401
    status, said = server.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, KEY)
    wanted = small_engine().generate(list(PROMPT.encode()), SamplingParams(max_tokens=8))[0].outputs[0].text
    # (the pair in memory also ends at a comma; this text has none so early)
    assert status == 200 and json.loads(said)["choices"][0]["text"] == wanted
    one = server.open_stream(LONG, KEY)
    received = one.recv(1024)
    os.kill(server.process.pid, signal.SIGTERM)
    refused = None
    while refused is None or refused[0] == 200:
        refused = server.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, KEY)
    assert refused[0] == 503 and json.loads(refused[1])["error"]["code"] == "unavailable"
    assert server.request("/health/ready")[0] == 503 and server.request("/health/live")[0] == 200
    while piece := one.recv(65536):
        received += piece
    assert b'"finish_reason":"length"' in received and b"data: [DONE]" in received
    assert server.process.wait() == 0
    entries = [json.loads(line) for line in server.process.complaints().splitlines()]
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
    assert KEY not in server.process.complaints() and PROMPT not in server.process.complaints()
    assert server.process.said() == ""


def test_what_is_not_finished_in_time_is_told_and_dropped(target: Path) -> None:
    server = ServerProcess(str(target), "--shutdown-timeout", "0")
    server.wait_ready()
    with server.open_stream({**LONG, "n": 4}) as one:
        received = one.recv(1024)
        os.kill(server.process.pid, signal.SIGTERM)
        while piece := one.recv(65536):
            received += piece
    assert b'"code":"unavailable"' in received
    assert server.process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
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
def test_a_wrong_command_line_is_one_line(
    target: Path,
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [{"TARGET": str(target), "BARE": str(target_folder())}.get(a, a) for a in arguments]
    port = () if "--port" in given else ("--port", "0")
    monkeypatch.setattr(sys, "argv", ["peagle", "serve", *given, *port])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert said.startswith("peagle: error:") and len(said.splitlines()) == 1 and named in said


def test_a_model_that_cannot_be_loaded_ends_the_server(target: Path) -> None:
    process = forks.Process("-m", "peagle", "serve", str(target), "--port", "0", "--max-model-len", "100000")
    assert process.wait() == 2
    assert process.complaints().strip().splitlines()[-1].startswith("peagle: error: --max-model-len 100000")


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = forks.Process("-m", "peagle", "serve", str(target), "--port", str(taken.getsockname()[1]))
        assert process.wait() == 2 and "in use" in process.complaints()


# vLLM's words


def test_a_speculative_config_is_read_as_vllm_writes_it() -> None:
    text = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 5, "parallel_drafting": true}'
    assert parse_speculative_config(text) == DrafterChoice("d", 5, True)
    assert parse_speculative_config('{"model": "d", "num_speculative_tokens": 5}') == DrafterChoice("d", 5)
    for wrong, named in [
        ("[]", "object"),
        ('{"model": "d", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size"),
        ('{"num_speculative_tokens": 5}', "model"),
        ('{"model": "d", "num_speculative_tokens": true}', "num_speculative_tokens"),
        ('{"model": "d", "num_speculative_tokens": 99}', "99"),
        ('{"model": "d", "num_speculative_tokens": 5, "parallel_drafting": 1}', "parallel_drafting"),
    ]:
        with pytest.raises(UserError, match=named):
            parse_speculative_config(wrong)


def test_vllms_command_says_the_same_and_keeps_the_key_out() -> None:
    settings = ServeSettings(
        host="0.0.0.0",
        port=9,
        served_model_name="m",
        api_key=KEY,
        cors_origins=("https://a.example",),
        shutdown_timeout_s=12,
    )
    speculative = {"method": "eagle3", "model": "d", "num_speculative_tokens": 7, "parallel_drafting": True}
    options = VllmOptions("org/t", speculative, max_model_len=2048, max_num_seqs=8, gpu_memory_utilization=0.5)
    assert build_vllm_command(["/bin/vllm", "serve"], options, settings) == [
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
    plain = build_vllm_command(
        module, VllmOptions("t"), ServeSettings(served_model_name="t", tool_call_parser="llama3")
    )
    assert plain[:6] == [*module, "--model", "t"]
    more = build_vllm_command(
        ["vllm", "serve", "--enforce-eager"], VllmOptions("t"), ServeSettings(served_model_name="t")
    )
    assert more[:4] == ["vllm", "serve", "t", "--enforce-eager"]
    assert "--served-model-name" not in plain and "--speculative-config" not in plain
    assert plain[plain.index("--enable-auto-tool-choice") + 1 :][:2] == ["--tool-call-parser", "llama3_json"]
    for own in ({"max_queued_requests": 5}, {"max_body_bytes": 5}, {"request_timeout_s": 5.0}, {"log_json": True}):
        with pytest.raises(UserError, match="--" + next(iter(own)).removesuffix("_s").replace("_", "-")):
            build_vllm_command(["vllm", "serve"], VllmOptions("t"), ServeSettings(**own))  # type: ignore[arg-type]


def script(folder: Path, text: str) -> Path:
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(
    ("template", "more", "said", "warned"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "", ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], ""),
        ('{"name": n, "parameters": p}', "", ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"], ""),
        ("{{ tools }}<tool_call><function=", "", [], "--tool-call-parser"),
        ("{{ messages }}", "", [], ""),
        (None, "", [], ""),
        ("<tool_call>", " --tool_call_parser=xlam", ["--tool_call_parser=xlam"], ""),
    ],
)
def test_vllm_is_told_the_parser_that_the_template_means(
    template: str | None,
    more: str,
    said: list[str],
    warned: str,
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
    told = (tmp_path / "told").read_text().splitlines()
    assert ended.value.code == 0 and told[:2] == ["serve", str(folder)]
    assert [word for word in told if "tool" in word or word in said] == said
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == bool(warned) and all(warned in line for line in warnings)


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_drafter_of_the_other_kind_is_refused(
    engine: str, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever states the kind wrongly means another drafter, or would be served another way than they asked."""
    there = ("--vllm-command", "false serve") if engine == "vllm" else ()
    for drafter, parallel in (("p-eagle-1", False), ("eagle3-1", True)):
        named = str(drafter_folder(drafter))
        config = {"model": named, "num_speculative_tokens": K, "parallel_drafting": parallel}
        words = ["serve", str(target), "--engine", engine, *there, "--speculative-config", json.dumps(config)]
        monkeypatch.setattr(sys, "argv", ["peagle", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and len(said.splitlines()) == 1
        assert all(part in said for part in ("parallel_drafting", named, str(not parallel).lower()))


def test_vllm_is_run_and_told_to_stop(tmp_path: Path, target: Path) -> None:
    """A stand-in that writes down how it was started and leaves on SIGTERM, as the real one does."""
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
    process = forks.Process(
        *("-m", "peagle", *arguments), env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PEAGLE_API_KEY": KEY}
    )
    wait_until((tmp_path / "told.json").exists)
    told, key = json.loads((tmp_path / "told.json").read_text())
    assert key == KEY and told[:2] == ["serve", str(target)] and "1234" in told
    config = json.loads(told[told.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(drafter_folder("eagle3-1")), "num_speculative_tokens": 3}
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert (tmp_path / "told.json.stopped").exists()


def test_vllm_that_never_served_gives_its_status(tmp_path: Path) -> None:
    nowhere = ("127.0.0.1", 1)
    path = script(tmp_path, "import sys; sys.exit(7)\n")
    assert supervise([str(path)], dict(os.environ), nowhere) == 7
    path = script(tmp_path, "import os; os.kill(os.getpid(), 9)\n")
    assert supervise([str(path)], dict(os.environ), nowhere) == 128 + 9


def test_vllm_that_dies_once_it_has_served_is_started_again(tmp_path: Path, target: Path) -> None:
    """A stand-in that says that it is healthy, writes down who it and its own child are, and dies; the second stays."""
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
    wait_until(lambda: process.complaints().count("vllm ready") == 2)
    said = process.complaints()
    assert [said.count(words) for words in ("vllm started", "vllm ready", "vllm died, restarting status=3")] == [
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


def test_no_vllm_is_a_clear_error(target: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "peagle", "serve", str(target), "--engine", "vllm"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "`vllm`" in done.stderr
