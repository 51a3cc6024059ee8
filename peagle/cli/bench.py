"""`bench`: how fast is it under this load, with and without drafters, here or on a server.

Knows nothing about how it is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

import typer

from peagle.cli.app import TARGET_HELP, DeviceOption, DtypeOption, JsonOption, app, console, examples
from peagle.cli.several import MultiValueCommand, split_commas
from peagle.config import (
    BenchEngineSettings,
    BenchServerSettings,
    BenchSettings,
    SpeculationMethod,
    check_num_speculative_tokens,
)
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.bench.run import Outcome, Variant
    from peagle.bench.workload import Workload

SHOWN_WARNINGS = 12
N = TypeVar("N")


@app.command(
    cls=MultiValueCommand,
    epilog=examples(
        "peagle bench -d smollm2-135m-p-eagle -k 3 7 --prompts mt_bench.jsonl --concurrency 1 8",
        "peagle bench TARGET -d P_EAGLE EAGLE3 -k 3 7 auto --prompts chats.jsonl.gz --concurrency 1 8 64 --out a.json",
        "peagle bench --url http://localhost:8000 --prompts chats.jsonl --concurrency 1 8 --rate 2 4 --out vllm.json",
        "peagle bench --url http://localhost:8000 --method p-eagle -k 7 --prompts chats.jsonl --out vllm.json",
        "peagle bench --url http://localhost:8000 --random-input 256 --random-output 128 --concurrency 64",
        "peagle bench TARGET -d P_EAGLE EAGLE3 -k 3 7 --engine vllm --prompts chats.jsonl.gz --out a.json",
    ),
)
def bench(
    target: Annotated[str | None, typer.Argument(help=TARGET_HELP, show_default=DEFAULT_TARGET)] = None,
    same_target: Annotated[
        str | None, typer.Option("--target", "-t", help="The same, as other commands have it.", metavar="T")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Drafters' folders, hub ids or names.", metavar="D ..")
    ] = None,
    draft_tokens: Annotated[
        list[str] | None,
        typer.Option("-k", "--draft-tokens", help="Draft tokens a round; auto follows the load.", metavar="K .."),
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Measure the target without a drafter too.")] = True,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(help="Closed loop: so many requests at once.", metavar="C ..", show_default="1 8"),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Open loop: so many requests a second arrive, as a Poisson process.", metavar="R .."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSONL files (.gz) with prompt, turns or messages, or sets by name.", metavar="FILE .."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="embedded, or vllm: stock vLLM in this process.", metavar="WHO")
    ] = "embedded",
    random_input: Annotated[
        int | None, typer.Option(help="Instead: prompts of so many random tokens, answers of fixed length.")
    ] = None,
    random_output: Annotated[
        int | None, typer.Option(help="Tokens of those answers; --max-tokens says it too.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Of a repeat.", show_default="32, or twice the largest concurrency")
    ] = None,
    waves: Annotated[
        int | None,
        typer.Option(help="Of those, a load asks so many times its concurrency, 32 at least.", show_default="all"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = BenchSettings.max_tokens,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = BenchSettings.temperature,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without a chat template.")] = False,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out rows that make no sense.")] = False,
    repeats: Annotated[
        int, typer.Option(help="Of every load; their spread gives the intervals.")
    ] = BenchSettings.repeats,
    warmup: Annotated[
        int | None, typer.Option(help="Requests before each load.", show_default="as many as run at once")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, random prompts and sampling.")] = BenchSettings.seed,
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server, instead of the embedded engine.", metavar="URL")
    ] = None,
    model: Annotated[str | None, typer.Option(help="What the server calls it.", show_default="the one it has")] = None,
    method: Annotated[
        str | None, typer.Option(help="What the server drafts with: none, eagle3 or p-eagle; -k says how many.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Name of the server's rows.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Counts tokens where the server does not; a folder or hub id.", metavar="T")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of one request, to a server.")] = BenchServerSettings.total_s,
    stall_timeout: Annotated[float, typer.Option(help="Seconds without a byte.")] = BenchServerSettings.stall_s,
    connect_timeout: Annotated[float, typer.Option(help="Seconds until a connection.")] = BenchServerSettings.connect_s,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="The most requests the engine runs at once.", show_default="by the load")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together.", show_default="by the prompts")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the GPU's memory; less leaves room for others.")
    ] = BenchEngineSettings.gpu_memory_utilization,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Of the key-value cache, instead of that share.")
    ] = None,
    cost_table: Annotated[
        str | None, typer.Option(help="Of `peagle tune`, for -k auto.", metavar="FILE", show_default="measured")
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Let the engine remember prompts; every repeat asks the same ones.")
    ] = BenchEngineSettings.enable_prefix_caching,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Results; what it has already is not measured again.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure speed under load: tokens a second, time to the first token, between tokens, end to end.

    Without --url the embedded engine runs here, or stock vLLM with --engine vllm: without a drafter, then with every
    drafter and K. With it, any server that speaks OpenAI's protocol. Requests that fail are counted by name; exit
    status 1 says that there were some. Ctrl-C keeps what is done in --out, and the same command goes on. Rows are
    comparable only if they had the same prompts and lengths: in one run, or added to one file.
    """
    if random_output is not None and random_input is None:
        raise UserError(f"--random-output {random_output}: goes with --random-input N; else --max-tokens --ignore-eos")
    settings = BenchSettings(
        concurrency=tuple(_number("--concurrency", c, int, "whole numbers") for c in split_commas(concurrency)),
        rates=tuple(_number("--rate", r, float, "numbers") for r in split_commas(rate)),
        requests=requests,
        waves=waves,
        repeats=repeats,
        warmup=warmup,
        max_tokens=random_output if random_output is not None else max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        random_input=random_input,
        raw=raw,
        seed=seed,
    )
    if target is not None and same_target is not None:
        raise UserError(f"--target {same_target}: {target} is named already; give one of them")
    target = target or same_target
    drafts = [_draft_tokens(k) for k in split_commas(draft_tokens)]
    named = split_commas(prompts)
    if url is not None:
        _nothing_embedded(target, drafter)
        server = BenchServerSettings(url, model, connect_timeout, stall_timeout, timeout)
        variants, workload, fixed = _server(
            server, _method(method), drafts, label, tokenizer, named, settings, skip_bad_rows
        )
    else:
        for flag, value in (("--model", model), ("--method", method), ("--label", label), ("--tokenizer", tokenizer)):
            if value is not None:
                raise UserError(f"{flag} {value}: is about a server; give --url, or leave it out")
        if drafts and not drafter:
            raise UserError("-k: needs a --drafter")
        from peagle.bench.variants import Embedded

        own = BenchEngineSettings(
            None if device == "auto" else device,
            None if dtype == "auto" else dtype,
            max_num_seqs,
            max_model_len,
            gpu_memory_utilization,
            kv_cache_memory_bytes,
            cost_table,
            enable_prefix_caching,
        )
        here = Embedded(target or DEFAULT_TARGET, split_commas(drafter), drafts or ["auto"], baseline, own, engine)
        workload = here.workload(named, settings, skip_bad_rows)
        variants, fixed = here.variants(workload, settings), here.fixed
    _tell(_run(variants, workload, settings, out, fixed), out, as_json)


