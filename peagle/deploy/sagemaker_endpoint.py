"""An endpoint of SageMaker's: created whole or not at all, looked at, asked, deleted.

Knows boto3. What it creates bears one name, the endpoint's; what is left over when something fails is deleted again,
and what cannot be deleted is named with the command that does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from peagle.deploy.instances import INSTANCES
from peagle.deploy.sagemaker_plan import SagemakerPlan
from peagle.errors import UserError

Say = Callable[[str], None]
KINDS = {"endpoint": "Endpoint", "endpoint config": "EndpointConfig", "model": "Model"}  # in the order of deletion
PAGE = 1000  # objects that S3 deletes in one call
LONGEST_MESSAGE = 400  # characters; some of AWS's list all that would have been right


@dataclass(frozen=True)
class Aws:
    """The clients of one region."""

    region: str
    sagemaker: Any
    runtime: Any
    s3: Any


@dataclass(frozen=True)
class Status:
    name: str
    state: str
    reason: str | None
    instance_type: str
    instances: int
    hours: float
    price: float | None  # USD an hour, all instances
    artifact: str | None


@dataclass(frozen=True)
class Left:
    """What bears the name."""

    kinds: tuple[str, ...]
    artifact: str | None


def connect(given: str | None) -> Aws:
    boto3 = _boto3()
    from botocore.config import Config

    region = find_region(given)
    with plain_errors():
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise UserError("no AWS credentials: run `aws configure` or `aws sso login`, or set AWS_PROFILE")
        # a long answer is one long request; asking again would have it made twice
        patient = Config(read_timeout=900, retries={"max_attempts": 0})
        return Aws(
            region,
            session.client("sagemaker"),
            session.client("sagemaker-runtime", config=patient),
            session.client("s3"),
        )


def find_region(given: str | None) -> str:
    """As given, by the environment, or as boto3 is configured; a plan with a region needs no boto3."""
    region = given or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        boto3 = _boto3()
        with plain_errors():
            region = boto3.Session().region_name
    if not region:
        raise UserError("--region: needed; or set AWS_REGION, or a region in ~/.aws/config")
    return region


def _boto3() -> Any:
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise UserError(f"peagle deploy sagemaker needs {error.name}: pip install 'peagle[aws]'") from None
    return boto3


@contextmanager
def plain_errors(doing: str = "AWS") -> Iterator[None]:
    """AWS's complaints as one line."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        told = error.response.get("Error", {})
        message = str(told.get("Message", error))[:LONGEST_MESSAGE]
        raise UserError(f"{doing}: {told.get('Code', 'error')}: {message}") from None
    except (Boto3Error, BotoCoreError, OSError) as error:
        raise UserError(f"{doing}: {' '.join(str(error).split())[:LONGEST_MESSAGE]}") from None


def create(plan: SagemakerPlan, aws: Aws, say: Say) -> None:
    """All of it, or none. Nobody is waited for: the endpoint comes up by itself."""
    _check_free(plan, aws)
    name, doing = plan.settings.name, ""
    uploaded = False
    made: list[str] = []
    try:
        for upload in plan.uploads:
            doing, uploaded = f"upload of {upload.source.name}", True
            say(f"uploading {upload.source.name} ({upload.size / 1e9:.2f} GB)")
            with plain_errors(doing):
                aws.s3.upload_file(str(upload.source), plan.bucket, upload.key)
        for call, request in plan.requests().items():
            doing = call
            with plain_errors(doing):
                getattr(aws.sagemaker, call)(**request)
            made.insert(0, call.removeprefix("create_").replace("_", " "))
            say(f"{call}: {name}")
    except BaseException as error:  # Ctrl-C too: what was created costs money
        say(f"{doing} failed")
        left = delete(name, aws, say, made, plan.artifact if uploaded else None)
        left += [f"the {kind} {name}" for kind in _kinds_left(name, aws) if f"the {kind} {name}" not in left]
        why = str(error) if isinstance(error, UserError) else f"{doing}: {type(error).__name__}"
        if left:
            raise UserError(f"{why}; left: {', '.join(left)}; {remedy(left, name, aws.region)}") from None
        if isinstance(error, UserError):
            raise UserError(f"{why}; nothing is left of it") from None
        raise


def remedy(left: Sequence[str], name: str, region: str) -> str:
    """The commands that delete what is left."""
    objects = [one for one in left if one.startswith("s3://")]
    own = [f"peagle deploy sagemaker delete {name} --region {region} --yes"] if len(left) > len(objects) else []
    return " && ".join([*own, *(f"aws s3 rm --recursive {one}" for one in objects)])


