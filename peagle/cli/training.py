"""The verbs `data`, `hidden-states`, `train` and `fit`. Every field of `TrainConfig` is a flag of the last two."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import JSON, TARGET, TARGET_FLAGS, TARGET_HELP, PromptsArgument, verb
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings, TrainConfig
from peagle.config.options import REQUIRED, device_option, option
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.training.recipe import Recipe
    from peagle.training.run import TrainingResult

EXCLUDE_IDS = option(
    None, "File of prompt ids to exclude, one per line: the validation set.", panel="Data", metavar="FILE"
)


@verb(
    "peagle data prompts.jsonl.gz --out responses.jsonl",
    "peagle data prompts.jsonl.gz --out responses.jsonl --exclude-ids recipes/validation-ids.txt",
    "peagle data prompts.jsonl.gz --out responses.jsonl --temperature 0 --samples 4 --lead 64",
    "peagle data few.jsonl --out responses.jsonl --samples 100 --vary 16",
    "peagle data HuggingFaceH4/ultrachat_200k --split train_sft --limit 20000 --out responses.jsonl",
    "peagle data prompts.jsonl --out responses.jsonl -t TARGET --endpoint http://localhost:8000/v1",
)
def data(
    prompts: PromptsArgument,
    settings: ResponseSettings,
    engine: ResponseEngineSettings,
    server: EndpointSettings,
    out: Path = option(REQUIRED, "Response file; an existing one is resumed.", panel="Output"),
    target: str = TARGET,
    split: str = option("train", "Split of a Hugging Face dataset.", panel="Data"),
    exclude_ids: Path | None = EXCLUDE_IDS,
    chat_template: Path | None = option(
        None, "Jinja file with a chat template, instead of the target's.", metavar="FILE"
    ),
    raw: bool = option(False, "Continue raw prompts without a chat template."),
    endpoint: str | None = option(
        None, "OpenAI-compatible server that generates, instead of the embedded engine.", panel="Server", metavar="URL"
    ),
    as_json: bool = JSON,
) -> None:
    """Generate the target's responses to prompts: the training data of a drafter.

    A row is {"prompt": ...}, {"turns": [...]} or {"messages": [...]}; assistant messages in it are replaced by the
    target's own. The same command resumes a stopped run; more --samples or a higher --limit add rows.
    """
    if endpoint is None and server.model is not None:
        raise UserError(f"--model {server.model}: needs --endpoint URL; the embedded engine uses -t TARGET")

    from peagle.data.responses import write_responses

    endpoint_settings = replace(server, url=endpoint) if endpoint is not None else None
    summary = write_responses(
        *(prompts, out, target, settings, engine, endpoint_settings, chat_template, split),
        raw=raw,
        exclude_ids=exclude_ids,
    )
    print(json.dumps(vars(summary)) if as_json else summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.num_failed:
        raise typer.Exit(1)


@verb(
    "peagle hidden-states --recipe recipes/gpt-oss-120b-p-eagle.toml",
    "peagle hidden-states --recipe RECIPE --endpoint http://node0:8000 --endpoint http://node1:8000",
    name="hidden-states",
)
def hidden_states(
    server: Annotated[EndpointSettings, "concurrency", "timeout_s"],
    recipe: Path = option(REQUIRED, "Recipe with vllm_hidden_states, the output folder.", panel="Training"),
    endpoint: tuple[str, ...] = option(
        (), "vLLM server that writes to the folder; repeat for several.", panel="Server", metavar="URL"
    ),
) -> None:
    """Let vLLM servers write the hidden states a drafter is trained on.

    Without --endpoint, print the command that starts such a server. Rows with a file are not sent again.
    """
    from peagle.training.drafter_init import plan_drafter_config
    from peagle.training.hidden_states.vllm import HiddenStatesFiles, request_hidden_states, vllm_serve_command
    from peagle.training.recipe import load_training_inputs, make_recipe

    made = make_recipe(recipe, {})
    if made.train.vllm_hidden_states is None:
        raise UserError(f"--recipe {recipe}: lacks vllm_hidden_states, the folder for the files")
    inputs = load_training_inputs(made)
    folder = Path(made.train.vllm_hidden_states)
    folder.mkdir(parents=True, exist_ok=True)
    aux_layer_ids = plan_drafter_config(made.train, inputs.target).aux_layer_ids
    files = HiddenStatesFiles(folder, inputs.target, aux_layer_ids, made.train.max_seq_len)
    if not endpoint:
        print(vllm_serve_command(made.target, files))
        return
    servers = [replace(server, url=url) for url in endpoint]
    num_sent = request_hidden_states(inputs.train_set, files, servers, print)
    print(f"{folder}: {len(files):,} files; {num_sent:,} rows sent")


OUT = option(REQUIRED, "Folder of the drafter; an existing run is resumed.", panel="Output")
RECIPE_TARGET = option(
    None, TARGET_HELP, panel="Model", flags=TARGET_FLAGS, metavar="TARGET", show_default=DEFAULT_TARGET
)
RECIPE = option(None, "Recipe (TOML); flags override it.", panel="Training", metavar="FILE")
PAUSE_MINUTES = option(None, "Save and stop after this many minutes; the same command resumes.", panel="Training")


@verb(
    "peagle train responses.jsonl --out drafter -t TARGET --minutes 30",
    "peagle train --recipe recipes/smollm2-p-eagle.toml --out drafter --dry-run",
    "peagle train responses.jsonl --out drafter --method eagle3 --steps 4000 --lr 5e-4",
    "torchrun --nproc-per-node 8 -m peagle train responses.jsonl --out drafter -t TARGET --shard-target",
)
def train(
    settings: Annotated[dict[str, Any], TrainConfig],
    data: Annotated[
        list[str] | None, typer.Argument(help="Response files of `peagle data`: files, folders, globs.")
    ] = None,
    out: Path = OUT,
    target: str | None = RECIPE_TARGET,
    recipe: Path | None = RECIPE,
    resume: Literal["auto", "must", "never"] = option(
        "auto", "auto resumes an existing run; must and never require or forbid it."
    ),
    pause_minutes: float | None = PAUSE_MINUTES,
    dry_run: bool = option(False, "Print memory, disk and time of the run; train nothing.", panel="Output"),
    num_gpus: int = option(1, "For --dry-run: number of GPUs like this one.", min=1),
    tokens_per_second: float | None = option(None, "For --dry-run: known training rate of all GPUs."),
    as_json: bool = JSON,
    device: str | None = device_option(),
) -> None:
    """Train a drafter on the target's responses.

    The folder is a plain checkpoint at any time: the drafter with the longest acceptance length on the validation set.
    Ctrl-C saves and stops; the same command resumes, also after a kill.
    """
    started = time.perf_counter()
    made = _load_recipe(recipe, data, target, settings)
    if dry_run:
        from peagle.training.memory import format_plan, plan_run

        plan = plan_run(made, out, _resolve_device(device), num_gpus, tokens_per_second)
        print(json.dumps(plan) if as_json else format_plan(plan))
        return
    if num_gpus != 1:
        raise UserError(f"--num-gpus {num_gpus}: only for --dry-run; torchrun starts several processes")
    from peagle.training.run import train as run_training

    seconds_left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - started)
    _print_result(run_training(made, out, _resolve_device(device), resume, seconds_left))


@verb(
    "peagle fit prompts.jsonl.gz --out drafter -t TARGET --minutes 60",
    "peagle fit few.jsonl --out drafter -t TARGET --samples 100 --vary 16 --minutes 60",
    "peagle fit prompts.jsonl.gz --out drafter --samples 4 --recipe recipes/smollm2-p-eagle.toml",
)
def fit(
    prompts: PromptsArgument,
    settings: Annotated[dict[str, Any], TrainConfig],
    responses: Annotated[ResponseSettings, "samples", "temperature", "max_tokens", "limit", "lead", "vary"],
    out: Path = OUT,
    target: str | None = RECIPE_TARGET,
    recipe: Path | None = RECIPE,
    exclude_ids: Path | None = EXCLUDE_IDS,
    pause_minutes: float | None = PAUSE_MINUTES,
    device: str | None = device_option(),
) -> None:
    """Generate responses, train a drafter on them, and measure it. The same command resumes each stage."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("peagle fit: runs in one process; use `peagle data`, then torchrun -m peagle train")
    started = time.perf_counter()
    file = out / ".training" / "responses.jsonl"
    made = _load_recipe(recipe, [str(file)], target, settings)
    device = _resolve_device(device)

    from peagle.data.responses import write_responses
    from peagle.training.resume import RunFolder
    from peagle.training.run import evaluate_checkpoint
    from peagle.training.run import train as run_training

    RunFolder(out).create()
    print("1/3 generating the target's responses")
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
    print("2/3 training the drafter")
    seconds_left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - started)
    result = run_training(made, out, device, stop_after=seconds_left)
    _print_result(result)
    if not result.finished:
        return
    print("3/3 measuring the acceptance length on the validation set")
    for row in evaluate_checkpoint(made, out, device):
        rates = " ".join(f"{rate:.2f}" for rate in row.acceptance_rates)
        print(f"K={row.num_speculative_tokens}: acceptance length {row.acceptance_length:.2f} (by position: {rates})")
    print(f"{out}: drafter, model card and log")


def _load_recipe(file: Path | None, data: list[str] | None, target: str | None, settings: dict[str, Any]) -> Recipe:
    from peagle.training.recipe import make_recipe

    return make_recipe(file, {**settings, "data": tuple(data or ()), "target": target})


def _resolve_device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


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
