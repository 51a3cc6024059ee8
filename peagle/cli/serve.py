"""`peagle serve`: OpenAI's API with the embedded engine, or with vLLM."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from peagle.cli.app import (
    ENGINE_PANEL,
    MODEL_PANEL,
    SERVER_PANEL,
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
    ToolCallParserName,
    check_num_speculative_tokens,
)
from peagle.errors import UserError
from peagle.hub.resolve import BUILT_IN_TARGETS, DEFAULT_TARGET, resolve_drafter, resolve_target

API_KEY_VARIABLE = "PEAGLE_API_KEY"
DEFAULTS = ServeSettings()
SPECULATIVE_FLAG = "--speculative-config"


@dataclass(frozen=True)
class DrafterChoice:
    """The drafter of a server: its name, K, and whether --speculative-config calls it parallel (None: not given)."""

    name: str | None
    num_speculative_tokens: int | Literal["auto"]
    parallel_drafting: bool | None = None

    def check_method(self, config: DrafterConfig) -> None:
        if self.parallel_drafting is None or self.parallel_drafting == config.parallel:
            return
        method, value = ("P-EAGLE", "true") if config.parallel else ("EAGLE-3", "false, or be omitted")
        raise UserError(
            f"{SPECULATIVE_FLAG}: parallel_drafting: {self.name} is an {method} drafter, so it must be {value}"
        )


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
    num_speculative_tokens: NumSpeculativeTokensOrAuto = "auto",
    speculative_config: Annotated[
        str | None,
        typer.Option(help="Drafter and K in vLLM's format.", metavar="JSON", rich_help_panel=MODEL_PANEL),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(help="Format of tool calls: auto, hermes, llama3, mistral or none.", rich_help_panel=MODEL_PANEL),
    ] = DEFAULTS.tool_call_parser,
    engine: Annotated[
        str,
        typer.Option(help="embedded, or vllm to run and supervise `vllm serve`.", rich_help_panel=ENGINE_PANEL),
    ] = "embedded",
    vllm_command: Annotated[
        str | None,
        typer.Option(
            help="Command that starts vLLM's server.",
            metavar="COMMAND",
            show_default="vllm serve",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of running requests.",
            show_default=f"{GPU_MAX_NUM_SEQS} on a GPU, {CPU_MAX_NUM_SEQS} on a CPU",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of the GPU's memory for weights and KV cache.",
            show_default=str(GPU_MEMORY_UTILIZATION),
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of the KV cache.", show_default="free memory", rich_help_panel=ENGINE_PANEL),
    ] = None,
    cost_table: Annotated[
        Path | None,
        typer.Option(help="Cost table of `peagle tune` for -k auto.", metavar="FILE", rich_help_panel=ENGINE_PANEL),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; 0.0.0.0 accepts remote clients.", rich_help_panel=SERVER_PANEL)
    ] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.", rich_help_panel=SERVER_PANEL)] = DEFAULTS.port,
    served_model_name: ServedModelName = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send; prefer the environment variable.",
            envvar=API_KEY_VARIABLE,
            show_default=False,
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call the API; repeatable.", metavar="URL", rich_help_panel=SERVER_PANEL
        ),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Maximum number of waiting requests; more get 429.", rich_help_panel=SERVER_PANEL)
    ] = DEFAULTS.max_queued_requests,
    max_body_bytes: Annotated[
        int, typer.Option(help="Maximum size of a request; larger ones get 413.", rich_help_panel=SERVER_PANEL)
    ] = DEFAULTS.max_body_bytes,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds until a request gets 503.", rich_help_panel=SERVER_PANEL)
    ] = DEFAULTS.request_timeout_s,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds for running requests after SIGTERM.", rich_help_panel=SERVER_PANEL)
    ] = DEFAULTS.shutdown_timeout_s,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.", rich_help_panel=SERVER_PANEL)] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log prompts, too.", rich_help_panel=SERVER_PANEL)
    ] = False,
) -> None:
    """Serve a model over OpenAI's API, with speculative decoding if there is a drafter; the playground is at /."""
    if engine not in get_args(ServeEngine):
        raise UserError(f"--engine {engine}: must be {' or '.join(get_args(ServeEngine))}")
    settings = ServeSettings(
        host=host,
        port=port,
        served_model_name=served_model_name or target,
        api_key=api_key or None,
        cors_origins=tuple(cors_origin or ()),
        max_queued_requests=max_queued_requests,
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        shutdown_timeout_s=shutdown_timeout,
        log_json=log_json,
        log_prompts=log_prompts,
        tool_call_parser=tool_call_parser,  # type: ignore[arg-type]  # checked by ServeSettings
    )
    choice = DrafterChoice(drafter, parse_num_speculative_tokens(num_speculative_tokens))
    if speculative_config is not None:
        if drafter is not None or choice.num_speculative_tokens != "auto":
            raise UserError(f"{SPECULATIVE_FLAG}: names the drafter and K already; omit --drafter and -k")
        choice = parse_speculative_config(speculative_config)
    if choice.name is None and choice.num_speculative_tokens != "auto":
        raise UserError(f"-k {choice.num_speculative_tokens}: needs a --drafter")
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "cost_table": cost_table,
        "dtype": None if dtype == "auto" else dtype,
        "device": None if device == "auto" else device,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if engine == "vllm":
        sys.exit(_serve_vllm(target, choice, settings, options, vllm_command))
    if vllm_command is not None:
        raise UserError("--vllm-command: only with --engine vllm")
    _serve_embedded(target, choice, settings, options)


