"""`peagle deploy sagemaker` against moto's SageMaker and S3: nothing without a yes, all or nothing, and all of it gone
after a delete. Faults are put between the code and moto, call by call.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws import ACCOUNT, pretended
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ClientError
from pairs import drafter_folder, target_folder

from peagle.cli import main
from peagle.config import SagemakerSettings
from peagle.deploy import sagemaker_endpoint as endpoint
from peagle.deploy.models import resolve_pair
from peagle.deploy.sagemaker_endpoint import SagemakerPlan, build_plan
from peagle.errors import UserError

REGION, BUCKET, NAME = "us-west-2", "my-bucket", "my-llm"
ROLE = "arn:aws:iam::123456789012:role/sagemaker"
TARGET, DRAFTER = str(target_folder()), str(drafter_folder("p-eagle-4"))
NEEDED = ("--role", ROLE, "--instance-type", "ml.g6e.xlarge", "--region", REGION, "--name", NAME)
LOCAL = (TARGET, "-d", DRAFTER, *NEEDED, "--s3", f"s3://{BUCKET}/models")
SETTINGS = SagemakerSettings(
    name=NAME, role=ROLE, instance_type="ml.g6e.xlarge", region=REGION, s3=f"s3://{BUCKET}/models"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[endpoint.AwsClients]:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pretended(REGION, BUCKET) as clients:
        yield clients


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def one(*arguments: str, typed: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peagle", "deploy", "sagemaker", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return one


def there(aws: endpoint.AwsClients) -> tuple[list[str], list[str]]:
    """The kinds of SageMaker resources and the S3 keys that exist."""
    lists = {
        "endpoint": aws.sagemaker.list_endpoints()["Endpoints"],
        "endpoint config": aws.sagemaker.list_endpoint_configs()["EndpointConfigs"],
        "model": aws.sagemaker.list_models()["Models"],
    }
    objects = aws.s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return [kind for kind, found in lists.items() if found], [one["Key"] for one in objects]


ALL = ["endpoint", "endpoint config", "model"]
KEYS = [
    f"models/{NAME}/{role}/{file}" for role in ("drafter", "target") for file in ("config.json", "model.safetensors")
]


def test_nothing_is_created_without_confirmation(aws: endpoint.AwsClients, run: Any) -> None:
    for arguments, typed in (((), None), ((), "n\n"), ((), "\n"), (("--dry-run",), "y\n")):
        status, output, _ = run(*LOCAL, *arguments, typed=typed)
        assert status == 0 and output.rstrip().endswith("nothing was created; --yes creates it")
        assert "USD 2.61 an hour, 63 a day, 1905 a month" in output and "August 2026" in output
        assert "SM_VLLM_SPECULATIVE_CONFIG" in output and f"s3://{BUCKET}/models/{NAME}/" in output
        assert there(aws) == ([], [])


def test_create_status_and_delete(aws: endpoint.AwsClients, run: Any) -> None:
    status, output, _ = run(*LOCAL, "-k", "5", "--max-model-len", "128", "--wait", typed="y\n")
    assert status == 0 and output.rstrip().endswith(f"{NAME} is in service")
    assert there(aws) == (ALL, KEYS)
    model = aws.sagemaker.describe_model(ModelName=NAME)
    assert model["ExecutionRoleArn"] == ROLE
    container = model["PrimaryContainer"]
    assert container["Image"] == f"763104351884.dkr.ecr.{REGION}.amazonaws.com/vllm:server-sagemaker-cuda-v2.5"
    source = {"S3Uri": f"s3://{BUCKET}/models/{NAME}/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert container["ModelDataSource"]["S3DataSource"] == source
    environment = container["Environment"]
    assert json.loads(environment.pop("SM_VLLM_SPECULATIVE_CONFIG")) == {
        "method": "eagle3",
        "model": "/opt/ml/model/drafter",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }
    assert environment == {
        "SM_VLLM_MODEL": "/opt/ml/model/target",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_SERVED_MODEL_NAME": NAME,
        "SM_VLLM_MAX_MODEL_LEN": "128",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    (variant,) = aws.sagemaker.describe_endpoint_config(EndpointConfigName=NAME)["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g6e.xlarge", 1)
    uploaded = aws.s3.get_object(Bucket=BUCKET, Key=KEYS[1])["Body"].read()
    assert uploaded == (Path(DRAFTER) / "model.safetensors").read_bytes()

    status, output, _ = run("status", NAME, "--region", REGION)
    assert status == 0 and f"{NAME}: InService" in output and "1 x ml.g6e.xlarge for 0.0 hours" in output
    status, _, complaints = run(*LOCAL, "--yes")
    assert status == 2 and f"--name {NAME}: the endpoint {NAME} exists already" in complaints, "not made twice"

    assert "nothing was deleted" in run("delete", NAME, "--region", REGION)[1] and there(aws)[0] == ALL
    status, output, _ = run("delete", NAME, "--region", REGION, typed="y\nn\n")
    assert status == 0 and "kept: s3://" in output and there(aws) == ([], KEYS)
    assert run("delete", NAME, "--region", REGION, "--yes")[0] == 2, "nothing of that name any more"


def test_delete_with_artifact(aws: endpoint.AwsClients, run: Any) -> None:
    aws.s3.put_object(Bucket=BUCKET, Key="models/other/x", Body=b"x")
    assert run(*LOCAL, "--yes")[0] == 0
    assert run("delete", NAME, "--region", REGION, "--yes", "--artifact", "delete")[0] == 0
    assert there(aws) == ([], ["models/other/x"])


def test_hub_models_are_not_uploaded(aws: endpoint.AwsClients, run: Any) -> None:
    status, _, complaints = run(
        *("openai/gpt-oss-20b", "-d", "amazon/GPT-OSS-20B-P-EAGLE", "--unchecked", *NEEDED, "--yes")
    )
    assert status == 0 and "needs internet access" in complaints
    container = aws.sagemaker.describe_model(ModelName=NAME)["PrimaryContainer"]
    assert container["Environment"]["SM_VLLM_MODEL"] == "openai/gpt-oss-20b" and "ModelDataSource" not in container
    assert json.loads(container["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"])["model"] == "amazon/GPT-OSS-20B-P-EAGLE"
    assert there(aws) == (ALL, [])
    status, output, _ = run("delete", NAME, "--region", REGION, "--yes")
    assert status == 0 and "kept" not in output and there(aws) == ([], [])


def test_invoke(aws: endpoint.AwsClients, run: Any) -> None:
    from moto.sagemakerruntime.models import sagemakerruntime_backends

    assert run(*LOCAL, "--yes")[0] == 0
    backend = sagemakerruntime_backends[ACCOUNT][REGION]
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Because."}}]})
    backend.results_queue.append((body, "application/json", "all", ""))
    assert run("invoke", NAME, "Why?", "--region", REGION)[:2] == (0, "Because.\n")
    backend.results_queue.append(("<html>", "text/html", "all", ""))
    status, _, complaints = run("invoke", NAME, "Why not?", "--region", REGION)
    assert status == 2 and "'<html>' is not a chat completion" in complaints


# Faults


class Failing:
    """A client whose named calls fail; before they are made, or after, as when an answer is lost."""

    def __init__(self, client: Any, error: BaseException, *calls: str, late: bool = False) -> None:
        self.client, self.error, self.calls, self.late = client, error, calls, late

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.client, name)
        if name not in self.calls:
            return call

        def fail(*arguments: Any, **named: Any) -> Any:
            if self.late:
                call(*arguments, **named)
            raise self.error

        return fail


def refused(operation: str) -> ClientError:
    return ClientError({"Error": {"Code": "ResourceLimitExceeded", "Message": "quota is 0"}}, operation)


@pytest.fixture
def plan() -> SagemakerPlan:
    return build_plan(resolve_pair(TARGET, DRAFTER, None, unchecked=False), SETTINGS)


@pytest.mark.parametrize("call", ["create_model", "create_endpoint_config", "create_endpoint"])
def test_failed_creation_is_rolled_back(aws: endpoint.AwsClients, plan: SagemakerPlan, call: str) -> None:
    failing = replace(aws, sagemaker=Failing(aws.sagemaker, refused(call), call))
    with pytest.raises(UserError, match=f"{call}: ResourceLimitExceeded: quota is 0; everything created was deleted"):
        endpoint.create(plan, failing, lambda line: None)
    assert there(aws) == ([], [])


def test_failed_upload_is_deleted(aws: endpoint.AwsClients, plan: SagemakerPlan) -> None:
    failing = replace(aws, s3=Failing(aws.s3, S3UploadFailedError("Access Denied"), "upload_file", late=True))
    with pytest.raises(UserError, match="upload of config.json: Access Denied; everything created was deleted"):
        endpoint.create(plan, failing, lambda line: None)
    assert there(aws) == ([], [])


def test_error_names_objects_that_are_not_deleted(aws: endpoint.AwsClients, plan: SagemakerPlan) -> None:
    failing = replace(
        aws,
        sagemaker=Failing(aws.sagemaker, refused("x"), "create_endpoint"),
        s3=Failing(aws.s3, refused("x"), "delete_objects"),
    )
    with pytest.raises(UserError) as failure:
        endpoint.create(plan, failing, lambda line: None)
    place = f"s3://{BUCKET}/models/{NAME}/"
    assert str(failure.value).endswith(f"; not deleted: {place}; aws s3 rm --recursive {place}")
    assert there(aws) == ([], KEYS)


@pytest.mark.parametrize("late", [False, True])
def test_interrupted_upload_is_deleted(aws: endpoint.AwsClients, plan: SagemakerPlan, late: bool) -> None:
    failing = replace(aws, s3=Failing(aws.s3, KeyboardInterrupt(), "upload_file", late=late))
    with pytest.raises(KeyboardInterrupt):
        endpoint.create(plan, failing, lambda line: None)
    assert there(aws) == ([], [])


def test_error_names_the_command_that_deletes_the_rest(aws: endpoint.AwsClients, plan: SagemakerPlan, run: Any) -> None:
    broken = Failing(aws.sagemaker, refused("x"), "create_endpoint", "delete_model")
    told: list[str] = []
    with pytest.raises(UserError) as failure:
        endpoint.create(plan, replace(aws, sagemaker=broken), told.append)
    assert "not deleted: the model my-llm;" in str(failure.value) and there(aws)[0] == ["model"]
    command = str(failure.value).rpartition("; ")[2]
    assert command.startswith("peagle deploy sagemaker delete")
    assert run(*command.split()[3:])[0] == 0 and there(aws) == ([], [])


def test_lost_response_is_reported(aws: endpoint.AwsClients, plan: SagemakerPlan) -> None:
    """AWS creates the endpoint, but the response is lost: the error names the endpoint, since it costs money."""
    lost = Failing(aws.sagemaker, KeyboardInterrupt(), "create_endpoint", late=True)
    with pytest.raises(UserError, match="not deleted: the endpoint my-llm; peagle deploy sagemaker delete my-llm"):
        endpoint.create(plan, replace(aws, sagemaker=lost), lambda line: None)


def test_resources_of_others_are_kept(aws: endpoint.AwsClients, plan: SagemakerPlan) -> None:
    """A model created between the check and the call, and a prefix that is not empty."""

    class Rival:
        def __getattr__(self, name: str) -> Any:
            call = getattr(aws.sagemaker, name)
            if name != "create_model":
                return call

            def create(**request: Any) -> Any:
                call(**{**request, "ExecutionRoleArn": ROLE + "-of-another"})
                raise refused("create_model")

            return create

    with pytest.raises(UserError, match="not deleted: the model"):
        endpoint.create(plan, replace(aws, sagemaker=Rival()), lambda line: None)
    assert aws.sagemaker.describe_model(ModelName=NAME)["ExecutionRoleArn"] == ROLE + "-of-another"
    aws.sagemaker.delete_model(ModelName=NAME)
    aws.s3.put_object(Bucket=BUCKET, Key=f"models/{NAME}/mine", Body=b"x")
    with pytest.raises(UserError, match=f"models/{NAME}/ is not empty"):
        endpoint.create(plan, aws, lambda line: None)
    assert there(aws) == ([], [f"models/{NAME}/mine"])


def test_artifacts_of_others_are_kept(aws: endpoint.AwsClients) -> None:
    with pytest.raises(UserError, match="not uploaded by peagle"):
        endpoint.delete_artifact(NAME, aws, f"s3://{BUCKET}/models/other/")


def test_bucket_in_another_region_is_an_error(aws: endpoint.AwsClients, plan: SagemakerPlan) -> None:
    boto3.client("s3", region_name="eu-west-1").create_bucket(
        Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    with pytest.raises(UserError, match="the bucket is in eu-west-1, the endpoint in us-west-2"):
        endpoint.create(replace(plan, bucket="far-away"), aws, lambda line: None)
    with pytest.raises(UserError, match="NoSuchBucket"):
        endpoint.create(replace(plan, bucket="no-such-bucket"), aws, lambda line: None)
    assert there(aws) == ([], [])


# Errors before AWS is called


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((TARGET, "-d", DRAFTER, *NEEDED), "--s3: needed to upload the target and the drafter"),
        ((*LOCAL, "--region", "mars-1"), "--region mars-1"),
        ((*LOCAL, "--role", "me"), "--role me"),
        ((*LOCAL, "--instance-type", "g6e.xlarge"), "--instance-type g6e.xlarge"),
        ((*LOCAL, "--instance-type", "ml.new.8xlarge"), "--tensor-parallel: needed for ml.new.8xlarge"),
        ((*LOCAL, "--instance-type", "ml.p5.4xlarge", "--yes"), "--price: needed"),
        ((*LOCAL, "--s3", "my-bucket"), "--s3 my-bucket"),
        ((*LOCAL, "--env", f"A={'x' * 1025}"), "A: has 1025 characters"),
        (("delete", NAME, "--artifact", "burn"), "--artifact burn"),
        (("status", NAME, "--region", REGION), "no such endpoint"),
    ],
)  # fmt: skip
def test_wrong_command_line_is_one_line(
    aws: endpoint.AwsClients, run: Any, arguments: tuple[str, ...], named: str
) -> None:
    status, _, complaints = run(*arguments)
    assert status == 2 and named in complaints and complaints.count("\n") == 1
    assert there(aws) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tensor-parallel", "2"), "ml.g6e.xlarge has 1 GPUs"),
        (("--instance-type", "ml.g6e.48xlarge"), "error: --tensor-parallel 8: cannot split the target's 4 heads"),
        (("--instance-type", "ml.g6e.12xlarge", "--tensor-parallel", "2"), "warning: 2 of 4 GPUs stay idle"),
        (("--env", "HF_TOKEN=hf_x"), "error: --env HF_TOKEN"),
        (("--env", "VLLM_USE_V2_MODEL_RUNNER=1"), "error: VLLM_USE_V2_MODEL_RUNNER=1"),
        (("--image", "me/vllm:old", "--vllm-version", "0.15"), "needs vLLM 0.16"),
    ],
)  # fmt: skip
def test_errors_stop_the_deployment(aws: endpoint.AwsClients, run: Any, arguments: tuple[str, ...], told: str) -> None:
    status, _, complaints = run(*LOCAL, *arguments, "--yes")
    assert told in complaints
    assert (status == 0) == told.startswith("warning") and (there(aws)[0] == []) == (status != 0)


def test_plan_does_not_need_boto3(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    status, output, _ = run(*LOCAL)
    assert status == 0 and "create_endpoint_config" in output
    status, _, complaints = run(*LOCAL, "--yes")
    assert status == 2 and "pip install 'peagle[aws]'" in complaints


def test_no_credentials_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    status, _, complaints = run(*LOCAL, "--yes")
    assert status == 2 and "no AWS credentials" in complaints and complaints.count("\n") == 1
    status, _, complaints = run("status", NAME)
    assert status == 2 and "--region: needed" in complaints
