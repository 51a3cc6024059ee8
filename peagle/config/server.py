"""How a server meets the world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from peagle.config.validation import field_validator
from peagle.errors import UserError

ServeEngine = Literal["embedded", "vllm"]
ToolParser = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True)
class ServeSettings:
    """How a server meets the world. Times are in seconds."""

    host: str = "127.0.0.1"  # loopback: who wants to be reached from outside says so
    port: int = 8000  # 0: any that is free
    model: str = ""  # the name that clients ask for
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()  # none: no page of another origin may read an answer
    max_queue: int = 256  # requests that may wait for the engine; more are told to come back
    max_body: int = 4 << 20  # bytes of a request
    deadline_s: float = 600.0  # from a request's arrival to its last token
    drain_s: float = 30.0  # for what is being answered when the server is told to stop
    head_s: float = 20.0  # for the head of a request to arrive
    body_s: float = 60.0  # for its body
    keep_alive_s: float = 30.0  # that an idle connection stays open; above the 5 s that clients usually keep theirs
    retry_after_s: int = 1
    temperature: float = 1.0  # where a request names none, as OpenAI's API has it
    completion_tokens: int = 16  # max_tokens of /v1/completions where it names none; a chat may fill the context
    max_answers: int = 128  # n
    max_stops: int = 32  # stop strings
    stop_length: int = 1024  # characters of one
    rebuilds: int = 3  # tries to build a failed engine anew
    failures: int = 5  # of the engine in a row, without an answer between them, before it is given up
    log_json: bool = False
    log_prompts: bool = False
    tool_parser: ToolParser = "auto"  # how the model writes calls of tools; auto: as its chat template says

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(0 <= self.port < 1 << 16, "port", "from 0 (any that is free) to 65535")
        require(self.max_queue >= 0, "max_queue", "0 or more")
        require(self.max_body >= 1, "max_body", "at least 1 byte")
        require(0 < self.deadline_s < 1e9, "deadline_s", "above 0, in seconds")
        require(0 <= self.drain_s < 1e9, "drain_s", "0 or more, in seconds")
        kinds = get_args(ToolParser)
        require(self.tool_parser in kinds, "tool_parser", f"{', '.join(kinds[:-1])} or {kinds[-1]}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("--api-key: must be printable ASCII, and not empty")
