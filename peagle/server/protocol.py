"""Requests of OpenAI's API, with vLLM's extensions, and their translation to `SamplingParams`.

Unknown fields are refused by name, and so are known fields that the engine does not support: the server never ignores
a field that would change the output. A field that is null counts as absent.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Field, SkipValidation, model_validator

from peagle.config import SamplingParams, ServeSettings
from peagle.server.errors import ApiError, invalid_value

MIN_TEMPERATURE = 1e-5  # lower ones are greedy: dividing logits by them may overflow
INT_LIMIT = 1 << 31
PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams))

FiniteFloat = Annotated[float, AllowInfNan(False)]
BoundedInt = Annotated[int, Field(gt=-INT_LIMIT, lt=INT_LIMIT)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=INT_LIMIT)]
PositiveInt = Annotated[int, Field(ge=1, lt=INT_LIMIT)]
JSON = dict[str, Any]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    # Known fields that the engine does not support, with the values that mean "off" and are accepted.
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, accepted in cls.UNSUPPORTED.items():
            value = data.get(name)
            if value is not None and not any(type(value) is type(a) and value == a for a in accepted):
                raise invalid_value(name, "not supported by this server", "unsupported_parameter")
        return {name: value for name, value in data.items() if name not in cls.UNSUPPORTED}


class PeagleOptions(StrictModel):
    """This server's own extension, the field `peagle`. It never changes the output."""

    tokens: bool = False  # return the id and the text of every token, and whether it was a draft token
    speculation: bool | None = None  # False: no draft tokens
    num_speculative_tokens: NonNegativeInt | None = None  # at most the server's K


class StreamOptions(StrictModel):
    include_usage: bool | None = None

    UNSUPPORTED = {"continuous_usage_stats": (False,), "include_obfuscation": (False, True)}


class JsonSchemaFormat(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def get_schema(self) -> JSON | None:
        """Returns the schema of the output; None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        if schema is None:
            field = "response_format.json_schema" + (".schema" if self.json_schema is not None else "")
            raise invalid_value(field, "required", "missing_required_parameter")
        return schema


class SamplingRequest(StrictModel):
    """Fields of both /v1/completions and /v1/chat/completions."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: BoundedInt | None = None  # 0 and -1 are off
    min_p: FiniteFloat | None = None
    n: PositiveInt | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[NonNegativeInt], Field(fail_fast=True)] | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    logit_bias: dict[str, FiniteFloat] | None = None
    allowed_token_ids: Annotated[list[NonNegativeInt], Field(fail_fast=True)] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    user: str | None = None  # accepted, without effect
    peagle: PeagleOptions | None = None

    @property
    def options(self) -> PeagleOptions:
        return self.peagle or PeagleOptions()

    def get_num_logprobs(self) -> int | None:
        """Returns the number of alternatives per token; None: no logprobs."""
        raise NotImplementedError

    def get_max_tokens(self) -> int | None:
        return self.max_tokens

    def to_sampling_params(
        self, settings: ServeSettings, max_tokens: int, max_speculative_tokens: int, **options: Any
    ) -> SamplingParams:
        """`options` replace fields of the request."""
        self._check_limits(settings, max_speculative_tokens)
        temperature = self.temperature if self.temperature is not None else settings.default_temperature
        values = {name: value for name, value in self if name in PARAM_NAMES} | {
            "max_tokens": max_tokens,
            "temperature": 0.0 if 0.0 <= temperature < MIN_TEMPERATURE else temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logprobs": self.get_num_logprobs(),
            "max_speculative_tokens": 0 if self.options.speculation is False else self.options.num_speculative_tokens,
        }
        return SamplingParams(**{name: value for name, value in (values | options).items() if value is not None})

    def _check_limits(self, settings: ServeSettings, max_speculative_tokens: int) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        max_length = settings.max_stop_length
        for field, texts in (("stop", stops), ("bad_words", self.bad_words or [])):
            _require(all(len(s) <= max_length for s in texts), field, f"at most {max_length} characters each")
        _require((self.n or 1) <= settings.max_n, "n", f"at most {settings.max_n}")
        _require(self.stream_options is None or self.stream is True, "stream_options", "only with stream: true")
        if (k := self.options.num_speculative_tokens) is not None:
            field = "peagle.num_speculative_tokens"
            _require(k <= max_speculative_tokens, field, f"at most {max_speculative_tokens} on this server")
            _require(self.options.speculation is not False or k == 0, field, "contradicts speculation: false")


