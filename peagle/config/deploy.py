"""How vLLM is started elsewhere, and which of its versions is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from peagle.config.validation import requirer

VLLM_VERSION = "0.32"  # the newest that folders are checked against

NAME_RULE = "small letters, digits and dashes, a letter first, at most 40"  # Kubernetes' for a service, and shorter


def is_name(text: str) -> bool:
    return re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text) is not None


@dataclass(frozen=True)
class DeploySettings:
    """`peagle deploy vllm`. None: vLLM's own choice."""

    name: str = "peagle"
    vllm_version: str = VLLM_VERSION
    tensor_parallel: int = 1
    replicas: int = 1
    host: str = "0.0.0.0"  # it is a service: others are meant to reach it
    port: int = 8000
    image: str | None = None  # None: vLLM's own of that version
    program: str = "/usr/local/bin/vllm"  # systemd wants a whole path
    user: str = "vllm"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_fraction: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()  # words behind vLLM's command
    shared_memory_gib: int = 16  # what tensor parallel workers talk through
    start_s: int = 1800  # to download, load, compile and capture
    drain_s: int = 60

    def __post_init__(self) -> None:
        require = requirer(self)
        require(is_name(self.name), "name", NAME_RULE)
        require(self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.replicas >= 1, "replicas", "at least 1")
        require(1 <= self.port and self.port + self.replicas <= 1 << 16, "port", "from 1 to 65535, replicas included")
        require(self.program.startswith("/"), "program", "a whole path")
        require(self.max_model_len is None or self.max_model_len >= 1, "max_model_len", "at least 1")
        require(self.max_num_seqs is None or self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        fraction = self.gpu_memory_fraction
        require(fraction is None or 0 < fraction <= 1, "gpu_memory_fraction", "above 0 and at most 1")


@dataclass(frozen=True)
class SagemakerSettings:
    """`peagle deploy sagemaker`. The image is AWS's own, by the tag that is newest here and the vLLM in it."""

    name: str = "peagle"
    role: str = ""
    instance_type: str = ""
    instances: int = 1
    region: str = ""
    s3: str | None = None  # s3://bucket/prefix, for what is uploaded
    image: str | None = None
    image_tag: str = "server-sagemaker-cuda-v2.5"
    vllm_version: str = "0.30"  # in that image
    ami: str = "al2023-ami-sagemaker-inference-gpu-4-1"  # the driver that its CUDA 13 needs
    tensor_parallel: int | None = None  # None: all GPUs of an instance
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_fraction: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    price: float | None = None  # USD an hour and instance; None: by the table
    start_s: int = 3600  # SageMaker's most

    def __post_init__(self) -> None:
        require = requirer(self)
        require(is_name(self.name), "name", NAME_RULE)
        role = r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+"
        require(re.fullmatch(role, self.role) is not None, "role", "arn:aws:iam::ACCOUNT:role/NAME")
        require(self.instance_type.startswith("ml."), "instance_type", "SageMaker's name of one, as ml.g6e.xlarge")
        require(self.instances >= 1, "instances", "at least 1")
        place = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?"
        require(self.s3 is None or re.fullmatch(place, self.s3) is not None, "s3", "s3://bucket/prefix")
        require(self.tensor_parallel is None or self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.price is None or self.price >= 0, "price", "0 or more, in USD an hour")
