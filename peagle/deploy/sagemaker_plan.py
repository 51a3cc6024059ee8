"""What SageMaker would be asked for: three requests, the files to upload, and what an hour costs.

Knows SageMaker's words and nothing of how they are sent, so a plan needs neither boto3 nor an account. The container
turns each SM_VLLM_NAME into vLLM's flag --name; what is uploaded is seen by it under /opt/ml/model.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.config import SagemakerSettings
from peagle.deploy.checks import RUNNER, Hazard, check
from peagle.deploy.instances import HOURS_A_MONTH, INSTANCES, PRICED, PRICED_IN
from peagle.deploy.models import Pair
from peagle.deploy.service import speculative
from peagle.errors import UserError
from peagle.hub.resolve import HUB_FILES

MOUNTED = "/opt/ml/model"
LONGEST_VALUE = 1024  # characters of a variable, SageMaker's limit
ACCOUNT = "763104351884"  # AWS's own containers, in the regions below; others have accounts of their own
REGIONS = """us-east-1 us-east-2 us-west-1 us-west-2 ca-central-1 sa-east-1 eu-central-1 eu-north-1 eu-west-1 eu-west-2
    eu-west-3 ap-northeast-1 ap-northeast-2 ap-northeast-3 ap-south-1 ap-southeast-1 ap-southeast-2""".split()
TAGS = [{"Key": "created-by", "Value": "peagle"}]


@dataclass(frozen=True)
class Upload:
    source: Path
    key: str
    size: int


@dataclass(frozen=True)
class SagemakerPlan:
    settings: SagemakerSettings
    image: str
    environment: Mapping[str, str]
    bucket: str | None
    prefix: str  # of all that is uploaded, with a / at the end
    uploads: tuple[Upload, ...]
    price: float | None

    @property
    def artifact(self) -> str | None:
        return f"s3://{self.bucket}/{self.prefix}" if self.uploads else None

    @property
    def size(self) -> int:
        return sum(upload.size for upload in self.uploads)

    def requests(self) -> dict[str, dict[str, Any]]:
        """By the name of the call, in the order in which they are made."""
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


def make_plan(pair: Pair, settings: SagemakerSettings) -> SagemakerPlan:
    local = {role: m for role, m in (("target", pair.target), ("drafter", pair.drafter)) if not m.on_hub}
    if local and settings.s3 is None:
        raise UserError(f"--s3: needed to upload the {' and the '.join(local)}; give s3://bucket/prefix, or a hub id")
    bucket, _, before = (settings.s3 or "").removeprefix("s3://").partition("/")
    prefix = "/".join(part for part in (before.strip("/"), settings.name) if part) + "/"
    uploads: list[Upload] = []
    names = {"target": pair.target.name, "drafter": pair.drafter.name}
    for role, model in local.items():
        assert model.folder is not None
        uploads += _uploads(model.folder, f"{prefix}{role}/")
        names[role] = f"{MOUNTED}/{role}"
    known = INSTANCES.get(settings.instance_type)
    return SagemakerPlan(
        settings,
        settings.image or _own_image(settings),
        _environment(pair, settings, names),
        bucket or None,
        prefix,
        tuple(uploads),
        settings.price if settings.price is not None else known.price if known is not None else None,
    )


def check_sagemaker(pair: Pair, settings: SagemakerSettings) -> list[Hazard]:
    gpus, known = tensor_parallel(settings), INSTANCES.get(settings.instance_type)
    found = check(
        pair,
        settings.vllm_version,
        tensor_parallel=gpus,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        env=dict(settings.env),
    )
    if known is not None and gpus > known.gpus:
        found.append(Hazard("error", f"--tensor-parallel {gpus}: {settings.instance_type} has {known.gpus} GPUs"))
    if known is not None and gpus < known.gpus:
        found.append(Hazard("warning", f"{known.gpus - gpus} of {known.gpus} GPUs stay idle; take a smaller instance"))
    if pair.target.on_hub or pair.drafter.on_hub:
        text = "what is on the hub is fetched by the container, which needs a way out; gated models go by --s3"
        found.append(Hazard("warning", text))
    return found


def tensor_parallel(settings: SagemakerSettings) -> int:
    if settings.tensor_parallel is not None:
        return settings.tensor_parallel
    known = INSTANCES.get(settings.instance_type)
    if known is None:
        raise UserError(f"--tensor-parallel: needed for {settings.instance_type}, whose GPUs are not known here")
    return known.gpus


def _own_image(settings: SagemakerSettings) -> str:
    if settings.region not in REGIONS:
        raise UserError(f"--region {settings.region}: AWS's container has another account there; give it by --image")
    return f"{ACCOUNT}.dkr.ecr.{settings.region}.amazonaws.com/vllm:{settings.image_tag}"


def _environment(pair: Pair, settings: SagemakerSettings, names: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {
        "SM_VLLM_MODEL": names["target"],
        "SM_VLLM_SPECULATIVE_CONFIG": speculative(pair, names["drafter"]),
        "SM_VLLM_TENSOR_PARALLEL_SIZE": str(tensor_parallel(settings)),
        "SM_VLLM_SERVED_MODEL_NAME": settings.name,
    }
    for flag, value in (
        ("MAX_MODEL_LEN", settings.max_model_len),
        ("MAX_NUM_SEQS", settings.max_num_seqs),
        ("GPU_MEMORY_UTILIZATION", settings.gpu_memory_utilization),
    ):
        if value is not None:
            values[f"SM_VLLM_{flag}"] = str(value)
    if pair.parallel:
        values[RUNNER] = "0"
    values |= dict(settings.env)
    for name, text in values.items():
        if len(text) > LONGEST_VALUE:
            raise UserError(f"{name}: {len(text)} characters, SageMaker takes {LONGEST_VALUE}; use a shorter name")
    return values


def _uploads(folder: Path, prefix: str) -> list[Upload]:
    """Checkpoint files only: no pickle and no code."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and _wanted(path.name))
    return [Upload(path, prefix + path.name, path.stat().st_size) for path in files]


def _wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in HUB_FILES) and not name.startswith("consolidated")


def cost_line(plan: SagemakerPlan) -> str:
    settings = plan.settings
    if plan.price is None:
        return f"cost: not known here for {settings.instance_type}; look it up and give it by --price"
    hour = plan.price * settings.instances
    each = f"{settings.instances} x {plan.price:g} " if settings.instances > 1 else ""
    source = "by --price" if settings.price is not None else f"list price in {PRICED_IN}, {PRICED}"
    return (
        f"cost: {each}USD {hour:.2f} an hour, {hour * 24:.0f} a day, {hour * HOURS_A_MONTH:.0f} a month "
        f"({source}), from creation until it is deleted, used or not; storage and traffic come on top"
    )


def describe(plan: SagemakerPlan) -> str:
    """All that would be created, and what it costs."""
    lines = [f"region: {plan.settings.region}", cost_line(plan)]
    if plan.artifact is not None:
        lines.append(f"upload: {len(plan.uploads)} files, {plan.size / 1e9:.2f} GB, to {plan.artifact}")
    for call, request in plan.requests().items():
        lines.append(f"{call}:")
        lines += [f"  {line}" for line in json.dumps(request, indent=2).splitlines()]
    return "\n".join(lines)
