"""The one document all measurements are written as: a kind, a stamp, the settings, the rows.

Knows what a row may hold and how it is read and written; knows nothing about how anything is measured. What the fields
mean is told in docs/results.md, and a test keeps the two in step. Numbers that follow from others are properties: they
are written for readers without this package, and left aside when a document is read back.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from peagle.errors import UserError
from peagle.results.stamp import Stamp

SCHEMA = 1
Kind = Literal["eval", "bench", "tune", "plan"]
Loops = Literal["all", "excluded"]
Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class AcceptanceRow:
    """How much of a drafter's work was accepted, for one K on one set of prompts or a part of it."""

    drafter: str
    method: Literal["p-eagle", "eagle3"]
    engine: str
    dataset: str
    category: str | None
    context: tuple[int, int] | None
    temperature: float
    k: int
    loops: Loops
    answers: int
    tokens: int
    rounds: int
    accepted: list[int]
    ci95: Interval | None = None

    derived: ClassVar[tuple[str, ...]] = ("acceptance_length", "unconditional", "conditional")

    def __post_init__(self) -> None:
        _require(self.k >= 1, "k", "at least 1")
        _require(self.temperature >= 0, "temperature", "0 or more")
        for name in ("answers", "tokens", "rounds"):
            _require(getattr(self, name) >= 0, name, "0 or more")
        _require(len(self.accepted) == self.k, "accepted", f"one count for each of the {self.k} drafts")
        falling = all(a >= b for a, b in zip([self.rounds, *self.accepted], [*self.accepted, 0], strict=True))
        _require(falling, "accepted", "counts that never rise, none above the rounds")

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round gains, the target's own included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def unconditional(self) -> list[float | None]:
        """Share of all rounds in which draft i was accepted."""
        return [count / self.rounds if self.rounds else None for count in self.accepted]

    @property
    def conditional(self) -> list[float | None]:
        """Share of the rounds that accepted all before it in which draft i was accepted too."""
        before = [self.rounds, *self.accepted[:-1]]
        return [count / reached if reached else None for count, reached in zip(self.accepted, before, strict=True)]


@dataclass(frozen=True)
class Percentiles:
    mean: float
    p50: float
    p95: float
    p99: float

    @staticmethod
    def of(values: list[float]) -> Percentiles | None:
        """As numpy has them: between two values they are interpolated. None of no values."""
        if not values:
            return None
        ordered = sorted(values)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            low = math.floor(place)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

        return Percentiles(sum(ordered) / len(ordered), at(0.5), at(0.95), at(0.99))


@dataclass(frozen=True)
class BenchRepeat:
    """One run of the whole load."""

    seconds: float
    requests: int
    failed: dict[str, int]
    input_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    acceptance_length: float | None = None

    derived: ClassVar[tuple[str, ...]] = ("output_tokens_per_second",)

    def __post_init__(self) -> None:
        _require(self.seconds > 0, "seconds", "above 0")
        for name in ("requests", "input_tokens", "output_tokens"):
            _require(getattr(self, name) >= 0, name, "0 or more")

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class BenchRow:
    """Speed of one engine with one drafter and K under one load."""

    name: str
    engine: str
    drafter: str | None
    method: Literal["none", "eagle3", "p-eagle"]
    k: int | Literal["auto"] | None
    load: Literal["closed", "open"]
    concurrency: int | None
    rate: float | None
    repeats: list[BenchRepeat]
    prompts: str

    derived: ClassVar[tuple[str, ...]] = ("output_tokens_per_second", "ci95")

    def __post_init__(self) -> None:
        _require(bool(self.repeats), "repeats", "one at least")
        _require(self.load != "closed" or self.concurrency is not None, "concurrency", "given for a closed load")
        _require(self.load != "open" or self.rate is not None, "rate", "given for an open load")

    @property
    def output_tokens_per_second(self) -> float:
        """Mean over the repeats."""
        return sum(r.output_tokens_per_second for r in self.repeats) / len(self.repeats)

    @property
    def ci95(self) -> Interval | None:
        """Of `output_tokens_per_second`, by the t distribution; None of a single repeat."""
        return mean_ci95([r.output_tokens_per_second for r in self.repeats])


@dataclass(frozen=True)
class TuneRow:
    """What a round costs, and what it brings."""

    batch: int
    k: int
    round_ms: float
    expected_tokens_per_second: float
    chosen: bool


@dataclass(frozen=True)
class PlanRow:
    """What is to be expected of one K at one load."""

    concurrency: int
    k: int
    method: str
    round_ms: float
    tokens_per_second: float
    gpus: int
    cost_per_million: float | None
    chosen: bool


Row: TypeAlias = AcceptanceRow | BenchRow | TuneRow | PlanRow
ROWS: dict[str, type] = {"eval": AcceptanceRow, "bench": BenchRow, "tune": TuneRow, "plan": PlanRow}


@dataclass(frozen=True)
class Results:
    kind: Kind
    stamp: Stamp
    settings: dict[str, Any]
    rows: list[Any]  # all of the one class that `ROWS` has for the kind
    finished: bool = True  # False: the run was interrupted, or goes on
    warnings: list[str] = field(default_factory=list)  # what a reader of the numbers has to know

    def __post_init__(self) -> None:
        assert all(isinstance(row, ROWS[self.kind]) for row in self.rows), f"rows of another kind than {self.kind}"


