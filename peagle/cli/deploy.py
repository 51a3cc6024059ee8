"""`deploy`: stock vLLM with a drafter on other machines, and on SageMaker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from peagle.cli.app import (
    DRAFTER_HELP,
    ENGINE_PANEL,
    K_HELP,
    MODEL_PANEL,
    OUTPUT_PANEL,
    SERVER_PANEL,
    MaxModelLen,
    ServedModelName,
    TargetArgument,
    app,
    examples,
)
from peagle.config import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    EAGLE3_NUM_SPECULATIVE_TOKENS,
    DeploySettings,
    SagemakerSettings,
)
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.checks import DeployFinding

DEFAULTS = DeploySettings()
AWS_DEFAULTS = SagemakerSettings(role="arn:aws:iam::000000000000:role/x", instance_type="ml.x")
AWS_PANEL, CHECKS_PANEL = "AWS", "Checks"

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


def _option(panel: str, *flags: str, **options: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, **options)


RequiredDrafter = Annotated[str, _option(MODEL_PANEL, "--drafter", "-d", help=DRAFTER_HELP, metavar="DRAFTER")]
OptionalK = Annotated[
    int | None,
    _option(
        *(MODEL_PANEL, "--num-speculative-tokens", "-k"),
        help=K_HELP,
        metavar="K",
        show_default=f"{DEFAULT_NUM_SPECULATIVE_TOKENS}, EAGLE-3: {EAGLE3_NUM_SPECULATIVE_TOKENS}",
    ),
]
MaxNumSeqs = Annotated[int | None, _option(ENGINE_PANEL, help="Concurrent requests.", show_default="vLLM's")]
GpuMemory = Annotated[
    float | None, _option(ENGINE_PANEL, help="Share of each GPU's memory, weights included.", show_default="vLLM's")
]
Env = Annotated[list[str] | None, _option(ENGINE_PANEL, help="Environment variable; repeatable.", metavar="NAME=VALUE")]
VllmVersion = Annotated[str, _option(CHECKS_PANEL, help="vLLM version to check against.", metavar="VERSION")]
Unchecked = Annotated[bool, _option(CHECKS_PANEL, "--unchecked", help="Fetch nothing from the hub; skip its checks.")]
Force = Annotated[bool, _option(CHECKS_PANEL, "--force", help="Continue despite errors.")]
Region = Annotated[str | None, _option(AWS_PANEL, help="AWS region.", show_default="the configured one")]
EndpointName = Annotated[str, typer.Argument(help="Endpoint name.", metavar="NAME")]
Yes = Annotated[bool, _option(AWS_PANEL, "--yes", "-y", help="Do not ask for confirmation.")]


@deploy.command(
    epilog=examples(
        "peagle deploy vllm TARGET -d DRAFTER",
        "peagle deploy vllm TARGET -d DRAFTER -k 7 --tensor-parallel 2 --replicas 4 --out DIR",
        "peagle deploy vllm TARGET -d DRAFTER --format kubernetes --vllm-version 0.30 -- --kv-cache-dtype fp8",
    )
)
def vllm(
    target: TargetArgument,
    drafter: RequiredDrafter,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of vllm serve, after --.", metavar="ARGS")
    ] = None,
    num_speculative_tokens: OptionalK = None,
    output_format: Annotated[
        str,
        _option(OUTPUT_PANEL, "--format", help="command, systemd, compose, kubernetes or all.", show_default=False),
    ] = "",
    out: Annotated[Path | None, _option(OUTPUT_PANEL, help="Output folder; without it, one format is printed.")] = None,
    name: Annotated[str, _option(SERVER_PANEL, help="Service name.")] = DEFAULTS.name,
    vllm_version: VllmVersion = DEFAULTS.vllm_version,
    tensor_parallel: Annotated[int, _option(ENGINE_PANEL, help="GPUs per replica.")] = DEFAULTS.tensor_parallel,
    replicas: Annotated[int, _option(ENGINE_PANEL, help="Number of replicas.")] = DEFAULTS.replicas,
    host: Annotated[str, _option(SERVER_PANEL, help="Address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, _option(SERVER_PANEL, help="Port for clients.")] = DEFAULTS.port,
    image: Annotated[
        str | None, _option(SERVER_PANEL, help="Container image.", show_default="vLLM's of that version")
    ] = None,
    program: Annotated[str, _option(SERVER_PANEL, help="Path of vllm, for systemd.")] = DEFAULTS.program,
    user: Annotated[str, _option(SERVER_PANEL, help="User that systemd runs it as.")] = DEFAULTS.user,
    served_model_name: ServedModelName = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    gpu_memory_utilization: GpuMemory = None,
    env: Env = None,
    service_monitor: Annotated[
        bool, _option(SERVER_PANEL, "--service-monitor", help="Kubernetes: add a Prometheus ServiceMonitor.")
    ] = False,
    unchecked: Unchecked = False,
    overwrite: Annotated[bool, _option(OUTPUT_PANEL, "--overwrite", help="Overwrite files that differ.")] = False,
    force: Force = False,
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
    settings = DeploySettings(
        name=name,
        vllm_version=vllm_version,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        host=host,
        port=port,
        image=image,
        program=program,
        user=user,
        served_model_name=served_model_name,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        env=parse_env(env),
        extra=tuple(extra or ()),
    )
    pair = resolve_pair(target, drafter, num_speculative_tokens, unchecked)
    print_findings(check_deployment(pair, settings, tensor_parallel, settings.extra), force)
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


@sagemaker.command("create")
def sagemaker_create(
    target: TargetArgument,
    drafter: RequiredDrafter,
    role: Annotated[str, _option(AWS_PANEL, help="IAM role that SageMaker assumes.", metavar="ARN")],
    instance_type: Annotated[str, _option(AWS_PANEL, help="Instance type, like ml.g6e.xlarge.", metavar="TYPE")],
    num_speculative_tokens: OptionalK = None,
    name: Annotated[str, _option(AWS_PANEL, help="Endpoint name.")] = AWS_DEFAULTS.name,
    instances: Annotated[int, _option(AWS_PANEL, help="Number of instances.")] = AWS_DEFAULTS.instances,
    s3: Annotated[str | None, _option(AWS_PANEL, help="s3://bucket/prefix to upload folders to, below NAME/.")] = None,
    region: Region = None,
    image: Annotated[
        str | None,
        _option(AWS_PANEL, help="Container image.", show_default=f"AWS's {AWS_DEFAULTS.image_tag}"),
    ] = None,
    vllm_version: VllmVersion = AWS_DEFAULTS.vllm_version,
    tensor_parallel: Annotated[
        int | None, _option(ENGINE_PANEL, help="GPUs per model.", show_default="all of an instance")
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    gpu_memory_utilization: GpuMemory = None,
    env: Env = None,
    price: Annotated[
        float | None, _option(AWS_PANEL, help="USD per instance and hour.", show_default="the list price")
    ] = None,
    unchecked: Unchecked = False,
    force: Force = False,
    wait: Annotated[bool, _option(AWS_PANEL, "--wait", help="Wait until the endpoint is in service.")] = False,
    dry_run: Annotated[bool, _option(AWS_PANEL, "--dry-run", help="Print the plan only.")] = False,
    yes: Yes = False,
) -> None:
    """Print the plan and the cost of an endpoint, and create it after confirmation."""
    from peagle.deploy import sagemaker_endpoint as endpoint
    from peagle.deploy.models import resolve_pair
    from peagle.deploy.sagemaker_plan import build_plan, check_sagemaker, format_plan

    region = endpoint.find_region(region)
    settings = SagemakerSettings(
        name=name,
        role=role,
        instance_type=instance_type,
        instances=instances,
        region=region,
        s3=s3,
        image=image,
        vllm_version=vllm_version,
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        env=parse_env(env),
        price=price,
    )
    pair = resolve_pair(target, drafter, num_speculative_tokens, unchecked)
    print_findings(check_sagemaker(pair, settings), force)
    plan = build_plan(pair, settings)
    print(format_plan(plan))
    if dry_run or not confirm(yes, "create this, at that price?"):
        print("nothing was created; --yes creates it")
        return
    if plan.price is None:
        raise UserError(f"--price: needed, since the price of {instance_type} is not known")
    aws = endpoint.connect(region)
    endpoint.create(plan, aws, print)
    print(f"in service in 10 to 30 minutes; see: peagle deploy sagemaker status {name} --region {region}")
    print(f"it costs money until deleted: peagle deploy sagemaker delete {name} --region {region}")
    if wait:
        endpoint.wait(name, aws, print)
        print(f"{name} is in service")


@sagemaker.command("status")
def sagemaker_status(name: EndpointName, region: Region = None) -> None:
    """Show an endpoint's status and its cost so far."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    print(endpoint.format_status(name, endpoint.connect(region)))


