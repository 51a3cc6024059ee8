"""The verbs `train` and `fit`. Every field of `TrainConfig` is a flag of both."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import (
    DATA_PANEL,
    ENGINE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    TARGET_HELP,
    TRAINING_PANEL,
    DeviceOption,
    JsonOption,
    Lead,
    Vary,
    app,
    console,
    examples,
)
from peagle.config import ResponseSettings, TrainConfig
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.training.recipe import Recipe
    from peagle.training.run import TrainingResult

Resume = Literal["auto", "must", "never"]
data_option = partial(typer.Option, rich_help_panel=DATA_PANEL)
model_option = partial(typer.Option, rich_help_panel=MODEL_PANEL)
output_option = partial(typer.Option, rich_help_panel=OUTPUT_PANEL)
sampling_option = partial(typer.Option, rich_help_panel=SAMPLING_PANEL)
training_option = partial(typer.Option, rich_help_panel=TRAINING_PANEL)
FLAG_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "int | None": int, "float | None": float}
# The panel of each field of TrainConfig and of those after it.
FIELD_PANELS = {
    "method": MODEL_PANEL,
    "num_depths": "Loss and COD sampling",
    "max_seq_len": "Batches and length of the run",
    "lr": "Optimizer",
    "dtype": ENGINE_PANEL,
    "chat_template": DATA_PANEL,
    "hidden_states_cache": "Hidden states of the target",
    "validation_size": "Validation, logging and saving",
}


def add_training_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag for every field of `TrainConfig`; the verb's last parameter, `settings`, receives them as a dict."""
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[:-1]
    flags, panel = [], ""
    for f in fields(TrainConfig):
        panel = FIELD_PANELS.get(f.name, panel)
        kind: Any = FLAG_TYPES.get(str(f.type), str)  # fields with several types are parsed like a recipe's values
        default = "" if f.default is None else str(f.default).lower() if kind is bool else str(f.default)
        name = f.name.replace("_", "-")
        declared = (f"--{name}/--no-{name}",) if kind is bool else (f"--{name}",)
        option = typer.Option(*declared, help=f.metadata["help"], show_default=default or False, rich_help_panel=panel)
        parameter = inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        flags.append(parameter.replace(annotation=Annotated[kind | None, option]))

    def command(**given: Any) -> None:
        settings = {f.name: given.pop(f.name) for f in fields(TrainConfig)}
        verb(**given, settings=settings)

    parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *flags]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


RecipeOption = Annotated[
    Path | None,
    training_option("--recipe", help="Recipe (TOML); flags override it.", metavar="FILE"),
]
OutOption = Annotated[
    Path,
    output_option("--out", help="Folder of the drafter; an existing run is resumed."),
]
RunTargetOption = Annotated[
    str | None,
    model_option("--target", "-t", help=TARGET_HELP, metavar="TARGET", show_default=DEFAULT_TARGET),
]
ResumeOption = Annotated[
    str,
    training_option("--resume", help="auto resumes an existing run; must and never require or forbid it."),
]
PauseMinutes = Annotated[
    float | None,
    training_option(help="Save and stop after this many minutes; the same command resumes."),
]


@app.command(
    epilog=examples(
        "peagle train responses.jsonl --out drafter -t TARGET --minutes 30",
        "peagle train --recipe recipes/smollm2-p-eagle.toml --out drafter --dry-run",
        "peagle train responses.jsonl --out drafter --method eagle3 --steps 4000 --lr 5e-4",
        "torchrun --nproc-per-node 8 -m peagle train responses.jsonl --out drafter -t TARGET --shard-target",
    )
)
@add_training_flags
def train(
    out: OutOption,
    data: Annotated[
        list[str] | None, typer.Argument(help="Response files of `peagle data`: files, folders, globs.")
    ] = None,
    target: RunTargetOption = None,
    recipe: RecipeOption = None,
    resume: ResumeOption = "auto",
    pause_minutes: PauseMinutes = None,
    dry_run: Annotated[
        bool, output_option("--dry-run", help="Print memory, disk and time of the run; train nothing.")
    ] = False,
    num_gpus: Annotated[int, output_option(help="For --dry-run: number of GPUs like this one.")] = 1,
    tokens_per_second: Annotated[
        float | None, output_option(help="For --dry-run: known training rate of all GPUs.")
    ] = None,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    settings: Any = None,
) -> None:
    """Train a drafter on the target's responses.

    The folder is a plain checkpoint at any time: the drafter with the longest acceptance length on the validation set.
    Ctrl-C saves and stops; the same command resumes, also after a kill.
    """
    started = time.perf_counter()
    made = _load_recipe(recipe, data, target, settings)
    if num_gpus < 1:
        raise UserError(f"--num-gpus {num_gpus}: must be at least 1")
    if dry_run:
        from peagle.training.dry_run import plan_run

        plan = plan_run(made, out, _resolve_device(device), num_gpus, tokens_per_second)
        print(json.dumps(plan.as_json()) if as_json else plan.text())
        return
    if num_gpus != 1:
        raise UserError(f"--num-gpus {num_gpus}: only for --dry-run; torchrun starts several processes")
    from peagle.training.run import train as run_training

    seconds_left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - started)
    _print_result(run_training(made, out, _resolve_device(device), _parse_resume(resume), seconds_left))


