"""Flags that take several values: `--concurrency 1 8 64`, `--concurrency 1,8,64` or the flag again for each.

Knows nothing about what the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

NUMBER = re.compile(r"-\.?\d")


class SpreadCommand(TyperCommand):
    """A command in which a flag that may be given again takes every value up to the next flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {flag for p in self.params if getattr(p, "multiple", False) for flag in p.opts}
        return super().parse_args(ctx, spread(args, several))


def spread(args: list[str], several: set[str]) -> list[str]:
    """`--c 1 8 --x` -> `--c 1 --c 8 --x`; a flag without a value stays as it is, to be complained about."""
    found: list[str] = []
    flag = None  # whose values are being read
    for i, arg in enumerate(args):
        if arg == "--":
            return found + args[i:]
        if not _is_value(arg):
            flag = arg if arg in several and i + 1 < len(args) and _is_value(args[i + 1]) else None
            found += [] if flag is not None else [arg]
        else:
            found += [arg] if flag is None else [flag, arg]
    return found


def _is_value(arg: str) -> bool:
    return not arg.startswith("-") or arg == "-" or NUMBER.match(arg) is not None


def split(values: Iterable[str] | None) -> list[str]:
    """What was given with commas, one by one."""
    return [part for value in values or () for part in value.split(",") if part]
