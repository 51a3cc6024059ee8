"""The engine process and the front end die one without the other: nothing hangs, and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pairs import drafter_folder
from serving_support import PROMPT, ServerProcess, wait_until, write_target

# One completion runs at a time, so this request lasts until the engine is killed.
LONG = {"prompt": PROMPT, "max_tokens": 200, "n": 64, "temperature": 0, "ignore_eos": True, "logprobs": 20}
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    arguments = (str(write_target(tmp_path)), "-d", str(drafter_folder("p-eagle-1")), "-k", "4")
    process = ServerProcess(*arguments, "--max-num-seqs", "1")
    process.wait_ready()
    yield process
    if is_alive(process.process.pid):
        os.kill(process.process.pid, signal.SIGTERM)
        process.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def find_engine(server: ServerProcess) -> int:
    """The process id of the server's engine process."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    found = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1, children
    return found[0]


def health(server: ServerProcess) -> dict[str, object]:
    return json.loads(server.request("/health")[1])


def test_a_killed_engine_fails_the_running_request_and_serves_the_waiting_ones(server: ServerProcess) -> None:
    """Streamed and whole. SIGTERM then ends both processes."""
    expected = json.loads(server.request("/v1/completions", SHORT)[1])["choices"][0]["text"]
    for restarts, stream in enumerate((True, False), 1):
        engine = find_engine(server)
        with ThreadPoolExecutor(4) as pool:
            running = pool.submit(server.request, "/v1/completions", {**LONG, "stream": stream})
            wait_until(lambda: health(server)["running"] == 1)
            os.kill(engine, signal.SIGSTOP)  # it cannot finish any request before it is killed
            waiting = [pool.submit(server.request, "/v1/completions", SHORT) for _ in range(3)]
            wait_until(lambda: health(server)["waiting"] > 64)
            os.kill(engine, signal.SIGKILL)
            status, body = running.result()
            if stream:
                assert status == 200 and b'"code":"engine_error"' in body and body.endswith(b"data: [DONE]\n\n")
            else:
                assert (status, json.loads(body)["error"]["code"]) == (500, "engine_error")
            for future in waiting:
                status, body = future.result()
                assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected)
        after = health(server)
        assert (after["status"], after["restarts"]) == ("ready", restarts) and "SIGKILL" in str(after["last_error"])
        assert find_engine(server) != engine and not is_alive(engine)
    engine = find_engine(server)
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait() == 0
    assert not is_alive(engine)


def test_a_killed_front_end_takes_the_engine_with_it(server: ServerProcess) -> None:
    engine = find_engine(server)
    connection = server.open_stream({**LONG, "stream": True})
    assert b"200 OK" in connection.recv(4096)
    os.kill(server.process.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(engine))
    connection.close()


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(tmp_path: Path) -> None:
    arguments = (str(write_target(tmp_path)), "--kv-cache-memory-bytes", "1")
    process = ServerProcess(*arguments).process
    assert process.wait() == 2
    (line,) = [line for line in process.stderr().splitlines() if "error: " in line]
    assert "kv-cache-memory-bytes" in line