@sagemaker.command("invoke")
def sagemaker_invoke(
    name: EndpointName,
    prompt: Annotated[str, typer.Argument(help="User message.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum number of output tokens.")] = 256,
    region: Region = None,
) -> None:
    """Send a prompt to an endpoint and print the response."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    print(endpoint.invoke(name, endpoint.connect(region), prompt, max_tokens))


@sagemaker.command("delete")
def sagemaker_delete(
    name: EndpointName,
    region: Region = None,
    artifact: Annotated[str, _option(AWS_PANEL, help="Uploaded models: delete, keep or ask.")] = "ask",
    yes: Yes = False,
) -> None:
    """Delete an endpoint, its configuration and model, and on request the uploaded files."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    if artifact not in ("delete", "keep", "ask"):
        raise UserError(f"--artifact {artifact}: must be delete, keep or ask")
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


def parse_env(variables: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for variable in variables or ():
        name, equals, value = variable.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env {variable}: must be NAME=VALUE")
        pairs.append((name, value))
    return tuple(pairs)


def print_findings(findings: list[DeployFinding], force: bool) -> None:
    for finding in findings:
        print(f"{finding.level}: {finding.text}", file=sys.stderr)
    num_errors = sum(finding.level == "error" for finding in findings)
    if num_errors and not force:
        raise UserError(f"{num_errors} error(s) above; nothing was done. --force continues despite them")
