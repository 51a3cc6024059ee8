"""Makes tests/pairs.py importable from every test, wherever it lies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
