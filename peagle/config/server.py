"""Settings of `peagle serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from peagle.config.validation import field_validator
from peagle.errors import UserError

ServeEngine = Literal["embedded", "vllm"]
ToolCallParserName = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True)
class ServeSettings:
    """Address, limits and defaults of the HTTP server. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    served_model_name: str = ""
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    max_queued_requests: int = 256  # beyond the running ones; more get status 429
    max_body_bytes: int = 4 << 20
    request_timeout_s: float = 600.0  # from arrival to the last token
    shutdown_timeout_s: float = 30.0  # running requests may take this long after SIGTERM
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 30.0  # idle connections; above the 5 s that most clients use
    retry_after_s: int = 1
    default_temperature: float = 1.0  # OpenAI's default
    default_completion_tokens: int = 16  # of /v1/completions; a chat may fill the context
    max_n: int = 128  # completions per prompt
    max_stop_strings: int = 32
    max_stop_length: int = 1024  # characters of one stop string
    max_rebuild_attempts: int = 3  # of an engine that failed
    max_consecutive_failures: int = 5  # of the engine, without a finished request between them
    log_json: bool = False
    log_prompts: bool = False
    tool_call_parser: ToolCallParserName = "auto"  # auto: found in the chat template

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(0 <= self.port < 1 << 16, "port", "from 0 (any free port) to 65535")
        require(self.max_queued_requests >= 0, "max_queued_requests", "0 or more")
        require(self.max_body_bytes >= 1, "max_body_bytes", "at least 1")
        require(0 < self.request_timeout_s < 1e9, "request_timeout_s", "above 0, in seconds")
        require(0 <= self.shutdown_timeout_s < 1e9, "shutdown_timeout_s", "0 or more, in seconds")
        names = get_args(ToolCallParserName)
        require(self.tool_call_parser in names, "tool_call_parser", f"{', '.join(names[:-1])} or {names[-1]}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("--api-key: must be printable ASCII, and not empty")
