"""Reads and writes result files."""

from __future__ import annotations

import dataclasses
import json
import os
import types
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.results.json_codec import DecodeError, decode, encode, format_choices, format_value
from peagle.results.migration import migrate_version_1
from peagle.results.schema import ROW_CLASSES, SCHEMA_VERSION, Results


def write_results(path: Path, results: Results) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(to_json(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def read_results(path: Path) -> Results:
    """Reads a result file of this schema version or migrates one of an older version."""

    def reject_constant(name: str) -> float:
        raise UserError(f"{path}: contains {name}, which is not a JSON number; use null for a missing value")

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=reject_constant)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a result file (not UTF-8)") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is not JSON (line {error.lineno}: {error.msg})") from None
    return from_json(document, str(path))


def to_json(results: Results) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **encode(results)}


def from_json(document: Any, name: str = "the document") -> Results:
    """Decodes a document. Error messages start with `name`, such as the file's path."""
    if isinstance(document, dict) and document.get("schema") == 1:
        document = migrate_version_1(document)
    if not isinstance(document, dict) or "schema_version" not in document:
        raise UserError(f"{name}: is not a result file: it has no field 'schema_version'")
    body = dict(document)
    version = body.pop("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise UserError(
            f"{name}: schema_version: is {format_value(version)}, must be {SCHEMA_VERSION}; "
            "read it with the version of peagle that wrote it"
        )
    kind = body.get("kind")
    if not isinstance(kind, str) or kind not in ROW_CLASSES:
        raise UserError(f"{name}: kind: is {format_value(kind)}, must be {format_choices(tuple(ROW_CLASSES))}")
    try:
        results: Results = decode({**body, "rows": []}, Results)
        rows = decode(body.get("rows"), types.GenericAlias(list, ROW_CLASSES[kind]), "rows")
    except DecodeError as error:
        raise UserError(f"{name}: {error}") from None
    return dataclasses.replace(results, rows=rows)
