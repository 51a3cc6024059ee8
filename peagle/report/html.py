"""A report as one HTML page that needs nothing beside it: styles and charts are inside, no network, no script to read.

Knows nothing about results. Every text is escaped; a content policy in the page itself lets nothing run but the few
lines of script that are ours, by their hash, and nothing be fetched at all. Ids are counted, never made of names.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from html import escape
from importlib import resources
from itertools import count

from peagle import __version__
from peagle.report.charts import HALF, SMALL, WIDE, HeatPanel, Panel, draw
from peagle.report.page import Block, Command, Figure, Note, Page, Section, Table, clean

SHOWN_WARNINGS = 6


def html_of(page: Page) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_sha(style)}; script-src {_sha(script)}; base-uri 'none'; form-action 'none'"
    )
    figures = count(1)
    sections = [(f"s{i}", section) for i, section in enumerate(page.sections, 1)]
    links = "".join(f'<li><a href="#{i}">{_text(section.title)}</a></li>' for i, section in sections)
    body = "".join(_section(section, i, figures) for i, section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(page.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">Skip to the content</a>\n'
        f'<header class="top"><h1>{_text(page.title)}</h1><p class="about">{_text(page.about)}</p>'
        f"{_recommendations(page)}{_tiles(page)}{_warnings(page)}{_missing(page)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f'<main id="content">{body}</main>\n<footer><p>Made by peagle {__version__}, '
        "<code>peagle report</code>.</p></footer>\n"
        f'<div id="tip" aria-hidden="true" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _recommendations(page: Page) -> str:
    if not page.recommendations:
        return '<p class="lead">These results are not enough to recommend anything.</p>'
    first, *others = page.recommendations
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in others)
    return f'<p class="lead">{_text(first)}</p>' + (f"<ul>{items}</ul>" if items else "")


def _tiles(page: Page) -> str:
    if not page.tiles:
        return ""
    tiles = "".join(
        f"<div><dt>{_text(tile.name)}</dt><dd><strong>{_text(tile.value)}</strong> "
        f"<span>{_text(tile.about)}</span></dd></div>"
        for tile in page.tiles
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _warnings(page: Page) -> str:
    if not page.warnings:
        return ""
    items = [f"<li>{_text(warning)}</li>" for warning in page.warnings]
    first, rest = items[:SHOWN_WARNINGS], items[SHOWN_WARNINGS:]
    more = f"<details><summary>{len(rest)} more</summary><ul>{''.join(rest)}</ul></details>" if rest else ""
    return f'<aside class="warning" aria-label="Warnings"><h2>Mind this</h2><ul>{"".join(first)}</ul>{more}</aside>'


def _missing(page: Page) -> str:
    if not page.missing:
        return ""
    items = "".join(f"<li>{_text(missing)}</li>" for missing in page.missing)
    return f'<aside class="missing" aria-label="Missing"><h2>Not in these results</h2><ul>{items}</ul></aside>'


def _section(section: Section, name: str, figures: count[int]) -> str:
    blocks = "".join(_block(block, figures) for block in section.blocks)
    title = f'<h2 id="{name}-h">{_text(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{title}{blocks}</section>\n'


def _block(block: Block, figures: count[int]) -> str:
    if isinstance(block, Note):
        return f'<p class="{block.tone}">{_text(block.text)}</p>'
    if isinstance(block, Command):
        command = f'<pre tabindex="0" aria-label="Command"><code>{escape(clean(block.text, None))}</code></pre>'
        return f'<p class="made">{_text(block.made)}</p>{command}'
    if isinstance(block, Figure):
        return _figure(block, f"f{next(figures)}")
    is_open = " open" if block.open else ""
    return f"<details{is_open}><summary>{_text(block.caption)}</summary>{_table(block)}</details>"


def _figure(figure: Figure, name: str) -> str:
    """A lone panel is large where there is room, and its caption stands beside it; two share the width."""
    kind = {1: "lone", 2: "pair"}.get(len(figure.panels), "several")
    drawn = "".join(_panel(panel, f"{name}-{i}", kind, figure.title) for i, panel in enumerate(figure.panels, 1))
    return (
        f'<figure class="{kind}"><figcaption><h3>{_text(figure.title)}</h3>'
        f'<p>{_text(f"{figure.caption} {figure.reading}")}</p></figcaption><div class="panels">{drawn}</div>'
        f'<details class="values"><summary>Values: {_text(figure.table.caption)}</summary>'
        f"{_table(figure.table)}</details></figure>"
    )


def _panel(panel: Panel, name: str, kind: str, above: str) -> str:
    """Drawn for a screen and for a phone, where the two differ; the style sheet shows one of them."""
    panel = _cleaned(panel)
    title = "" if panel.title == clean(above) else f"<h4>{escape(panel.title)}</h4>"
    small = draw(panel, SMALL, f"{name}s")
    if kind == "several":
        return f'<div class="panel">{title}{small}</div>'
    large = draw(panel, WIDE if kind == "lone" else HALF, f"{name}w")
    return f'<div class="panel">{title}<div class="large">{large}</div><div class="small">{small}</div></div>'


def _cleaned(panel: Panel) -> Panel:
    """The chart's own texts without what cannot be shown: it escapes, but knows nothing about strangers."""
    if isinstance(panel, HeatPanel):
        cells = tuple(tuple(c and replace(c, text=clean(c.text), tip=clean(c.tip)) for c in row) for row in panel.cells)
        rows, columns = tuple(map(clean, panel.rows)), tuple(map(clean, panel.columns))
        return replace(panel, title=clean(panel.title), rows=rows, columns=columns, cells=cells)
    lines = tuple(
        replace(line, label=clean(line.label), points=tuple(replace(p, tip=clean(p.tip)) for p in line.points))
        for line in panel.lines
    )
    levels = tuple(replace(v, label=clean(v.label), tip=clean(v.tip)) for v in panel.levels)
    return replace(panel, title=clean(panel.title), lines=lines, levels=levels)


def _table(table: Table) -> str:
    """Scrolls by itself where it is too wide, by keyboard too."""
    kinds = [' class="n"' if number else "" for number in table.numbers]
    heads = "".join(
        f'<th scope="col"{kind}>{_text(head)}</th>' for head, kind in zip(table.headings, kinds, strict=True)
    )
    lines = []
    for row in table.rows:
        first = f'<th scope="row">{_text(row[0])}</th>'
        rest = "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        lines.append(f"<tr>{first}{rest}</tr>")
    label = _text(table.caption)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _text(plain: str) -> str:
    return escape(clean(plain))


def _asset(name: str) -> str:
    return resources.files("peagle.report").joinpath("assets", name).read_text(encoding="utf-8")


def _sha(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