def parse_speculative_config(text: str) -> DrafterChoice:
    """Parses vLLM's JSON. Keys that the embedded engine does not support are refused by name."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{SPECULATIVE_FLAG}: is not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{SPECULATIVE_FLAG}: must be a JSON object")
    supported = {"method", "model", "num_speculative_tokens", "parallel_drafting"}
    if unknown := sorted(values.keys() - supported):
        supported_keys = ", ".join(sorted(supported))
        raise UserError(f"{SPECULATIVE_FLAG}: {unknown[0]} is not supported; supported: {supported_keys}")
    if values.get("method", "eagle3") != "eagle3":
        raise UserError(f"{SPECULATIVE_FLAG}: method {values['method']!r} must be eagle3, for P-EAGLE and EAGLE-3")
    drafter, k = values.get("model"), values.get("num_speculative_tokens")
    if not isinstance(drafter, str) or not drafter:
        raise UserError(f"{SPECULATIVE_FLAG}: model must name the drafter")
    if type(k) is not int:
        raise UserError(f"{SPECULATIVE_FLAG}: num_speculative_tokens must be a whole number")
    parallel = values.get("parallel_drafting")
    if parallel is not None and type(parallel) is not bool:
        raise UserError(f"{SPECULATIVE_FLAG}: parallel_drafting must be true or false")
    return DrafterChoice(drafter, check_num_speculative_tokens(k), parallel)


def _serve_embedded(target: str, choice: DrafterChoice, settings: ServeSettings, options: dict[str, Any]) -> None:
    from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
    from peagle.checkpoints.target import has_tokenizer, read_target_config

    # Check everything that does not need the weights before loading them.
    target_folder = resolve_target(target)
    drafter_folder = resolve_drafter(choice.name) if choice.name is not None else None
    cfg = read_target_config(target_folder)
    if not has_tokenizer(target_folder):
        raise UserError(f"{target}: has no tokenizer, which the API needs")
    if drafter_folder is not None:
        drafter_cfg = read_drafter_config(drafter_folder, cfg)
        check_drafter_fits(drafter_cfg, cfg, drafter_folder)
        choice.check_method(drafter_cfg)
    try:
        from peagle.server.engine_client import EngineClient, start_engine_process
        from peagle.server.logs import start_logging
        from peagle.server.server import bind_socket, run_server
    except ModuleNotFoundError as error:
        raise UserError(f"peagle serve needs {error.name}: pip install 'peagle[serve]'") from None
    from peagle.engine.llm import LLM

    listener = bind_socket(settings.host, settings.port)
    start_logging(settings.log_json)

    build_llm = partial(LLM, target_folder, drafter_folder, choice.num_speculative_tokens, **options)
    start_engine = partial(start_engine_process, build_llm, settings.log_json)
    k = choice.num_speculative_tokens if choice.name is not None else None
    run_server(lambda: EngineClient(start_engine, settings), settings, choice.name, k, listener)


def _serve_vllm(
    target: str,
    choice: DrafterChoice,
    settings: ServeSettings,
    options: dict[str, Any],
    vllm_command: str | None,
) -> int:
    from peagle.server import vllm_process
    from peagle.server.logs import start_logging

    for name in ("kv_cache_memory_bytes", "cost_table", "device"):
        if name in options:
            raise UserError(f"--{name.replace('_', '-')}: not with --engine vllm")
    base_command = vllm_process.find_vllm(vllm_command or vllm_process.DEFAULT_COMMAND)
    vllm_config = None
    if choice.name is not None:
        from peagle.checkpoints.drafter import read_drafter_config
        from peagle.checkpoints.validate import build_speculative_config, vllm_model_name

        folder = resolve_drafter(choice.name)
        drafter_cfg = read_drafter_config(folder, None)
        choice.check_method(drafter_cfg)
        k = None if choice.num_speculative_tokens == "auto" else choice.num_speculative_tokens
        vllm_config = build_speculative_config(vllm_model_name(choice.name, folder), k, drafter_cfg.parallel)
    # vLLM takes folders and Hugging Face ids, but not our built-in names.
    model = str(resolve_target(target)) if target in BUILT_IN_TARGETS else target
    command = vllm_process.build_vllm_command(base_command, model, settings, speculative_config=vllm_config, **options)
    start_logging(settings.log_json)
    if settings.tool_call_parser == "auto" and not vllm_process.has_parser_flags(base_command):
        command += vllm_process.build_parser_flags(_detect_tool_call_parser(model))
    environment = vllm_process.build_vllm_environment(settings, dict(os.environ))
    return vllm_process.supervise(command, environment, (settings.host, settings.port))


def _detect_tool_call_parser(target: str) -> ToolCallParserName:
    """Finds the parser in the target's chat template, which vLLM does not do. Warns if there is none."""
    from peagle.checkpoints.target import load_tokenizer
    from peagle.deploy.models import resolve_deployed_target
    from peagle.server.logs import log_event
    from peagle.server.tool_calls import detect_parser

    try:
        folder = resolve_deployed_target(target, unchecked=False).folder
        assert folder is not None
        template = str(load_tokenizer(folder).chat_template or "")
    except UserError as error:
        reason = str(error)
    else:
        parser = detect_parser(template)
        if parser != "none" or "tools" not in template:
            return parser
        reason = "its chat template teaches an unknown format"
    log_event("tool calls stay text; set --tool-call-parser to parse them", level="warning", reason=reason)
    return "none"
