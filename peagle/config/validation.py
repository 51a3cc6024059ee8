"""How a setting is refused: one line with its flag, its value and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peagle.errors import UserError


def requirer(settings: Any) -> Callable[[bool, str, str], None]:
    """A flag is called as its field; of a field in seconds, without the unit."""

    def require(ok: bool, name: str, want: str) -> None:
        if not ok:
            flag = name.removesuffix("_s").replace("_", "-")
            raise UserError(f"--{flag} {getattr(settings, name)}: must be {want}")

    return require
