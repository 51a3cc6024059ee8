"""The command line: one function per verb, whose parameters declare its options (see `peagle.cli.app`).

The verbs import their packages lazily, so that `peagle --help` is fast. A `UserError` becomes one line on standard
error and exit status 2.
"""

import sys
from typing import Any

import typer

from peagle.cli import demo, evaluation, folders, generate, planning, serving, training  # noqa: F401  register verbs
from peagle.cli.app import app
from peagle.errors import UserError

# The order and the headings of the verbs in `peagle --help`.
VERB_PANELS = {
    "Generate and serve": ("demo", "generate", "chat", "serve", "deploy"),
    "Train a drafter": ("fit", "data", "hidden-states", "train", "inspect", "convert", "average"),
    "Evaluate and plan": ("eval", "bench", "report", "plan", "tune"),
}


def main() -> None:
    try:
        status = build_command().main(standalone_mode=False, prog_name="peagle")
    except UserError as error:
        _print_error(str(error))
        status = 2
    except (KeyboardInterrupt, typer.Abort):  # typer turns the one into the other
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 141
    except Exception as error:
        # typer's usage errors; their classes have moved between versions
        if not hasattr(error, "format_message"):
            raise
        status = 2
        if message := error.format_message():  # empty if there was no verb: typer has printed the help text
            context = getattr(error, "ctx", None)
            command_path = context.command_path if context is not None else "peagle"
            _print_error(f"{message.rstrip('.')} (see {command_path} --help)")
    sys.exit(status or 0)


def build_command() -> Any:
    """Builds the click command, with the verbs sorted into `VERB_PANELS`."""
    command: Any = typer.main.get_command(app)
    verbs, command.commands = command.commands, {}
    for panel, names in VERB_PANELS.items():
        for name in names:
            command.commands[name] = verbs.pop(name)
            command.commands[name].rich_help_panel = panel
    command.commands |= verbs
    return command


def _print_error(message: str) -> None:
    print(f"peagle: error: {' '.join(message.split())}", file=sys.stderr)
