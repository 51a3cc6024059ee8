"""The verbs `serve`, OpenAI's API with the embedded engine or vLLM, and `deploy`: vLLM elsewhere, and on SageMaker."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from peagle.cli.app import DRAFTER, REQUIRED_DRAFTER, TargetArgument, app, verb
from peagle.config import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    EAGLE3_NUM_SPECULATIVE_TOKENS,
    DeploySettings,
    EngineSettings,
    SagemakerSettings,
    ServeEngine,
    ServeSettings,
    ToolCallParserName,
    check_num_speculative_tokens,
)
from peagle.config.engine import k_option
from peagle.config.options import option
from peagle.errors import UserError
from peagle.hub.resolve import BUILT_IN_TARGETS, DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from peagle.deploy.checks import DeployFinding

SPECULATIVE_FLAG = "--speculative-config"
SPECULATIVE_KEYS = {"method": str, "model": str, "num_speculative_tokens": int, "parallel_drafting": bool}


@verb(
    "peagle serve",
    "peagle serve -d smollm2-135m-p-eagle",
    "PEAGLE_API_KEY=... peagle serve TARGET -d DRAFTER -k 7 --host 0.0.0.0 --port 8000 --log-json",
    "peagle serve TARGET -d DRAFTER --engine vllm",
)
def serve(
    settings: ServeSettings,
    engine_settings: EngineSettings,
    target: TargetArgument = DEFAULT_TARGET,
    drafter: str | None = DRAFTER,
    speculative_config: str | None = option(None, "Drafter and K in vLLM's format.", metavar="JSON"),
    engine: ServeEngine = option("embedded", "embedded, or vllm to run and supervise `vllm serve`.", panel="Engine"),
    vllm_command: str | None = option(
        None, "Command that starts vLLM's server.", metavar="COMMAND", show_default="vllm serve"
    ),
) -> None:
    """Serve a model over OpenAI's API, with speculative decoding if there is a drafter; the playground is at /."""
    from peagle.checkpoints.drafter import read_drafter_config

    settings = replace(settings, served_model_name=settings.served_model_name or target)
    k = engine_settings.num_speculative_tokens
    if speculative_config is not None:
        if drafter is not None or k != "auto":
            raise UserError(f"{SPECULATIVE_FLAG}: names the drafter and K already; omit --drafter and -k")
        drafter, k, parallel = parse_speculative_config(speculative_config)
        if parallel is not None and parallel != read_drafter_config(resolve_drafter(drafter), None).parallel:
            method, value = ("P-EAGLE", "true") if not parallel else ("EAGLE-3", "false, or be omitted")
            fact = f"{drafter} is an {method} drafter, so it must be {value}"
            raise UserError(f"{SPECULATIVE_FLAG}: parallel_drafting: {fact}")
        engine_settings = replace(engine_settings, num_speculative_tokens=k)
    if drafter is None and k != "auto":
        raise UserError(f"-k {k}: needs a --drafter")
    if engine == "vllm":
        sys.exit(_serve_vllm(target, drafter, settings, engine_settings, vllm_command))
    if vllm_command is not None:
        raise UserError("--vllm-command: only with --engine vllm")
    _serve_embedded(target, drafter, settings, engine_settings)


