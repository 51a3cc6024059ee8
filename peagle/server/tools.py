"""Text that a model writes -> content and calls of tools, while it grows; and the schema of a text that must be a call.

Knows the forms that chat templates teach, and nothing about tokens or HTTP. What is not a whole call stays text, to
the letter. What comes out does not depend on the pieces in which the text comes in:

    "Let me see.\n<tool_", "call>\n{\"name\": \"find\", \"argum", "ents\": {\"x\": 1}}\n</tool_call>"
    -> "Let me see.", Call("find", '{"x": 1}')

Spaces and new lines around a call are part of its form, and no content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from peagle.config import ToolParser

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
SPACE = re.compile(r"\s*")
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')  # what matters of JSON, beside and in its strings
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class Form:
    """How a model writes calls."""

    opens: str | None  # what comes before JSON with calls: an object, or a list of them
    closes: str | None = None  # what may come after it
    key: str = "arguments"  # what the model calls them
    bare: bool = False  # a text may begin with an object, without anything before it, and others may follow
    named: bool = False  # a name, and then JSON with the arguments alone, does too
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(self.id_length)[: self.id_length]


FORMS: Mapping[ToolParser, Form] = {
    "hermes": Form("<tool_call>", "</tool_call>"),
    "llama3": Form("<|python_tag|>", key="parameters", bare=True),
    "mistral": Form("[TOOL_CALLS]", named=True, id_prefix="", id_length=9),  # its templates take no other ids
}
BETWEEN = "[ARGS]"  # a name and its arguments


def parser_of(template: str) -> ToolParser:
    """What `auto` stands for: by the form that a chat template teaches; none: one that is not known here."""
    if "<function=" in template:  # within <tool_call>, but it is no JSON
        return "none"
    for name, form in FORMS.items():
        if form.opens is not None and form.opens in template:
            return name
    return "llama3" if '"name": ' in template and '"parameters": ' in template else "none"


def form_of(template: str, asked: ToolParser = "auto") -> Form | None:
    """None: calls stay text."""
    return FORMS.get(parser_of(template) if asked == "auto" else asked)


def forced(form: Form | None) -> Form:
    """Where a grammar makes the whole text one call."""
    return replace(form or Form(None), opens=None, closes=None, bare=True)


def forced_schema(form: Form | None, tools: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """JSON of one call of one of these, by name and schema of its arguments."""
    key = forced(form).key
    kinds = []
    for i, (name, given) in enumerate(tools):
        schema = NO_ARGUMENTS if given is None else given
        if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}:
            schema = {**schema, "type": "object"}
        inside = _moved(schema, f"#/anyOf/{i}/properties/{key}")
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: inside},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": kinds}


def _moved(schema: Any, to: str) -> Any:
    """A schema's references into itself begin at its root, which is elsewhere now."""
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _moved(value, to) for name, value in schema.items()}
    aim = made.get("$ref")
    if isinstance(aim, str) and (aim == "#" or aim.startswith("#/")):
        made["$ref"] = to + aim[1:]
    return made