def _check_free(plan: SagemakerPlan, aws: Aws) -> None:
    """Nothing of the name is there, and the bucket is one that SageMaker can read."""
    name = plan.settings.name
    taken = look(name, aws).kinds
    if taken:
        raise UserError(f"--name {name}: the {taken[0]} {name} is there already, in {aws.region}; use another")
    if plan.artifact is None:
        return
    with plain_errors(f"--s3 {plan.settings.s3}"):
        place = aws.s3.get_bucket_location(Bucket=plan.bucket).get("LocationConstraint") or "us-east-1"
        there = aws.s3.list_objects_v2(Bucket=plan.bucket, Prefix=plan.prefix, MaxKeys=1).get("KeyCount", 0)
    if place != aws.region:
        raise UserError(f"--s3 {plan.settings.s3}: the bucket is in {place}, the endpoint in {aws.region}")
    if there:
        raise UserError(f"--s3 {plan.settings.s3}: there is something under {plan.prefix} already; use another --name")


def _found(aws: Aws, kind: str, name: str) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    with plain_errors(f"describe the {kind}"):
        try:
            answer: dict[str, Any] = getattr(aws.sagemaker, _call("describe", kind))(**{f"{KINDS[kind]}Name": name})
            return answer
        except ClientError as error:
            if _is_absent(error.response.get("Error", {})):
                return None
            raise


def _call(verb: str, kind: str) -> str:
    return f"{verb}_{kind.replace(' ', '_')}"


def _is_absent(told: dict[str, Any]) -> bool:
    """SageMaker has no code for it."""
    return told.get("Code") == "ValidationException" and "could not find" in str(told.get("Message")).lower()


def look(name: str, aws: Aws) -> Left:
    found = {kind: _found(aws, kind, name) for kind in KINDS}
    model = found["model"] or {}
    source = model.get("PrimaryContainer", {}).get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
    return Left(tuple(kind for kind, there in found.items() if there is not None), source)


def status(name: str, aws: Aws) -> Status:
    endpoint = _found(aws, "endpoint", name)
    if endpoint is None:
        raise UserError(f"{name}: there is no endpoint of that name in {aws.region}")
    config = _found(aws, "endpoint config", endpoint["EndpointConfigName"]) or {}
    variant = (config.get("ProductionVariants") or [{}])[0]
    kind, count = variant.get("InstanceType", "unknown"), variant.get("InitialInstanceCount", 1)
    known = INSTANCES.get(kind)
    return Status(
        name,
        endpoint["EndpointStatus"],
        endpoint.get("FailureReason"),
        kind,
        count,
        (datetime.now(UTC) - endpoint["CreationTime"]).total_seconds() / 3600,
        known.price * count if known is not None and known.price is not None else None,
        look(name, aws).artifact,
    )


def invoke(name: str, aws: Aws, prompt: str, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    with plain_errors(name):
        answer = aws.runtime.invoke_endpoint(
            EndpointName=name, ContentType="application/json", Body=json.dumps(body).encode()
        )
        said = answer["Body"].read().decode("utf-8", "replace")
    try:
        return str(json.loads(said)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{name}: answered {said[:300]!r}, which is no chat completion") from None


def delete(name: str, aws: Aws, say: Say, kinds: Sequence[str], artifact: str | None) -> list[str]:
    """The endpoint first, since it costs; an artifact only if it is named. What could not be deleted comes back."""
    left = []
    for kind in kinds:
        try:
            with plain_errors(f"delete the {kind}"):
                getattr(aws.sagemaker, _call("delete", kind))(**{f"{KINDS[kind]}Name": name})
            say(f"deleted the {kind} {name}")
        except UserError as error:
            say(str(error))
            left.append(f"the {kind} {name}")
    if artifact is not None:
        try:
            say(f"deleted {delete_artifact(name, aws, artifact)} objects under {artifact}")
        except UserError as error:
            say(str(error))
            left.append(artifact)
    return left


def _kinds_left(name: str, aws: Aws) -> tuple[str, ...]:
    """Where even looking fails everything may be there."""
    try:
        return look(name, aws).kinds
    except UserError:
        return tuple(KINDS)


def delete_artifact(name: str, aws: Aws, artifact: str) -> int:
    """Only what was uploaded under the endpoint's name; the number of objects."""
    bucket, _, prefix = artifact.removeprefix("s3://").partition("/")
    if not prefix.endswith(f"{name}/"):
        raise UserError(f"{artifact}: not uploaded by peagle for {name}, so it is not deleted")
    count = 0
    with plain_errors(artifact):
        while True:
            listed = aws.s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=PAGE).get("Contents", [])
            if not listed:
                return count
            keys = [{"Key": one["Key"]} for one in listed]
            refused = aws.s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True}).get("Errors")
            if refused:
                raise UserError(f"{artifact}: {refused[0].get('Code')}: {refused[0].get('Message')}")
            count += len(keys)


def wait(name: str, aws: Aws, say: Say) -> None:
    from botocore.exceptions import WaiterError

    say("waiting until it answers; Ctrl-C leaves it to come up by itself")
    try:
        aws.sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=name)
    except WaiterError:
        seen = status(name, aws)
        reason = f": {seen.reason}" if seen.reason else ""
        raise UserError(
            f"{name} is {seen.state}{reason}; its log is in CloudWatch under /aws/sagemaker/Endpoints/{name}; "
            f"{remedy(['the endpoint'], name, aws.region)}"
        ) from None
