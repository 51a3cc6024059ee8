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
    handler.setFormatter(LogFormatter(as_json))
    for logger, level in ((logging.getLogger("peagle"), logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING)):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


class LogFormatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        event, level = " ".join(record.getMessage().split())[:MAX_FIELD_LENGTH], record.levelname.lower()
        fields = {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        if record.exc_info is not None and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__  # its message may quote the request
        if self.as_json:
            clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            return json.dumps({"time": clock, "level": level, "event": event, **fields}, default=str)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        prefix = "" if record.levelno == logging.INFO else f"{level}: "
        return f"{clock} {prefix}{event}" + "".join(f" {name}={_format_value(value)}" for name, value in fields.items())


def _format_value(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if not text or any(c in text for c in ' "=') or not text.isprintable():
        return json.dumps(text[:MAX_FIELD_LENGTH], ensure_ascii=False)
    return text[:MAX_FIELD_LENGTH]


def format_traceback(error: BaseException) -> str:
    """File, line and function of the last frames. Source lines stay out: they may show values of a request."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
