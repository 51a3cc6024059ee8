"""Who may import whom inside peagle, and what the command line may load before it is asked for work.

The direction is read from the source of every file, imports inside functions included.
"""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PEAGLE = Path(__file__).resolve().parent.parent / "peagle"

# From the bottom up. A module sees its own package and every layer below its own.
LAYERS = (
    {"errors", "versions"},
    {"config"},
    {"gguf_import"},
    {"gguf_gemma3"},
    {"hub"},
    {"kernels"},
    {"models"},
    {"checkpoints"},
    {"reference"},
    {"engine"},
    {"data"},
    {"training"},
    {"measuring"},
)
# These stand beside the layers: each sees them up to the one named, and no layer sees these.
BESIDE = {"display": "errors", "deploying": "checkpoints", "serving": "engine", "bench": "engine"}

RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
WORKING = RANK.keys() | BESIDE.keys()
SEES = {
    **{package: {p for p in RANK if RANK[p] < rank} for package, rank in RANK.items()},
    **{package: {p for p in RANK if RANK[p] <= RANK[top]} for package, top in BESIDE.items()},
    "__init__": WORKING,
    "cli": WORKING | {"__init__"},
    "__main__": WORKING | {"__init__", "cli"},
}


def package_of(module: str) -> str:
    """The entry of the table that a dotted name falls under: 'peagle.models.layers' -> 'models'."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every peagle module that the source of `module` imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "peagle" else [base]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        else:
            continue
        for name in names:
            if name == "peagle.__version__":
                continue  # a constant of the root, which is loaded before anything in it
            if name == "peagle" or name.startswith("peagle."):
                yield node.lineno, name


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    own = package_of(module)
    if own not in SEES:
        return [f"{module}: not in the table of layers in {Path(__file__).name}"]
    found = []
    for line, name in imported(ast.parse(source), module, is_package):
        target = package_of(name)
        if target not in SEES:  # `from peagle import Name`: something the root re-exports
            target = "__init__"
        if target != own and target not in SEES[own]:
            found.append(f"{module}:{line}: imports {name}, and {own} may not see {target}")
    return found


def modules() -> list[tuple[Path, str, bool]]:
    found = []
    for path in sorted(PEAGLE.rglob("*.py")):
        parts = ["peagle", *path.relative_to(PEAGLE).with_suffix("").parts]
        is_package = parts[-1] == "__init__" and len(parts) > 2  # the root keeps its own entry
        if is_package:
            parts.pop()
        found.append((path, ".".join(parts), is_package))
    return found


def test_imports_point_downwards():
    known = modules()
    assert known, "no source found"
    found = [v for path, name, is_package in known for v in violations(path.read_text(), name, is_package)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("peagle.errors", "import peagle.config"),
        ("peagle.models.layers", "from peagle.engine import Engine"),
        ("peagle.models.layers", "from ..engine import Engine"),
        ("peagle.models.layers", "from .. import engine"),
        ("peagle.models.layers", "def f():\n    from peagle.training.loop import train"),
        ("peagle.models.layers", "if TYPE_CHECKING:\n    from peagle import data"),
        ("peagle.models.layers", "importlib.import_module('peagle.engine')"),
        ("peagle.models.layers", "from peagle import Engine"),
        ("peagle.serving.app", "from peagle.data import stream"),
        ("peagle.serving.app", "import peagle.bench"),
        ("peagle.bench", "from peagle.training import loop"),
        ("peagle.deploying.checks", "from peagle.reference import greedy"),
        ("peagle.engine.loop", "from peagle.serving import app"),
        ("peagle.training", "from peagle.cli import main"),
        ("peagle.__init__", "from peagle.cli import main"),
        ("peagle.novelty", ""),
    ],
)
def test_a_wrong_import_is_caught(module, source):
    found = violations(source, module)
    assert len(found) == 1
    assert module in found[0]


def test_a_wrong_relative_import_of_a_package_is_caught():
    # In a package's __init__ one dot is the package itself, so two reach the root.
    assert violations("from ..engine import Engine", "peagle.models", is_package=True)
    assert not violations("from .engine import Engine", "peagle.models", is_package=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("peagle.config", "from .errors import UserError"),
        ("peagle.models.layers", "from . import drafter\nfrom .drafter import Drafter\nimport torch.nn"),
        ("peagle.training.loop", "from peagle.data import stream\nfrom ..engine import Engine"),
        ("peagle.serving.app", "from peagle import __version__, engine"),
        ("peagle.__main__", "from peagle.cli import main"),
        ("peagle.__init__", "from peagle.engine import Engine"),
        ("peagle.cli", "def f():\n    from peagle import Engine, training"),
        ("peagle.errors", "import peaglet"),
    ],
)
def test_a_right_import_passes(module, source):
    assert violations(source, module) == []


def test_the_command_line_loads_neither_torch_nor_transformers():
    code = "import sys, peagle.cli; print(*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_help_is_fast():
    taken = []
    for _ in range(3):  # the best of three: the machine may be busy with something else
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "peagle", "--help"], capture_output=True, text=True)
        taken.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
        assert "demo" in done.stdout
        if taken[-1] < 2:
            return
    pytest.fail(f"peagle --help took {min(taken):.1f} s at best")
