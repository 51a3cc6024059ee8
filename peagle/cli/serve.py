"""`serve`: OpenAI's API over the embedded engine, or over vLLM.

Knows nothing about how requests are answered.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from peagle.cli.app import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxModelLen,
    NumSpeculativeTokensOrAuto,
    ServedModelName,
    TargetArgument,
    app,
    examples,
    parse_num_speculative_tokens,
)
from peagle.config import (
    CPU_MAX_NUM_SEQS,
    GPU_MAX_NUM_SEQS,
    GPU_MEMORY_UTILIZATION,
    DrafterConfig,
    ServeEngine,
    ServeSettings,
    ToolParser,
    check_num_speculative_tokens,
)
from peagle.errors import UserError
from peagle.hub.resolve import BUILT_IN_TARGETS, DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

KEY_VARIABLE = "PEAGLE_API_KEY"
USUAL = ServeSettings()
Drafts = int | Literal["auto"]


@dataclass(frozen=True)
class Speculative:
    """What `--speculative-config` says."""

    drafter: str
    draft_tokens: int
    parallel: bool | None = None  # None: not said


@app.command(
    epilog=examples(
        "peagle serve",
        "peagle serve -d smollm2-135m-p-eagle",
        "PEAGLE_API_KEY=... peagle serve TARGET -d DRAFTER -k 7 --host 0.0.0.0 --port 8000 --log-json",
        "peagle serve TARGET -d DRAFTER --engine vllm",
    )
)
def serve(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    draft_tokens: NumSpeculativeTokensOrAuto = "auto",
    speculative_config: Annotated[
        str | None, typer.Option(help="Drafter and K as vLLM writes them.", metavar="JSON")
    ] = None,
    engine: Annotated[str, typer.Option(help="embedded, or vllm: its own server, kept running.")] = "embedded",
    vllm_command: Annotated[
        str | None, typer.Option(help="What starts vLLM's server.", metavar="WORDS", show_default="vllm serve")
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets others in.")] = USUAL.host,
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = USUAL.port,
    served_model_name: ServedModelName = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Clients must send it; better given by the variable.", envvar=KEY_VARIABLE, show_default=False
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Pages of this origin may use it; may be given again.", metavar="URL")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = USUAL.max_queue,
    max_body: Annotated[int, typer.Option(help="Bytes of a request; more get 413.")] = USUAL.max_body,
    deadline: Annotated[float, typer.Option(help="Seconds a request may take; then 503.")] = USUAL.deadline_s,
    drain_seconds: Annotated[float, typer.Option(help="For what is under way at SIGTERM.")] = USUAL.drain_s,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Requests at once.", show_default=f"{GPU_MAX_NUM_SEQS} on a GPU, {CPU_MAX_NUM_SEQS} on a CPU"
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Of the whole GPU, weights included.", show_default=str(GPU_MEMORY_UTILIZATION))
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Bytes of the cache.", show_default="what is free")
    ] = None,
    cost_table: Annotated[
        Path | None, typer.Option(help="Written by `peagle tune`; -k auto goes by it.", metavar="FILE")
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes calls of tools: hermes, llama3, mistral or none.")
    ] = USUAL.tool_parser,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what is asked, too.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, with a drafter's help if one is named; and a page to try it at /."""
    if engine not in get_args(ServeEngine):
        raise UserError(f"--engine {engine}: must be {' or '.join(get_args(ServeEngine))}")
    settings = ServeSettings(
        host=host,
        port=port,
        model=served_model_name or target,
        api_key=api_key or None,
        cors_origins=tuple(cors_origin or ()),
        max_queue=max_queue,
        max_body=max_body,
        deadline_s=deadline,
        drain_s=drain_seconds,
        log_json=log_json,
        log_prompts=log_prompts,
        tool_parser=tool_parser,  # type: ignore[arg-type]  # it is looked at there
    )
    drafts = parse_num_speculative_tokens(draft_tokens)
    stated = parse_speculative(speculative_config) if speculative_config is not None else None
    if stated is not None:
        if drafter is not None or drafts != "auto":
            raise UserError("--speculative-config: says the drafter and K already; leave --drafter and -k away")
        drafter, drafts = stated.drafter, stated.draft_tokens
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "cost_table": cost_table,
        "dtype": None if dtype == "auto" else dtype,
        "device": None if device == "auto" else device,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if engine == "vllm":
        sys.exit(_vllm(target, drafter, drafts, stated, settings, given, vllm_command))
    if vllm_command is not None:
        raise UserError("--vllm-command: only with --engine vllm")
    _embedded(target, drafter, drafts, stated, settings, given)


def parse_speculative(text: str) -> Speculative:
    """vLLM's JSON, as far as this engine can do it; the rest is refused by its name."""
    asked = "--speculative-config"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{asked}: is not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{asked}: must be a JSON object")
    known = {"method", "model", "num_speculative_tokens", "parallel_drafting"}
    if unknown := sorted(values.keys() - known):
        raise UserError(f"{asked}: {unknown[0]} is not supported; supported: {', '.join(sorted(known))}")
    if values.get("method", "eagle3") != "eagle3":
        raise UserError(f"{asked}: method {values['method']!r} is not supported; P-EAGLE and EAGLE-3 are eagle3")
    drafter, k = values.get("model"), values.get("num_speculative_tokens")
    if not isinstance(drafter, str) or not drafter:
        raise UserError(f"{asked}: model must name the drafter")
    if type(k) is not int:
        raise UserError(f"{asked}: num_speculative_tokens must be a whole number")
    parallel = values.get("parallel_drafting")
    if parallel is not None and type(parallel) is not bool:
        raise UserError(f"{asked}: parallel_drafting must be true or false")
    return Speculative(drafter, check_num_speculative_tokens(k), parallel)


