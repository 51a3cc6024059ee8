r"""Parses tool calls out of the text that a model writes, while it streams.

Text that is not a complete call stays content, character by character. The result does not depend on how the text is
split into deltas:

    "Let me see.\n<tool_", "call>\n{\"name\": \"find\", \"argum", "ents\": {\"x\": 1}}\n</tool_call>"
    -> "Let me see.", ParsedToolCall("find", '{"x": 1}')

Whitespace around a call belongs to the call.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from peagle.config import ToolCallParserName

FUNCTION_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# Characters that matter for finding the end of JSON, outside and inside its strings.
OUTSIDE_STRING, INSIDE_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ARGUMENTS_TAG = "[ARGS]"  # Mistral's tag between a name and its arguments


@dataclass(frozen=True)
class ParsedToolCall:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class ToolCallFormat:
    """How a model writes tool calls."""

    start_tag: str | None  # before the JSON of a call, or of a list of calls
    end_tag: str | None = None  # optional, after the JSON
    arguments_key: str = "arguments"
    bare_json: bool = False  # the text may begin with a call without a start tag
    name_first: bool = False  # a call may be its name followed by the JSON of its arguments
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(self.id_length)[: self.id_length]


TOOL_CALL_FORMATS: Mapping[ToolCallParserName, ToolCallFormat] = {
    "hermes": ToolCallFormat("<tool_call>", "</tool_call>"),
    "llama3": ToolCallFormat("<|python_tag|>", arguments_key="parameters", bare_json=True),
    # Mistral's templates accept only ids of nine characters.
    "mistral": ToolCallFormat("[TOOL_CALLS]", name_first=True, id_prefix="", id_length=9),
}


def detect_parser(chat_template: str) -> ToolCallParserName:
    """Finds the format that a chat template teaches. Returns "none" for an unknown format."""
    if "<function=" in chat_template:  # XML within <tool_call>
        return "none"
    for name, call_format in TOOL_CALL_FORMATS.items():
        if call_format.start_tag is not None and call_format.start_tag in chat_template:
            return name
    return "llama3" if '"name": ' in chat_template and '"parameters": ' in chat_template else "none"


def get_format(chat_template: str, parser: ToolCallParserName = "auto") -> ToolCallFormat | None:
    """Returns the format of a parser. None: tool calls stay text."""
    return TOOL_CALL_FORMATS.get(detect_parser(chat_template) if parser == "auto" else parser)


def get_forced_format(call_format: ToolCallFormat | None) -> ToolCallFormat:
    """Returns the format for a completion that a grammar forces to be one bare call."""
    return replace(call_format or ToolCallFormat(None), start_tag=None, end_tag=None, bare_json=True)


def build_forced_schema(
    call_format: ToolCallFormat | None, functions: Sequence[tuple[str, dict[str, Any] | None]]
) -> dict[str, Any]:
    """Builds the JSON schema of one call of one of the functions, given as (name, schema of the arguments)."""
    key = get_forced_format(call_format).arguments_key
    calls = []
    for i, (name, arguments_schema) in enumerate(functions):
        schema = NO_ARGUMENTS if arguments_schema is None else arguments_schema
        if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}:
            schema = {**schema, "type": "object"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: _move_references(schema, f"#/anyOf/{i}/properties/{key}")},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _move_references(schema: Any, new_root: str) -> Any:
    """Rewrites the references of a schema into itself for its place within another schema."""
    if isinstance(schema, list):
        return [_move_references(item, new_root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _move_references(value, new_root) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = new_root + reference[1:]
    return moved


class ToolCallParser:
    """Splits the text of one completion into content and tool calls.

    A state machine: `_state` is the method that handles the beginning of `_text`, the text that was not returned yet.
    A state returns whether the next state can run, or False if it needs more text.
    """

    def __init__(self, call_format: ToolCallFormat, function_names: Collection[str]) -> None:
        """A bare call counts only if it names one of `function_names`."""
        self.format, self.function_names = call_format, frozenset(function_names)
        self.num_calls = 0
        self._text = ""
        self._state = self._read_start if call_format.bare_json else self._read_content
        self._json_start = 0  # in `_text`
        self._name: str | None = None  # of a call whose JSON holds the arguments alone
        self._json_end = JsonEndFinder(0)
        self._content_begun = False  # since the last call
        self._results: list[str | ParsedToolCall] = []

    def feed(self, text: str, final: bool = False) -> list[str | ParsedToolCall]:
        """Adds text and returns the content and calls that are certain by now, in order."""
        self._text += text
        while self._state(final):
            pass
        results, self._results = self._results, []
        return results

    def _read_start(self, final: bool) -> bool:
        """The beginning of a text that may be a bare call."""
        start = _skip_whitespace(self._text)
        if start == len(self._text) and not final:
            return False
        if self._text.startswith("{", start):
            self._begin_json(start)
        else:
            self._state = self._read_content
        return True

    def _read_content(self, final: bool) -> bool:
        """Content, up to a start tag. Holds back whitespace and a possible beginning of the tag."""
        tag, text = self.format.start_tag, self._text
        found = text.find(tag) if tag is not None else -1
        if found >= 0:
            assert tag is not None
            content_end = len(text[:found].rstrip())
            self._emit_content(content_end)
            self._json_start, self._state = found - content_end + len(tag), self._read_after_tag
            return True
        if tag is not None and not final:
            text = text[: len(text) - _partial_tag_length(text, tag)]
        self._emit_content(len(text if final else text.rstrip()))
        return False

    def _read_after_tag(self, final: bool) -> bool:
        """After a start tag: JSON, or a name and JSON. Anything else makes the tag content."""
        start = _skip_whitespace(self._text, self._json_start)
        rest = self._text[start:]
        if self.format.name_first and (name := FUNCTION_NAME.match(rest)):
            end = name.end()
            if end == len(rest) and not final:
                return False
            if rest.startswith(ARGUMENTS_TAG, end):
                end += len(ARGUMENTS_TAG)
            elif not final and _is_partial_tag(rest[end:], ARGUMENTS_TAG):
                return False
            end = _skip_whitespace(rest, end)
            if end == len(rest) and not final:
                return False
            if rest.startswith("{", end):
                self._begin_json(start + end, name[0])
                return True
        elif rest[:1] in ("{", "["):
            self._begin_json(start)
            return True
        elif not rest and not final:
            return False
        return self._emit_as_content(self._json_start)

    def _begin_json(self, start: int, name: str | None = None) -> None:
        self._json_start, self._name, self._json_end = start, name, JsonEndFinder(start)
        self._state = self._read_json

    def _read_json(self, final: bool) -> bool:
        end = self._json_end.find(self._text)
        if end is None:
            return self._emit_as_content(len(self._text)) if final else False
        calls = self._parse_calls(self._text[self._json_start : end])
        if calls is None:
            return self._emit_as_content(end)
        self._results += calls
        self.num_calls += len(calls)
        self._text, self._content_begun, self._state = self._text[end:], False, self._read_after_call
        return True

    def _parse_calls(self, text: str) -> list[ParsedToolCall] | None:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            if self._name is not None:
                return [ParsedToolCall(self._name, _dump_arguments(value))]
            return [self._parse_call(call) for call in (value if isinstance(value, list) else [value])] or None
        except (ValueError, TypeError, LookupError, RecursionError):
            return None

    def _parse_call(self, value: dict[str, Any]) -> ParsedToolCall:
        name = value["name"]
        arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
        if not isinstance(name, str) or not name or (self.format.bare_json and name not in self.function_names):
            raise ValueError(name)
        name.encode()  # fails on half of a surrogate pair
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        return ParsedToolCall(name, _dump_arguments(arguments))

    def _read_after_call(self, final: bool) -> bool:
        """After a call: the end tag, or another bare call."""
        end = _skip_whitespace(self._text)
        rest, tag = self._text[end:], self.format.end_tag
        if tag is not None and not rest.startswith(tag):
            if not final and _is_partial_tag(rest, tag):
                return False
        elif tag is not None:
            end += len(tag)
        elif self.format.bare_json:
            start = _skip_whitespace(rest, 1) if rest.startswith(";") else 0
            if start == len(rest) and not final:
                return False
            if rest.startswith("{", start):
                self._text = rest
                self._begin_json(start)
                return True
        self._text, self._state = self._text[end:], self._read_content
        return True

    def _emit_as_content(self, end: int) -> bool:
        """Emits text that turned out not to be a call."""
        self._emit_content(end)
        self._state = self._read_content
        return True

    def _emit_content(self, end: int) -> None:
        content, self._text = self._text[:end], self._text[end:]
        if self.num_calls and not self._content_begun:
            content = content.lstrip()
        if content:
            self._content_begun = True
            self._results.append(content)


class JsonEndFinder:
    """Finds the end of a JSON object or list in a growing text, reading every character once."""

    def __init__(self, position: int) -> None:
        self.position, self.depth, self.in_string = position, 0, False

    def find(self, text: str) -> int | None:
        while found := (INSIDE_STRING if self.in_string else OUTSIDE_STRING).search(text, self.position):
            self.position = found.end()
            if found[0] == "\\":
                if self.position == len(text):  # the escaped character is still to come
                    self.position -= 1
                    return None
                self.position += 1
            elif found[0] == '"':
                self.in_string = not self.in_string
            else:
                self.depth += 1 if found[0] in "{[" else -1
                if self.depth == 0:
                    return self.position
        self.position = len(text)
        return None


def _dump_arguments(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        raise TypeError(type(arguments).__name__)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _skip_whitespace(text: str, start: int = 0) -> int:
    return len(text) - len(text[start:].lstrip())


def _is_partial_tag(text: str, tag: str) -> bool:
    return len(text) < len(tag) and tag.startswith(text)


def _partial_tag_length(text: str, tag: str) -> int:
    """Returns how many characters at the end of the text may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
