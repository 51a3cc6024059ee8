"""Validation of settings: an error is one line that names the flag, the value and the accepted range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peagle.errors import UserError


def field_validator(settings: Any) -> Callable[[bool, str, str], None]:
    """Returns `require(ok, name, expected)`, which raises a UserError about the field `name` unless `ok`.

    The flag has the field's name with dashes, without the unit `_s`.
    """

    def require(ok: bool, name: str, expected: str) -> None:
        if not ok:
            flag = name.removesuffix("_s").replace("_", "-")
            raise UserError(f"--{flag} {getattr(settings, name)}: must be {expected}")

    return require
