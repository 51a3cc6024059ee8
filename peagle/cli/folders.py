"""`inspect`, `convert` and `average`: verbs that work on drafter folders."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.cli.app import DRAFTER_HELP, JSON, TARGET_FLAGS, TARGET_HELP, verb
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, VLLM_VERSION
from peagle.config.engine import k_option
from peagle.config.options import REQUIRED, option
from peagle.errors import UserError
from peagle.hub.resolve import resolve_drafter, resolve_target

DrafterArgument = Annotated[str, typer.Argument(help=DRAFTER_HELP, metavar="DRAFTER")]


@verb("peagle inspect DRAFTER --target T", "peagle inspect DRAFTER -t T --vllm-version 0.26 --json")
def inspect(
    drafter: DrafterArgument,
    target: str | None = option(
        None, "Also check that the drafter fits this target.", panel="Model", flags=TARGET_FLAGS
    ),
    num_speculative_tokens: int | None = k_option(None),
    vllm_version: str = option(VLLM_VERSION, "Check against this version of vLLM.", metavar="VERSION"),
    as_json: bool = JSON,
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


@verb("peagle convert DRAFTER OUT --to speculators --target T", "peagle convert DRAFTER OUT --to plain --target T")
def convert(
    drafter: DrafterArgument,
    out: Annotated[Path, typer.Argument(help="Output folder.")],
    to: Literal["plain", "speculators"] = option(
        REQUIRED, "Output format: plain (vLLM's) or speculators.", panel="Output", metavar="FORMAT"
    ),
    target: str = option(REQUIRED, TARGET_HELP, panel="Model", flags=TARGET_FLAGS, metavar="TARGET"),
    num_speculative_tokens: int = k_option(DEFAULT_NUM_SPECULATIVE_TOKENS),
) -> None:
    """Convert a drafter between the plain and the speculators format; tensors stay bit-identical."""
    from peagle.checkpoints.drafter import convert_drafter, detect_format

    source = resolve_drafter(drafter)
    if detect_format(source) == to:
        raise UserError(f"{drafter}: is in the {to} format already")
    messages = convert_drafter(source, out, to, resolve_target(target), target, num_speculative_tokens)
    print(f"wrote {out} in the {to} format")
    for name, message in messages.items():
        print(f"  {name}: {message}")


@verb("peagle average DRAFTER FINE_TUNED --out MEAN", "peagle average A B C --out D --weights 2,1,1")
def average(
    drafters: Annotated[
        list[str], typer.Argument(help="Two or more drafters of the same shape.", metavar="DRAFTER...")
    ],
    out: Path = option(REQUIRED, "Output folder.", panel="Output"),
    weights: str | None = option(
        None, "Weight of each drafter, comma-separated.", show_default="equal", metavar="A,B,.."
    ),
) -> None:
    """Average the weights of drafters that were fine-tuned from the same checkpoint.

    The average is often better than each of them; compare them with `peagle eval`.
    """
    from peagle.checkpoints.drafter import average_drafters

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
