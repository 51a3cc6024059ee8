"""Prompts made of code and mixed for training (`benchmarks/code_prompts.py`, `benchmarks/training_prompts.py`)."""

from __future__ import annotations

import ast
import gzip
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CODE = '''
import os

def area(sides: List[int], scale: float = 1.0, *, check=True) -> Optional[float]:
    """The area of a rectangle, by its two sides.

    >>> area([2, 3])
    6.0
    """
    secret = sides[0] * sides[1]
    return secret * scale

def _private(x):
    """Long enough to be taken, but nobody's business outside."""

def short(x):
    """Too short."""

def contaminated(x):
    """Return the number of words in a text that begin with the letter x and end with it."""

class Box:
    def method(self):
        """Long enough to be taken, but a method of something."""
'''


def run(script: str, *words: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout


def rows(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        return [json.loads(line) for line in file]


def written(path: Path, *turns: list[str], source: str = "chat") -> Path:
    lines = [{"id": f"{source}/{i}", "source": source, "turns": own} for i, own in enumerate(turns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "wheel"])
def test_a_prompt_has_what_stands_before_a_body(tmp_path: Path, packed: bool) -> None:
    package = tmp_path / "package"
    for name in ("shapes.py", "tests/test_shapes.py", "twin.py", "broken.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("def (" if name == "broken.py" else CODE)
    if packed:
        with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
            for file in sorted(package.rglob("*.py")):
                wheel.write(file, file.relative_to(tmp_path))
        package = tmp_path / "package.whl"
    asked = written(
        tmp_path / "measured.jsonl",
        ["Please: return the number of words in a text that begin with the letter Q. Thanks!"],
    )
    out = tmp_path / "functions.jsonl"
    assert "1 prompts" in run("code_prompts.py", package, "--without", asked, "--out", out)
    (only,) = rows(out)
    (said,) = only["turns"]
    assert only["source"] == "functions" and "secret" not in said
    code = re.search(
        r'from typing import List, Optional\n\n\ndef area.*?"""\n    The area|from typing.*"""', said, re.S
    )
    assert code is not None
    made = ast.parse(code.group(0)).body[-1]
    assert isinstance(made, ast.FunctionDef) and made.name == "area" and len(made.body) == 1
    assert ast.get_docstring(made) == "The area of a rectangle, by its two sides.\n\n>>> area([2, 3])\n6.0"
    assert ast.unparse(made.args) == "sides: List[int], scale: float=1.0, *, check=True"
    first = out.read_bytes()
    run("code_prompts.py", package, "--without", asked, "--out", out)
    assert out.read_bytes() == first


def test_files_are_mixed_and_some_prompts_kept_aside(tmp_path: Path) -> None:
    chats = written(tmp_path / "chats.jsonl", *([f"question {i}"] for i in range(200)), ["one", "two"])
    sums = written(tmp_path / "sums.jsonl", *([f"{i} + {i}"] for i in range(40)), source="sums")
    left = written(tmp_path / "left.jsonl", ["no thanks"], source="t0/left")
    held = written(tmp_path / "held.jsonl", ["question 3"], ["question 5"])
    words = [chats, sums, left, "--without", held, "--leave-out", "t0", "--follow", 0.4, "--alone", "sums"]
    words += ["--hold", "sums=10", "--shards", 3, "--out", tmp_path / "out"]
    said = run("training_prompts.py", *words)
    shards = [rows(tmp_path / "out" / f"shard-{i}.jsonl.gz") for i in range(3)]
    aside = rows(tmp_path / "out" / "held.jsonl")
    trained = [row for shard in shards for row in shard]
    assert [len(shard) for shard in shards] == [77, 76, 76] and "229 prompts in 3 files" in said
    assert [row["turns"][0] for row in aside[:2]] == ["question 3", "question 5"] and len(aside) == 12
    assert {row["source"] for row in aside[2:]} == {"sums"}
    firsts = [row["turns"][0] for row in [*trained, *aside]]
    assert len(set(firsts)) == len(firsts) == 241 and "no thanks" not in firsts
    longer = [row for row in trained if len(row["turns"]) == 2 and row["turns"] != ["one", "two"]]
    assert 50 < len(longer) < 110 and all(row["source"] == "chat" for row in longer)
    assert ["one", "two"] in [row["turns"] for row in trained]
    before = [(tmp_path / "out" / f"shard-{i}.jsonl.gz").read_bytes() for i in range(3)]
    run("training_prompts.py", *words)
    assert [(tmp_path / "out" / f"shard-{i}.jsonl.gz").read_bytes() for i in range(3)] == before
