"""The server's log: one event with fields per line, as JSON or as text, on standard error.

Callers never pass secrets or text of a user as fields.
"""

import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal, TextIO

LOGGER = logging.getLogger("peagle.server")
MAX_FIELD_LENGTH = 2000  # characters

LogLevel = Literal["info", "warning", "error"]


def log_event(event: str, level: LogLevel = "info", **fields: Any) -> None:
    LOGGER.log(logging.getLevelName(level.upper()), event, extra={"fields": fields})


def start_logging(as_json: bool, stream: TextIO | None = None) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLogFormatter() if as_json else TextLogFormatter())
    for logger, level in ((logging.getLogger("peagle"), logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING)):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


class TextLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_format_value(value)}" for name, value in _get_fields(record).items())
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{clock} {level}{_one_line(record.getMessage())}{fields}"


class JsonLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        head = {"time": clock, "level": record.levelname.lower(), "event": _one_line(record.getMessage())}
        return json.dumps({**head, **_get_fields(record)}, default=str)


def _get_fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if record.exc_info is not None and record.exc_info[0] is not None:
        fields["error"] = record.exc_info[0].__name__  # its message may quote the request
    return {name: value for name, value in fields.items() if value is not None}


def _format_value(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if not text or any(c in text for c in ' "=') or not text.isprintable():
        return json.dumps(text[:MAX_FIELD_LENGTH], ensure_ascii=False)
    return text[:MAX_FIELD_LENGTH]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_FIELD_LENGTH]


def format_traceback(error: BaseException) -> str:
    """File, line and function of the last frames. Source lines stay out: they may show values of a request."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
