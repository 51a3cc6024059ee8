"""`deploy`: vLLM with a drafter on other machines, and on SageMaker.

Knows flags, questions and what is printed; nothing about the files or AWS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from peagle.cli.app import DRAFTER_HELP, MaxModelLen, ServedModelName, TargetArgument, app, examples
from peagle.config import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    EAGLE3_NUM_SPECULATIVE_TOKENS,
    DeploySettings,
    SagemakerSettings,
)
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.checks import Hazard

USUAL, USUAL_AWS = DeploySettings(), SagemakerSettings(role="arn:aws:iam::000000000000:role/x", instance_type="ml.x")
CREATE = "create"

deploy = typer.Typer(help="vLLM with a drafter elsewhere: files that start it, or SageMaker.", no_args_is_help=True)
app.add_typer(deploy, name="deploy", rich_help_panel=None)


class CreateByDefault(TyperGroup):
    """`sagemaker TARGET ...` is `sagemaker create TARGET ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [CREATE, *args]
        return super().parse_args(ctx, args)


sagemaker = typer.Typer(
    cls=CreateByDefault, help="A SageMaker endpoint: plan, create, look, ask, delete.", no_args_is_help=True
)
deploy.add_typer(sagemaker, name="sagemaker")

Drafter = Annotated[str, typer.Option("--drafter", "-d", help=DRAFTER_HELP)]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "-k",
        "--draft-tokens",
        help="Draft tokens a round.",
        show_default=f"{DEFAULT_NUM_SPECULATIVE_TOKENS}, EAGLE-3: {EAGLE3_NUM_SPECULATIVE_TOKENS}",
    ),
]
VllmVersion = Annotated[str, typer.Option(help="That it shall run on; its hazards are checked.", metavar="VERSION")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests at once.", show_default="vLLM's")]
GpuMemory = Annotated[float | None, typer.Option(help="Of each GPU, weights included.", show_default="vLLM's")]
Env = Annotated[list[str] | None, typer.Option(help="A variable more; may be given again.", metavar="NAME=VALUE")]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Fetch nothing from the hub, so what is there stays unchecked.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on in spite of errors.")]
Region = Annotated[str | None, typer.Option(help="Of AWS.", show_default="the configured one")]
Name = Annotated[str, typer.Argument(help="The endpoint's.", metavar="NAME")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, without a question.")]


@deploy.command(
    epilog=examples(
        "peagle deploy vllm TARGET -d DRAFTER",
        "peagle deploy vllm TARGET -d DRAFTER -k 7 --tensor-parallel 2 --replicas 4 --out DIR",
        "peagle deploy vllm TARGET -d DRAFTER --format kubernetes --vllm-version 0.30 -- --kv-cache-dtype fp8",
    )
)
def vllm(
    target: TargetArgument,
    drafter: Drafter,
    more: Annotated[list[str] | None, typer.Argument(help="Behind --: words for vllm serve.", metavar="WORDS")] = None,
    draft_tokens: NumSpeculativeTokens = None,
    kind: Annotated[
        str, typer.Option("--format", help="command, systemd, compose, kubernetes or all.", show_default=False)
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The folder to write to; without it, one format is printed.")] = None,
    name: Annotated[str, typer.Option(help="Of the service.")] = USUAL.name,
    vllm_version: VllmVersion = USUAL.vllm_version,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share one model.")] = USUAL.tensor_parallel,
    replicas: Annotated[int, typer.Option(help="Models side by side.")] = USUAL.replicas,
    host: Annotated[str, typer.Option(help="That it listens on.")] = USUAL.host,
    port: Annotated[int, typer.Option(help="That clients use.")] = USUAL.port,
    image: Annotated[str | None, typer.Option(help="For containers.", show_default="vLLM's of that version")] = None,
    program: Annotated[str, typer.Option(help="vLLM's, for systemd.")] = USUAL.program,
    user: Annotated[str, typer.Option(help="That systemd runs it as.")] = USUAL.user,
    served_model_name: ServedModelName = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    gpu_memory_utilization: GpuMemory = None,
    env: Env = None,
    service_monitor: Annotated[
        bool, typer.Option("--service-monitor", help="Kubernetes: scraped by a Prometheus operator.")
    ] = False,
    unchecked: Unchecked = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Files that are there and differ.")] = False,
    force: Force = False,
) -> None:
    """Write what starts stock vLLM with a drafter, checked first: command, systemd, Compose, Kubernetes."""
    from peagle.deploy.checks import check
    from peagle.deploy.models import resolve_pair
    from peagle.deploy.service import Service, command_line
    from peagle.deploy.writing import FORMATS, files_of, how_to_start, write_files

    kind = kind or ("command" if out is None else "all")
    if kind not in (*FORMATS, "all"):
        raise UserError(f"--format {kind}: must be {', '.join(FORMATS)} or all")
    if kind == "all" and out is None:
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
        extra=tuple(more or ()),
    )
    pair = resolve_pair(target, drafter, draft_tokens, unchecked)
    hazards = check(
        pair,
        vllm_version,
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        env=dict(settings.env),
        extra=settings.extra,
    )
    tell(hazards, force)
    service = Service(settings, pair)
    formats = [one for one in FORMATS if kind in (one, "all")]
    files, doubts = files_of(service, formats, service_monitor)
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    if out is None:
        texts = [command_line(service)] if kind == "command" else files.values()
        print("\n".join(text.rstrip() for text in texts))
        return
    write_files(files, out, overwrite)
    print(f"wrote {', '.join(str(out / file) for file in files)}")
    for line in how_to_start(service, formats):
        print(f"  {line}")


@sagemaker.command(CREATE)
def sagemaker_create(
    target: TargetArgument,
    drafter: Drafter,
    role: Annotated[str, typer.Option(help="That SageMaker acts as.", metavar="ARN")],
    instance_type: Annotated[str, typer.Option(help="As ml.g6e.xlarge.", metavar="TYPE")],
    draft_tokens: NumSpeculativeTokens = None,
    name: Annotated[str, typer.Option(help="Of the endpoint.")] = USUAL_AWS.name,
    instances: Annotated[int, typer.Option(help="Side by side.")] = USUAL_AWS.instances,
    s3: Annotated[str | None, typer.Option(help="s3://bucket/prefix, for folders; below it, NAME/.")] = None,
    region: Region = None,
    image: Annotated[
        str | None,
        typer.Option(help="With what vLLM, --vllm-version says.", show_default=f"AWS's {USUAL_AWS.image_tag}"),
    ] = None,
    vllm_version: VllmVersion = USUAL_AWS.vllm_version,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="GPUs that share one model.", show_default="all of an instance")
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    gpu_memory_utilization: GpuMemory = None,
    env: Env = None,
    price: Annotated[float | None, typer.Option(help="USD an hour and instance.", show_default="a table's")] = None,
    unchecked: Unchecked = False,
    force: Force = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until it answers.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The plan alone, no question.")] = False,
    yes: Yes = False,
) -> None:
    """Say what would be created and what it costs; create it after a yes."""
    from peagle.deploy import sagemaker_endpoint as endpoint
    from peagle.deploy.models import resolve_pair
    from peagle.deploy.sagemaker_plan import check_sagemaker, describe, make_plan

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
    pair = resolve_pair(target, drafter, draft_tokens, unchecked)
    tell(check_sagemaker(pair, settings), force)
    plan = make_plan(pair, settings)
    print(describe(plan))
    if dry_run or not confirmed(yes, "create this, at that price?"):
        print("nothing was created; --yes creates it")
        return
    if plan.price is None:
        raise UserError(f"--price: needed, since what {instance_type} costs is not known here")
    aws = endpoint.connect(region)
    endpoint.create(plan, aws, print)
    print(f"it comes up in 10 to 30 minutes: peagle deploy sagemaker status {name} --region {region}")
    print(f"and costs until: peagle deploy sagemaker delete {name} --region {region}")
    if wait:
        endpoint.wait(name, aws, print)
        print(f"{name} is in service")


@sagemaker.command("status")
def sagemaker_status(name: Name, region: Region = None) -> None:
    """How an endpoint is, and what it has cost so far."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    seen = endpoint.status(name, endpoint.connect(region))
    print(f"{name}: {seen.state}" + (f": {seen.reason}" if seen.reason else ""))
    cost = "at a price not known here" if seen.price is None else f"about USD {seen.price * seen.hours:.2f} so far"
    print(f"{seen.instances} x {seen.instance_type} for {seen.hours:.1f} hours, {cost}")
    if seen.artifact is not None:
        print(f"models: {seen.artifact}")


@sagemaker.command("invoke")
def sagemaker_invoke(
    name: Name,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    region: Region = None,
) -> None:
    """Ask an endpoint and print its answer."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    print(endpoint.invoke(name, endpoint.connect(region), prompt, max_tokens))


@sagemaker.command("delete")
def sagemaker_delete(
    name: Name,
    region: Region = None,
    artifact: Annotated[str, typer.Option(help="The uploaded models: delete, keep or ask.")] = "ask",
    yes: Yes = False,
) -> None:
    """Delete endpoint, endpoint configuration and model; and what was uploaded, if that is said."""
    from peagle.deploy import sagemaker_endpoint as endpoint

    if artifact not in ("delete", "keep", "ask"):
        raise UserError(f"--artifact {artifact}: must be delete, keep or ask")
    aws = endpoint.connect(region)
    there = endpoint.look(name, aws)
    if not there.kinds:
        raise UserError(f"{name}: nothing of that name in {aws.region}")
    print(f"to delete: {', '.join(f'the {kind} {name}' for kind in there.kinds)}, in {aws.region}")
    if not confirmed(yes, "delete it?"):
        print("nothing was deleted; --yes deletes it")
        return
    gone = None
    if there.artifact is not None:
        wanted = artifact == "delete" or (artifact == "ask" and confirmed(False, f"delete {there.artifact} too?"))
        gone = there.artifact if wanted else None
    left = endpoint.delete(name, aws, print, there.kinds, gone)
    if there.artifact is not None and gone is None:
        print(f"kept: {there.artifact} (aws s3 rm --recursive {there.artifact})")
    if left:
        raise UserError(f"not deleted: {', '.join(left)}; {endpoint.remedy(left, name, aws.region)}")


def confirmed(yes: bool, question: str) -> bool:
    """A yes by flag, or by someone at a terminal; nobody there means no."""
    return yes or (sys.stdin.isatty() and typer.confirm(question, default=False))


def parse_env(given: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env {one}: must be NAME=VALUE")
        pairs.append((name, value))
    return tuple(pairs)


def tell(hazards: list[Hazard], force: bool) -> None:
    for hazard in hazards:
        print(f"{hazard.level}: {hazard.text}", file=sys.stderr)
    errors = sum(hazard.level == "error" for hazard in hazards)
    if errors and not force:
        raise UserError(f"{errors} error(s) above; nothing was done. --force goes on all the same")