@app.command(
    epilog=examples(
        "peagle fit prompts.jsonl.gz --out drafter -t TARGET --minutes 60",
        "peagle fit few.jsonl --out drafter -t TARGET --samples 100 --vary 16 --minutes 60",
        "peagle fit prompts.jsonl.gz --out drafter --samples 4 --recipe recipes/smollm2-p-eagle.toml",
    )
)
@add_training_flags
def fit(
    prompts: Annotated[
        str, typer.Argument(help="Prompts: a .jsonl or .jsonl.gz file, a folder of them, or a Hugging Face dataset.")
    ],
    out: OutOption,
    target: RunTargetOption = None,
    recipe: RecipeOption = None,
    samples: Annotated[int, sampling_option(help="Responses per prompt.")] = ResponseSettings.samples,
    temperature: Annotated[
        float, sampling_option(help="Sampling temperature of the responses.")
    ] = ResponseSettings.temperature,
    max_tokens: Annotated[int, sampling_option(help="Maximum tokens per response.")] = ResponseSettings.max_tokens,
    limit: Annotated[int | None, data_option(help="Use only the first N prompts.", show_default="all")] = None,
    exclude_ids: Annotated[
        Path | None, data_option(help="File of prompt ids to exclude, one per line.", metavar="FILE")
    ] = None,
    lead: Lead = ResponseSettings.lead,
    vary: Vary = ResponseSettings.vary,
    pause_minutes: PauseMinutes = None,
    device: DeviceOption = "auto",
    settings: Any = None,
) -> None:
    """Generate responses, train a drafter on them, and measure it. The same command resumes each stage."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("peagle fit: runs in one process; use `peagle data`, then torchrun -m peagle train")
    responses = ResponseSettings(
        temperature=temperature, max_tokens=max_tokens, samples=samples, limit=limit, lead=lead, vary=vary
    )
    started = time.perf_counter()
    file = out / ".training" / "responses.jsonl"
    made = _load_recipe(recipe, [str(file)], target, settings)
    device = _resolve_device(device)

    from peagle.config import ResponseEngineSettings
    from peagle.data.responses import write_responses
    from peagle.training.resume import RunFolder
    from peagle.training.run import evaluate_checkpoint
    from peagle.training.run import train as run_training

    RunFolder(out).create()
    _print_stage(1, "generating the target's responses")
    template = Path(made.train.chat_template) if made.train.chat_template is not None else None
    summary = write_responses(
        prompts,
        file,
        made.target,
        responses,
        ResponseEngineSettings(device),
        chat_template=template,
        raw=made.train.raw,
        exclude_ids=exclude_ids,
    )
    print(summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    _print_stage(2, "training the drafter")
    seconds_left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - started)
    result = run_training(made, out, device, stop_after=seconds_left)
    _print_result(result)
    if not result.finished:
        return
    _print_stage(3, "measuring the acceptance length on the validation set")
    for row in evaluate_checkpoint(made, out, device):
        rates = " ".join(f"{rate:.2f}" for rate in row.acceptance_rates)
        print(f"K={row.num_speculative_tokens}: acceptance length {row.acceptance_length:.2f} (by position: {rates})")
    print(f"{out}: drafter, model card and log")


def _load_recipe(file: Path | None, data: list[str] | None, target: str | None, settings: dict[str, Any]) -> Recipe:
    from peagle.training.recipe import make_recipe

    return make_recipe(file, {**settings, "data": tuple(data or ()), "target": target})


def _parse_resume(value: str) -> Resume:
    if value not in ("auto", "must", "never"):
        raise UserError(f"--resume {value}: must be auto, must or never")
    return value  # type: ignore[return-value]


def _resolve_device(device: str) -> str:
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_stage(number: int, text: str) -> None:
    console().print(f"[bold]{number}/3[/bold] {text}")


def _print_result(result: TrainingResult) -> None:
    state = result.state
    if not result.is_main:
        return
    best = ""
    if state.best_acceptance is not None:
        best = f"; best acceptance length {state.best_acceptance:.2f} at step {state.best_step:,}"
    if result.finished:
        print(f"{result.out}: finished after {state.step:,} steps, {state.tokens:,} tokens{best}")
    else:
        print(f"{result.out}: saved at step {state.step:,}{best}; the same command resumes")
