"""Prompts for completing code, from code: signatures and docstrings of the functions of Python packages.

    python benchmarks/code_prompts.py SITE_PACKAGES/networkx toolz-1.0-py3-none-any.whl ... --out functions.jsonl \
        --without humaneval.jsonl

Takes folders, .py files and wheels. A prompt asks for a function's body, in one of several wordings; bodies are not
read, since a drafter learns from what its target answers. Left out are tests, methods, private functions, those with
little or much to say, and whatever has a run of 10 words in common with a prompt of the --without files, so that what
will be measured with is not trained with. The same code gives the same prompts, in the same order.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RUN = 10  # words in common that are too many
SHORT, LONG = 30, 700  # characters of a docstring
MOST_CODE = 1000  # of signature and docstring
TYPING = re.compile(r"\b(Any|Callable|Dict|Iterable|Iterator|List|Optional|Sequence|Set|Tuple|Union)\b")
WORDINGS = (
    "Write the body of this Python function.\n\n```python\n{code}\n```",
    "Finish this function and show all of it:\n\n```python\n{code}\n```",
    "Here is a Python function without its body. Please implement it.\n\n```python\n{code}\n```",
    "{code}\n\nImplement the function above in Python.",
    "Fill in the missing code.\n\n```python\n{code}\n    # your code here\n```",
    "Complete the function `{name}` below. Answer with Python code.\n\n```python\n{code}\n```",
)


def sources(path: Path) -> Iterator[str]:
    """Python files in a folder or a wheel, in the order of their names."""
    if path.is_dir():
        for file in sorted(path.rglob("*.py")):
            if wanted(str(file.relative_to(path))):
                yield file.read_text(errors="replace")
    elif path.suffix == ".py":
        yield path.read_text(errors="replace")
    else:
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".py") and wanted(name):
                    yield wheel.read(name).decode(errors="replace")


def wanted(name: str) -> bool:
    return not re.search(r"(^|[/_])(tests?|testing|conftest|setup|_vendor)([/_.]|$)", name)


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Names and code, up to the docstring."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        said = (ast.get_docstring(node) or "").strip()
        if not SHORT <= len(said) <= LONG or '"""' in said or "\\" in said:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        signature = f"def {node.name}({ast.unparse(node.args)}){returns}:"
        types = sorted(set(TYPING.findall(signature)))
        imports = f"from typing import {', '.join(types)}\n\n\n" if types else ""
        close = "" if "\n" not in said else "\n"
        code = imports + signature + "\n" + textwrap.indent(f'"""{said}{close}"""', "    ")
        if len(code) <= MOST_CODE:
            yield node.name, code


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def prompts(paths: list[Path], without: list[Path]) -> Iterator[dict[str, object]]:
    from peagle.data.prompts import read_prompts

    kept_out = {
        run for path in without for row in read_prompts(str(path)).rows for turn in row.turns for run in runs(turn)
    }
    seen: set[str] = set()
    for path in paths:
        for source in sources(path):
            for name, code in functions(source):
                digest = hashlib.sha256(code.encode()).hexdigest()
                if digest in seen or runs(code) & kept_out:
                    continue
                seen.add(digest)
                wording = random.Random(digest).choice(WORDINGS)
                yield {
                    "id": f"functions/{len(seen) - 1}",
                    "source": "functions",
                    "turns": [wording.format(code=code, name=name)],
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", type=Path, nargs="+", help="folders, .py files or wheels")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="prompts to have nothing in common with")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for path in [*args.code, *args.without]:
        if not path.exists():
            parser.error(f"{path}: there is no such file or folder")
    rows = list(prompts(args.code, args.without))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows):,} prompts in {args.out}")


if __name__ == "__main__":
    main()
