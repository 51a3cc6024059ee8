"""Makes tests/pairs.py and tests/support.py importable from every test, hypothesis repeatable, and room for others:
several pytest processes run the tests together (`make test`), and many tests start processes of their own."""

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Torch and transformers take twice as long to import where each process compiles them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read when torch is imported, here and in children. Tests that run side by side would fight over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell makes what it starts in the background, and all of its children, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run: a red run means a change, not a draw.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")

sys.path.insert(0, str(Path(__file__).parent))

MOST_WORKERS = 4  # each takes 1.5 GB, and imports torch first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices of tiny models only lose by a second thread."""
    from support import threads

    with threads(1):
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default target. Where it must be built first, one process does and the others wait."""
    from peagle.hub import resolve as hub

    with (Path(tempfile.gettempdir()) / f"peagle-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return hub.resolve_target(hub.DEFAULT_TARGET)
