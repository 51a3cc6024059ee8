"""What every command shares: the app, the flags that mean the same everywhere, the console.

Knows nothing about what the commands do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle import __version__
from peagle.config import check_draft_tokens
from peagle.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="peagle",
    help="Parallel speculative decoding: a P-EAGLE drafter for your model, its worth, and serving with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

WHICH_TARGET = "A folder, a hub id or a built-in name."
WHICH_DRAFTER = "A drafter's folder, hub id or built-in name."
Target = Annotated[str, typer.Option("--target", "-t", help=WHICH_TARGET, metavar="T")]
TargetFirst = Annotated[str, typer.Argument(help=WHICH_TARGET, metavar="TARGET")]
MaybeDrafter = Annotated[str | None, typer.Option("--drafter", "-d", help=WHICH_DRAFTER, metavar="D")]
DraftTokens = Annotated[int, typer.Option("-k", "--draft-tokens", help="Draft tokens a round.")]
DraftTokensOrAuto = Annotated[
    str, typer.Option("-k", "--draft-tokens", help="Draft tokens a round; auto follows the load.", metavar="K")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: what is fast on the device.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt and answer together.", show_default="what the target can")
]
ServedModelName = Annotated[str | None, typer.Option(help="The name that clients ask for.", show_default="TARGET")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: a GPU where there is one.")]
Lead = Annotated[int, typer.Option(help="Every sample but the first begins with up to so many freely sampled tokens.")]
Vary = Annotated[
    int,
    typer.Option(
        help="Every sample but the first has a prompt of its own: it begins with up to so many tokens of the given "
        "one, and the target makes up the rest."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def parse_draft_tokens(given: str) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    try:
        k = int(given)
    except ValueError:
        raise UserError(f"-k {given}: must be a number of draft tokens, or auto") from None
    return check_draft_tokens(k)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"peagle {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=True)
