"""What the server says while it runs: an event with fields a line, as JSON or for people.

Knows nothing about requests. Whoever calls `log` sees to it that no secret and no text of a user is among the fields.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal, TextIO

LOGGER = logging.getLogger("peagle.server")
LONGEST_FIELD = 2000  # characters

Level = Literal["info", "warning", "error"]


def log(event: str, level: Level = "info", **fields: Any) -> None:
    LOGGER.log(logging.getLevelName(level.upper()), event, extra={"fields": fields})


def start_logging(as_json: bool, stream: TextIO | None = None) -> None:
    """To stderr, so that standard output stays free."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Lines())
    for logger, level in ((LOGGER, logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING)):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        told = "".join(f" {name}={_plain(value)}" for name, value in _fields(record).items())
        mark = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{at} {mark}{_one_line(record.getMessage())}{told}"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        head = {"time": at, "level": record.levelname.lower(), "event": _one_line(record.getMessage())}
        return json.dumps({**head, **_fields(record)}, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if record.exc_info is not None and record.exc_info[0] is not None:
        fields["error"] = record.exc_info[0].__name__  # its message may quote what a client sent
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if not text or any(c in text for c in ' "=') or not text.isprintable():
        return json.dumps(text[:LONGEST_FIELD], ensure_ascii=False)  # a line stays a line
    return text[:LONGEST_FIELD]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_FIELD]


def where(error: BaseException) -> str:
    """File and line of each frame: source lines, and so values, stay out of the log."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
