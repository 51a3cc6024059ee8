"""Reads and writes result files: dataclasses to JSON and back, with type checks that name the wrong field."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from peagle.errors import UserError
from peagle.results.schema import ROW_CLASSES, SCHEMA_VERSION, Results

MAX_NUMBER = 1e18  # larger numbers, and 1e999 which JSON reads as infinity, are rejected


@contextmanager
def replace_file(path: Path, flag: str = "") -> Iterator[Path]:
    """Yields a temporary path that replaces `path` at the end. `flag` is the option that named the path."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})".strip()) from None


def write_results(path: Path, results: Results) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(to_json(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_results(path: Path) -> Results:
    def reject_constant(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number; use null for a missing value")

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=reject_constant)
    except (OSError, ValueError) as error:  # also of an encoding other than UTF-8
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    return from_json(document, str(path))


def read_resumable(path: Path, kind: str, settings: dict[str, Any], ignored: tuple[str, ...]) -> Results:
    """Reads the result file of a run that is resumed: of the same kind, and with the same settings but `ignored`."""
    old = read_results(path)
    if old.kind != kind:
        raise UserError(f"--out {path}: contains results of `peagle {old.kind}`; give another file")
    for name, now in settings.items():
        before = old.settings.get(name, now)
        if name not in ignored and before != now:
            raise UserError(
                f"--out {path}: was started with {name} {before}, now it is {now}; give the same, or another file"
            )
    return old


def to_json(results: Results) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **_encode(results)}


def from_json(document: Any, name: str = "the document") -> Results:
    """Decodes a document. Error messages start with `name`, such as the file's path."""
    if not isinstance(document, dict) or "schema_version" not in document:
        raise UserError(f"{name}: is not a result file: it has no field 'schema_version'")
    if (version := document["schema_version"]) != SCHEMA_VERSION:
        raise UserError(
            f"{name}: schema_version: is {json.dumps(version)}, must be {SCHEMA_VERSION}; measure again, or read it "
            "with the version of peagle that wrote it"
        )
    body = {key: value for key, value in document.items() if key != "schema_version"}
    try:
        results: Results = _decode({**body, "rows": []}, Results, "")
        rows = _decode(body.get("rows"), GenericAlias(list, ROW_CLASSES[results.kind]), "rows")
    except UserError as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None  # a name in the file may have line breaks
    return dataclasses.replace(results, rows=rows)


def _encode(value: Any) -> Any:
    """Dataclasses become objects that include their derived properties, tuples become lists."""
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)] + list(getattr(value, "derived", ()))
        return {name: _encode(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, kind: Any, path: str) -> Any:
    """Converts a JSON value to the type `kind`, or raises UserError that names the field at `path`."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        *others, last = sorted(members, key=lambda m: (m is not NoneType, m is float))
        for member in others:  # float last, so that whole numbers stay int
            with suppress(UserError):
                return _decode(value, member, path)
        return _decode(value, last, path)
    if origin is Literal:
        _check(not isinstance(value, bool) and value in members, value, " or ".join(map(str, members)), path)
        return value
    if origin is list:
        _check(isinstance(value, list), value, "a list", path)
        return [_decode(item, members[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        _check(isinstance(value, list) and len(value) == len(members), value, f"a list of {len(members)}", path)
        pairs = zip(value, members, strict=True)
        return tuple(_decode(item, member, f"{path}[{i}]") for i, (item, member) in enumerate(pairs))
    if origin is dict:
        _check(isinstance(value, dict), value, "an object", path)
        return {key: _decode(item, members[1], f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(value, kind, path)
    if isinstance(value, int | float):
        _check(abs(value) < MAX_NUMBER, value, f"below {MAX_NUMBER:g}", path)
        if kind is float and not isinstance(value, bool):
            return float(value)
    fits = kind is Any or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
    _check(fits, value, f"of type {getattr(kind, '__name__', kind)}", path)
    return value


def _decode_dataclass(value: Any, kind: Any, path: str) -> Any:
    _check(isinstance(value, dict), value, "an object", path)
    prefix = f"{path}." if path else ""
    hints, fields = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name in value.keys() - fields.keys() - set(getattr(kind, "derived", ())):
        raise UserError(f"{prefix}{name}: {kind.__name__} has no such field")
    for name, field in fields.items():
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        _check(name in value or has_default, None, "present", f"{prefix}{name}")
    arguments = {n: _decode(value[n], hints[n], f"{prefix}{n}") for n in fields.keys() & value.keys()}
    try:
        return kind(**arguments)
    except UserError as error:  # a value of the right type that is not allowed
        raise UserError(f"{prefix}{error}") from None


def _check(condition: bool, value: Any, expected: str, path: str) -> None:
    if not condition:
        text = "missing" if value is None else json.dumps(value)
        raise UserError(f"{path}: is {text if len(text) <= 60 else f'{text[:57]}...'}, must be {expected}")