def write_results(path: Path, results: Results) -> None:
    """Takes the place of what is there as a whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(to_json(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def read_results(path: Path) -> Results:
    def no_number(name: str) -> float:
        raise UserError(f"{path}: holds {name}, which is no number; null says that there is none")

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=no_number)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8, so no document of results") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is not JSON (line {error.lineno}: {error.msg})") from None
    return from_json(document, str(path))


def to_json(results: Results) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(results)
    return {"schema": SCHEMA, **plain}


def from_json(document: Any, name: str = "the document") -> Results:
    """`name` is what messages call it, a file's path for one."""
    if not isinstance(document, dict) or "schema" not in document:
        raise UserError(f"{name}: is no document of results: it has no field 'schema'")
    body = dict(document)
    schema = body.pop("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise UserError(f"{name}: schema: is {_shown(schema)}, must be a whole number from 1")
    if schema > SCHEMA:
        raise UserError(f"{name}: schema: is {schema}, and this peagle knows up to {SCHEMA}; a newer one reads it")
    kind = body.get("kind")
    if kind not in tuple(ROWS):  # whatever it is, also what cannot be a key
        raise UserError(f"{name}: kind: is {_shown(kind)}, must be {_choice(tuple(ROWS))}")
    given = body.get("rows")
    body["rows"] = []
    results: Results = _read(body, Results, name, "")
    rows = _read(given, types.GenericAlias(list, ROWS[kind]), name, "rows")
    return dataclasses.replace(results, rows=rows)


def mean_ci95(values: list[float]) -> Interval | None:
    """Of the mean, by the t distribution; None of fewer than two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    reach = t_975(len(values) - 1) * error
    return mean - reach, mean + reach


def t_975(freedom: int) -> float:
    """The 97.5% quantile of Student's t, exact for 1 and 2 degrees of freedom; from 3 on by bisection of its tail.

    With theta = atan(t / sqrt(n)) the mass between -t and t is a finite sum (Abramowitz and Stegun 26.7.3 and 4).
    """
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _t_mass(t: float, freedom: int) -> float:
    theta = math.atan(t / math.sqrt(freedom))
    cos2, odd = math.cos(theta) ** 2, freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for i in range(1 + odd, freedom, 2):  # cos^1, cos^3 .. or cos^0, cos^2 .. up to freedom - 2
        total += term
        term *= cos2 * i / (i + 1)
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total


def _plain(value: Any) -> Any:
    """Dataclasses as objects with their derived numbers, tuples as lists."""
    if is_dataclass(value):
        names = [f.name for f in fields(value)] + list(getattr(value, "derived", ()))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


WANTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


LARGEST = 1e18  # of any number; what is measured is far below


class _Unfit(ValueError):
    """A value is not of the kind asked for; `args` are where, the value, what it should be."""


def _read(value: Any, kind: Any, file: str, where: str) -> Any:
    try:
        return _as(value, kind, where)
    except _Unfit as unfit:
        place, found, wanted = unfit.args
        raise UserError(f"{file}: {place or 'the document'}: is {_shown(found)}, must be {wanted}") from None


def _as(value: Any, kind: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _as_one_of(value, inner, where)
    if origin is Literal:
        if isinstance(value, bool) or value not in inner:
            raise _Unfit(where, value, _choice(inner))
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _Unfit(where, value, "a list")
        return [_as(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(inner):
            raise _Unfit(where, value, f"a list of {len(inner)}")
        return tuple(_as(item, of, f"{where}[{i}]") for i, (item, of) in enumerate(zip(value, inner, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Unfit(where, value, "an object")
        return {key: _as(item, inner[1], f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _as_object(value, kind, where)
    if isinstance(value, int | float) and not abs(value) < LARGEST:  # 1e999 is read as infinity
        raise _Unfit(where, value, "a number that is not so large")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise _Unfit(where, value, WANTED[kind])
    return value


def _as_one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    """The first kind that fits. If none does, a lone one beside null explains itself; of several all are named."""
    complaints = []
    for kind in sorted(kinds, key=lambda kind: kind is float):  # a whole number stays one where both may be
        try:
            return _as(value, kind, where)
        except _Unfit as unfit:
            if kind is not types.NoneType:
                complaints.append(unfit)
    if len(complaints) == 1:
        place, found, wanted = complaints[0].args
        raise _Unfit(place, found, f"{wanted} or null" if place == where else wanted)
    raise _Unfit(where, value, " or ".join(WANTED.get(kind, str(get_args(kind) or kind)) for kind in kinds))


def _as_object(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _Unfit(where, value, "an object")
    dot = f"{where}." if where else ""
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    for name in value.keys() - known.keys() - set(getattr(kind, "derived", ())):
        raise _Unfit(f"{dot}{name}", value[name], f"left out: {kind.__name__} has no such field")
    given = {}
    for name, spec in known.items():
        if name in value:
            given[name] = _as(value[name], hints[name], f"{dot}{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise _Unfit(f"{dot}{name}", None, "there")
    try:
        return kind(**given)
    except _Wrong as wrong:
        name, want = wrong.args
        raise _Unfit(f"{dot}{name}", value.get(name), want) from None


class _Wrong(ValueError):
    """A field holds what it may not; `args` are its name and what it should be."""

    def __str__(self) -> str:
        return f"{self.args[0]}: must be {self.args[1]}"


def _require(ok: bool, name: str, want: str) -> None:
    if not ok:
        raise _Wrong(name, want)


def _choice(values: tuple[Any, ...]) -> str:
    return " or ".join(map(str, values))


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
