"""What clients may ask, in OpenAI's words and vLLM's for what OpenAI lacks; and what it means to the engine.

Knows nothing about HTTP or tokens. A field that is not here is refused by its name, and so is one that asks for
something the engine does not do: nothing that changes an answer is ever ignored. null means: not given.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, model_validator

from peagle.config import Grammar, SamplingParams, ServeSettings
from peagle.engine import grammar
from peagle.server.errors import ApiError

GREEDY_BELOW = 1e-5  # of temperatures: beneath it a quotient may leave the range of a float, and the best token wins
HUGE = 1 << 31

Number = Annotated[float, AllowInfNan(False)]
Whole = Annotated[int, Field(gt=-HUGE, lt=HUGE)]
TokenId = Annotated[int, Field(ge=0, lt=HUGE)]
JSON = dict[str, Any]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    NEUTRAL: ClassVar[
        dict[str, tuple[Any, ...]]
    ] = {}  # known fields that we do not do, and values that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, allowed in cls.NEUTRAL.items():
            value = data.get(name)
            if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
                raise ApiError(400, f"{name}: not supported by this server", name, "unsupported_parameter")
        return {name: value for name, value in data.items() if name not in cls.NEUTRAL}


class Extra(Strict):
    """What only this server has: a look at speculation, and a say in it. The text never depends on it."""

    tokens: bool = False  # tell each token's id, text and whether it was drafted
    speculation: bool | None = None
    draft_tokens: Annotated[int, Field(ge=0, lt=HUGE)] | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None

    NEUTRAL = {"continuous_usage_stats": (False,), "include_obfuscation": (False, True)}


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Strict):
    """What both kinds of request have."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=HUGE)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None  # 0 and -1 are off
    min_p: Number | None = None
    n: Annotated[int, Field(ge=1, lt=HUGE)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=HUGE)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None  # names the client's own user; asks nothing of the answer
    peagle: Extra | None = None

    def alternatives(self) -> int | None:
        raise NotImplementedError

    @property
    def extra(self) -> Extra:
        return self.peagle or Extra()

    def to_params(
        self, settings: ServeSettings, max_tokens: int, most_drafts: int, grammar: Grammar | None = None
    ) -> SamplingParams:
        """A UserError names what is out of range."""
        self._check(settings, most_drafts)
        given: dict[str, Any] = {
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "n": self.n,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": self.alternatives(),
            "skip_special_tokens": self.skip_special_tokens,
            "max_speculative_tokens": 0 if self.extra.speculation is False else self.extra.draft_tokens,
            "grammar": grammar,
        }
        temperature = self.temperature if self.temperature is not None else settings.temperature
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if 0.0 <= temperature < GREEDY_BELOW else temperature,
            **{name: value for name, value in given.items() if value is not None},
        )

    def _check(self, settings: ServeSettings, most_drafts: int) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise ApiError(400, f"{name}: {want}", name, "invalid_value")

        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        require(len(stops) <= settings.max_stops, "stop", f"at most {settings.max_stops} strings")
        longest = settings.stop_length
        require(all(len(s) <= longest for s in stops), "stop", f"at most {longest} characters each")
        require((self.n or 1) <= settings.max_answers, "n", f"at most {settings.max_answers}")
        require(self.stream_options is None or self.stream is True, "stream_options", "only with stream: true")
        if (k := self.extra.draft_tokens) is not None:
            require(k <= most_drafts, "peagle.draft_tokens", f"at most {most_drafts} on this server")
            off = self.extra.speculation is False and k > 0
            require(not off, "peagle.draft_tokens", "contradicts speculation: false")


def grammar_of(wanted: ResponseFormat) -> Grammar | None:
    """Takes its time: a schema is tried out before it is let near the engine."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_schema" and (wanted.json_schema is None or wanted.json_schema.schema_ is None):
        where = "response_format.json_schema" if wanted.json_schema is None else "response_format.json_schema.schema"
        raise ApiError(400, f"{where}: required", where, "missing_required_parameter")
    if wanted.type == "json_object":
        return grammar.from_json_object()
    assert wanted.json_schema is not None and wanted.json_schema.schema_ is not None
    return grammar.from_json_schema(wanted.json_schema.schema_)


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Whole | None = None

    NEUTRAL = {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "prompt_logprobs": (),
    }

    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str | JSON = ""


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    # what a client's library adds when it sends an answer back to us
    NEUTRAL = {"refusal": (), "audio": (), "annotations": ([],), "function_call": (), "reasoning_content": ()}

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        """An image is refused by its kind, and its address is never looked at."""
        content = data.get("content") if isinstance(data, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ApiError(
                    400, f"messages: content of type {kind[:40]!r} is not supported", "messages.content.type"
                )
        return data

    def as_template_sees_it(self) -> JSON:
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        said: JSON = {"role": self.role, "content": content if content is not None else ""}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        if self.tool_calls:
            said["tool_calls"] = [_tool_call(call) for call in self.tool_calls]
        return said


def _tool_call(call: ToolCall) -> JSON:
    """Arguments travel as JSON in a string; templates write them out from the value."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # as the model said it
    made: JSON = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


class Function(Strict):
    name: str
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True)
class ToolUse:
    """What the template tells the model of tools, and what has to come of it."""

    offered: list[JSON] | None = None
    forced: tuple[tuple[str, JSON | None], ...] = ()  # names and schemas, one of which must be called

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.offered or ()]


class Conversation(Strict):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: JSON | None = None


class ChatRequest(Conversation, Sampling):
    max_completion_tokens: Annotated[int, Field(ge=1, lt=HUGE)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=HUGE)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    NEUTRAL = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "functions": (),
        "function_call": (),
        "audio": (),
        "prediction": (),
        "metadata": ({},),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": (),
    }

    def alternatives(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs", "invalid_value")
            return None
        return self.top_logprobs or 0

    @property
    def longest(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_completion_tokens: differs from max_tokens", "max_completion_tokens")
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def tool_use(self) -> ToolUse:
        def require(ok: bool, name: str, want: str, code: str = "invalid_value") -> None:
            if not ok:
                raise ApiError(400, f"{name}: {want}", name, code)

        choice, tools = self.tool_choice, self.tools or []
        must_call = choice == "required" or isinstance(choice, NamedTool)
        require(bool(tools) or not must_call, "tool_choice", "only with tools")
        if not tools or choice == "none":
            return ToolUse()
        formed = self.response_format is not None and self.response_format.type != "text"
        require(not formed, "response_format", "with tools only where tool_choice is none", "unsupported_parameter")
        if not must_call:
            by_grammar = "only where tool_choice is required or names a function"
            for i, tool in enumerate(tools):
                path = f"tools.{i}.function.strict"
                require(not tool.function.strict, path, by_grammar, "unsupported_parameter")
            one = self.parallel_tool_calls is False
            require(not one, "parallel_tool_calls", f"false {by_grammar}", "unsupported_parameter")
        may = [tool.function for tool in tools]
        if isinstance(choice, NamedTool):
            may = [function for function in may if function.name == choice.function.name]
            require(bool(may), "tool_choice", "names a function that is not among the tools")
        forced = tuple((function.name, function.parameters) for function in may) if must_call else ()
        return ToolUse([tool.model_dump(exclude_none=True) for tool in tools], forced)


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: JSON | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    NEUTRAL = {"continue_final_message": (False,)}


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]