def _server(
    server: BenchServerSettings,
    method: SpeculationMethod,
    drafts: list[int | Literal["auto"]],
    label: str | None,
    tokenizer: str | None,
    prompts: list[str],
    settings: BenchSettings,
    skip_bad_rows: bool,
) -> tuple[list[Variant], Workload, dict[str, object]]:
    from peagle.bench.server import Stated
    from peagle.bench.variants import Server

    if len(drafts) > 1 or "auto" in drafts:
        raise UserError("-k: a server drafts one number of tokens a round; give that one")
    k = drafts[0] if drafts else None
    assert k != "auto"
    asked = Server(server, Stated(method, k), label, tokenizer)
    return asked.variants(), asked.workload(prompts, settings, skip_bad_rows), {}


def _run(
    variants: list[Variant], workload: Workload, settings: BenchSettings, out: Path | None, fixed: dict[str, object]
) -> Outcome:
    from peagle.bench.run import bench as run
    from peagle.bench.view import Progress

    progress = Progress()
    try:
        return run(variants, workload, settings, progress, out, fixed)
    finally:
        progress.close()


def _tell(outcome: Outcome, out: Path | None, as_json: bool) -> None:
    from peagle.bench.view import WIDTH, tables
    from peagle.results.files import to_json

    results = outcome.results
    if as_json:
        print(json.dumps(to_json(results)))
    elif results.rows:
        screen = console()
        if not screen.is_terminal:
            screen.width = max(screen.width, WIDTH)
        screen.print(*tables(results.rows))
    for warning in results.warnings[:SHOWN_WARNINGS]:
        print(f"warning: {warning}", file=sys.stderr)
    if len(results.warnings) > SHOWN_WARNINGS:
        print(f"warning: and {len(results.warnings) - SHOWN_WARNINGS} more, in --out and --json", file=sys.stderr)
    again = f"the same command goes on with {out}" if out is not None else "with --out FILE it could be gone on with"
    if out is not None and not as_json:
        print(f"wrote {out}", file=sys.stderr)
    if outcome.interrupted:
        print(f"interrupted; {again}", file=sys.stderr)
        raise typer.Exit(130)
    if outcome.given_up is not None:
        print(f"gave up at {outcome.given_up}: request after request failed; {again}", file=sys.stderr)
        raise typer.Exit(1)
    if any(repeat.failed for row in results.rows for repeat in row.repeats):
        raise typer.Exit(1)


def _nothing_embedded(target: str | None, drafter: list[str] | None) -> None:
    for flag, value in (("TARGET", target), ("--drafter", " ".join(drafter or ()) or None)):
        if value is not None:
            raise UserError(f"{flag} {value}: a server has its own; with --url say --method and -k what it runs")


def _method(given: str | None) -> SpeculationMethod:
    if given is None:
        return "none"
    if given not in get_args(SpeculationMethod):
        raise UserError(f"--method {given}: must be {', '.join(get_args(SpeculationMethod))}")
    return given  # type: ignore[return-value]


def _number(flag: str, given: str, kind: Callable[[str], N], want: str) -> N:
    try:
        return kind(given)
    except ValueError:
        raise UserError(f"{flag} {given}: must be {want}") from None


def _draft_tokens(given: str) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    try:
        return check_num_speculative_tokens(int(given))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"-k {given}: must be numbers of draft tokens, or auto") from None
