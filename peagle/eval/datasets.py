"""Prompts to measure on: a JSONL file, or a well-known set by its name.

Knows where sets lie and how the hub's columns are called; nothing about tokens. A name is looked up in the data folder
first (NAME.jsonl or NAME.jsonl.gz, there or in its folder `eval`), then on the hub where `datasets` is installed. A
file with rows that make no sense is refused with their line numbers: a part of a set is not the set.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.data.prompts import SUFFIXES, PromptSet, read_prompts
from peagle.errors import UserError

SHOWN_ROWS = 5
FOLDER_VARIABLE = "PEAGLE_DATA"


@dataclass(frozen=True)
class OnHub:
    """Where the hub has a set, and in which columns."""

    repository: str
    subset: str | None
    split: str
    asked: str  # the column with the question, or with the list of turns
    category: str | None = None
    told: str = "{}"  # what is asked around it


CODE_TASK = "Complete the following Python function. Return the whole function in a code block.\n\n```python\n{}\n```"
NAMED: dict[str, OnHub | str] = {
    "mt_bench": OnHub("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt", "category"),
    "humaneval": OnHub("openai/openai_humaneval", None, "test", "prompt", told=CODE_TASK),
    "gsm8k": OnHub("openai/gsm8k", "main", "test", "question"),
    # on no hub whole; where their files are
    "spec_bench": "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
    "speed_bench": "qualitative.jsonl, as the prepare.py of nvidia/SPEED-Bench writes it",
}


@dataclass(frozen=True)
class DataSet:
    name: str  # what rows of results call it
    source: str  # the file, or the hub's name
    prompts: PromptSet

    @property
    def fingerprint(self) -> str:
        return self.prompts.fingerprint


def data_folder(given: Path | None) -> Path:
    return given if given is not None else Path(os.environ.get(FOLDER_VARIABLE) or "data")


def open_datasets(
    names: Sequence[str], folder: Path | None = None, limit: int | None = None, skip_bad_rows: bool = False
) -> list[DataSet]:
    """In the order given. Sets that would have the same name in the results are told apart by their paths."""
    found = [_open(name, data_folder(folder), skip_bad_rows) for name in names]
    short = [data.name for data in found]
    for i, data in enumerate(found):
        if short.count(data.name) > 1:
            found[i] = replace(data, name=data.source)
    if len({data.name for data in found}) < len(found):
        raise UserError(f"--data {' '.join(names)}: the same set twice")
    return [replace(d, prompts=replace(d.prompts, rows=d.prompts.rows[:limit])) for d in found]


def _open(name: str, folder: Path, skip_bad_rows: bool) -> DataSet:
    path = Path(name).expanduser()
    if name in NAMED and not path.is_file():
        local = next((f for f in _places(folder, name) if f.is_file()), None)
        if local is None:
            return _from_hub(name, folder, skip_bad_rows)
        return DataSet(name, str(local), _checked(local, name, skip_bad_rows))
    if not path.is_file():
        known = ", ".join(NAMED)
        raise UserError(f"--data {name}: no such file; give a .jsonl or .jsonl.gz file, or one of {known}")
    return DataSet(_stem(path), str(path), _checked(path, name, skip_bad_rows))


def _places(folder: Path, name: str) -> Iterator[Path]:
    for base in (folder, folder / "eval"):
        for suffix in SUFFIXES:
            yield base / f"{name}{suffix}"
    for own in ("question.jsonl", "qualitative.jsonl"):  # MT-Bench's and Spec-Bench's, SPEED-Bench's
        yield folder / name / own


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _checked(path: Path, name: str, skip_bad_rows: bool) -> PromptSet:
    prompts = read_prompts(str(path))
    bad = prompts.rejected
    if bad and not skip_bad_rows:
        shown = "; ".join(f"line {str(row).removeprefix(f'{path}:')}" for row in bad[:SHOWN_ROWS])
        more = f"; and {len(bad) - SHOWN_ROWS} more" if len(bad) > SHOWN_ROWS else ""
        raise UserError(
            f"--data {name}: {len(bad)} of its rows make no sense: {shown}{more}. "
            "Mend them, or leave them out with --skip-bad-rows"
        )
    return prompts


def _from_hub(name: str, folder: Path, skip_bad_rows: bool) -> DataSet:
    hub = NAMED[name]
    where = f"--data {name}: no {name}.jsonl in {folder} (--data-dir, ${FOLDER_VARIABLE})"
    how = 'put one there, rows {"turns": [...]} or {"prompt": "..."}, or give its path'
    if isinstance(hub, str):
        raise UserError(f"{where}, and no hub has it whole; {how} ({hub})")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{where}, and the hub's needs `pip install datasets`; {how}") from None
    try:
        loaded = load_dataset(hub.repository, hub.subset, split=hub.split)
        rows = [_row(dict(loaded[i]), hub) for i in range(len(loaded))]
    except Exception as error:  # whatever the hub, the network or a reader of formats says
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}, and {hub.repository} did not load ({reason}); {how}") from None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        prompts = _checked(path, name, skip_bad_rows)
    return DataSet(name, hub.repository, prompts)


def _row(row: dict[str, Any], hub: OnHub) -> dict[str, Any]:
    asked = row.get(hub.asked)
    turns = asked if isinstance(asked, list) else [asked]
    told = [hub.told.format(turn) if isinstance(turn, str) else turn for turn in turns]
    kind = {"category": row[hub.category]} if hub.category is not None and row.get(hub.category) else {}
    return {"turns": told, **kind}
