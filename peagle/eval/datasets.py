"""Prompts to measure on: JSONL files, or well-known data sets by name.

A name is looked up in the data folder (NAME.jsonl or NAME.jsonl.gz, there or in its folder `eval`), then on the Hugging
Face hub if `datasets` is installed. A file with invalid rows is rejected with their line numbers, unless bad rows are
skipped: a part of a data set is not the data set.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.data.prompts import SUFFIXES, PromptSet, collect_prompts, read_prompts
from peagle.errors import UserError

MAX_SHOWN_ROWS = 5
FOLDER_ENV = "PEAGLE_DATA"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub and its columns."""

    repository: str
    subset: str | None
    split: str
    prompt_column: str  # a prompt, or a list of turns
    category_column: str | None = None
    template: str = "{}"


CODE_TASK = "Complete the following Python function. Return the whole function in a code block.\n\n```python\n{}\n```"
NAMED: dict[str, HubDataset | str] = {
    "mt_bench": HubDataset("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt", "category"),
    "humaneval": HubDataset("openai/openai_humaneval", None, "test", "prompt", template=CODE_TASK),
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", "question"),
    # not complete on the hub: where to get the file
    "spec_bench": "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
    "speed_bench": "qualitative.jsonl, as the prepare.py of nvidia/SPEED-Bench writes it",
}


@dataclass(frozen=True)
class EvalDataset:
    name: str  # in the results
    source: str  # file, or id on the hub
    prompts: PromptSet


def open_datasets(
    names: Sequence[str], folder: Path | None = None, limit: int | None = None, skip_bad_rows: bool = False
) -> list[EvalDataset]:
    """Opens data sets in the given order. Sets with the same name are named by their paths."""
    folder = folder if folder is not None else Path(os.environ.get(FOLDER_ENV) or "data")
    datasets = []
    for name in names:
        datasets.append(_open_dataset(name, folder))
        if (bad := datasets[-1].prompts.rejected) and not skip_bad_rows:
            shown = "; ".join(f"line {row.where.rpartition(':')[2]}: {row.reason}" for row in bad[:MAX_SHOWN_ROWS])
            more = f"; and {len(bad) - MAX_SHOWN_ROWS} more" if len(bad) > MAX_SHOWN_ROWS else ""
            fix = "Fix or remove them (`peagle eval` skips them with --skip-bad-rows)"
            raise UserError(f"--data {name}: {len(bad)} of its rows are invalid: {shown}{more}. {fix}")
    short = [dataset.name for dataset in datasets]
    datasets = [replace(d, name=d.source) if short.count(d.name) > 1 else d for d in datasets]
    if len({dataset.name for dataset in datasets}) < len(datasets):
        raise UserError(f"--data {' '.join(names)}: contains the same data set twice")
    return [replace(d, prompts=replace(d.prompts, rows=d.prompts.rows[:limit])) for d in datasets]


def _open_dataset(name: str, folder: Path) -> EvalDataset:
    path = Path(name).expanduser()
    if path.is_file():
        return EvalDataset(path.name.removesuffix(".gz").removesuffix(".jsonl"), str(path), read_prompts(str(path)))
    if name not in NAMED:
        known = ", ".join(NAMED)
        raise UserError(f"--data {name}: no such file; give a .jsonl or .jsonl.gz file, or one of {known}")
    candidates = [base / f"{name}{suffix}" for base in (folder, folder / "eval") for suffix in SUFFIXES]
    # MT-Bench and Spec-Bench, SPEED-Bench
    candidates += [folder / name / file for file in ("question.jsonl", "qualitative.jsonl")]
    for path in candidates:
        if path.is_file():
            return EvalDataset(name, str(path), read_prompts(str(path)))
    return _load_from_hub(name, folder)


def _load_from_hub(name: str, folder: Path) -> EvalDataset:
    hub = NAMED[name]
    missing = f"--data {name}: no {name}.jsonl in {folder} (--data-dir, ${FOLDER_ENV})"
    fix = 'put one there, rows {"turns": [...]} or {"prompt": "..."}, or give its path'
    if isinstance(hub, str):
        raise UserError(f"{missing}, and the hub does not have all of it; {fix} ({hub})")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{missing}, and loading it from the hub needs `pip install datasets`; {fix}") from None
    try:
        loaded = load_dataset(hub.repository, hub.subset, split=hub.split)
        rows = [_convert_row(dict(loaded[i]), hub) for i in range(len(loaded))]
    except Exception as error:  # the hub, the network and format readers raise many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{missing}, and {hub.repository} did not load ({reason}); {fix}") from None
    found = ((f"{name}:{i}", name, row) for i, row in enumerate(rows, start=1))
    return EvalDataset(name, hub.repository, collect_prompts(name, found))


def _convert_row(row: dict[str, Any], hub: HubDataset) -> dict[str, Any]:
    prompt = row.get(hub.prompt_column)
    turns = prompt if isinstance(prompt, list) else [prompt]
    converted = {"turns": [hub.template.format(t) if isinstance(t, str) else t for t in turns]}
    category = row.get(hub.category_column) if hub.category_column is not None else None
    return {**converted, "category": category} if category else converted
