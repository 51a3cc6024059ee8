"""The typer application: how verbs declare their options, the options that several verbs share, and the console.

A parameter of a verb is one of these:

- an option of its own: `name: type = option(...)`
- a dataclass: each of its options is a flag. `Annotated[SomeSettings, "name", ...]` selects some of them, and a default
  of the parameter replaces the defaults of the class.
- `Annotated[dict[str, Any], SomeSettings]`: the same flags, as a dict with None for those that were not given.
- anything else that typer accepts
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from peagle import __version__
from peagle.config.options import PANELS, REQUIRED, check_value, find_check, flag_name, option
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

app = typer.Typer(
    name="peagle",
    help="P-EAGLE speculative decoding: train a drafter for your model, evaluate it, and serve with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

NEGATIVE_NUMBER = re.compile(r"-\.?\d")
Verb = TypeVar("Verb", bound=Callable[..., None])

TARGET_HELP = "Target model: a folder, a Hugging Face id or a built-in name."
DRAFTER_HELP = "Drafter: a folder, a Hugging Face id or a built-in name."
TargetArgument = Annotated[str, typer.Argument(help=TARGET_HELP, metavar="TARGET")]
PromptsArgument = Annotated[
    str, typer.Argument(help="Prompts: a .jsonl or .jsonl.gz file, a folder of them, or a Hugging Face dataset.")
]
TARGET_FLAGS, DRAFTER_FLAGS = ("--target", "-t"), ("--drafter", "-d")
TARGET = option(DEFAULT_TARGET, TARGET_HELP, panel="Model", flags=TARGET_FLAGS, metavar="TARGET")
DRAFTER = option(None, DRAFTER_HELP, panel="Model", flags=DRAFTER_FLAGS, metavar="DRAFTER")
REQUIRED_DRAFTER = option(REQUIRED, DRAFTER_HELP, panel="Model", flags=DRAFTER_FLAGS, metavar="DRAFTER")
DRAFTERS = option(
    (), "Folders, Hugging Face ids or built-in names.", panel="Model", flags=DRAFTER_FLAGS, metavar="DRAFTER ..."
)
PROMPT_HELP = "Prompts: JSONL files, or mt_bench, humaneval, gsm8k, spec_bench, speed_bench."
PROMPT_FILES = option((), PROMPT_HELP, panel="Data", metavar="NAME_OR_FILE ...")
RESUMED_OUT = option(None, "Result file; an existing one is resumed.", panel="Output", metavar="FILE")
RESULTS_OUT = option(None, "Results file, for `peagle report`.", panel="Output")
JSON = option(False, "Print one JSON object instead of text.", panel="Output", flags=("--json",))


def verb(
    *examples: str, group: typer.Typer = app, name: str | None = None, several: bool = False
) -> Callable[[Verb], Verb]:
    """Registers a verb. With `several`, an option with several values takes all values up to the next option."""

    def register(function: Verb) -> Verb:
        lines = ["Examples:", *(f"[cyan]{escape(line)}[/cyan]" for line in examples)] if examples else []
        # The terminal's width decides where the lines of a paragraph break.
        help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (function.__doc__ or "").split("\n\n"))
        cls = MultiValueCommand if several else TyperCommand
        group.command(name, cls=cls, help=help, epilog="\n\n".join(lines))(expand_options(function))
        return function

    return register


@dataclass(frozen=True)
class Flag:
    """An option as a parameter of the function that typer calls. A flag that is not given is None or the default."""

    name: str
    kind: Any  # the option's type
    option: Field[Any]
    panel: str | None
    default: Any
    given_only: bool = False  # None if the flag is not given

    def build_parameter(self) -> inspect.Parameter:
        kinds = [kind for kind in get_args(self.kind) if kind is not NoneType]
        single = kinds[0] if len(kinds) == 1 else self.kind
        kind: Any = single if single in (bool, int, float, Path) else str
        default, flag = self.default, flag_name(self.name, self.option)
        flags = self.option.metadata["flags"] or (flag,)
        if kind is bool and (default or self.given_only):
            flags = (f"{flag}/--no-{flag[2:]}",)
        display = {"rich_help_panel": self.panel, **self.option.metadata["display"]}
        if isinstance(default, tuple) or self.given_only:
            kind = kind if self.given_only else list[str]
            if kind == list[str] and get_args(self.kind)[0] in (int, float):
                display.setdefault("metavar", "N ...")
            shown = "" if default is None else str(default).lower()
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else shown
            display.setdefault("show_default", shown or False)
            default = None
        kind = kind | None if default is None else kind
        default = inspect.Parameter.empty if default is MISSING else default
        parameter = inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default)
        return parameter.replace(annotation=Annotated[kind, typer.Option(*flags, **display)])

    def parse(self, given: Any) -> Any:
        """Converts a value of the command line, and checks it; `1,8 64` becomes (1, 8, 64)."""
        if given is None or given == []:
            return None if self.given_only else self.default
        flag, parse = flag_name(self.name, self.option), self.option.metadata["parse"]
        if parse is None and isinstance(given, list):
            parse = partial(parse_items, get_args(self.kind)[0], flag)
        value = given if parse is None else parse(given)
        if not self.given_only and (check := find_check(self.kind, self.option)) is not None:
            check_value(flag, value, check)
        return value


def parse_items(kind: type, flag: str, texts: list[str]) -> tuple[Any, ...]:
    """Splits numbers at commas; without duplicates."""
    if kind not in (int, float):
        return tuple(texts)
    values: dict[Any, None] = {}
    for text in filter(None, ",".join(texts).split(",")):
        try:
            values[kind(text)] = None
        except ValueError:
            raise UserError(f"{flag} {text}: must be {'an integer' if kind is int else 'a number'}") from None
    return tuple(values)


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function that typer calls: with a parameter for each flag of the verb."""
    hints = get_type_hints(function, include_extras=True)
    flags: dict[str, Flag] = {}
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}  # how a parameter is built, and from which flags
    own, of_settings = [], []  # parameters
    panel = None
    for p in inspect.signature(function).parameters.values():
        kind, *selected = get_args(hints[p.name]) if get_origin(hints[p.name]) is Annotated else (hints[p.name],)
        given_only = kind == dict[str, Any]
        settings = selected.pop() if given_only else kind
        if is_dataclass(settings):
            found = list(_list_flags(settings, selected, p.default, given_only))
            flags |= {flag.name: flag for flag in found}
            build: Any = dict if given_only else settings if p.default is p.empty else partial(replace, p.default)
            groups[p.name] = build, [flag.name for flag in found]
            of_settings += [flag.build_parameter() for flag in found]
        elif isinstance(p.default, Field):
            panel = p.default.metadata["panel"] or panel
            flags[p.name] = Flag(p.name, kind, p.default, panel, p.default.default)
            own.append(flags[p.name].build_parameter())
        else:
            own.append(p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]))

    @wraps(function)
    def command(**given: Any) -> None:
        values = {name: flags[name].parse(value) if name in flags else value for name, value in given.items()}
        for name, (build, names) in groups.items():
            values[name] = build(**{each: values.pop(each) for each in names})
        function(**values)

    parameters = sorted(own + of_settings, key=_panel_order)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _list_flags(settings: Any, selected: list[str], defaults: Any, given_only: bool) -> Iterator[Flag]:
    types, panel = get_type_hints(settings), None
    for f in fields(settings):
        if "flags" in f.metadata:
            panel = f.metadata["panel"] or panel
            if not selected or f.name in selected:
                yield Flag(f.name, types[f.name], f, panel, getattr(defaults, f.name, f.default), given_only)


def _panel_order(parameter: inspect.Parameter) -> int:
    displayed = get_args(parameter.annotation)[1:]
    panel = displayed[0].rich_help_panel if displayed else None
    return -1 if panel is None else PANELS.index(panel if panel in PANELS else "Training")


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


def _print_version(requested: bool) -> None:
    if requested:
        print(f"peagle {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, emoji=False, markup=True)


def print_tables(*tables: Table) -> None:
    """Prints tables in full width: a narrow terminal wraps lines instead of cutting off numbers."""
    for table in tables:
        output = console()
        output.width = max(output.width, output.measure(table, options=output.options.update(max_width=1000)).maximum)
        output.print(table)
