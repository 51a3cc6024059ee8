"""Tool calls: parsed from text in any deltas, and through the server with real clients."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import engines
import openai
import pairs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_support import MODEL, LocalServer
from transformers import AddedToken

from peagle.checkpoints.target import Target, load_tokenizer
from peagle.config import LayerConfig
from peagle.engine.llm import LLM
from peagle.models.decoder import Decoder
from peagle.server.tool_calls import (
    TOOL_CALL_FORMATS,
    JsonEndFinder,
    ParsedToolCall,
    ToolCallFormat,
    ToolCallParser,
    get_forced_format,
    get_format,
)

NAMES = ("find", "get_weather", "a-b.c")


def read(form: ToolCallFormat, pieces: list[str], names: tuple[str, ...] = NAMES) -> tuple[str, list[ParsedToolCall]]:
    """Content and calls."""
    reader = ToolCallParser(form, names)
    out = [one for piece in pieces for one in reader.feed(piece)] + reader.feed("", final=True)
    return "".join(one for one in out if isinstance(one, str)), [one for one in out if isinstance(one, ParsedToolCall)]


def cut(text: str, at: list[int]) -> list[str]:
    marks = [0, *sorted({n % (len(text) + 1) for n in at}), len(text)]
    return [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8") | st.sampled_from('"\\{}[];<>|'), max_size=12)
    | st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '"}]', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
calls = st.tuples(st.sampled_from(NAMES), arguments)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
spaces = st.sampled_from(["", " ", "\n", "\n\n \t"])
# words that hold no beginning of a call, and have no space at their ends
words = st.text(st.characters(codec="utf-8", exclude_characters="<[{;"), max_size=20).map(str.strip)


@st.composite
def answers(draw: st.DrawFn, kind: str) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """A text in a format, with its content and its calls."""
    form, layout = TOOL_CALL_FORMATS[kind], draw(layouts)

    def written(call: tuple[str, Any], as_text: bool = False) -> str:
        value = json.dumps(call[1]) if as_text else call[1]
        return json.dumps({"name": call[0], form.arguments_key: value}, **layout)

    before = draw(words)
    many = draw(st.lists(calls, min_size=1, max_size=3))
    if kind == "hermes":
        text, content = before, before
        for call in many:
            text += f"{draw(spaces)}<tool_call>{draw(spaces)}{written(call, draw(st.booleans()))}{draw(spaces)}"
            text += "</tool_call>"
            between = draw(words)
            text, content = text + draw(spaces) + between, content + between
        end = draw(spaces)
        return text + end, content + (end if between else ""), many
    if kind == "llama3":
        tag = draw(st.booleans())
        text = f"{before}{draw(spaces)}<|python_tag|>" if tag else ""
        joined = "".join(draw(spaces) + draw(st.sampled_from([";", ""])) + draw(spaces) + written(c) for c in many[1:])
        return text + draw(spaces) + written(many[0]) + joined + draw(spaces), before if tag else "", many
    lead = f"{before}{draw(spaces)}"
    if draw(st.booleans()):
        listed = "[" + ", ".join(written(c) for c in many) + "]"
        return f"{lead}[TOOL_CALLS]{draw(spaces)}{listed}{draw(spaces)}", before, many
    between = draw(st.sampled_from(["", "[ARGS]"]))
    return lead + "".join(f"[TOOL_CALLS]{n}{between}{json.dumps(a, **layout)}" for n, a in many), before, many


@pytest.mark.parametrize("kind", TOOL_CALL_FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_calls_are_found_in_any_deltas(kind: str, data: st.DataObject) -> None:
    text, content, expected = data.draw(answers(kind))
    for pieces in ([text], list(text), cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=8)))):
        remaining, found = read(TOOL_CALL_FORMATS[kind], pieces)
        assert [(call.name, json.loads(call.arguments)) for call in found] == expected
        assert remaining == content


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool", "_call>", "[", "]", "{", "}"),
    *('"', "\\", ";", " ", "\n", "find", '{"name": "find", "arguments": {}}', '{"name": "find", "parameters": {"x":'),
    *('"name"', ":", "1}}", "é", "NaN", "\\ud800", '{"name": "\\ud800", "arguments": {}}', "1e999", "word"),
]


@pytest.mark.parametrize(
    "form", [*TOOL_CALL_FORMATS.values(), get_forced_format(None)], ids=[*TOOL_CALL_FORMATS, "forced"]
)
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), at=st.lists(st.integers(0, 500), max_size=8))
def test_deltas_never_matter_and_text_stays_text(form: ToolCallFormat, parts: list[str], at: list[int]) -> None:
    text = "".join(parts)
    content, found = read(form, [text])
    assert read(form, list(text)) == read(form, parts) == read(form, cut(text, at)) == (content, found)
    json.dumps(
        [content, [call.name for call in found], [call.arguments for call in found]], ensure_ascii=False
    ).encode()
    if not found:
        assert content == text
    else:  # of what is left nothing is made up, and nothing but calls is gone
        left = iter(text)
        assert all(letter in left for letter in content)
        assert all(isinstance(json.loads(call.arguments), dict) for call in found)
    if form.start_tag is not None and form.start_tag not in text and not form.bare_json:
        assert (content, found) == (text, [])


@pytest.mark.parametrize(
    ("kind", "text", "content", "found"),
    [
        ("hermes", '<tool_call>{"name": "new", "arguments": {}}</tool_call>', "", ["new"]),
        ("hermes", '<tool_call>{"name": "find", "arguments": {}}', "", ["find"]),  # the closing tag was its stop string
        ("hermes", '<tool_call>{"name": "find"}</tool_call> so', "so", ["find"]),
        ("hermes", '{"name": "find", "arguments": {}}', '{"name": "find", "arguments": {}}', []),
        ("hermes", 'a \n<tool_call>{"name": "find", "argu', 'a \n<tool_call>{"name": "find", "argu', []),
        ("hermes", "a <tool_call> b </tool_call>\n", "a <tool_call> b </tool_call>\n", []),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
         '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
         '<tool_call>{"name": "find", "arguments": [1]}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"x": NaN}}</tool_call>',
         '<tool_call>{"name": "find", "arguments": {"x": NaN}}</tool_call>', []),
        ("llama3", '{"name": "Ann", "parameters": {"age": 5}}', '{"name": "Ann", "parameters": {"age": 5}}', []),
        ("llama3", 'See {"name": "find", "parameters": {}}', 'See {"name": "find", "parameters": {}}', []),
        ("llama3", '{"name": "find", "parameters": {}}; done', "; done", ["find"]),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}, 5]',
         '[TOOL_CALLS][{"name": "find", "arguments": {}}, 5]', []),
    ],
)  # fmt: skip
def test_what_counts_as_a_call(kind: str, text: str, content: str, found: list[str]) -> None:
    remaining, calls = read(TOOL_CALL_FORMATS[kind], list(text))
    assert (remaining, [call.name for call in calls]) == (content, found)


def test_long_texts() -> None:
    """Many beginnings of calls, and one call with long arguments."""
    noise = '<tool_call>{"' * 20_000
    assert read(TOOL_CALL_FORMATS["hermes"], re.findall("(?s).{1,4}", noise)) == (noise, [])
    long = json.dumps({"name": "find", "arguments": {"x": 'a"\\' * 60_000}})
    content, found = read(TOOL_CALL_FORMATS["hermes"], re.findall("(?s).{1,4}", f"<tool_call>{long}</tool_call>"))
    assert content == "" and json.loads(found[0].arguments)["x"] == 'a"\\' * 60_000
    brackets = JsonEndFinder(0)
    assert [brackets.find(t) for t in ('{"a', '{"a}\\', '{"a}\\"]', '{"a}\\"]"', '{"a}\\"]"}x')] == [None] * 4 + [9]


def test_the_format_is_found_in_the_template() -> None:
    qwen = '{% if tools %}<tools></tools> within <tool_call></tool_call>: {"name": ...}{% endif %}'
    assert get_format(qwen) is TOOL_CALL_FORMATS["hermes"]
    assert get_format(qwen + "<function=example>") is None  # no JSON inside
    assert get_format("{{ '[TOOL_CALLS] [' }}") is TOOL_CALL_FORMATS["mistral"]
    assert get_format("{{ '<|python_tag|>' + tool_call.name }}") is TOOL_CALL_FORMATS["llama3"]
    assert (
        get_format('Respond in the format {"name": function name, "parameters": dictionary}.')
        is TOOL_CALL_FORMATS["llama3"]
    )
    assert get_format("{{ message.content }}") is None
    assert get_format(qwen, "none") is None and get_format("", "mistral") is TOOL_CALL_FORMATS["mistral"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", TOOL_CALL_FORMATS["mistral"].new_id()) and TOOL_CALL_FORMATS[
        "hermes"
    ].new_id().startswith("call_")


# Through the server. The target says what is written here: each of its tokens has one that follows it, whatever came
# before. Tokens are bytes, and the pieces of the answers below, cut where no tag and no JSON ends.

ANSWERS = {
    "hermes": ["Let me", " see.\n<tool_", 'call>\n{"name": "get_w', 'eather", "argum',
               'ents": {"city": "Zürich"}}\n</to', 'ol_call>\n<tool_call>{"name": "fi',
               'nd", "arguments": {}}</tool_', "call>"],
    "llama3": ["<|python_tag|>", '{"name": "get_weather", "para', 'meters": {"city": "Zürich"}}; {"name": "find",',
               ' "parameters": ', "{}}"],
    "mistral": ["Let me", " see.", "[TOOL_CALLS]", ' [{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"na',
                'me": "find", "argu', 'ments": {}}]'],
}  # fmt: skip
ASK, TELL = "Q", "Z"  # the last letters of a question that is answered by calls, and of one that is answered in words
WORDS = [" It", " rains in", " Zürich."]
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "<|end|>"]
RENDERED = (
    "{%% if tools %%}%s{%% for t in tools %%}{{ t.function.name }},{%% endfor %%}{%% endif %%}{%% for m in messages %%}"
    "{{ m.role[0] }}:{{ m.content }}{%% for c in m.tool_calls or [] %%}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments.city }}]{%% endfor %%}{{ m.tool_call_id or '' }};{%% endfor %%}"
    "{{ messages[-1].content[-1] }}"
)
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"City": {"enum": ["Zürich", "Rome"]}}}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": CITY}},
    {"type": "function", "function": {"name": "find"}},
]


def build_scripted_engine(kind: str) -> LLM:
    folder = engines.home() / f"scripted-{kind}"
    pieces = [*dict.fromkeys(p for p in (*ANSWERS[kind], *WORDS) if p not in SPECIAL)]
    shutil.copytree(pairs.target_folder(), folder, dirs_exist_ok=True)
    engines.write_tokenizer(folder, 256, RENDERED % (TOOL_CALL_FORMATS[kind].start_tag or ""))
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.add_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL], special_tokens=True)
    tokenizer.save_pretrained(folder)
    ids = {piece: tokenizer.convert_tokens_to_ids(piece) for piece in [*pieces, *SPECIAL]}
    follows = {}
    for last, answer in ((ASK, ANSWERS[kind]), (TELL, WORDS)):
        chain = [ord(last), *(ids[piece] for piece in answer), ids["<|end|>"]]
        follows |= dict(zip(chain, chain[1:], strict=False))
    layer = LayerConfig(256, 64, num_heads=4, num_kv_heads=2, head_dim=32)
    cfg = replace(
        pairs.TARGET, vocab_size=len(tokenizer), num_layers=1, layer=layer, windows=(None,), max_positions=512
    )
    model = Decoder(cfg)
    pairs.initialise(model, seed=0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.startswith(("embed", "lm_head")):
            weight.data.zero_()  # a token is all that its state knows
    states = dict(model.named_parameters())
    embedding = next(w for n, w in states.items() if n.startswith("embed"))
    head = next(w for n, w in states.items() if n.startswith("lm_head"))
    for token, following in follows.items():
        head.data[following] += 10 * embedding.data[token]
    target = Target(folder, model.eval(), frozenset({ids["<|end|>"]}))
    return LLM(target, None, device="cpu", dtype="float32", threads=1, max_model_len=512, max_num_seqs=4)


@pytest.fixture(scope="module", params=TOOL_CALL_FORMATS)
def talk(request: pytest.FixtureRequest) -> Iterator[tuple[str, LocalServer, openai.OpenAI]]:
    with LocalServer(lambda: build_scripted_engine(request.param)) as server:
        yield request.param, server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        server.check_engine_idle()


def question(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200}


WANTED = [("get_weather", {"city": "Zürich"}), ("find", {})]


def parse_tool_calls(calls: Any) -> list[tuple[str, Any]]:
    assert all(call.type == "function" and call.id for call in calls) and len({c.id for c in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_openai_gets_calls_and_the_model_their_results(talk: tuple[str, LocalServer, openai.OpenAI]) -> None:
    """Whole and streamed, several calls at once, and their results back through the template."""
    kind, server, client = talk
    content = None if kind == "llama3" else "Let me see."
    whole = client.chat.completions.create(**question(ASK), n=2)
    assert [c.finish_reason for c in whole.choices] == ["tool_calls"] * 2
    message = whole.choices[0].message
    assert message.content == content and parse_tool_calls(message.tool_calls) == WANTED
    chunks = list(client.chat.completions.create(**question(ASK), stream=True, logprobs=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in streamed] == [0, 1] and parse_tool_calls(streamed) == WANTED
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    tokens = [t.token for c in chunks for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else None) or ()]
    assert "".join(tokens) == "".join(ANSWERS[kind]) + "<|end|>"  # logprobs cover every generated token
    with client.chat.completions.stream(**question(ASK)) as stream:
        final = stream.get_final_completion().choices[0]
    assert parse_tool_calls(final.message.tool_calls) == WANTED and final.finish_reason == "tool_calls"

    first, second = message.tool_calls or []
    history = [
        {"role": "user", "content": ASK},
        message.model_dump(),
        {"role": "tool", "tool_call_id": first.id, "content": "wet"},
        {"role": "tool", "tool_call_id": second.id, "content": TELL},
    ]
    assert isinstance(history, list)
    response = client.chat.completions.create(**{**question(""), "messages": history})
    assert (response.choices[0].message.content, response.choices[0].finish_reason) == ("".join(WORDS), "stop")
    assert response.choices[0].message.tool_calls is None
    seen = server.request("/tokenize", {"messages": history, "tools": TOOLS})[2]["tokens"]
    calls = f"[{first.id} get_weather Zürich][{second.id} find ]"
    expected = f"u:{ASK};a:{content or ''}{calls};t:wet{first.id};t:{TELL}{second.id};{TELL}"
    text = server.request("/detokenize", {"tokens": seen})[2]["prompt"]
    assert text == f"{TOOL_CALL_FORMATS[kind].start_tag}get_weather,find,{expected}"


def test_without_tools_or_a_parser_calls_stay_text(talk: tuple[str, LocalServer, openai.OpenAI]) -> None:
    kind, server, client = talk
    shown = "".join(piece for piece in ANSWERS[kind] if piece not in SPECIAL)  # they are no text
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        choice = client.chat.completions.create(**{**question(ASK), **more}).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (shown, None, "stop")
    kept = client.chat.completions.create(
        **question(ASK), tool_choice="none", extra_body={"skip_special_tokens": False}
    ).choices[0]
    assert kept.message.content == "".join(ANSWERS[kind])
    most = {"hermes": 3, "llama3": 2, "mistral": 4}[kind]  # tokens, up to the middle of a call
    cut = client.chat.completions.create(**{**question(ASK), "max_tokens": most}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content == "".join(ANSWERS[kind][:most])
    if kind == "hermes":
        with LocalServer(lambda: build_scripted_engine(kind), tool_call_parser="none") as other:
            status, _, plain = other.request("/v1/chat/completions", question(ASK))
            assert status == 200 and plain["choices"][0]["message"]["content"] == shown
            assert plain["choices"][0]["finish_reason"] == "stop"


def test_forced_calls_match_their_schema(talk: tuple[str, LocalServer, openai.OpenAI]) -> None:
    """A grammar forces the call. References inside a schema still work."""
    _, _, client = talk
    named = {"type": "function", "function": {"name": "get_weather"}}
    tight = {str(ord(space)): -100 for space in " \t\n"}  # else it fills its JSON with them
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for choice, names in (("required", {"get_weather", "find"}), (named, {"get_weather"})):
        for more in ({}, {"tools": strict, "parallel_tool_calls": False}):
            ask = {**question(TELL), "tool_choice": choice, "logit_bias": tight, **more}
            whole = client.chat.completions.create(**ask).choices[0]
            (call,) = parse_tool_calls(whole.message.tool_calls)
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", None) and call[0] in names
            assert call[1] in ({"city": "Zürich"}, {"city": "Rome"}) if call[0] == "get_weather" else call[1] == {}
            chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask, stream=True)]
            assert parse_tool_calls([c for delta in chunks for c in delta.tool_calls or ()]) == [call]
            assert not any(delta.content for delta in chunks)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:9/x"}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_unsupported_combinations_are_refused(
    talk: tuple[str, LocalServer, openai.OpenAI], more: dict[str, Any], param: str
) -> None:
    status, _, body = talk[1].request("/v1/chat/completions", {**question(ASK), **more})
    assert (status, body["error"]["param"]) == (400, param), body


def test_langchain_binds_tools(talk: tuple[str, LocalServer, openai.OpenAI]) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    model = chat_models.ChatOpenAI(base_url=talk[1].url + "/v1", api_key="none", model=MODEL, temperature=0)
    bound = model.bind_tools(TOOLS)
    assert [(c["name"], c["args"]) for c in bound.invoke(ASK).tool_calls] == WANTED
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and [(c["name"], c["args"]) for c in whole.tool_calls] == WANTED
    tight = {str(ord(space)): -100 for space in " \t\n"}
    (call,) = model.bind_tools(TOOLS, tool_choice="get_weather", logit_bias=tight).invoke(TELL).tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Zürich", "Rome")
