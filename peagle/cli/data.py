"""The verb `data`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import (
    DATA_PANEL,
    ENGINE_PANEL,
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    SERVER_PANEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    Lead,
    MaxModelLen,
    TargetOption,
    Vary,
    app,
    examples,
)
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

MAX_SHOWN_REJECTIONS = 5


@app.command(
    epilog=examples(
        "peagle data prompts.jsonl.gz --out responses.jsonl",
        "peagle data prompts.jsonl.gz --out responses.jsonl --exclude-ids recipes/validation-ids.txt",
        "peagle data prompts.jsonl.gz --out responses.jsonl --temperature 0 --samples 4 --lead 64",
        "peagle data few.jsonl --out responses.jsonl --samples 100 --vary 16",
        "peagle data HuggingFaceH4/ultrachat_200k --split train_sft --limit 20000 --out responses.jsonl",
        "peagle data prompts.jsonl --out responses.jsonl -t TARGET --endpoint http://localhost:8000/v1",
    )
)
def data(
    prompts: Annotated[
        str, typer.Argument(help="Prompts: a .jsonl or .jsonl.gz file, a folder of them, or a Hugging Face dataset.")
    ],
    out: Annotated[Path, typer.Option(help="Response file; an existing one is resumed.", rich_help_panel=OUTPUT_PANEL)],
    target: TargetOption = DEFAULT_TARGET,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.", rich_help_panel=DATA_PANEL)] = "train",
    limit: Annotated[
        int | None, typer.Option(help="Use only the first N prompts.", show_default="all", rich_help_panel=DATA_PANEL)
    ] = None,
    exclude_ids: Annotated[
        Path | None,
        typer.Option(
            help="File of prompt ids to exclude, one per line: the validation set.",
            metavar="FILE",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja file with a chat template, instead of the target's.", metavar="FILE", rich_help_panel=DATA_PANEL
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue raw prompts without a chat template.", rich_help_panel=DATA_PANEL),
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING_PANEL)
    ] = ResponseSettings.temperature,
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling; 1 disables it.", rich_help_panel=SAMPLING_PANEL)
    ] = ResponseSettings.top_p,
    top_k: Annotated[
        int, typer.Option(help="Top-k sampling; 0 disables it.", rich_help_panel=SAMPLING_PANEL)
    ] = ResponseSettings.top_k,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per response.", rich_help_panel=SAMPLING_PANEL)
    ] = ResponseSettings.max_tokens,
    samples: Annotated[
        int, typer.Option(help="Responses per prompt.", rich_help_panel=SAMPLING_PANEL)
    ] = ResponseSettings.samples,
    seed: Annotated[int, typer.Option(help="Seed of the responses.", rich_help_panel=SAMPLING_PANEL)] = (
        ResponseSettings.seed
    ),
    lead: Lead = ResponseSettings.lead,
    vary: Vary = ResponseSettings.vary,
    loop_tokens: Annotated[
        int,
        typer.Option(help="Tokens kept behind the start of a loop; the rest is cut.", rich_help_panel=SAMPLING_PANEL),
    ] = ResponseSettings.loop_tokens,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible server that generates, instead of the embedded engine.",
            metavar="URL",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name on the server.",
            show_default="its only model",
            metavar="NAME",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Concurrent requests to the server.", rich_help_panel=SERVER_PANEL)
    ] = EndpointSettings.concurrency,
    timeout: Annotated[
        float, typer.Option(help="Seconds before a request is retried.", rich_help_panel=SERVER_PANEL)
    ] = EndpointSettings.timeout_s,
    retries: Annotated[
        int, typer.Option(help="Retries per request.", rich_help_panel=SERVER_PANEL)
    ] = EndpointSettings.retries,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Maximum concurrent responses.", show_default="by device", rich_help_panel=ENGINE_PANEL),
    ] = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of GPU memory to use.", rich_help_panel=ENGINE_PANEL)
    ] = ResponseEngineSettings.gpu_memory_utilization,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(help="Size of the KV cache, instead of that fraction.", rich_help_panel=ENGINE_PANEL),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Generate the target's responses to prompts: the training data of a drafter.

    A row is {"prompt": ...}, {"turns": [...]} or {"messages": [...]}; assistant messages in it are replaced by the
    target's own. The same command resumes a stopped run; more --samples or a higher --limit add rows.
    """
    settings = ResponseSettings(temperature, top_p, top_k, max_tokens, samples, seed, limit, lead, loop_tokens, vary)
    server = None
    if endpoint is not None:
        server = EndpointSettings(endpoint, model, concurrency, timeout, retries)
    elif model is not None:
        raise UserError(f"--model {model}: needs --endpoint URL; the embedded engine uses -t TARGET")
    engine = ResponseEngineSettings(
        None if device == "auto" else device,
        None if dtype == "auto" else dtype,
        max_num_seqs,
        max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )

    from peagle.data.run import write_responses

    summary = write_responses(
        prompts, out, target, settings, engine, server, chat_template, split, raw=raw, exclude_ids=exclude_ids
    )
    if summary.rejected:
        with open(f"{out}.rejected", encoding="utf-8") as file:
            for line, _ in zip(file, range(MAX_SHOWN_REJECTIONS), strict=False):
                row = json.loads(line)
                detail = f" ({row['detail']})" if row["detail"] else ""
                print(f"rejected: {row['where']}: {row['reason']}{detail}", file=sys.stderr)
    print(json.dumps(summary.as_json()) if as_json else summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.num_failed:
        raise typer.Exit(1)
