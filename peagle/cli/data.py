"""The verb `data`."""

from __future__ import annotations

import json
import sys
from functools import partial
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
data_option = partial(typer.Option, rich_help_panel=DATA_PANEL)
engine_option = partial(typer.Option, rich_help_panel=ENGINE_PANEL)
output_option = partial(typer.Option, rich_help_panel=OUTPUT_PANEL)
sampling_option = partial(typer.Option, rich_help_panel=SAMPLING_PANEL)
server_option = partial(typer.Option, rich_help_panel=SERVER_PANEL)


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
    out: Annotated[Path, output_option(help="Response file; an existing one is resumed.")],
    target: TargetOption = DEFAULT_TARGET,
    split: Annotated[str, data_option(help="Split of a Hugging Face dataset.")] = "train",
    limit: Annotated[int | None, data_option(help="Use only the first N prompts.", show_default="all")] = None,
    exclude_ids: Annotated[
        Path | None,
        data_option(help="File of prompt ids to exclude, one per line: the validation set.", metavar="FILE"),
    ] = None,
    chat_template: Annotated[
        Path | None, data_option(help="Jinja file with a chat template, instead of the target's.", metavar="FILE")
    ] = None,
    raw: Annotated[bool, data_option("--raw", help="Continue raw prompts without a chat template.")] = False,
    temperature: Annotated[
        float, sampling_option(help="Sampling temperature; 0 is greedy.")
    ] = ResponseSettings.temperature,
    top_p: Annotated[float, sampling_option(help="Nucleus sampling; 1 disables it.")] = ResponseSettings.top_p,
    top_k: Annotated[int, sampling_option(help="Top-k sampling; 0 disables it.")] = ResponseSettings.top_k,
    max_tokens: Annotated[int, sampling_option(help="Maximum tokens per response.")] = ResponseSettings.max_tokens,
    samples: Annotated[int, sampling_option(help="Responses per prompt.")] = ResponseSettings.samples,
    seed: Annotated[int, sampling_option(help="Seed of the responses.")] = ResponseSettings.seed,
    lead: Lead = ResponseSettings.lead,
    vary: Vary = ResponseSettings.vary,
    loop_tokens: Annotated[
        int, sampling_option(help="Tokens kept behind the start of a loop; the rest is cut.")
    ] = ResponseSettings.loop_tokens,
    endpoint: Annotated[
        str | None,
        server_option(help="OpenAI-compatible server that generates, instead of the embedded engine.", metavar="URL"),
    ] = None,
    model: Annotated[
        str | None, server_option(help="Model name on the server.", show_default="its only model", metavar="NAME")
    ] = None,
    concurrency: Annotated[
        int, server_option(help="Concurrent requests to the server.")
    ] = EndpointSettings.concurrency,
    timeout: Annotated[float, server_option(help="Seconds before a request is retried.")] = EndpointSettings.timeout_s,
    retries: Annotated[int, server_option(help="Retries per request.")] = EndpointSettings.retries,
    max_num_seqs: Annotated[
        int | None, engine_option(help="Maximum concurrent responses.", show_default="by device")
    ] = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: Annotated[
        float, engine_option(help="Fraction of GPU memory to use.")
    ] = ResponseEngineSettings.gpu_memory_utilization,
    kv_cache_memory_bytes: Annotated[
        int | None, engine_option(help="Size of the KV cache, instead of that fraction.")
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

    from peagle.data.responses import write_responses

    summary = write_responses(
        prompts, out, target, settings, engine, server, chat_template, split, raw=raw, exclude_ids=exclude_ids
    )
    if summary.rejected:
        with open(f"{out}.rejected", encoding="utf-8") as file:
            for line, _ in zip(file, range(MAX_SHOWN_REJECTIONS), strict=False):
                row = json.loads(line)
                detail = f" ({row['detail']})" if row["detail"] else ""
                print(f"rejected: {row['where']}: {row['reason']}{detail}", file=sys.stderr)
    print(json.dumps(vars(summary)) if as_json else summary.text())
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.num_failed:
        raise typer.Exit(1)
