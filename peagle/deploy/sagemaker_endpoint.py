"""Plans, creates, inspects, invokes and deletes a SageMaker endpoint. Planning needs neither boto3 nor an account.

AWS's vLLM container turns each variable SM_VLLM_NAME into the flag --name, and sees uploads under /opt/ml/model.
`instances.json` has SageMaker's GPU instance types, with on-demand list prices in USD per hour of real-time inference
in PRICE_REGION as of PRICE_DATE. They change over time; null is unknown.

Endpoint, endpoint config and model have the same name. If creation fails, everything created so far is deleted; the
error names what could not be deleted, and the command for it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from peagle.checkpoints.validate import build_speculative_config, build_vllm_flags
from peagle.config import SagemakerSettings
from peagle.deploy.checks import DeployFinding, check_deployment, error, warning
from peagle.deploy.files import vllm_environment
from peagle.deploy.models import DeployedPair
from peagle.errors import UserError
from peagle.hub.resolve import HUB_FILES

INSTANCES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("instances.json").read_text())
PRICE_DATE, PRICE_REGION = "August 2026", "us-east-1"
HOURS_PER_MONTH = 730
MODEL_PATH = "/opt/ml/model"
MAX_VARIABLE_CHARS = 1024  # SageMaker's limit
ECR_ACCOUNT = "763104351884"  # of AWS's containers in ECR_REGIONS; other regions use other accounts
ECR_REGIONS = """us-east-1 us-east-2 us-west-1 us-west-2 ca-central-1 sa-east-1 eu-central-1 eu-north-1 eu-west-1
    eu-west-2 eu-west-3 ap-northeast-1 ap-northeast-2 ap-northeast-3 ap-south-1 ap-southeast-1 ap-southeast-2""".split()
TAGS = [{"Key": "created-by", "Value": "peagle"}]

Report = Callable[[str], None]  # prints a line
RESOURCES = {"endpoint": "Endpoint", "endpoint config": "EndpointConfig", "model": "Model"}  # in the order of deletion
MAX_MESSAGE_CHARS = 400  # AWS lists all valid values in some messages


@dataclass(frozen=True)
class SagemakerPlan:
    settings: SagemakerSettings
    image: str
    environment: Mapping[str, str]
    bucket: str | None
    prefix: str  # of all uploads, with a / at the end
    uploads: Mapping[Path, str]  # local files -> their S3 keys
    price: float | None  # USD per instance and hour

    @property
    def artifact(self) -> str | None:
        return f"s3://{self.bucket}/{self.prefix}" if self.uploads else None

    def requests(self) -> dict[str, dict[str, Any]]:
        """Requests by the name of the boto3 call, in order."""
        settings, name = self.settings, self.settings.name
        container: dict[str, Any] = {"Image": self.image, "Environment": dict(self.environment)}
        if self.artifact is not None:
            source = {"S3Uri": self.artifact, "S3DataType": "S3Prefix", "CompressionType": "None"}
            container["ModelDataSource"] = {"S3DataSource": source}
        variant = {
            "VariantName": "all",
            "ModelName": name,
            "InstanceType": settings.instance_type,
            "InitialInstanceCount": settings.instances,
            "ContainerStartupHealthCheckTimeoutInSeconds": settings.start_s,
            "ModelDataDownloadTimeoutInSeconds": settings.start_s,
            "InferenceAmiVersion": settings.ami,
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        }
        return {
            "create_model": {
                "ModelName": name,
                "ExecutionRoleArn": settings.role,
                "PrimaryContainer": container,
                "Tags": TAGS,
            },
            "create_endpoint_config": {"EndpointConfigName": name, "ProductionVariants": [variant], "Tags": TAGS},
            "create_endpoint": {"EndpointName": name, "EndpointConfigName": name, "Tags": TAGS},
        }


def build_plan(pair: DeployedPair, settings: SagemakerSettings) -> SagemakerPlan:
    local = {role: m for role, m in (("target", pair.target), ("drafter", pair.drafter)) if not m.on_hub}
    if local and settings.s3 is None:
        raise UserError(
            f"--s3: needed to upload the {' and the '.join(local)}; give s3://bucket/prefix, or use a hub id"
        )
    bucket, _, before = (settings.s3 or "").removeprefix("s3://").partition("/")
    prefix = "/".join(part for part in (before.strip("/"), settings.name) if part) + "/"
    uploads: dict[Path, str] = {}
    names = {"target": pair.target.name, "drafter": pair.drafter.name}
    names |= {role: f"{MODEL_PATH}/{role}" for role in local}
    for role, model in local.items():
        assert model.folder is not None
        # only checkpoint files: no pickles, no code, no second copy of the weights
        found = {path for pattern in HUB_FILES for path in model.folder.glob(pattern)}
        files = sorted(path for path in found if not path.name.startswith("consolidated"))
        uploads |= {path: f"{prefix}{role}/{path.name}" for path in files}
    flags = build_vllm_flags(
        model=names["target"],
        speculative_config=build_speculative_config(names["drafter"], pair.num_speculative_tokens, pair.parallel),
        tensor_parallel_size=resolve_tensor_parallel(settings),
        served_model_name=settings.name,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )
    environment = {f"SM_VLLM_{flag.strip('-').replace('-', '_').upper()}": value for flag, value in flags.items()}
    environment |= vllm_environment(pair, settings.env)
    for name, text in environment.items():
        if len(text) > MAX_VARIABLE_CHARS:
            raise UserError(
                f"{name}: has {len(text)} characters, SageMaker allows {MAX_VARIABLE_CHARS}; use a shorter name"
            )
    image = f"{ECR_ACCOUNT}.dkr.ecr.{settings.region}.amazonaws.com/vllm:{settings.image_tag}"
    if settings.image is None and settings.region not in ECR_REGIONS:
        raise UserError(f"--region {settings.region}: the account of AWS's containers there is not known; give --image")
    list_price = INSTANCES.get(settings.instance_type, {}).get("price")
    return SagemakerPlan(
        settings,
        settings.image or image,
        environment,
        bucket or None,
        prefix,
        uploads,
        settings.price if settings.price is not None else list_price,
    )


def check_sagemaker(pair: DeployedPair, settings: SagemakerSettings) -> list[DeployFinding]:
    num_used = resolve_tensor_parallel(settings)
    found = check_deployment(pair, settings, num_used)
    num_gpus = INSTANCES.get(settings.instance_type, {}).get("num_gpus", num_used)
    if num_used > num_gpus:
        found.append(error(f"--tensor-parallel {num_used}: {settings.instance_type} has {num_gpus} GPUs"))
    if num_used < num_gpus:
        found.append(warning(f"{num_gpus - num_used} of {num_gpus} GPUs stay idle; use a smaller instance"))
    if pair.target.on_hub or pair.drafter.on_hub:
        text = "the container downloads hub models, which needs internet access; upload gated models with --s3"
        found.append(warning(text))
    return found


def resolve_tensor_parallel(settings: SagemakerSettings) -> int:
    if settings.tensor_parallel is not None:
        return settings.tensor_parallel
    if settings.instance_type not in INSTANCES:
        raise UserError(f"--tensor-parallel: needed for {settings.instance_type}, whose number of GPUs is not known")
    return int(INSTANCES[settings.instance_type]["num_gpus"])


def format_plan(plan: SagemakerPlan) -> str:
    """Returns everything that would be created, and its cost."""
    settings = plan.settings
    if plan.price is None:
        cost = f"not known for {settings.instance_type}; look it up and give --price"
    else:
        hour = plan.price * settings.instances
        each = f"{settings.instances} x {plan.price:g} " if settings.instances > 1 else ""
        source = "from --price" if settings.price is not None else f"list price in {PRICE_REGION}, {PRICE_DATE}"
        cost = (
            f"{each}USD {hour:.2f} an hour, {hour * 24:.0f} a day, {hour * HOURS_PER_MONTH:.0f} a month "
            f"({source}), from creation to deletion, even if unused; storage and traffic cost extra"
        )
    lines = [f"region: {settings.region}", f"cost: {cost}"]
    if plan.artifact is not None:
        upload_bytes = sum(path.stat().st_size for path in plan.uploads)
        lines.append(f"upload: {len(plan.uploads)} files, {upload_bytes / 1e9:.2f} GB, to {plan.artifact}")
    for call, request in plan.requests().items():
        lines.append(f"{call}:")
        lines += [f"  {line}" for line in json.dumps(request, indent=2).splitlines()]
    return "\n".join(lines)


@dataclass(frozen=True)
class AwsClients:
    """boto3 clients of one region."""

    region: str
    sagemaker: Any
    runtime: Any
    s3: Any


def connect(region: str | None) -> AwsClients:
    boto3 = _boto3()
    from botocore.config import Config

    region = find_region(region)
    with aws_errors():
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise UserError("no AWS credentials: run `aws configure` or `aws sso login`, or set AWS_PROFILE")
        # A response may take long, and a retry would generate it twice.
        no_retries = Config(read_timeout=900, retries={"max_attempts": 0})
        return AwsClients(
            region,
            session.client("sagemaker"),
            session.client("sagemaker-runtime", config=no_retries),
            session.client("s3"),
        )


def find_region(region: str | None) -> str:
    """Returns the region: as given, from the environment, or from boto3's configuration."""
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        boto3 = _boto3()
        with aws_errors():
            region = boto3.Session().region_name
    if not region:
        raise UserError("--region: needed; or set AWS_REGION, or configure a region in ~/.aws/config")
    return region