class ToolReader:
    """Of one answer."""

    def __init__(self, form: Form, names: Collection[str]) -> None:
        """`names` of the tools that were offered: an object that stands for itself is a call only of one of them."""
        self.form, self.names = form, frozenset(names)
        self.calls = 0
        self._text = ""  # that is not out yet
        self._step = self._begin if form.bare else self._content
        self._value = 0  # where JSON begins in it, behind what opens it
        self._name: str | None = None  # of the arguments that follow
        self._brackets = Brackets(0)
        self._begun = False  # something of the content since the last call is out
        self._out: list[str | Call] = []

    def feed(self, text: str, final: bool = False) -> list[str | Call]:
        """What is certain by now, in the order in which it stands in the text."""
        self._text += text
        while self._step(final):
            pass
        out, self._out = self._out, []
        return out

    # Steps. Each is at the beginning of `_text` and says whether another can be made.

    def _begin(self, final: bool) -> bool:
        """Where an object may stand for itself."""
        at = _behind_space(self._text)
        if at == len(self._text) and not final:
            return False
        if self._text.startswith("{", at):
            self._read_json_at(at)
        else:
            self._step = self._content
        return True

    def _content(self, final: bool) -> bool:
        opens, text = self.form.opens, self._text
        found = text.find(opens) if opens is not None else -1
        if found >= 0:
            assert opens is not None
            kept = len(text[:found].rstrip())
            self._say(kept)
            self._value, self._step = found - kept + len(opens), self._opened
            return True
        if opens is not None and not final:
            text = text[: len(text) - _half(text, opens)]
        self._say(len(text if final else text.rstrip()))
        return False

    def _opened(self, final: bool) -> bool:
        """Behind what opens a call."""
        at = _behind_space(self._text, self._value)
        rest = self._text[at:]
        if self.form.named and (found := NAME.match(rest)):
            behind = found.end()
            if behind == len(rest) and not final:
                return False
            if rest.startswith(BETWEEN, behind):
                behind += len(BETWEEN)
            elif not final and _is_half(rest[behind:], BETWEEN):
                return False
            behind = _behind_space(rest, behind)
            if behind == len(rest) and not final:
                return False
            if rest.startswith("{", behind):
                self._read_json_at(at + behind, found[0])
                return True
        elif rest[:1] in ("{", "["):
            self._read_json_at(at)
            return True
        elif not rest and not final:
            return False
        return self._is_text(self._value)

    def _read_json_at(self, at: int, name: str | None = None) -> None:
        self._value, self._name, self._brackets, self._step = at, name, Brackets(at), self._json

    def _json(self, final: bool) -> bool:
        end = self._brackets.end(self._text)
        if end is None:
            return self._is_text(len(self._text)) if final else False
        calls = self._calls_in(self._text[self._value : end])
        if calls is None:
            return self._is_text(end)
        self._out += calls
        self.calls += len(calls)
        self._text, self._begun, self._step = self._text[end:], False, self._close
        return True

    def _calls_in(self, said: str) -> list[Call] | None:
        try:
            value = json.loads(said, parse_constant=_not_json)
            if self._name is not None:
                return [Call(self._name, _written(value))]
            return [self._call(one) for one in (value if isinstance(value, list) else [value])] or None
        except (ValueError, TypeError, LookupError, RecursionError):
            return None

    def _call(self, value: dict[str, Any]) -> Call:
        name = value["name"]
        given: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
        if not isinstance(name, str) or not name or (self.form.bare and name not in self.names):
            raise ValueError(name)
        name.encode()  # half of a surrogate pair is no character
        return Call(name, _written(json.loads(given, parse_constant=_not_json) if isinstance(given, str) else given))

    def _close(self, final: bool) -> bool:
        """Behind a call: what closes it, or what stands between two."""
        at = _behind_space(self._text)
        rest, closes = self._text[at:], self.form.closes
        if closes is not None and not rest.startswith(closes):
            if not final and _is_half(rest, closes):
                return False
        elif closes is not None:
            at += len(closes)
        elif self.form.bare:
            behind = _behind_space(rest, 1) if rest.startswith(";") else 0
            if behind == len(rest) and not final:
                return False
            if rest.startswith("{", behind):
                self._text = rest
                self._read_json_at(behind)
                return True
        self._text, self._step = self._text[at:], self._content
        return True

    def _is_text(self, end: int) -> bool:
        """What was held turned out to be no call."""
        self._say(end)
        self._step = self._content
        return True

    def _say(self, end: int) -> None:
        """Content up to there; space behind a call is none, and space before one was held back."""
        said, self._text = self._text[:end], self._text[end:]
        if self.calls and not self._begun:
            said = said.lstrip()
        if said:
            self._begun = True
            self._out.append(said)


class Brackets:
    """Where JSON that begins with a bracket ends, found in a growing text without reading any of it twice."""

    def __init__(self, at: int) -> None:
        self.at, self.depth, self.in_string = at, 0, False

    def end(self, text: str) -> int | None:
        while found := (INSIDE if self.in_string else OUTSIDE).search(text, self.at):
            self.at = found.end()
            if found[0] == "\\":
                if self.at == len(text):  # what it stands before is still to come
                    self.at -= 1
                    return None
                self.at += 1
            elif found[0] == '"':
                self.in_string = not self.in_string
            else:
                self.depth += 1 if found[0] in "{[" else -1
                if self.depth == 0:
                    return self.at
        self.at = len(text)
        return None


def _written(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        raise TypeError(type(arguments).__name__)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def _not_json(name: str) -> NoReturn:
    raise ValueError(name)


def _behind_space(text: str, at: int = 0) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()


def _is_half(text: str, marker: str) -> bool:
    return len(text) < len(marker) and marker.startswith(text)


def _half(text: str, marker: str) -> int:
    """Characters at the end of the text with which the marker may have begun."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
