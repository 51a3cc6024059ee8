"""Renders a report page as HTML or Markdown with the templates of this package.

The HTML page is one file: styles, script and charts are inline. Its content security policy allows only its own style
sheet and script, by hash, and no network access. All strings are escaped; ids are numbered, never built from names.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from peagle import __version__
from peagle.report.charts import LARGE, MEDIUM, SMALL, ChartPanel, layout_chart, px
from peagle.report.page import ReportFigure, ReportNote, ReportPage, ReportTable

MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def render_html(page: ReportPage) -> str:
    style, script = _read_asset("report.css"), _read_asset("report.js")
    return (
        _environment(escape_html=True)
        .get_template("report.html.jinja")
        .render(
            page=page,
            style=Markup(style),
            script=Markup(script),
            policy=Markup(
                f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
                "base-uri 'none'; form-action 'none'"
            ),
            version=__version__,
        )
    )


def render_markdown(page: ReportPage) -> str:
    text = _environment(escape_html=False).get_template("report.md.jinja").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_sentence(template: str, **facts: Any) -> str:
    """Renders a plain-text template to one line."""
    text = _environment(escape_html=False).get_template(template).render(**facts)
    return " ".join(text.split())


def _environment(escape_html: bool) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read_template),
        autoescape=escape_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def draw_svg(panel: ChartPanel, name: str, size: str) -> Markup:
        chart = layout_chart(panel, {"large": LARGE, "medium": MEDIUM, "small": SMALL}[size])
        return Markup(environment.get_template("chart.svg.jinja").render(chart=chart, name=name))

    environment.filters.update(md=_escape_markdown, fence=_fence, svg=draw_svg, px=px)
    environment.tests.update(
        figure=lambda block: isinstance(block, ReportFigure),
        table=lambda block: isinstance(block, ReportTable),
        note=lambda block: isinstance(block, ReportNote),
    )
    return environment


def _escape_markdown(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKDOWN_SPECIAL.sub(r"\\\1", text)


def _fence(text: str) -> str:
    """A code fence longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _read_template(name: str) -> str:
    return resources.files("peagle.report").joinpath("templates", name).read_text(encoding="utf-8")


def _read_asset(name: str) -> str:
    return resources.files("peagle.report").joinpath("assets", name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