def _boto3() -> Any:
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise UserError(f"peagle deploy sagemaker needs {error.name}: pip install 'peagle[aws]'") from None
    return boto3


@contextmanager
def aws_errors(action: str = "AWS") -> Iterator[None]:
    """Turns AWS's exceptions into one-line UserErrors."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        message = str(details.get("Message", error))[:MAX_MESSAGE_CHARS]
        raise UserError(f"{action}: {details.get('Code', 'error')}: {message}") from None
    except (Boto3Error, BotoCoreError, OSError) as error:
        raise UserError(f"{action}: {' '.join(str(error).split())[:MAX_MESSAGE_CHARS]}") from None


def create(plan: SagemakerPlan, aws: AwsClients, report: Report) -> None:
    """Creates all resources or none. Does not wait until the endpoint is in service."""
    _check_names_are_free(plan, aws)
    name, action = plan.settings.name, ""
    uploaded = False
    created: list[str] = []
    try:
        for path, key in plan.uploads.items():
            action, uploaded = f"upload of {path.name}", True
            report(f"uploading {path.name} ({path.stat().st_size / 1e9:.2f} GB)")
            with aws_errors(action):
                aws.s3.upload_file(str(path), plan.bucket, key)
        for call, request in plan.requests().items():
            action = call
            with aws_errors(action):
                getattr(aws.sagemaker, call)(**request)
            created.insert(0, call.removeprefix("create_").replace("_", " "))
            report(f"{call}: {name}")
    except BaseException as error:  # also Ctrl-C: resources cost money
        report(f"{action} failed")
        left = delete(name, aws, report, created, plan.artifact if uploaded else None)
        try:
            remaining, _ = find_resources(name, aws)
        except UserError:
            remaining = list(RESOURCES)  # AWS cannot be asked: everything may exist
        left += [f"the {kind} {name}" for kind in remaining if f"the {kind} {name}" not in left]
        reason = str(error) if isinstance(error, UserError) else f"{action}: {type(error).__name__}"
        if left:
            raise UserError(
                f"{reason}; not deleted: {', '.join(left)}; {deletion_command(left, name, aws.region)}"
            ) from None
        if isinstance(error, UserError):
            raise UserError(f"{reason}; everything created was deleted again") from None
        raise


def deletion_command(left: Sequence[str], name: str, region: str) -> str:
    """Returns the commands that delete remaining resources."""
    objects = [one for one in left if one.startswith("s3://")]
    own = [f"peagle deploy sagemaker delete {name} --region {region} --yes"] if len(left) > len(objects) else []
    return " && ".join([*own, *(f"aws s3 rm --recursive {one}" for one in objects)])


def _check_names_are_free(plan: SagemakerPlan, aws: AwsClients) -> None:
    """Checks that the name and the S3 prefix are unused, and that the bucket is in the endpoint's region."""
    name = plan.settings.name
    taken, _ = find_resources(name, aws)
    if taken:
        raise UserError(f"--name {name}: the {taken[0]} {name} exists already in {aws.region}; use another name")
    if plan.artifact is None:
        return
    with aws_errors(f"--s3 {plan.settings.s3}"):
        bucket_region = aws.s3.get_bucket_location(Bucket=plan.bucket).get("LocationConstraint") or "us-east-1"
        num_objects = aws.s3.list_objects_v2(Bucket=plan.bucket, Prefix=plan.prefix, MaxKeys=1).get("KeyCount", 0)
    if bucket_region != aws.region:
        raise UserError(f"--s3 {plan.settings.s3}: the bucket is in {bucket_region}, the endpoint in {aws.region}")
    if num_objects:
        raise UserError(f"--s3 {plan.settings.s3}: {plan.prefix} is not empty; use another --name")


