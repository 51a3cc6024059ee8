"""What rows are called and how they are coloured, so that one thing looks the same wherever it appears.

Knows results, but not what is said about them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from peagle.report.axes import shown
from peagle.report.charts import STYLES
from peagle.results.schema import Results
from peagle.results.statistics import Interval

METHODS = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
METHOD_STYLES = {"none": 0, "p-eagle": 1, "eagle3": 2}
ORDER = ("none", "eagle3", "p-eagle")

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Source:
    """A document of results, under a name that no other one on the page has."""

    name: str
    results: Results

    @property
    def machine(self) -> str:
        """What rows must share before their speeds are compared."""
        machine = self.results.provenance.machine
        if "gpu" in machine:
            count = machine.get("gpus", 1)
            return f"{machine['gpu']}" if count == 1 else f"{count} x {machine['gpu']}"
        return f"{machine.get('cpu', 'an unknown machine')}, {machine.get('cores', '?')} cores"

    @property
    def target(self) -> str:
        """Empty where the results do not tell: a server's may be anything."""
        return str(self.results.settings.get("target") or "")


def method_name(method: str) -> str:
    return METHODS.get(method, method)


NAMES = {"embedded": "peagle", "vllm": "vLLM"}  # engines in the process that measured


def server_name(engine: str) -> str:
    """A server's address without what every address has; other engines have a name."""
    return NAMES.get(engine) or engine.removeprefix("http://").removeprefix("https://").removesuffix("/").removesuffix(
        "/v1"
    )


def server_host(engine: str) -> str:
    """Without the port, too."""
    return server_name(engine).rpartition(":")[0] or server_name(engine)


def choice_name(method: str, k: int | str | None) -> str:
    """What a person would set: 'P-EAGLE with K=7'."""
    if method == "none" or k is None or k == 0:
        return "no speculation" if method == "none" or k == 0 else method_name(method)
    return f"{method_name(method)} with K={k}"


def labels(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """The shortest names that still tell the keys apart: the first field, and of the others those that help.

    >>> labels([("P-EAGLE", "a", "t=0"), ("P-EAGLE", "a", "t=1"), ("EAGLE-3", "b", "t=0")])
    ['P-EAGLE t=0', 'P-EAGLE t=1', 'EAGLE-3 t=0']
    """
    taken = [0]
    for field in range(1, len(keys[0]) if keys else 0):
        so_far = {tuple(key[i] for i in taken) for key in keys}
        if len(so_far) == len(set(keys)):
            break
        if len({tuple(key[i] for i in (*taken, field)) for key in keys}) > len(so_far):
            taken.append(field)
    return [" ".join(key[i] for i in taken if key[i]) for key in keys]


def styles(methods: Sequence[str]) -> list[int]:
    """A style for each line: its method's own, and for a second line of a method one that is free."""
    free = [s for s in (3, 4, 5, 1, 2) if s not in {METHOD_STYLES.get(m) for m in methods}]
    given: list[int] = []
    for method in methods:
        own = METHOD_STYLES.get(method)
        if own is not None and own not in given:
            given.append(own)
        else:
            given.append(free.pop(0) if free else len(given) % STYLES)
    return given


def chunks(items: Sequence[Item], most: int = STYLES) -> list[Sequence[Item]]:
    """As many as one panel can tell apart."""
    return [items[i : i + most] for i in range(0, len(items), most)]


def by_key(items: Iterable[Item], keys: Iterable[Key]) -> dict[Key, list[Item]]:
    """In the order in which keys first appear."""
    grouped: dict[Key, list[Item]] = {}
    for item, key in zip(items, keys, strict=True):
        grouped.setdefault(key, []).append(item)
    return grouped


def segments(pairs: Sequence[tuple[float, str]]) -> list[tuple[list[float], str]]:
    """Loads that are next to each other with the same choice, together."""
    return [([load for load, _ in run], choice) for choice, run in groupby(pairs, key=lambda pair: pair[1])]


def interval(ci95: Interval | None) -> str:
    return f"{shown(ci95[0])} to {shown(ci95[1])}" if ci95 is not None else "–"


def number(value: float | None) -> str:
    return "–" if value is None else shown(value)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
