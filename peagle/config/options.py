"""Options: a dataclass field or a parameter of a verb that is also a flag, declared once with its help text.

`peagle.cli.app` turns options into flags; `Settings` checks their values.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from peagle.errors import UserError

REQUIRED = MISSING  # default of an option that must be given
# The panels of `--help`, in order. Panels that only training or AWS verbs have come with "Training".
PANELS = ("Model", "Acceptance", "Data", "Load", "Sampling", "Training", "Engine", "GPU", "Server", "Checks", "Output")

Check = tuple[Callable[[Any], bool], str]  # a condition, and the accepted values in words


def range_check(least: float | None, above: float | None, most: float | None) -> Check | None:
    if least is None and above is None:
        return None

    def accepts(value: Any) -> bool:
        return (value >= least if above is None else value > above) and (most is None or value <= most)

    lowest = f"above {above}" if above is not None else f"at least {least}" if least else "0 or more"
    in_range = f"{lowest} and at most {most}" if above is not None else f"between {least} and {most}"
    return accepts, lowest if most is None else in_range


def option(
    default: Any,
    help: str,
    *,
    panel: str | None = None,
    flags: tuple[str, ...] = (),
    check: Check | None = None,
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    parse: Callable[[Any], Any] | None = None,
    repr: bool = True,
    **display: Any,
) -> Any:
    """Declares an option.

    Without `panel`, the option follows in the panel of the one before it. Without `flags`, the flag is the name with
    dashes, without the unit `_s`. `check`, or the bounds, apply to each value other than None, and to the items of a
    tuple. `parse` converts the text of the command line. `display` are further arguments of `typer.Option`.
    """
    metadata = {"panel": panel, "flags": flags, "parse": parse, "display": display | {"help": help}}
    return field(default=default, repr=repr, metadata=metadata | {"check": check or range_check(min, above, max)})


def checked(default: Any, *, min: float | None = None, above: float | None = None, max: float | None = None) -> Any:
    """Declares a dataclass field that is checked like an option, without a flag."""
    return field(default=default, metadata={"check": range_check(min, above, max)})


def _auto_option(help: str) -> Any:
    return option(None, help, panel="Engine", parse=lambda text: None if text == "auto" else text, show_default="auto")


def device_option() -> Any:
    return _auto_option("cpu, cuda, cuda:1, ..., or auto for a GPU if there is one.")


def dtype_option() -> Any:
    return _auto_option("float32, bfloat16, float16, or auto for the device's default.")


def flag_name(name: str, declared: Field[Any]) -> str:
    """The flag of an option, as messages name it."""
    return (declared.metadata.get("flags") or (f"--{name.removesuffix('_s').replace('_', '-')}",))[-1]


class Settings:
    """Base of the dataclasses with options: checks their values."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, flag, check in _list_checks(kind):
            check_value(flag, getattr(self, name), check)


def check_value(flag: str, value: Any, check: Check) -> None:
    """Raises a UserError that names the flag, the value and the accepted values."""
    accepts, expected = check
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None and not accepts(item):
            raise UserError(f"{flag} {item}: must be {expected}")


@cache
def _list_checks(settings: Any) -> list[tuple[str, str, Check]]:
    types = get_type_hints(settings)
    found = [(f.name, flag_name(f.name, f), find_check(types[f.name], f)) for f in fields(settings)]
    return [(name, flag, check) for name, flag, check in found if check is not None]


def find_check(kind: Any, declared: Field[Any]) -> Check | None:
    """The check of an option; the choices of a Literal are a check, too."""
    literal = kind if get_origin(kind) is Literal else next(iter(get_args(kind)), None)  # of `Literal[...] | None`
    if get_origin(literal) is Literal:
        return get_args(literal).__contains__, " or ".join(get_args(literal))
    return declared.metadata.get("check")


def require(ok: bool, flag: str, value: Any, expected: str) -> None:
    """Raises a UserError about a flag unless `ok`."""
    if not ok:
        raise UserError(f"{flag} {value}: must be {expected}")
