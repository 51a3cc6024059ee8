"""The typer application, the options that several verbs share, and the console.

Every option has a panel (`rich_help_panel`) and one line of help. The panels below are shared, so that the same kind of
option stands under the same heading in every verb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle import __version__
from peagle.config import check_num_speculative_tokens
from peagle.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="peagle",
    help="P-EAGLE speculative decoding: train a drafter for your model, evaluate it, and serve with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

# Option panels, in the order in which verbs list them.
MODEL_PANEL = "Model"  # target, drafter, number of speculative tokens
DATA_PANEL = "Data"  # prompts, data sets, responses
SAMPLING_PANEL = "Sampling"  # temperature, max tokens, stop strings
TRAINING_PANEL = "Training"
ENGINE_PANEL = "Engine"  # device, dtype, memory, batch size
SERVER_PANEL = "Server"  # addresses, keys, time limits
OUTPUT_PANEL = "Output"  # files and formats

TARGET_HELP = "Target model: a folder, a Hugging Face id or a built-in name."
DRAFTER_HELP = "Drafter: a folder, a Hugging Face id or a built-in name."
K_HELP = "Draft tokens per decode step (K)."

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help=TARGET_HELP, metavar="TARGET", rich_help_panel=MODEL_PANEL)
]
TargetArgument = Annotated[str, typer.Argument(help=TARGET_HELP, metavar="TARGET")]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", "-d", help=DRAFTER_HELP, metavar="DRAFTER", rich_help_panel=MODEL_PANEL)
]
NumSpeculativeTokens = Annotated[
    int, typer.Option("--num-speculative-tokens", "-k", help=K_HELP, metavar="K", rich_help_panel=MODEL_PANEL)
]
NumSpeculativeTokensOrAuto = Annotated[
    str,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Draft tokens per decode step (K); auto picks K for the current load.",
        metavar="K",
        rich_help_panel=MODEL_PANEL,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16, or auto for the device's default.", rich_help_panel=ENGINE_PANEL
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, cuda, cuda:1, ..., or auto for a GPU if there is one.", rich_help_panel=ENGINE_PANEL
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Maximum number of prompt and output tokens of a request.",
        show_default="the target's limit",
        rich_help_panel=ENGINE_PANEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        help="Model name in the API.",
        show_default="TARGET",
        rich_help_panel=SERVER_PANEL,
    ),
]
Lead = Annotated[
    int,
    typer.Option(
        help="Begin every sample but the first with up to this many freely sampled tokens.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Vary = Annotated[
    int,
    typer.Option(
        help="Keep up to this many prompt tokens in every sample but the first; the target writes the rest of the "
        "prompt.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=OUTPUT_PANEL)
]


def examples(*lines: str) -> str:
    """Returns a verb's epilog: its example command lines, one per line."""
    from rich.markup import escape

    return "\n\n".join(["Examples:", *(f"[cyan]{escape(line)}[/cyan]" for line in lines)])


def parse_num_speculative_tokens(text: str) -> int | Literal["auto"]:
    """Parses the value of -k: a number of draft tokens, or auto."""
    if text == "auto":
        return "auto"
    try:
        num_speculative_tokens = int(text)
    except ValueError:
        raise UserError(f"-k {text}: must be a number of draft tokens, or auto") from None
    return check_num_speculative_tokens(num_speculative_tokens)


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
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=True)
