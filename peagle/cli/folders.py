"""`inspect`, `convert` and `average`: verbs that work on drafter folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import K_HELP, MODEL_PANEL, JsonOption, NumSpeculativeTokens, TargetOption, app, examples
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, VLLM_VERSION, check_num_speculative_tokens
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target

FolderArgument = Annotated[
    str, typer.Argument(help="Drafter: a folder, a Hugging Face id or a built-in name.", metavar="DRAFTER")
]


@app.command(
    epilog=examples("peagle inspect DRAFTER --target T", "peagle inspect DRAFTER -t T --vllm-version 0.26 --json"),
)
def inspect(
    drafter: FolderArgument,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", help="Also check that the drafter fits this target.", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", "-k", help=K_HELP, metavar="K", rich_help_panel=MODEL_PANEL),
    ] = None,
    vllm_version: Annotated[
        str,
        typer.Option(help="Check against this version of vLLM.", metavar="VERSION", rich_help_panel=MODEL_PANEL),
    ] = VLLM_VERSION,
    as_json: JsonOption = False,
) -> None:
    """Show a drafter's configuration, its `vllm serve` command and problems; exit status 1 if there are problems."""
    from peagle.checkpoints.validate import inspect_drafter

    target_folder = resolve_target(target) if target is not None else None
    folder = resolve_drafter(drafter)
    report = inspect_drafter(folder, drafter, target_folder, target, vllm_version, num_speculative_tokens)
    if as_json:
        print(json.dumps({"facts": report.facts, "serve": report.serve, "findings": report.findings}))
    else:
        width = max(map(len, report.facts))
        for label, fact in {**report.facts, "serve": report.serve}.items():
            print(f"{label:<{width}}  {fact}")
        for finding in report.findings:
            print(f"PROBLEM  {finding}")
        if not report.findings:
            print("ok: no problems found")
    if report.findings:
        raise typer.Exit(1)


@app.command(
    epilog=examples(
        "peagle convert DRAFTER OUT --to speculators --target T", "peagle convert DRAFTER OUT --to plain --target T"
    )
)
def convert(
    drafter: FolderArgument,
    out: Annotated[Path, typer.Argument(help="Output folder.")],
    to: Annotated[str, typer.Option(help="Output format: plain (vLLM's) or speculators.", metavar="FORMAT")],
    target: TargetOption,
    num_speculative_tokens: NumSpeculativeTokens = DEFAULT_NUM_SPECULATIVE_TOKENS,
) -> None:
    """Convert a drafter between the plain and the speculators format; tensors stay bit-identical."""
    from peagle.checkpoints.convert import convert_drafter, detect_format

    if to not in ("plain", "speculators"):
        raise UserError(f"--to {to}: must be plain or speculators")
    source = resolve_drafter(drafter)
    if detect_format(source) == to:
        raise UserError(f"{drafter}: is in the {to} format already")
    check_num_speculative_tokens(num_speculative_tokens)
    messages = convert_drafter(source, out, to, resolve_target(target), target, num_speculative_tokens)  # type: ignore[arg-type]
    print(f"wrote {out} in the {to} format")
    for name, message in messages.items():
        print(f"  {name}: {message}")


@app.command(
    epilog=examples("peagle average DRAFTER FINE_TUNED --out MEAN", "peagle average A B C --out D --weights 2,1,1")
)
def average(
    drafters: Annotated[
        list[str], typer.Argument(help="Two or more drafters of the same shape.", metavar="DRAFTER...")
    ],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Weight of each drafter, comma-separated.", show_default="equal", metavar="A,B,.."),
    ] = None,
) -> None:
    """Average the weights of drafters that were fine-tuned from the same checkpoint.

    The average is often better than each of them; compare them with `peagle eval`.
    """
    from peagle.checkpoints.convert import average_drafters

    if len(drafters) < 2:
        raise UserError(f"{drafters[0]}: cannot average a single drafter; give two or more")
    try:
        numbers = [float(part) for part in weights.split(",")] if weights is not None else [1.0] * len(drafters)
    except ValueError:
        raise UserError(f"--weights {weights}: must be numbers, separated by commas") from None
    if len(numbers) != len(drafters) or not all(0 < number < float("inf") for number in numbers):
        raise UserError(f"--weights {weights}: must be {len(drafters)} numbers above 0, one for each drafter")
    average_drafters([resolve_drafter(drafter) for drafter in drafters], out, numbers)
    print(f"wrote {out}, the average of {len(drafters)} drafters")