def _call(aws: AwsClients, verb: str, kind: str, name: str) -> Any:
    method = getattr(aws.sagemaker, f"{verb}_{kind.replace(' ', '_')}")
    return method(**{f"{RESOURCES[kind]}Name": name})


def _describe(aws: AwsClients, kind: str, name: str) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    with aws_errors(f"describe the {kind}"):
        try:
            response: dict[str, Any] = _call(aws, "describe", kind, name)
            return response
        except ClientError as error:
            # SageMaker has no error code for a missing resource
            if "(ValidationException)" in str(error) and "could not find" in str(error).lower():
                return None
            raise


def find_resources(name: str, aws: AwsClients) -> tuple[list[str], str | None]:
    """The kinds of resources that exist with an endpoint's name, and the S3 address of its uploads."""
    found = {kind: _describe(aws, kind, name) for kind in RESOURCES}
    model = found["model"] or {}
    source = model.get("PrimaryContainer", {}).get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
    return [kind for kind, description in found.items() if description is not None], source


def format_status(name: str, aws: AwsClients) -> str:
    endpoint = _describe(aws, "endpoint", name)
    if endpoint is None:
        raise UserError(f"{name}: no such endpoint in {aws.region}")
    reason = f": {endpoint['FailureReason']}" if endpoint.get("FailureReason") else ""
    config = _describe(aws, "endpoint config", endpoint["EndpointConfigName"]) or {}
    variant = (config.get("ProductionVariants") or [{}])[0]
    instance_type, count = variant.get("InstanceType", "unknown"), variant.get("InitialInstanceCount", 1)
    hours = (datetime.now(UTC) - endpoint["CreationTime"]).total_seconds() / 3600
    price = INSTANCES.get(instance_type, {}).get("price")
    cost = "price not known" if price is None else f"about USD {price * count * hours:.2f} so far"
    lines = [f"{name}: {endpoint['EndpointStatus']}{reason}"]
    lines.append(f"{count} x {instance_type} for {hours:.1f} hours, {cost}")
    _, artifact = find_resources(name, aws)
    return "\n".join(lines if artifact is None else [*lines, f"models: {artifact}"])


