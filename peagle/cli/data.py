"""`data`: prompts in, the target's own responses out.

Knows nothing about how they are written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import DeviceOption, DtypeOption, JsonOption, Lead, TargetOption, Vary, app, examples
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

SHOWN_REFUSALS = 5


@app.command(
    epilog=examples(
        "peagle data prompts.jsonl.gz --out responses.jsonl",
        "peagle data prompts.jsonl.gz --out responses.jsonl --temperature 0 --samples 4 --lead 64",
        "peagle data few.jsonl --out responses.jsonl --samples 100 --vary 16",
        "peagle data prompts/ --out responses.jsonl -t TARGET --samples 4 --max-tokens 2048",
        "peagle data HuggingFaceH4/ultrachat_200k --split train_sft --limit 20000 --out responses.jsonl",
        "peagle data prompts.jsonl --out responses.jsonl -t TARGET --endpoint http://localhost:8000/v1",
    )
)
def data(
    prompts: Annotated[str, typer.Argument(help="A .jsonl or .jsonl.gz file, a folder of them, or a hub dataset.")],
    out: Annotated[Path, typer.Option(help="Rows go here; if it is there already, it is gone on with.")],
    target: TargetOption = DEFAULT_TARGET,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = ResponseSettings.temperature,
    top_p: Annotated[float, typer.Option(help="Sample within this mass; 1 is off.")] = ResponseSettings.top_p,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0 is off.")] = ResponseSettings.top_k,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = ResponseSettings.max_tokens,
    samples: Annotated[int, typer.Option(help="Responses to each prompt.")] = ResponseSettings.samples,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Another one gives other responses.")] = ResponseSettings.seed,
    lead: Lead = ResponseSettings.lead,
    loop_tokens: Annotated[
        int, typer.Option(help="Answers that loop are cut so many tokens behind where that begins.")
    ] = ResponseSettings.loop_tokens,
    vary: Vary = ResponseSettings.vary,
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that answers, instead of the engine.", metavar="URL")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What the server calls it.", show_default="the one it has", metavar="NAME")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.")] = EndpointSettings.concurrency,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is sent again.")] = EndpointSettings.timeout_s,
    retries: Annotated[int, typer.Option(help="How often it is.")] = EndpointSettings.retries,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file, instead of the target's own template.", metavar="FILE")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts as they are, to be continued: for a target that does not chat.")
    ] = False,
    split: Annotated[str, typer.Option(help="Of a hub dataset.")] = "train",
    max_num_seqs: Annotated[
        int | None, typer.Option(help="The most answers at once.", show_default="by the device")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together.", show_default="what the target can")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the GPU's memory; less leaves room for others.")
    ] = ResponseEngineSettings.gpu_memory_utilization,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Of the key-value cache, instead of that share: for several on one GPU."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Let the target answer prompts: what a drafter is trained on.

    A row is {"prompt": ...}, {"turns": [...]} or {"messages": [...]}; answers in it are dropped for the target's own.
    A run that was killed goes on where it was when it is started again; more --samples or a higher --limit add rows.
    """
    settings = ResponseSettings(temperature, top_p, top_k, max_tokens, samples, seed, limit, lead, loop_tokens, vary)
    server = None
    if endpoint is not None:
        server = EndpointSettings(endpoint, model, concurrency, timeout, retries)
    elif model is not None:
        raise UserError(f"--model {model}: is what a server calls it; give --endpoint URL, or -t alone for the engine")
    writer = ResponseEngineSettings(
        None if device == "auto" else device,
        None if dtype == "auto" else dtype,
        max_num_seqs,
        max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )

    from peagle.data.run import write_responses

    summary = write_responses(prompts, out, target, settings, writer, server, chat_template, split, raw=raw)
    if summary.refused:
        with open(f"{out}.refused", encoding="utf-8") as file:
            for line, _ in zip(file, range(SHOWN_REFUSALS), strict=False):
                row = json.loads(line)
                detail = f" ({row['detail']})" if row["detail"] else ""
                print(f"refused: {row['where']}: {row['reason']}{detail}", file=sys.stderr)
    print(json.dumps(summary.as_json()) if as_json else summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.failed:
        raise typer.Exit(1)
