"""Makes tests/pairs.py and tests/support.py importable from every test, wherever it lies."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices of tiny models only lose by a second thread."""
    from support import threads

    with threads(1):
        yield
