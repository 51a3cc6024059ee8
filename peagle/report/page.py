"""The nouns of a report: a page of sections, each of notes, figures, tables and commands.

Knows nothing about results, HTML or Markdown: sections are filled by those who know the results, and two writers turn
the page into text. Every string here is plain text that may come from a stranger's file; the writers escape it.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, TypeAlias

from peagle.report.charts import Panel

Tone = Literal["plain", "warning"]
# Text that runs the other way round can make a name read as another one.
TURNING = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
NEVER_SHOWN = {"Cc", "Cs", "Cn", "Co"}
NUMBER = re.compile(r"[-–]?[\d.,]*[%×]?( \(.*\d\))?$")  # with its interval or K after it
LONGEST = 400  # characters of a name or a value that a page shows


@dataclass(frozen=True)
class Table:
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    open: bool = False  # read by everybody, not only looked up

    @property
    def numbers(self) -> list[bool]:
        """Which columns hold nothing but numbers, and are set to the right."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.headings))]
        return [i > 0 and all(map(NUMBER.match, column)) for i, column in enumerate(columns)]


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Command:
    """Something typed at a prompt, and what it made."""

    text: str
    made: str


@dataclass(frozen=True)
class Figure:
    """Panels of one kind, what they show, how to read the drawing, and the same values as a table."""

    title: str
    caption: str
    reading: str
    panels: tuple[Panel, ...]
    table: Table


Block: TypeAlias = Note | Figure | Table | Command


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Tile:
    """A figure worth a glance: what it is, the number, what it holds for."""

    name: str
    value: str
    about: str


@dataclass(frozen=True)
class Page:
    title: str
    about: str  # of how many files, which machines, when
    recommendations: tuple[str, ...]
    tiles: tuple[Tile, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]
    sections: tuple[Section, ...]


def clean(text: str, longest: int | None = LONGEST) -> str:
    """What can be shown of a string: no control characters, nothing that turns the line round, not endless."""

    def shown(character: str) -> str:
        if character in "\n\t":
            return " "
        hidden = character in TURNING or unicodedata.category(character) in NEVER_SHOWN
        return "\ufffd" if hidden else character

    text = "".join(map(shown, text))
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


@dataclass(frozen=True)
class Part:
    """What one kind of results adds to a page."""

    sections: tuple[Section, ...] = ()
    recommendations: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()
    warnings: tuple[str, ...] = ()