def _check_kind(stated: Speculative | None, drafter: DrafterConfig) -> None:
    if stated is None or stated.parallel is None or stated.parallel == drafter.parallel:
        return
    made = "for parallel drafting" if drafter.parallel else "to draft one token after another"
    right = "true" if drafter.parallel else "false, or left away"
    raise UserError(
        f"--speculative-config: parallel_drafting: {stated.drafter} was trained {made}, so it must be {right}"
    )


def _embedded(
    target: str,
    drafter: str | None,
    drafts: Drafts,
    stated: Speculative | None,
    settings: ServeSettings,
    options: dict[str, Any],
) -> None:
    from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
    from peagle.checkpoints.target import has_tokenizer, read_target_config

    # everything that can be wrong without the weights is found before they are read
    target_folder = resolve_target(target)
    drafter_folder = resolve_drafter(drafter) if drafter is not None else None
    cfg = read_target_config(target_folder)
    if not has_tokenizer(target_folder):
        raise UserError(f"{target}: has no tokenizer, so it cannot be asked in text")
    if drafter_folder is None and drafts != "auto":
        raise UserError(f"-k {drafts}: needs a --drafter")
    if drafter_folder is not None:
        draft_cfg = read_drafter_config(drafter_folder, cfg)
        check_drafter_fits(draft_cfg, cfg, drafter_folder)
        _check_kind(stated, draft_cfg)
    try:
        from peagle.server.logs import start_logging
        from peagle.server.loop import EngineLoop
        from peagle.server.server import listen, run
    except ModuleNotFoundError as error:
        raise UserError(f"peagle serve needs {error.name}: pip install 'peagle[serve]'") from None
    from peagle.engine.llm import LLM

    listener = listen(settings.host, settings.port)
    start_logging(settings.log_json)

    def make_llm() -> LLM:
        return LLM(target_folder, drafter_folder, drafts, **options)

    about = {"drafter": drafter, "k": drafts if drafter is not None else None}
    run(lambda: EngineLoop(make_llm, settings), settings, about, listener)


def _vllm(
    target: str,
    drafter: str | None,
    drafts: Drafts,
    stated: Speculative | None,
    settings: ServeSettings,
    options: dict[str, Any],
    words: str | None,
) -> int:
    import os

    from peagle.server.logs import start_logging
    from peagle.server.vllm import (
        VLLM,
        VllmOptions,
        find_vllm,
        has_tool_words,
        supervise,
        tool_words,
        vllm_command,
        vllm_environment,
    )

    for name in ("kv_cache_memory_bytes", "cost_table", "device"):
        if name in options:
            raise UserError(f"--{name.replace('_', '-')}: not with --engine vllm")
    if drafter is None and drafts != "auto":
        raise UserError(f"-k {drafts}: needs a --drafter")
    found = find_vllm(words if words is not None else VLLM)
    speculative = None
    if drafter is not None:
        from peagle.checkpoints.drafter import read_drafter_config
        from peagle.checkpoints.validate import build_speculative_config, vllm_model_name

        folder = resolve_drafter(drafter)
        draft_cfg = read_drafter_config(folder, None)
        _check_kind(stated, draft_cfg)
        k = None if drafts == "auto" else drafts
        speculative = build_speculative_config(vllm_model_name(drafter, folder), k, draft_cfg.parallel)
    # vLLM knows folders and hub ids; what is built in here is a folder to it
    model = str(resolve_target(target)) if target in BUILT_IN_TARGETS else target
    command = vllm_command(found, VllmOptions(model, speculative, **options), settings)
    start_logging(settings.log_json)
    if settings.tool_parser == "auto" and not has_tool_words(found):
        command += tool_words(_tool_parser(model))
    return supervise(command, vllm_environment(settings, dict(os.environ)), (settings.host, settings.port))


def _tool_parser(target: str) -> ToolParser:
    """What `auto` is by the target's chat template, which vLLM does not look into; of a hub id it is fetched alone.
    Where none is found that is told, and no error: not everyone who serves a model has tools."""
    from peagle.checkpoints.target import load_tokenizer
    from peagle.deploy.models import resolve_deployed_target
    from peagle.server.logs import log
    from peagle.server.tools import parser_of

    try:
        folder = resolve_deployed_target(target, unchecked=False).folder
        assert folder is not None
        template = str(load_tokenizer(folder).chat_template or "")
    except UserError as error:
        why = str(error)
    else:
        parser = parser_of(template)
        if parser != "none" or "tools" not in template:
            return parser
        why = "its chat template teaches a form that is not known here"
    log("calls of tools stay text unless --tool-parser names their form", level="warning", why=why)
    return "none"
