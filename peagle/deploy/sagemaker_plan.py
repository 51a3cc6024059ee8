"""Plans a SageMaker endpoint: API requests, uploads and cost. Needs neither boto3 nor an account.

AWS's vLLM container turns each variable SM_VLLM_NAME into the flag --name, and sees uploads under /opt/ml/model.
`instances.json` has SageMaker's GPU instance types, with on-demand list prices in USD per hour of real-time inference
in PRICE_REGION as of PRICE_DATE. They change over time; null is unknown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    image = f"{ECR_ACCOUNT}.dkr.ecr.{settings.region}.amazonaws.com/vllm:{settings.image_tag}"
    if settings.image is None and settings.region not in ECR_REGIONS:
        raise UserError(f"--region {settings.region}: the account of AWS's containers there is not known; give --image")
    list_price = INSTANCES.get(settings.instance_type, {}).get("price")
    return SagemakerPlan(
        settings,
        settings.image or image,
        _environment(pair, settings, names),
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


def _environment(pair: DeployedPair, settings: SagemakerSettings, names: Mapping[str, str]) -> dict[str, str]:
    flags = build_vllm_flags(
        model=names["target"],
        speculative_config=build_speculative_config(names["drafter"], pair.num_speculative_tokens, pair.parallel),
        tensor_parallel_size=resolve_tensor_parallel(settings),
        served_model_name=settings.name,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )
    values = {f"SM_VLLM_{flag.strip('-').replace('-', '_').upper()}": value for flag, value in flags.items()}
    values |= vllm_environment(pair, settings.env)
    for name, text in values.items():
        if len(text) > MAX_VARIABLE_CHARS:
            raise UserError(
                f"{name}: has {len(text)} characters, SageMaker allows {MAX_VARIABLE_CHARS}; use a shorter name"
            )
    return values


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
