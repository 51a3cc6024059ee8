"""Settings of `peagle serve`, and of `peagle deploy`: vLLM on other machines, and on SageMaker."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from peagle.config.engine import MAX_MODEL_LEN_HELP
from peagle.config.options import REQUIRED, Check, Settings, option, require
from peagle.errors import UserError

VLLM_VERSION = "0.32"  # the newest version that checkpoints are checked against
ServeEngine = Literal["embedded", "vllm"]
ToolCallParserName = Literal["auto", "hermes", "llama3", "mistral", "none"]
SERVED_MODEL_NAME_HELP = "Model name in the API."


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Address, limits and defaults of the HTTP server. Times are in seconds."""

    host: str = option("127.0.0.1", "Address to bind; 0.0.0.0 accepts remote clients.", panel="Server")
    port: int = option(8000, "Port; 0 picks a free one.", min=0, max=65535)
    served_model_name: str = option("", SERVED_MODEL_NAME_HELP, show_default="TARGET")
    api_key: str | None = option(
        None,
        "Key that clients must send; prefer the environment variable.",
        repr=False,
        envvar="PEAGLE_API_KEY",
        show_default=False,
    )
    cors_origins: tuple[str, ...] = option(
        (), "Origin whose pages may call the API; repeatable.", flags=("--cors-origin",), metavar="URL"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host header to accept beside loopback names, or * for any; repeatable.",
        metavar="HOST",
        show_default="any, but with a loopback --host only loopback names",
    )
    max_queued_requests: int = option(256, "Maximum number of waiting requests; more get 429.", min=0)
    max_body_bytes: int = option(4 << 20, "Maximum size of a request; larger ones get 413.", min=1)
    request_timeout_s: float = option(600.0, "Seconds until a request gets 503.", above=0, max=1e9)
    shutdown_timeout_s: float = option(30.0, "Seconds for running requests after SIGTERM.", min=0, max=1e9)
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 30.0  # idle connections; above the 5 s that most clients use
    default_temperature: float = 1.0  # OpenAI's default
    default_completion_tokens: int = 16  # of /v1/completions; a chat may fill the context
    max_n: int = 128  # completions per prompt
    max_messages: int = 2048
    max_tools: int = 512
    max_template_kwargs: int = 64
    max_stop_token_ids: int = 1024
    max_stop_strings: int = 32
    max_stop_length: int = 1024  # characters of one stop string
    max_rebuild_attempts: int = 3  # of an engine that failed
    max_consecutive_failures: int = 5  # of the engine, without a finished request between them
    log_json: bool = option(False, "Log JSON lines.")
    log_prompts: bool = option(False, "Log prompts, too.")
    tool_call_parser: ToolCallParserName = option(
        "auto", "Format of tool calls: auto, hermes, llama3, mistral or none.", panel="Model"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("--api-key: must be printable ASCII, and not empty")

    @property
    def accepted_hosts(self) -> frozenset[str] | None:
        """Values of the Host header, without a port. None: any."""
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback):
            return None
        host = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(map(str.lower, (*self.allowed_hosts, "localhost", "127.0.0.1", "[::1]", host)))


def matches(pattern: str, expected: str) -> Check:
    return lambda text: re.fullmatch(pattern, text) is not None, expected


SERVICE_NAME = matches(  # Kubernetes' rule, with room for suffixes
    r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "lowercase letters, digits and dashes, starting with a letter, at most 40 characters",
)


def parse_env(variables: list[str]) -> tuple[tuple[str, str], ...]:
    for variable in variables:
        name, equals, _ = variable.partition("=")
        require(bool(equals) and name.isidentifier(), "--env", variable, "NAME=VALUE")
    return tuple((name, value) for name, _, value in (variable.partition("=") for variable in variables))


@dataclass(frozen=True)
class VllmSettings(Settings):
    """A vLLM server that is deployed. None: vLLM's default."""

    max_model_len: int | None = option(
        None, MAX_MODEL_LEN_HELP, min=1, panel="Engine", show_default="the target's limit"
    )
    max_num_seqs: int | None = option(None, "Concurrent requests.", min=1, show_default="vLLM's")
    gpu_memory_utilization: float | None = option(
        None, "Share of each GPU's memory, weights included.", above=0, max=1, show_default="vLLM's"
    )
    env: tuple[tuple[str, str], ...] = option(
        (), "Environment variable; repeatable.", parse=parse_env, metavar="NAME=VALUE"
    )


def vllm_version_option(version: str) -> Any:
    return option(version, "vLLM version to check against.", panel="Checks", metavar="VERSION")


@dataclass(frozen=True)
class DeploySettings(VllmSettings):
    """`peagle deploy vllm`."""

    name: str = option("peagle", "Service name.", check=SERVICE_NAME, panel="Server")
    vllm_version: str = vllm_version_option(VLLM_VERSION)
    tensor_parallel: int = option(1, "GPUs per replica.", min=1, panel="Engine")
    replicas: int = option(1, "Number of replicas.", min=1)
    host: str = option("0.0.0.0", "Address to listen on.", panel="Server")  # a service listens on every interface
    port: int = option(8000, "Port for clients.", min=1, max=65535)
    image: str | None = option(None, "Container image.", show_default="vLLM's of that version")
    program: str = option("/usr/local/bin/vllm", "Path of vllm, for systemd.", check=matches("/.*", "an absolute path"))
    user: str = option("vllm", "User that systemd runs it as.")
    served_model_name: str | None = option(None, SERVED_MODEL_NAME_HELP, show_default="TARGET")
    extra: tuple[str, ...] = ()  # further arguments of `vllm serve`
    shared_memory_gib: int = 16  # /dev/shm, used by tensor parallel workers
    start_s: int = 1800  # time for download, load, compilation and graph capture
    drain_s: int = 60


@dataclass(frozen=True, kw_only=True)
class SagemakerSettings(VllmSettings):
    """`peagle deploy sagemaker`. The default image is AWS's vLLM container."""

    role: str = option(
        REQUIRED,
        "IAM role that SageMaker assumes.",
        check=matches(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", "arn:aws:iam::ACCOUNT:role/NAME"),
        panel="AWS",
        metavar="ARN",
    )
    instance_type: str = option(
        REQUIRED,
        "Instance type, like ml.g6e.xlarge.",
        check=matches(r"ml\..*", "a SageMaker instance type like ml.g6e.xlarge"),
        metavar="TYPE",
    )
    name: str = option("peagle", "Endpoint name.", check=SERVICE_NAME)
    instances: int = option(1, "Number of instances.", min=1)
    region: str = option("", "AWS region.", show_default="the configured one")
    s3: str | None = option(
        None,
        "s3://bucket/prefix to upload folders to, below NAME/.",
        check=matches(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?", "s3://bucket/prefix"),
    )
    image: str | None = option(None, "Container image.", show_default="AWS's server-sagemaker-cuda-v2.5")
    image_tag: str = "server-sagemaker-cuda-v2.5"
    vllm_version: str = vllm_version_option("0.30")  # in that image
    ami: str = "al2023-ami-sagemaker-inference-gpu-4-1"  # has the driver for the image's CUDA 13
    tensor_parallel: int | None = option(
        None, "GPUs per model.", min=1, panel="Engine", show_default="all of an instance"
    )
    price: float | None = option(
        None,
        "USD per instance and hour.",
        check=(lambda price: price >= 0, "0 or more, in USD per hour"),
        panel="AWS",
        show_default="the list price",
    )
    start_s: int = 3600  # SageMaker's maximum
