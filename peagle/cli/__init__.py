"""The command line: a verb a function, a flag a parameter.

Sees every room and is seen by none. Imports lazily, so that `peagle --help` is instant. A `UserError` becomes
one line and exit status 2; Ctrl-C leaves quietly.
"""

from __future__ import annotations

import sys

import typer

from peagle.cli import answer, bench, chat, data, demo, deploy, eval, folders, plan, report, serve, states, train, tune  # noqa: F401  each adds its verbs, in this order
from peagle.cli.app import app
from peagle.errors import UserError


def main() -> None:
    try:
        status = typer.main.get_command(app).main(standalone_mode=False, prog_name="peagle")
    except UserError as error:
        status = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):  # typer turns the one into the other
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 141
    except Exception as error:
        # typer's own complaints about flags; its exception classes have moved between versions
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if message.startswith("Usage:"):  # called without a verb: its complaint is the help text
            print(message)
            status = 2
        else:
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "peagle"
            status = _complain(f"{message.rstrip('.')} (see {where} --help)")
    sys.exit(status or 0)


def _complain(message: str) -> int:
    print(f"peagle: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