def _require(ok: bool, field: str, message: str, code: str = "invalid_value") -> None:
    if not ok:
        raise invalid_value(field, message, code)


def _check_prompt_type(prompt: Any) -> Any:
    """Pydantic would collect an error for every item and every branch of the union."""
    items = prompt if isinstance(prompt, list) else [prompt]
    nested = set(map(type, items)) == {list}
    types = set(map(type, chain.from_iterable(items) if nested else items))
    valid = (types == {str} and not nested) or (types <= {int} and isinstance(prompt, list))
    _require(valid, "prompt", "must be text, a list of token ids, or a list of texts or of lists of token ids")
    return prompt


Prompt = Annotated[
    str | list[str] | list[NonNegativeInt] | list[list[NonNegativeInt]],
    SkipValidation,
    AfterValidator(_check_prompt_type),
]


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    logprobs: BoundedInt | None = None

    UNSUPPORTED = {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "prompt_logprobs": (),
    }

    def get_num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]


class TextContent(StrictModel):
    type: Literal["text"]
    text: str


class MessageFunctionCall(StrictModel):
    name: str
    arguments: str | JSON = ""


class MessageToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: MessageFunctionCall


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextContent], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None

    # Client libraries add these when they send an assistant's message back.
    UNSUPPORTED = {"refusal": (), "audio": (), "annotations": ([],), "function_call": (), "reasoning_content": ()}

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: Any) -> Any:
        """Refuses images and other media by their type. Their addresses are never opened."""
        content = data.get("content") if isinstance(data, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                message = f"messages: content of type {kind[:40]!r} is not supported"
                raise ApiError(400, message, "messages.content.type")
        return data

    def to_template_input(self) -> JSON:
        message: JSON = {"role": self.role, "content": "", **self.model_dump(exclude_none=True)}
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        if not self.tool_calls:
            message.pop("tool_calls", None)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            with suppress(ValueError, TypeError, RecursionError):  # in messages a JSON string, in templates a value
                function["arguments"] = json.loads(function["arguments"])
        return message


class FunctionDefinition(StrictModel):
    name: str
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class ToolDefinition(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True)
class ToolUsage:
    """The tools of a chat request: those in the prompt, and those one of which must be called."""

    definitions: list[JSON] | None = None
    forced: tuple[tuple[str, JSON | None], ...] = ()  # (name, schema of the arguments)


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]


class ChatRequest(SamplingRequest):
    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: JSON | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegativeInt | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    UNSUPPORTED = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "metadata": ({},),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        **dict.fromkeys("functions function_call audio prediction reasoning_effort verbosity documents".split(), ()),
        **dict.fromkeys("web_search_options prompt_cache_key safety_identifier chat_template".split(), ()),
    }

    def get_num_logprobs(self) -> int | None:
        _require(bool(self.logprobs) or not self.top_logprobs, "top_logprobs", "only with logprobs: true")
        return self.top_logprobs or 0 if self.logprobs else None

    def get_max_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_completion_tokens: differs from max_tokens", "max_completion_tokens")
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def get_tool_usage(self) -> ToolUsage:
        choice, tools = self.tool_choice, self.tools or []
        must_call = choice == "required" or isinstance(choice, NamedToolChoice)
        _require(bool(tools) or not must_call, "tool_choice", "only with tools")
        if not tools or choice == "none":
            return ToolUsage()
        unsupported = "unsupported_parameter"
        has_format = self.response_format is not None and self.response_format.type != "text"
        _require(not has_format, "response_format", "with tools only if tool_choice is none", unsupported)
        if not must_call:
            condition = "only if tool_choice is required or names a function"
            for i, tool in enumerate(tools):
                _require(not tool.function.strict, f"tools.{i}.function.strict", condition, unsupported)
            parallel = self.parallel_tool_calls is not False
            _require(parallel, "parallel_tool_calls", f"false {condition}", unsupported)
        functions = [tool.function for tool in tools]
        if isinstance(choice, NamedToolChoice):
            functions = [function for function in functions if function.name == choice.function.name]
            _require(bool(functions), "tool_choice", "names a function that is not among the tools")
        forced = tuple((function.name, function.parameters) for function in functions) if must_call else ()
        return ToolUsage([tool.model_dump(exclude_none=True) for tool in tools], forced)


class TokenizeRequest(StrictModel):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: JSON | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    UNSUPPORTED = {"continue_final_message": (False,)}


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[NonNegativeInt], Field(fail_fast=True)]
