"""Result files of a report, and the names and line styles that identify their rows."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from peagle.report.charts import MARKS
from peagle.results.schema import METHOD_NAMES, Results

METHOD_STYLES = {"none": 0, "p-eagle": 1, "eagle3": 2}
ENGINE_NAMES = {"embedded": "peagle", "vllm": "vLLM"}

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class ResultSource:
    """A result file with a name that is unique on the page."""

    name: str
    results: Results

    @property
    def machine(self) -> str:
        """Speeds are compared only on the same machine."""
        machine = self.results.provenance.machine
        if "gpu" in machine:
            num_gpus = machine.get("gpus", 1)
            return f"{machine['gpu']}" if num_gpus == 1 else f"{num_gpus} x {machine['gpu']}"
        return f"{machine.get('cpu', 'unknown machine')}, {machine.get('cores', '?')} cores"

    @property
    def target(self) -> str:
        """Empty for a server, whose results do not name its target."""
        return str(self.results.settings.get("target") or "")


def method_name(method: str) -> str:
    return METHOD_NAMES.get(method, method)


def engine_name(engine: str) -> str:
    """A server's address without scheme and path; other engines have a name."""
    address = engine.removeprefix("http://").removeprefix("https://").removesuffix("/").removesuffix("/v1")
    return ENGINE_NAMES.get(engine) or address


def shortest_labels(keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The shortest labels that distinguish the keys: the first field, and those others that are needed.

    >>> list(shortest_labels([("P-EAGLE", "a", "t=0"), ("P-EAGLE", "a", "t=1"), ("EAGLE-3", "b", "t=0")]).values())
    ['P-EAGLE t=0', 'P-EAGLE t=1', 'EAGLE-3 t=0']
    """
    unique = list(dict.fromkeys(keys))
    fields = [0]
    for field in range(1, len(unique[0]) if unique else 0):
        distinct = {tuple(key[i] for i in fields) for key in unique}
        if len({tuple(key[i] for i in (*fields, field)) for key in unique}) > len(distinct):
            fields.append(field)
    return {key: " ".join(key[i] for i in fields if key[i]) for key in unique}


def assign_styles(methods: Sequence[str]) -> list[int]:
    """A line style per line: the method's own style, or an unused one if the method has several lines."""
    unused = [s for s in (3, 4, 5, 1, 2) if s not in {METHOD_STYLES.get(m) for m in methods}]
    styles: list[int] = []
    for method in methods:
        own = METHOD_STYLES.get(method)
        if own is not None and own not in styles:
            styles.append(own)
        else:
            styles.append(unused.pop(0) if unused else len(styles) % len(MARKS))
    return styles


def split_panels(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Groups of at most as many lines as one panel can distinguish."""
    return [items[i : i + len(MARKS)] for i in range(0, len(items), len(MARKS))]


def group_by(items: Iterable[Item], keys: Iterable[Key]) -> dict[Key, list[Item]]:
    """Groups items in the order in which their keys first appear."""
    groups: dict[Key, list[Item]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def merge_warnings(warnings: Sequence[str]) -> list[str]:
    """Merges warnings that differ only in the run and in numbers: the first one with the number of others."""
    unique = list(dict.fromkeys(warnings))
    texts = [re.sub(r"\d[\d.,]*", "#", warning.partition(": ")[2] or warning) for warning in unique]
    groups = group_by(unique, texts).values()
    return [f"{first} (and {len(more)} more)" if more else first for first, *more in groups]
