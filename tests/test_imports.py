"""Import rules of the package: layers import downwards, and no two modules import each other.

Both are read from the source of every file, including imports inside functions and under TYPE_CHECKING.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PEAGLE = Path(__file__).resolve().parent.parent / "peagle"

# From the bottom up: a package may import itself and any package in a lower row.
LAYERS = (
    {"errors", "versions", "paths", "display"},
    {"http_client"},
    {"config"},
    {"hub"},
    {"kernels"},
    {"models"},
    {"checkpoints"},
    {"speculative"},
    {"engine"},
    {"data"},
    {"training"},
    {"results"},
    {"eval"},
    {"bench"},
    {"planning"},
    {"report"},
)
# Packages outside the stack: each may import the named layer and everything below it; no layer imports them.
OUTSIDE = {"deploy": "checkpoints", "server": "engine"}

RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
PACKAGES = RANK.keys() | OUTSIDE.keys()
ALLOWED = {
    **{package: {p for p in RANK if RANK[p] < rank} for package, rank in RANK.items()},
    **{package: {p for p in RANK if RANK[p] <= RANK[top]} for package, top in OUTSIDE.items()},
    "__init__": PACKAGES,
    "cli": PACKAGES | {"__init__"},
    "__main__": PACKAGES | {"__init__", "cli"},
}


def package_of(module: str) -> str:
    """The top-level package of a dotted name: 'peagle.models.layers' -> 'models'."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every peagle module that the source of `module` imports, anywhere in it.

    `from peagle.a import b` yields 'peagle.a.b': b may be a module or a name in it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            names = [f"{base}.{alias.name}" for alias in node.names]
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
    if own not in ALLOWED:
        return [f"{module}: not in the table of layers in {Path(__file__).name}"]
    found = []
    for line, name in imported(ast.parse(source), module, is_package):
        target = package_of(name)
        if target not in ALLOWED:  # `from peagle import Name`: something the root re-exports
            target = "__init__"
        if target != own and target not in ALLOWED[own]:
            found.append(f"{module}:{line}: imports {name}, but {own} may not import {target}")
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


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected components with more than one module."""

    def reachable(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for after in graph.get(todo.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    closure = {module: reachable(module) for module in graph}
    return {
        frozenset({other for other in closure[module] if module in closure.get(other, ())})
        for module in graph
        if module in closure[module]
    }


def test_imports_point_downwards():
    known = modules()
    assert known, "no source found"
    found = [v for path, name, is_package in known for v in violations(path.read_text(), name, is_package)]
    assert not found, "\n".join(found)


def test_no_two_modules_import_each_other():
    known = {name for _, name, _ in modules()}
    graph: dict[str, set[str]] = {}
    for path, module, is_package in modules():
        if module == "peagle.__init__":  # re-exports lazily by name
            continue
        names = {name for _, name in imported(ast.parse(path.read_text()), module, is_package)}
        graph[module] = {n if n in known else n.rpartition(".")[0] for n in names} - {module}
    assert cycles(graph) == set()


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset({"b", "c"})}


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
        ("peagle.server.app", "from peagle.data import stream"),
        ("peagle.server.app", "import peagle.bench"),
        ("peagle.kernels.gemm.skinny_cpu", "from peagle.engine import llm"),
        ("peagle.deploy.checks", "from peagle.speculative.reference import generate"),
        ("peagle.engine.loop", "from peagle.server import app"),
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
        ("peagle.server.app", "from peagle import __version__, engine"),
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
