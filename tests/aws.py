"""moto's AWS, with the instance types that SageMaker has today: moto knows those of years ago, botocore all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import botocore.session
from moto import mock_aws
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeEndpointConfig

from peagle.deploy.sagemaker_endpoint import AwsClients, connect

ACCOUNT = "123456789012"  # moto's


@cache
def instance_types() -> frozenset[str]:
    model = botocore.session.get_session().get_service_model("sagemaker")
    return frozenset(model.shape_for("ProductionVariantInstanceType").enum)


def _check(self: Any, instance_type: str) -> None:
    if instance_type not in instance_types():
        raise ValidationError(message=f"Value '{instance_type}' at 'instanceType' failed to satisfy constraint")


@contextmanager
def pretended(region: str, bucket: str) -> Iterator[AwsClients]:
    """AWS with an empty bucket in it, while this lasts."""
    with mock_aws(), mock.patch.object(FakeEndpointConfig, "validate_instance_type", _check):
        aws = connect(region)
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        aws.s3.create_bucket(Bucket=bucket, **where)
        yield aws