def invoke(name: str, aws: AwsClients, prompt: str, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    with aws_errors(name):
        response = aws.runtime.invoke_endpoint(
            EndpointName=name, ContentType="application/json", Body=json.dumps(body).encode()
        )
        text = response["Body"].read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{name}: the response {text[:300]!r} is not a chat completion") from None


def delete(name: str, aws: AwsClients, report: Report, kinds: Sequence[str], artifact: str | None) -> list[str]:
    """Deletes resources of these kinds, and the uploads if `artifact` is given. Returns what could not be deleted."""
    deletions: dict[str, Callable[[], Any]] = {
        f"the {kind} {name}": partial(_call, aws, "delete", kind, name) for kind in kinds
    }
    if artifact is not None:
        deletions[artifact] = partial(delete_artifact, name, aws, artifact)
    left = []
    for what, run in deletions.items():
        try:
            with aws_errors(f"delete {what}"):
                run()
            report(f"deleted {what}")
        except UserError as error:
            report(str(error))
            left.append(what)
    return left


def delete_artifact(name: str, aws: AwsClients, artifact: str) -> None:
    """Deletes the objects uploaded for an endpoint."""
    bucket, _, prefix = artifact.removeprefix("s3://").partition("/")
    if not prefix.endswith(f"{name}/"):
        raise UserError(f"{artifact}: not uploaded by peagle for {name}, so it is kept")
    while listed := aws.s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents"):  # up to 1000 at once
        keys = [{"Key": one["Key"]} for one in listed]
        errors = aws.s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True}).get("Errors")
        if errors:
            raise UserError(f"{artifact}: {errors[0].get('Code')}: {errors[0].get('Message')}")


def wait(name: str, aws: AwsClients, report: Report) -> None:
    from botocore.exceptions import WaiterError

    report("waiting until it is in service; Ctrl-C stops waiting, not the endpoint")
    try:
        aws.sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=name)
    except WaiterError:
        state = format_status(name, aws).splitlines()[0]
        raise UserError(
            f"{state}; its log is in CloudWatch under /aws/sagemaker/Endpoints/{name}; "
            f"{deletion_command(['the endpoint'], name, aws.region)}"
        ) from None
