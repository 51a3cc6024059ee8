"""A report as Markdown: its sentences, tables and commands, without the charts.

Knows nothing about results. Escapes what Markdown or HTML inside it would take for more than text.
"""

from __future__ import annotations

import re

from peagle.report.page import Block, Command, Figure, Note, Page, Table, clean

SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def markdown_of(page: Page) -> str:
    parts = [f"# {text(page.title)}", text(page.about)]
    if page.recommendations:
        first, *others = page.recommendations
        parts.append(f"**{text(first)}**")
        parts += ["\n".join(f"- {text(sentence)}" for sentence in others)] if others else []
    else:
        parts.append("**These results are not enough to recommend anything.**")
    if page.tiles:
        tiles = [f"- {text(tile.name)}: **{text(tile.value)}**, {text(tile.about)}" for tile in page.tiles]
        parts.append("\n".join(tiles))
    if page.warnings:
        parts.append("## Warnings")
        parts.append("\n".join(f"- {text(warning)}" for warning in page.warnings))
    for section in page.sections:
        parts.append(f"## {text(section.title)}")
        parts += [_block(block) for block in section.blocks]
    if page.missing:
        parts.append("## Not in these results")
        parts.append("\n".join(f"- {text(missing)}" for missing in page.missing))
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Note):
        return f"> {text(block.text)}" if block.tone == "warning" else text(block.text)
    if isinstance(block, Command):
        return f"{text(block.made)}:\n\n{code(block.text)}"
    if isinstance(block, Figure):
        return f"### {text(block.title)}\n\n{text(block.caption)}\n\n{table(block.table)}"
    return f"### {text(block.caption)}\n\n{table(block)}"


def table(of: Table) -> str:
    """Columns of numbers are set to the right."""
    lines = [of.headings, tuple("---:" if right else "---" for right in of.numbers)]
    cells = [" | ".join(line) for line in (map(text, lines[0]), lines[1], *(map(text, row) for row in of.rows))]
    return "\n".join(f"| {line} |" for line in cells)


def text(plain: str) -> str:
    plain = clean(plain).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\1", plain)


def code(plain: str) -> str:
    """In a fence longer than any that the text may hold."""
    plain = clean(plain, None)
    longest = max((len(ticks) for ticks in re.findall("`+", plain)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{plain}\n{fence}"
