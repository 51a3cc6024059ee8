"""A report page: its sections of tables, charts and notes, rendered as HTML or Markdown with the package's templates.

Strings may come from untrusted result files: `clean_strings` replaces control characters, and the templates escape.
The HTML page is one file. Its content security policy allows only its own style sheet and script, by hash, and no
network access. Ids are numbered, never built from names.
"""

import base64
import hashlib
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from peagle import __version__
from peagle.report.charts import MARKS, ChartPanel, layout_chart

# Control characters and lone surrogates, and bidirectional controls, which can make a name read as another one.
HIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NUMERIC_CELL = re.compile(r"[-–]?[\d.,]*[%×]?( \(.*\d\))?\*?$")  # a number, optionally with an interval or a K
MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")
HEAT_EDGES = (0.75, 0.95, 1.05, 1.5, 2.0, 3.0)  # ratios: two colours below 1, one around 1, four above


@dataclass(frozen=True)
class ReportTable:
    """A table. With `panels` it holds the values of these charts."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    is_open: bool = False  # initially visible
    panels: tuple[ChartPanel, ...] = ()
    ratios: tuple[tuple[float | None, ...], ...] = ()  # colours of the cells after the first column; None: no colour

    def cell_class(self, row: int, column: int) -> str:
        names = ["n"] if self.is_numeric_column[column] else []
        ratio = self.ratios[row][column - 1] if self.ratios else None
        if ratio is not None:
            names.append(f"h{sum(ratio >= edge for edge in HEAT_EDGES)}")
        return " ".join(names)

    @property
    def is_numeric_column(self) -> list[bool]:
        columns = [[row[i] for row in self.rows] for i in range(len(self.headings))]
        return [i > 0 and all(map(NUMERIC_CELL.match, column)) for i, column in enumerate(columns)]


ReportBlock: TypeAlias = str | ReportTable  # a string is a note


@dataclass(frozen=True)
class ReportSection:
    title: str
    blocks: list[ReportBlock]


@dataclass(frozen=True)
class HeadlineTile:
    title: str
    value: str
    description: str


@dataclass
class ReportPage:
    title: str
    subtitle: str
    recommendations: list[str] = field(default_factory=list)
    tiles: list[HeadlineTile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # kinds of results that were not passed
    sections: list[ReportSection] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)  # command line, names of the files that it wrote


def clean_strings(value: Any) -> Any:
    """Replaces hidden characters in all strings of a dataclass, dictionary or list; line breaks become spaces."""
    if isinstance(value, str):
        return HIDDEN_CHARACTERS.sub("\ufffd", re.sub(r"[\n\t]", " ", value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: clean_strings(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {clean_strings(key): clean_strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(clean_strings, value))
    return value


def render_html(page: ReportPage) -> str:
    assets = Path(__file__).parent / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    trusted = {"style": Markup(style), "script": Markup(script), "policy": Markup(policy)}
    return _environment(escape_html=True).get_template("report.html.jinja").render(page=page, **trusted)


def render_markdown(page: ReportPage) -> str:
    text = _environment(escape_html=False).get_template("report.md.jinja").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment(escape_html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=escape_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": _escape_markdown, "px": "{:.1f}".format}
    environment.globals |= {"layout_chart": layout_chart, "marks": MARKS, "version": __version__}
    return environment


def _escape_markdown(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKDOWN_SPECIAL.sub(r"\\\1", text)


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
