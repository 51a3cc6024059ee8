"""Makes support modules importable, hypothesis repeatable, and several pytest processes fit on one machine."""

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Without bytecode, importing torch and transformers takes twice as long in every child process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# One thread per process: tests run side by side. Read when torch is imported, here and in children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same hypothesis examples on every run.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")

# Support modules, and test modules whose helpers other tests use, are imported by their plain names.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(folder) for folder in sorted(TESTS.iterdir()) if folder.is_dir())]

MAX_WORKERS = 4  # 1.5 GB each


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: tiny models are slower on two."""
    from support import threads

    with threads(1):
        yield


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich writes to the captured stderr as to a terminal."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default target. One process builds it while the others wait."""
    from peagle.hub import resolve as hub

    with (Path(tempfile.gettempdir()) / f"peagle-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return hub.resolve_target(hub.DEFAULT_TARGET)
