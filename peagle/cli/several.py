"""Options that take several values: `--concurrency 1 8 64`, `--concurrency 1,8,64`, or the option repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

NEGATIVE_NUMBER = re.compile(r"-\.?\d")


class MultiValueCommand(TyperCommand):
    """A command whose repeatable options take all values up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {flag for p in self.params if getattr(p, "multiple", False) for flag in p.opts}
        return super().parse_args(ctx, repeat_flags(args, repeatable))


def repeat_flags(args: list[str], repeatable: set[str]) -> list[str]:
    """`--c 1 8 --x` -> `--c 1 --c 8 --x`; a flag without a value stays, so that click reports it."""
    expanded: list[str] = []
    flag = None  # whose values follow
    for i, arg in enumerate(args):
        if arg == "--":
            return expanded + args[i:]
        if not _is_value(arg):
            flag = arg if arg in repeatable and i + 1 < len(args) and _is_value(args[i + 1]) else None
            expanded += [] if flag is not None else [arg]
        else:
            expanded += [arg] if flag is None else [flag, arg]
    return expanded


def _is_value(arg: str) -> bool:
    return not arg.startswith("-") or arg == "-" or NEGATIVE_NUMBER.match(arg) is not None


def split_commas(values: Iterable[str] | None) -> list[str]:
    return [part for value in values or () for part in value.split(",") if part]