def parse_speculative_config(text: str) -> tuple[str, int, bool | None]:
    """Parses vLLM's JSON to the drafter, K and `parallel_drafting` (None: not given). Other keys are refused."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{SPECULATIVE_FLAG}: is not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{SPECULATIVE_FLAG}: must be a JSON object")
    for key, value in values.items():
        if key not in SPECULATIVE_KEYS:
            raise UserError(f"{SPECULATIVE_FLAG}: {key} is not supported; supported: {', '.join(SPECULATIVE_KEYS)}")
        if type(value) is not SPECULATIVE_KEYS[key]:
            raise UserError(f"{SPECULATIVE_FLAG}: {key} {value!r} must be of type {SPECULATIVE_KEYS[key].__name__}")
    if values.get("method", "eagle3") != "eagle3":
        raise UserError(f"{SPECULATIVE_FLAG}: method {values['method']!r} must be eagle3, for P-EAGLE and EAGLE-3")
    if not values.get("model") or "num_speculative_tokens" not in values:
        raise UserError(f"{SPECULATIVE_FLAG}: needs model, the drafter, and num_speculative_tokens")
    k = check_num_speculative_tokens(values["num_speculative_tokens"])
    return values["model"], k, values.get("parallel_drafting")


def _serve_embedded(target: str, drafter: str | None, settings: ServeSettings, engine_settings: EngineSettings) -> None:
    from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
    from peagle.checkpoints.target import has_tokenizer, read_target_config

    # Check everything that does not need the weights before loading them.
    target_folder = resolve_target(target)
    drafter_folder = resolve_drafter(drafter) if drafter is not None else None
    cfg = read_target_config(target_folder)
    if not has_tokenizer(target_folder):
        raise UserError(f"{target}: has no tokenizer, which the API needs")
    if drafter_folder is not None:
        check_drafter_fits(read_drafter_config(drafter_folder, cfg), cfg, drafter_folder)
    try:
        from peagle.server.engine_client import EngineClient, start_engine_process
        from peagle.server.logs import start_logging
        from peagle.server.server import bind_socket, run_server
    except ModuleNotFoundError as error:
        raise UserError(f"peagle serve needs {error.name}: pip install 'peagle[serve]'") from None
    from peagle.engine.llm import LLM

    listener = bind_socket(settings.host, settings.port)
    start_logging(settings.log_json)

    build_llm = partial(LLM, target_folder, drafter_folder, **vars(engine_settings))
    start_engine = partial(start_engine_process, build_llm, settings.log_json)
    k = engine_settings.num_speculative_tokens if drafter is not None else None
    run_server(lambda: EngineClient(start_engine, settings), settings, drafter, k, listener, target_folder)


def _serve_vllm(
    target: str, drafter: str | None, settings: ServeSettings, engine_settings: EngineSettings, vllm_command: str | None
) -> int:
    from peagle.server import vllm_process
    from peagle.server.logs import start_logging

    for name in ("kv_cache_memory_bytes", "cost_table", "device"):
        if getattr(engine_settings, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: not with --engine vllm")
    base_command = vllm_process.find_vllm(vllm_command or vllm_process.DEFAULT_COMMAND)
    vllm_config = None
    if drafter is not None:
        from peagle.checkpoints.drafter import read_drafter_config
        from peagle.checkpoints.validate import build_speculative_config, vllm_model_name

        folder = resolve_drafter(drafter)
        parallel = read_drafter_config(folder, None).parallel
        k = None if engine_settings.num_speculative_tokens == "auto" else engine_settings.num_speculative_tokens
        vllm_config = build_speculative_config(vllm_model_name(drafter, folder), k, parallel)
    # vLLM takes folders and Hugging Face ids, but not our built-in names.
    model = str(resolve_target(target)) if target in BUILT_IN_TARGETS else target
    options = {
        name: getattr(engine_settings, name) for name in ("max_model_len", "max_num_seqs", "dtype", "quantization")
    }
    if engine_settings.gpu_memory_utilization != EngineSettings.gpu_memory_utilization:
        options["gpu_memory_utilization"] = engine_settings.gpu_memory_utilization
    if engine_settings.kv_cache_dtype != EngineSettings.kv_cache_dtype:
        options["kv_cache_dtype"] = engine_settings.kv_cache_dtype
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


deploy = typer.Typer(help="Deploy stock vLLM with a drafter: start-up files or SageMaker.", no_args_is_help=True)
app.add_typer(deploy, name="deploy", rich_help_panel=None)


class CreateByDefault(TyperGroup):
    """`sagemaker TARGET ...` means `sagemaker create TARGET ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["create", *args]
        return super().parse_args(ctx, args)


sagemaker = typer.Typer(
    cls=CreateByDefault, help="Create, inspect, invoke and delete SageMaker endpoints.", no_args_is_help=True
)
deploy.add_typer(sagemaker, name="sagemaker")


K = k_option(None, show_default=f"{DEFAULT_NUM_SPECULATIVE_TOKENS}, EAGLE-3: {EAGLE3_NUM_SPECULATIVE_TOKENS}")
UNCHECKED = option(False, "Fetch nothing from the hub; skip its checks.", panel="Checks")
FORCE = option(False, "Continue despite errors.", panel="Checks")
REGION = option(None, "AWS region.", panel="AWS", show_default="the configured one")
YES = option(False, "Do not ask for confirmation.", panel="AWS", flags=("-y", "--yes"))
EndpointName = Annotated[str, typer.Argument(help="Endpoint name.", metavar="NAME")]


@verb(
    "peagle deploy vllm TARGET -d DRAFTER",
    "peagle deploy vllm TARGET -d DRAFTER -k 7 --tensor-parallel 2 --replicas 4 --out DIR",
    "peagle deploy vllm TARGET -d DRAFTER --format kubernetes --vllm-version 0.30 -- --kv-cache-dtype fp8",
    group=deploy,
)
def vllm(
    target: TargetArgument,
    settings: DeploySettings,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of vllm serve, after --.", metavar="ARGS")
    ] = None,
    drafter: str = REQUIRED_DRAFTER,
    num_speculative_tokens: int | None = K,
    output_format: str = option(
        "", "command, systemd, compose, kubernetes or all.", panel="Output", flags=("--format",), show_default=False
    ),
    out: Path | None = option(None, "Output folder; without it, one format is printed."),
    service_monitor: bool = option(False, "Kubernetes: add a Prometheus ServiceMonitor.", panel="Server"),
    unchecked: bool = UNCHECKED,
    overwrite: bool = option(False, "Overwrite files that differ.", panel="Output"),
    force: bool = FORCE,
) -> None:
    """Check a deployment of stock vLLM, and write its shell, systemd, Compose and Kubernetes files."""
    from peagle.deploy.checks import check_deployment
    from peagle.deploy.files import FILES, VllmService, render_files, write_files
    from peagle.deploy.models import resolve_pair

    output_format = output_format or ("command" if out is None else "all")
    if output_format not in (*FILES, "all"):
        raise UserError(f"--format {output_format}: must be {', '.join(FILES)} or all")
    if output_format == "all" and out is None:
        raise UserError("--format all: needs --out, a folder for the files")
    settings = replace(settings, extra=tuple(extra or ()))
    pair = resolve_pair(target, drafter, num_speculative_tokens, unchecked)
    print_findings(check_deployment(pair, settings, settings.tensor_parallel, settings.extra), force)
    service = VllmService(settings, pair)
    formats = [each for each in FILES if output_format in (each, "all")]
    files, warnings = render_files(service, formats, service_monitor)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if out is None:
        texts = [service.command_line()] if output_format == "command" else files.values()
        print("\n".join(text.rstrip() for text in texts))
        return
    write_files(files, out, overwrite)
    print(f"wrote {', '.join(str(out / file) for file in files)}")
    print("docs/deploying.md has the commands that start them")


@verb(group=sagemaker, name="create")
def sagemaker_create(
    target: TargetArgument,
    settings: SagemakerSettings,
    drafter: str = REQUIRED_DRAFTER,
    num_speculative_tokens: int | None = K,
    unchecked: bool = UNCHECKED,
    force: bool = FORCE,
    wait: bool = option(False, "Wait until the endpoint is in service.", panel="AWS"),
    dry_run: bool = option(False, "Print the plan only."),
    yes: bool = YES,
) -> None:
    """Print the plan and the cost of an endpoint, and create it after confirmation."""
    from peagle.deploy import sagemaker_endpoint as endpoint
    from peagle.deploy.models import resolve_pair

    settings = replace(settings, region=endpoint.find_region(settings.region or None))
    pair = resolve_pair(target, drafter, num_speculative_tokens, unchecked)
    print_findings(endpoint.check_sagemaker(pair, settings), force)
    plan = endpoint.build_plan(pair, settings)
    print(endpoint.format_plan(plan))
    if dry_run or not confirm(yes, "create this, at that price?"):
        print("nothing was created; --yes creates it")
        return
    if plan.price is None:
        raise UserError(f"--price: needed, since the price of {settings.instance_type} is not known")
    name, region = settings.name, settings.region
    aws = endpoint.connect(region)
    endpoint.create(plan, aws, print)
    print(f"in service in 10 to 30 minutes; see: peagle deploy sagemaker status {name} --region {region}")
    print(f"it costs money until deleted: peagle deploy sagemaker delete {name} --region {region}")
    if wait:
        endpoint.wait(name, aws, print)
        print(f"{name} is in service")


@verb(group=sagemaker, name="status")
def sagemaker_status(name: EndpointName, region: str | None = REGION) -> None:
    """Show an endpoint's status and its cost so far."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    print(endpoint.format_status(name, endpoint.connect(region)))


@verb(group=sagemaker, name="invoke")
def sagemaker_invoke(
    name: EndpointName,
    prompt: Annotated[str, typer.Argument(help="User message.")],
    max_tokens: int = option(256, "Maximum number of output tokens."),
    region: str | None = REGION,
) -> None:
    """Send a prompt to an endpoint and print the response."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    print(endpoint.invoke(name, endpoint.connect(region), prompt, max_tokens))


@verb(group=sagemaker, name="delete")
def sagemaker_delete(
    name: EndpointName,
    region: str | None = REGION,
    artifact: Literal["delete", "keep", "ask"] = option("ask", "Uploaded models: delete, keep or ask."),
    yes: bool = YES,
) -> None:
    """Delete an endpoint, its configuration and model, and on request the uploaded files."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    aws = endpoint.connect(region)
    kinds, uploads = endpoint.find_resources(name, aws)
    if not kinds:
        raise UserError(f"{name}: no endpoint, configuration or model of that name in {aws.region}")
    print(f"to delete: {', '.join(f'the {kind} {name}' for kind in kinds)}, in {aws.region}")
    if not confirm(yes, "delete it?"):
        print("nothing was deleted; --yes deletes it")
        return
    to_delete = None
    if uploads is not None:
        if artifact == "delete" or (artifact == "ask" and confirm(False, f"delete {uploads} too?")):
            to_delete = uploads
    left = endpoint.delete(name, aws, print, kinds, to_delete)
    if uploads is not None and to_delete is None:
        print(f"kept: {uploads} (aws s3 rm --recursive {uploads})")
    if left:
        raise UserError(f"not deleted: {', '.join(left)}; {endpoint.deletion_command(left, name, aws.region)}")


def confirm(yes: bool, question: str) -> bool:
    """Asks on a terminal unless `yes`; without a terminal the answer is no."""
    return yes or (sys.stdin.isatty() and typer.confirm(question, default=False))


def print_findings(findings: list[DeployFinding], force: bool) -> None:
    for finding in findings:
        print(f"{finding.level}: {finding.text}", file=sys.stderr)
    num_errors = sum(finding.level == "error" for finding in findings)
    if num_errors and not force:
        raise UserError(f"{num_errors} error(s) above; nothing was done. --force continues despite them")
