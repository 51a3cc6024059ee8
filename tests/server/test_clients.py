"""Real clients over a real port: the openai SDK, LangChain, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest
from pairs import TEXT
from serving_support import MODEL, PROMPT, K, LocalServer, small_engine

from peagle.config import SamplingParams
from peagle.engine import grammar

KEY = "sk-a-key"
STARTS = [TEXT[i : i + 32].decode() for i in (900, 1700, 2500, 3300, 4100, 5000)]
LENGTH = 20


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServer]:
    with LocalServer(api_key=KEY) as server:
        yield server
        server.check_engine_idle()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The outputs of the engine without a server."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    texts = [PROMPT, *STARTS]
    outputs = small_engine().generate([list(text.encode()) for text in texts], params)
    return {text: out.outputs[0].text for text, out in zip(texts, outputs, strict=True)}


def messages(text: str) -> list:
    return [{"role": "user", "content": text}]


ASK = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_openai_whole_and_streamed(served: LocalServer, expected: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key=KEY)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    chat = client.chat.completions.create(messages=messages(PROMPT), **ASK)
    assert chat.choices[0].message.content == expected[PROMPT]
    assert chat.usage is not None and chat.usage.completion_tokens == LENGTH
    # an answer goes back into the next request as the library writes it
    history = [*messages(PROMPT), chat.choices[0].message.model_dump(), *messages("and")]
    assert client.chat.completions.create(messages=history, **ASK).choices[0].finish_reason == "length"
    text = client.completions.create(prompt=PROMPT, logprobs=2, **ASK)
    assert text.choices[0].text == expected[PROMPT]
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.top_logprobs or []) == LENGTH
    stream = client.chat.completions.create(
        messages=messages(PROMPT), stream=True, stream_options={"include_usage": True}, **ASK
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected[PROMPT]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == LENGTH
    pieces = client.completions.create(prompt=PROMPT, stream=True, **ASK)
    assert "".join(c.choices[0].text for c in pieces) == expected[PROMPT]
    several = client.chat.completions.create(
        messages=messages(PROMPT), n=3, seed=2, logprobs=True, top_logprobs=1, **{**ASK, "temperature": 0.7}
    )
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert all(c.logprobs is not None and len(c.logprobs.content or []) == LENGTH for c in several.choices)


def test_openai_raises_the_right_error(served: LocalServer) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="best_of") as error:
        client.completions.create(model=MODEL, prompt="a", best_of=2)
    assert error.value.param == "best_of" and error.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.url + "/v1", api_key="sk-wrong").models.list()


def test_concurrent_requests_get_their_own_output(served: LocalServer, expected: dict[str, str]) -> None:
    """Twice as many as max_num_seqs; half of them stream."""

    async def main() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=KEY) as client:

            async def one(text: str, stream: bool) -> tuple[str, str]:
                if not stream:
                    response = await client.chat.completions.create(messages=messages(text), **ASK)
                    return text, response.choices[0].message.content or ""
                parts = []
                async for chunk in await client.chat.completions.create(messages=messages(text), stream=True, **ASK):
                    parts += [choice.delta.content or "" for choice in chunk.choices]
                return text, "".join(parts)

            return await asyncio.gather(*(one(text, stream) for text in STARTS for stream in (True, False)))

    assert all(response == expected[text] for text, response in asyncio.run(main()))


def test_langchain(served: LocalServer, expected: dict[str, str]) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    model = chat_models.ChatOpenAI(
        base_url=served.url + "/v1",
        api_key=KEY,
        model=MODEL,
        temperature=0,
        max_tokens=LENGTH,
        extra_body={"ignore_eos": True},
    )
    assert model.invoke(PROMPT).content == expected[PROMPT]
    assert "".join(chunk.content for chunk in model.stream(PROMPT)) == expected[PROMPT]
    assert [response.content for response in model.batch(STARTS[:3])] == [expected[text] for text in STARTS[:3]]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(served: LocalServer, expected: dict[str, str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}

    def curl(*more: str) -> str:
        command = ["curl", "-sS", "--max-time", "60", "-H", f"Authorization: Bearer {KEY}", *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    kind = ("-H", "Content-Type: application/json")
    response = json.loads(curl(*kind, "-d", json.dumps(body), served.url + "/v1/completions"))
    assert response["choices"][0]["text"] == expected[PROMPT]
    streamed = curl("-N", *kind, "-d", json.dumps({**body, "stream": True}), served.url + "/v1/completions")
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == expected[PROMPT]
    assert json.loads(curl("-d", json.dumps(body), served.url + "/v1/completions"))["error"]["message"].startswith(
        "content-type"
    )
    info = json.loads(curl(served.url + "/peagle/info"))
    assert (info["num_speculative_tokens"], info["method"]) == (K, "p-eagle")


def test_openai_structured_output(served: LocalServer) -> None:
    """Equal to the engine's output with the same grammar: whole, streamed, with and without draft tokens."""
    schema = {
        "type": "object",
        "properties": {
            "kinds": {"type": "object", "properties": {"of": {"enum": ["work", "source"]}}, "required": ["of"]}
        },
        "required": ["kinds"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=150, grammar=grammar.from_json_schema(schema))
    direct = small_engine().generate(list(PROMPT.encode()), params)[0].outputs[0]
    # (a comma ends this target's texts, so its objects have one key)
    assert json.loads(direct.text)["kinds"]["of"] in ("work", "source") and direct.finish_reason == "stop"
    client = openai.OpenAI(base_url=served.url + "/v1", api_key=KEY)
    wanted_format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    ask = {"model": MODEL, "max_tokens": 150, "temperature": 0, "response_format": wanted_format}
    for extra in ({}, {"speculation": False}, {"num_speculative_tokens": 2}):
        response = client.chat.completions.create(messages=messages(PROMPT), extra_body={"peagle": extra}, **ask)
        assert response.choices[0].message.content == direct.text and response.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(messages=messages(PROMPT), stream=True, **ask)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == direct.text
    free = {**ask, "response_format": {"type": "json_object"}, "max_tokens": 40}
    response = client.chat.completions.create(messages=messages(PROMPT), **free)
    assert (response.choices[0].message.content or "").lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError) as error:
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        client.chat.completions.create(messages=messages(PROMPT), **{**ask, "response_format": bad})
    assert error.value.param == "response_format"


def test_openai_parses_into_a_model(served: LocalServer) -> None:
    class Thing(pydantic.BaseModel):
        kind: Literal["work", "source"]

    client = openai.OpenAI(base_url=served.url + "/v1", api_key=KEY)
    response = client.chat.completions.parse(
        messages=messages(PROMPT), model=MODEL, max_tokens=80, temperature=0, response_format=Thing
    )
    assert isinstance(response.choices[0].message.parsed, Thing)
