"""`inspect`, `convert` and `average`: what a drafter's folder holds, the same in the other format, one from several.

Knows nothing about tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import JsonOption, NumSpeculativeTokens, TargetOption, app, examples
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, VLLM_VERSION, check_num_speculative_tokens
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target


@app.command(
    epilog=examples("peagle inspect DIR --target T", "peagle inspect DIR -t T --vllm 0.26 --json"),
)
def inspect(
    folder: Annotated[str, typer.Argument(help="A drafter's folder, hub id or built-in name.", metavar="DIR")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The target it drafts for; checks the fit too.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option("-k", "--draft-tokens", help="For the vllm serve line.")] = None,
    vllm: Annotated[str, typer.Option(help="The vLLM version it shall run on.", metavar="VERSION")] = VLLM_VERSION,
    as_json: JsonOption = False,
) -> None:
    """Say what a drafter's folder holds and what is wrong with it; exit status 1 if anything is."""
    from peagle.checkpoints.validate import inspect_drafter

    target_folder = resolve_target(target) if target is not None else None
    report = inspect_drafter(resolve_drafter(folder), folder, target_folder, target, vllm, draft_tokens)
    if as_json:
        print(json.dumps({"facts": report.facts, "serve": report.serve, "findings": report.findings}))
    else:
        width = max(map(len, report.facts))
        for label, fact in report.facts.items():
            print(f"{label:<{width}}  {fact}")
        print(f"{'serve':<{width}}  {report.serve}")
        for finding in report.findings:
            print(f"FOUND  {finding}")
        if not report.findings:
            print("ok: nothing found")
    if report.findings:
        raise typer.Exit(1)


@app.command(
    epilog=examples(
        "peagle convert DIR OUT --to speculators --target T", "peagle convert DIR OUT --to plain --target T"
    )
)
def convert(
    folder: Annotated[str, typer.Argument(help="A drafter's folder, hub id or built-in name.", metavar="DIR")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option(help="plain (vLLM's own) or speculators.")],
    target: TargetOption,
    draft_tokens: NumSpeculativeTokens = DEFAULT_NUM_SPECULATIVE_TOKENS,
) -> None:
    """Write a drafter in the other format; every tensor stays as it is, bit for bit."""
    from peagle.checkpoints.convert import convert as convert_folder
    from peagle.checkpoints.convert import format_of

    if to not in ("plain", "speculators"):
        raise UserError(f"--to {to}: must be plain or speculators")
    source = resolve_drafter(folder)
    if format_of(source) == to:
        raise UserError(f"{folder}: is in the {to} format already")
    fate = convert_folder(source, out, to, resolve_target(target), target, check_num_speculative_tokens(draft_tokens))  # type: ignore[arg-type]
    print(f"wrote {out} in the {to} format")
    for name, what in fate.items():
        print(f"  {name}: {what}")


@app.command(
    epilog=examples("peagle average DRAFTER TRAINED_ON --out MEAN", "peagle average A B C --out D --shares 2,1,1")
)
def average(
    folders: Annotated[list[str], typer.Argument(help="Drafters of one shape, two or more.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    shares: Annotated[
        str | None, typer.Option(help="Each one's part, by commas.", show_default="all alike", metavar="A,B,..")
    ] = None,
) -> None:
    """Write the mean of drafters that were trained on from the same one: often better than each of them.

    Measure it: what `peagle eval` says of it and of them decides.
    """
    from peagle.checkpoints.average import average as average_folders

    if len(folders) < 2:
        raise UserError(f"{folders[0]}: one drafter is its own average; name two or more")
    try:
        parts = [float(part) for part in shares.split(",")] if shares is not None else [1.0] * len(folders)
    except ValueError:
        raise UserError(f"--shares {shares}: must be numbers, by commas") from None
    if len(parts) != len(folders) or not all(0 < part < float("inf") for part in parts):
        raise UserError(f"--shares {shares}: must be {len(folders)} numbers above 0, one for each drafter")
    average_folders([resolve_drafter(folder) for folder in folders], out, parts)
    print(f"wrote {out}, the mean of {len(folders)} drafters")
