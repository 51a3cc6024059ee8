"""`train` and `fit`: data in, a drafter out; or prompts in, a drafter out.

Knows nothing about training. The flags of both are the fields of `TrainConfig`: names, kinds, defaults and help.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import DeviceOption, JsonOption, Lead, Vary, app, console, examples
from peagle.config import ResponseSettings, TrainConfig
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.training.recipe import Recipe
    from peagle.training.run import TrainingResult

Resume = Literal["auto", "must", "never"]
KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "int | None": int, "float | None": float}


def training_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag for every field of `TrainConfig` to a function whose last parameter, `settings`, takes those that
    were given."""
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[:-1]
    flags = []
    for f in fields(TrainConfig):
        kind: Any = KINDS.get(str(f.type), str)  # what has several kinds is text here, and read like a recipe's
        shown = "" if f.default is None else str(f.default).lower() if kind is bool else str(f.default)
        name = f.name.replace("_", "-")
        declared = (f"--{name}/--no-{name}",) if kind is bool else (f"--{name}",)
        option = typer.Option(*declared, help=f.metadata["help"], show_default=shown or False)
        parameter = inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        flags.append(parameter.replace(annotation=Annotated[kind | None, option]))

    def called(**given: Any) -> None:
        settings = {f.name: given.pop(f.name) for f in fields(TrainConfig)}
        verb(**given, settings=settings)

    called.__name__, called.__doc__ = verb.__name__, verb.__doc__
    together = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *flags]
    called.__signature__ = inspect.Signature(together)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in together}
    return called


RecipeFile = Annotated[Path | None, typer.Option(help="A TOML file; flags go before it.", metavar="FILE")]
Out = Annotated[Path, typer.Option(help="The drafter's folder; a run that is there already is gone on with.")]
MaybeTarget = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", help="A folder, a hub id, or a built-in name.", metavar="T", show_default=DEFAULT_TARGET
    ),
]
HowToResume = Annotated[str, typer.Option(help="auto goes on with a run that is there; must or never insist.")]
PauseMinutes = Annotated[
    float | None, typer.Option(help="Save and stop after so long, to be gone on with; the schedule stays.")
]


