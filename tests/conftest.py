"""Makes tests/pairs.py and tests/support.py importable from every test, and hypothesis repeatable."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run: a red run means a change, not a draw.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices of tiny models only lose by a second thread."""
    from support import threads

    with threads(1):
        yield
