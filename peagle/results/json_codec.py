"""Dataclasses to JSON values and back, with type checks that name the wrong field."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from peagle.results.schema import FieldError

MAX_NUMBER = 1e18  # larger numbers, and 1e999 which JSON reads as infinity, are rejected
TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


class DecodeError(ValueError):
    """A JSON value does not fit the expected type."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        super().__init__(f"{path or 'the document'}: is {format_value(value)}, must be {expected}")
        self.path, self.value, self.expected = path, value, expected


def encode(value: Any) -> Any:
    """Dataclasses become objects that include their derived properties, tuples become lists."""
    if is_dataclass(value):
        names = [f.name for f in fields(value)] + list(getattr(value, "derived", ()))
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any, expected_type: Any, path: str = "") -> Any:
    """Converts a JSON value to `expected_type` or raises DecodeError with the path of the wrong field."""
    origin, arguments = get_origin(expected_type), get_args(expected_type)
    if expected_type is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(value, arguments, path)
    if origin is Literal:
        if isinstance(value, bool) or value not in arguments:
            raise DecodeError(path, value, format_choices(arguments))
        return value
    if origin is list:
        if not isinstance(value, list):
            raise DecodeError(path, value, "a list")
        return [decode(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            raise DecodeError(path, value, f"a list of {len(arguments)}")
        pairs = zip(value, arguments, strict=True)
        return tuple(decode(item, of, f"{path}[{i}]") for i, (item, of) in enumerate(pairs))
    if origin is dict:
        if not isinstance(value, dict):
            raise DecodeError(path, value, "an object")
        return {key: decode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if is_dataclass(expected_type):
        return _decode_dataclass(value, expected_type, path)
    if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
        raise DecodeError(path, value, f"below {MAX_NUMBER:g}")
    if expected_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected_type) or (expected_type is not bool and isinstance(value, bool)):
        raise DecodeError(path, value, TYPE_NAMES[expected_type])
    return value


def _decode_union(value: Any, members: tuple[Any, ...], path: str) -> Any:
    """Tries each member, float last so that whole numbers stay int."""
    errors = []
    for member in sorted(members, key=lambda member: member is float):
        try:
            return decode(value, member, path)
        except DecodeError as error:
            if member is not types.NoneType:
                errors.append(error)
    if len(errors) == 1:  # the only type beside null: its own error is more precise
        only = errors[0]
        raise DecodeError(only.path, only.value, only.expected + (" or null" if only.path == path else ""))
    expected = " or ".join(TYPE_NAMES.get(member, str(get_args(member) or member)) for member in members)
    raise DecodeError(path, value, expected)


def _decode_dataclass(value: Any, expected_type: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(path, value, "an object")
    prefix = f"{path}." if path else ""
    types_by_name, known = get_type_hints(expected_type), {f.name: f for f in fields(expected_type)}
    for name in value.keys() - known.keys() - set(getattr(expected_type, "derived", ())):
        raise DecodeError(f"{prefix}{name}", value[name], f"absent: {expected_type.__name__} has no such field")
    arguments = {}
    for name, spec in known.items():
        if name in value:
            arguments[name] = decode(value[name], types_by_name[name], f"{prefix}{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{prefix}{name}", None, "present")
    try:
        return expected_type(**arguments)
    except FieldError as error:
        raise DecodeError(f"{prefix}{error.field_name}", value.get(error.field_name), error.expected) from None


def format_choices(values: tuple[Any, ...]) -> str:
    return " or ".join(map(str, values))


def format_value(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
