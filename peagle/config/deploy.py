"""Settings of `peagle deploy`: vLLM on other machines, and on SageMaker."""

from __future__ import annotations

import re
from dataclasses import dataclass

from peagle.config.validation import field_validator

VLLM_VERSION = "0.32"  # the newest version that checkpoints are checked against

SERVICE_NAME_RULE = "lowercase letters, digits and dashes, starting with a letter, at most 40 characters"


def is_service_name(text: str) -> bool:
    """Kubernetes' rule for a service name, with room for suffixes."""
    return re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text) is not None


@dataclass(frozen=True)
class DeploySettings:
    """`peagle deploy vllm`. None: vLLM's default."""

    name: str = "peagle"
    vllm_version: str = VLLM_VERSION
    tensor_parallel: int = 1
    replicas: int = 1
    host: str = "0.0.0.0"  # a service listens on every interface
    port: int = 8000
    image: str | None = None  # None: vllm/vllm-openai of that version
    program: str = "/usr/local/bin/vllm"  # systemd needs an absolute path
    user: str = "vllm"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()  # further arguments of `vllm serve`
    shared_memory_gib: int = 16  # /dev/shm, used by tensor parallel workers
    start_s: int = 1800  # time for download, load, compilation and graph capture
    drain_s: int = 60

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(is_service_name(self.name), "name", SERVICE_NAME_RULE)
        require(self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.replicas >= 1, "replicas", "at least 1")
        require(1 <= self.port and self.port + self.replicas <= 1 << 16, "port", "from 1 to 65535, replicas included")
        require(self.program.startswith("/"), "program", "an absolute path")
        require(self.max_model_len is None or self.max_model_len >= 1, "max_model_len", "at least 1")
        require(self.max_num_seqs is None or self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        utilization = self.gpu_memory_utilization
        require(utilization is None or 0 < utilization <= 1, "gpu_memory_utilization", "above 0 and at most 1")


@dataclass(frozen=True)
class SagemakerSettings:
    """`peagle deploy sagemaker`. The default image is AWS's vLLM container."""

    name: str = "peagle"
    role: str = ""
    instance_type: str = ""
    instances: int = 1
    region: str = ""
    s3: str | None = None  # s3://bucket/prefix for uploaded folders
    image: str | None = None
    image_tag: str = "server-sagemaker-cuda-v2.5"
    vllm_version: str = "0.30"  # in that image
    ami: str = "al2023-ami-sagemaker-inference-gpu-4-1"  # has the driver for the image's CUDA 13
    tensor_parallel: int | None = None  # None: all GPUs of an instance
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    price: float | None = None  # USD per instance and hour; None: from the built-in table
    start_s: int = 3600  # SageMaker's maximum

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(is_service_name(self.name), "name", SERVICE_NAME_RULE)
        role = r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+"
        require(re.fullmatch(role, self.role) is not None, "role", "arn:aws:iam::ACCOUNT:role/NAME")
        require(self.instance_type.startswith("ml."), "instance_type", "a SageMaker instance type like ml.g6e.xlarge")
        require(self.instances >= 1, "instances", "at least 1")
        bucket = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?"
        require(self.s3 is None or re.fullmatch(bucket, self.s3) is not None, "s3", "s3://bucket/prefix")
        require(self.tensor_parallel is None or self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.price is None or self.price >= 0, "price", "0 or more, in USD per hour")
