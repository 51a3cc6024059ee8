"""Contents of a report page: sections of figures, tables and notes.

Strings may come from untrusted result files: `clean_strings` replaces control characters, the templates escape.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

from peagle.report.charts import ChartPanel

# Bidirectional control characters can make a name read as another one.
BIDI_CONTROLS = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
UNPRINTABLE_CATEGORIES = {"Cc", "Cs", "Cn", "Co"}
NUMERIC_CELL = re.compile(r"[-–]?[\d.,]*[%×]?( \(.*\d\))?$")  # a number, optionally with an interval or a K


@dataclass(frozen=True)
class ReportTable:
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_open: bool = False  # initially visible

    @property
    def is_numeric_column(self) -> list[bool]:
        columns = [[row[i] for row in self.rows] for i in range(len(self.headings))]
        return [i > 0 and all(map(NUMERIC_CELL.match, column)) for i, column in enumerate(columns)]


@dataclass(frozen=True)
class ReportFigure:
    """Chart panels of one kind, a caption, and the same values as a table."""

    title: str
    caption: str
    panels: tuple[ChartPanel, ...]
    table: ReportTable


@dataclass(frozen=True)
class ReportNote:
    text: str


ReportBlock: TypeAlias = ReportNote | ReportFigure | ReportTable


@dataclass(frozen=True)
class ReportSection:
    title: str
    blocks: tuple[ReportBlock, ...]


@dataclass(frozen=True)
class HeadlineTile:
    title: str
    value: str
    description: str


@dataclass(frozen=True)
class SectionResult:
    """What the results of one kind add to the page."""

    sections: tuple[ReportSection, ...] = ()
    recommendations: tuple[str, ...] = ()
    tiles: tuple[HeadlineTile, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportPage:
    title: str
    subtitle: str
    recommendations: tuple[str, ...]
    tiles: tuple[HeadlineTile, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]  # kinds of results that were not passed
    sections: tuple[ReportSection, ...]
    commands: tuple[tuple[str, str], ...]  # command line, names of the files that it wrote


def clean_text(text: str) -> str:
    """Replaces control characters, which could hide or reverse text."""

    def clean(character: str) -> str:
        if character in "\n\t":
            return " "
        is_hidden = character in BIDI_CONTROLS or unicodedata.category(character) in UNPRINTABLE_CATEGORIES
        return "\ufffd" if is_hidden else character

    return "".join(map(clean, text))


def clean_strings(value: Any) -> Any:
    """Applies `clean_text` to all strings of a dataclass, dictionary or list."""
    if isinstance(value, str):
        return clean_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: clean_strings(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {clean_strings(key): clean_strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(clean_strings, value))
    return value