@app.command(
    epilog=examples(
        "peagle train responses.jsonl --out drafter -t TARGET --minutes 30",
        "peagle train --recipe recipes/smollm2-p-eagle.toml --out drafter --dry-run",
        "peagle train --recipe recipes/gpt-oss-120b-p-eagle.toml --out X --dry-run --nodes 4 --data-tokens 1000000000",
        "peagle train responses.jsonl --out drafter --method eagle3 --steps 4000 --lr 5e-4",
        "torchrun --nproc-per-node 8 -m peagle train responses.jsonl --out drafter -t TARGET --shard-target",
    )
)
@training_flags
def train(
    out: Out,
    data: Annotated[
        list[str] | None, typer.Argument(help="Responses, as `peagle data` writes them: files, folders, globs.")
    ] = None,
    target: MaybeTarget = None,
    recipe: RecipeFile = None,
    resume: HowToResume = "auto",
    pause_minutes: PauseMinutes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will take, and train nothing.")] = False,
    tokens_per_second: Annotated[float | None, typer.Option(help="For --dry-run: a rate that is known.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="For --dry-run: on such GPUs, which need not be here.", show_default="h200")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="For --dry-run: GPUs of a node.", show_default="8")] = None,
    nodes: Annotated[int | None, typer.Option(help="For --dry-run.", show_default="1")] = None,
    network: Annotated[
        float | None, typer.Option(help="For --dry-run: GB/s a GPU sends to other nodes.", show_default="50")
    ] = None,
    data_tokens: Annotated[int | None, typer.Option(help="For --dry-run: of data that is not there yet.")] = None,
    mean_length: Annotated[
        int | None, typer.Option(help="For --dry-run: tokens of its documents.", show_default="--max-length")
    ] = None,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    settings: Any = None,
) -> None:
    """Train a drafter on the target's responses.

    The folder is a plain checkpoint at any time: the drafter with the longest acceptance on held-out prompts so far.
    Ctrl-C saves; the same command goes on, also after a kill. A --dry-run for other GPUs needs a target's config.json
    or a name that is known, and no weights.
    """
    began = time.perf_counter()
    made = _recipe(recipe, data, target, settings)
    elsewhere = {
        "gpu": gpu,
        "gpus": gpus,
        "nodes": nodes,
        "network": network,
        "data-tokens": data_tokens,
        "mean-length": mean_length,
    }
    named = {name: value for name, value in elsewhere.items() if value is not None}
    if not dry_run:
        for name, value in named.items():
            raise UserError(f"--{name} {value}: is for --dry-run; torchrun says how many processes train")
    elif named:
        _plan_elsewhere(made, tokens_per_second, as_json, named)
        return
    else:
        from peagle.training.run import dry_run as planned

        found = planned(made, out, _device(device), tokens_per_second)
        print(json.dumps(found.as_json()) if as_json else found.text())
        return
    from peagle.training.run import train as run

    left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - began)
    _tell(run(made, out, _device(device), _resume(resume), left))


@app.command(
    epilog=examples(
        "peagle fit prompts.jsonl.gz --out drafter -t TARGET --minutes 60",
        "peagle fit few.jsonl --out drafter -t TARGET --samples 100 --vary 16 --minutes 60",
        "peagle fit prompts.jsonl.gz --out drafter --samples 4 --recipe recipes/smollm2-p-eagle.toml",
    )
)
@training_flags
def fit(
    prompts: Annotated[str, typer.Argument(help="A .jsonl or .jsonl.gz file, a folder of them, or a hub dataset.")],
    out: Out,
    target: MaybeTarget = None,
    recipe: RecipeFile = None,
    samples: Annotated[int, typer.Option(help="Responses to each prompt.")] = ResponseSettings.samples,
    temperature: Annotated[float, typer.Option(help="Of the responses.")] = ResponseSettings.temperature,
    max_tokens: Annotated[int, typer.Option(help="Longest response.")] = ResponseSettings.max_tokens,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.", show_default="all")] = None,
    lead: Lead = ResponseSettings.lead,
    vary: Vary = ResponseSettings.vary,
    pause_minutes: PauseMinutes = None,
    device: DeviceOption = "auto",
    settings: Any = None,
) -> None:
    """From prompts to a measured drafter: write responses, train, measure. Each stage goes on where it was."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("peagle fit runs in one process; with several use `peagle data`, then torchrun -m peagle train")
    responses = ResponseSettings(
        temperature=temperature, max_tokens=max_tokens, samples=samples, limit=limit, lead=lead, vary=vary
    )
    began = time.perf_counter()
    file = out / ".training" / "responses.jsonl"
    made = _recipe(recipe, [str(file)], target, settings)
    chosen = _device(device)

    from peagle.config import ResponseEngineSettings
    from peagle.data.run import write_responses
    from peagle.training.resume import RunFolder
    from peagle.training.run import evaluate_checkpoint
    from peagle.training.run import train as run

    RunFolder(out).create()
    _stage(1, "the target answers the prompts")
    summary = write_responses(
        prompts,
        file,
        made.target,
        responses,
        ResponseEngineSettings(chosen),
        chat_template=_template(made),
        raw=made.train.raw,
    )
    print(summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    _stage(2, "a drafter learns from the answers")
    left = None if pause_minutes is None else 60 * pause_minutes - (time.perf_counter() - began)
    outcome = run(made, out, chosen, stop_after=left)
    _tell(outcome)
    if not outcome.finished:
        return
    _stage(3, "its acceptance on prompts that were kept aside")
    for line in evaluate_checkpoint(made, out, chosen):
        rates = " ".join(f"{share:.2f}" for share in line.per_position)
        print(f"K={line.draft_tokens}: {line.length:.2f} tokens a round (accepted, by position: {rates})")
    print(f"{out}: a drafter, its card and its log")


def _plan_elsewhere(made: Recipe, known_rate: float | None, as_json: bool, named: dict[str, Any]) -> None:
    from peagle.data.dataset import load_responses as responses
    from peagle.planning.gpus import find_gpu
    from peagle.planning.training_scale import MEASURED_ON, Cluster, assumed_data, on_paper
    from peagle.training.run import planned_data

    sizes: dict[str, Any] = {name: named[name] for name in ("gpus", "nodes") if name in named}
    if "network" in named:
        sizes["network"] = named["network"] * 1e9
    cluster = Cluster(find_gpu(named["gpu"]) if "gpu" in named else MEASURED_ON, **sizes)
    if "data-tokens" in named:
        facts = assumed_data(made, named["data-tokens"], named.get("mean-length"))
    elif "mean-length" in named:
        raise UserError(f"--mean-length {named['mean-length']}: is of data that is not there; give --data-tokens too")
    else:
        facts = planned_data(responses(made.data))
    found = on_paper(made, cluster, facts, known_rate)
    print(json.dumps(found.as_json()) if as_json else found.text())


def _recipe(file: Path | None, data: list[str] | None, target: str | None, settings: dict[str, Any]) -> Recipe:
    from peagle.training.recipe import make_recipe

    return make_recipe(file, {**settings, "data": tuple(data or ()), "target": target})


def _template(made: Recipe) -> Path | None:
    return Path(made.train.chat_template) if made.train.chat_template is not None else None


def _resume(given: str) -> Resume:
    if given not in ("auto", "must", "never"):
        raise UserError(f"--resume {given}: must be auto, must or never")
    return given  # type: ignore[return-value]


def _device(given: str) -> str:
    if given != "auto":
        return given
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _stage(number: int, what: str) -> None:
    console().print(f"[bold]{number}/3[/bold] {what}")


def _tell(outcome: TrainingResult) -> None:
    standing = outcome.standing
    if not outcome.first:
        return
    best = ""
    if standing.best_acceptance is not None:
        best = f"; best acceptance length {standing.best_acceptance:.2f}, at step {standing.best_step:,}"
    if outcome.finished:
        print(f"{outcome.out}: done after {standing.step:,} steps, {standing.tokens:,} tokens{best}")
    else:
        print(f"{outcome.out}: saved at step {standing.step:,}{best}; the same command goes on from there")
