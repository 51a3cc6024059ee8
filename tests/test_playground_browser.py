"""The playground in a real browser, against the real server: a conversation with SmolLM2, the keyboard, small screens.

Needs Chromium (`make test-browser`). Answers, shades and numbers are held to the engine's own; what a server says only
when it is in trouble is said by a `fetch` of the test's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from serving_support import MODEL, PROMPT, K, Served
from test_report_browser import READ_TEXTS

from peagle.config import SamplingParams
from peagle.display import TokenText
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from scripts.browser import Tab, browser

pytestmark = pytest.mark.browser

TOKENS = 24
FIRST, SECOND = "What is the capital of France?", "Name three things to see there."
LOOKS = [(1280, False), (1280, True), (800, True), (400, False), (320, True)]
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script> & </p><b>bold</b>'
# Every character of the last answers, with whether it is shaded.
SHADES = """
[...document.querySelectorAll(".turn:last-child .text")].map((text) =>
  [...text.querySelectorAll("span")].map((span) => [span.textContent, span.className === "draft"]))
"""
DRAFTED_LOOKS = """
(() => {
  const [drafted, own] = ["draft", "own"].map((name) => getComputedStyle(document.querySelector(`#turns .${name}`)));
  return [drafted.textDecorationLine, own.textDecorationLine, drafted.backgroundColor !== own.backgroundColor];
})()
"""
FOCUSED = """
(() => {
  const e = document.activeElement;
  if (e === document.body) return ["", false];
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.width > 0;
  return [e.id || e.name || e.textContent.trim().slice(0, 20), seen];
})()
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser(local=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with Served() as server:
        yield server


class Talk:
    """SmolLM2 and what it must say, found before the server has it."""

    def __init__(self) -> None:
        options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 1024}
        self.llm = LLM("smollm2-135m", "smollm2-135m-p-eagle", K, **options)
        self.first = self.answer({"role": "user", "content": FIRST})
        said = {"role": "assistant", "content": self.first.text}
        self.second = self.answer(
            {"role": "user", "content": FIRST}, said, {"role": "user", "content": SECOND}, draft_tokens=2
        )

    def answer(self, *messages: dict[str, str], draft_tokens: int = K) -> CompletionOutput:
        params = SamplingParams(max_tokens=TOKENS, draft_tokens=draft_tokens)
        return self.llm.chat(list(messages), params)[0].outputs[0]

    def shades(self, out: CompletionOutput) -> list[tuple[str, bool]]:
        parts = TokenText(lambda ids: self.llm.tokenizer.decode(ids, skip_special_tokens=True))
        return letters(parts.feed(out.token_ids, out.drafted, final=True))


@pytest.fixture(scope="module")
def talk(smollm2: Any) -> Talk:
    return Talk()


@pytest.fixture(scope="module")
def smol(talk: Talk) -> Iterator[Served]:
    with Served(lambda: talk.llm, model="smollm2-135m") as server:
        yield server


def letters(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(letter, bool(flag)) for text, flag in parts for letter in text]


def wait(tab: Tab, expression: str, seconds: float = 60) -> Any:
    ends = time.monotonic() + seconds
    while not (value := tab.evaluate(expression)):
        assert time.monotonic() < ends, (expression, tab.evaluate("document.body.innerText"), tab.said)
        time.sleep(0.02)
    return value


def visit(tab: Tab, server: Served, width: int = 1280, tokens: int = TOKENS) -> None:
    tab.look(width)
    tab.open(server.url + "/")
    wait(tab, f"document.getElementById('about').textContent.startsWith({json.dumps(server.settings.model)})")
    tab.evaluate(f"document.getElementById('max-tokens').value = {tokens}")


def press(tab: Tab, key: str, code: int, modifiers: int = 0) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    tab.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key=key,
        code=key,
        windowsVirtualKeyCode=code,
        modifiers=modifiers,
        **text,
    )
    tab.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers)


def send(tab: Tab, words: str) -> None:
    tab.evaluate("document.getElementById('ask').focus()")
    tab.call("Input.insertText", text=words)
    press(tab, "Enter", 13)


def ask(tab: Tab, words: str) -> None:
    before = tab.evaluate("document.querySelectorAll('.turn').length")
    send(tab, words)
    assert tab.evaluate("document.querySelectorAll('.turn').length") == before + 1
    wait(tab, "document.getElementById('stop').hidden")


def shown(tab: Tab, name: str) -> str:
    return tab.evaluate(f"document.getElementById({json.dumps(name)}).textContent")


def last_error(tab: Tab) -> str:
    return wait(tab, "document.querySelector('.turn:last-child .error p')?.textContent", 10)


def pretend(tab: Tab, response: str) -> None:
    """The next answer comes from here: JavaScript of a Response. Everything behind it is the server's again."""
    tab.evaluate(
        "(() => { const real = window.fetch; window.fetch = (at, how) => { if (!String(at).includes('chat')) "
        f"return real(at, how); window.fetch = real; return Promise.resolve({response}); }}; }})()"
    )


def test_the_policy_names_the_script_and_the_style() -> None:
    page = files("peagle.serving").joinpath("static/index.html").read_text(encoding="utf-8")
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
        assert len(found) == 1
        wanted = f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()}'"
        assert wanted in page, f"the policy of index.html must say: {wanted}"
    assert "unsafe" not in page and "innerHTML" not in page and "localStorage" not in page


def test_a_conversation_with_smollm2(tab: Tab, talk: Talk, smol: Served) -> None:
    visit(tab, smol)
    ask(tab, FIRST)
    assert letters(tab.evaluate(SHADES)[0]) == talk.shades(talk.first) and any(talk.first.drafted)
    assert tab.evaluate(DRAFTED_LOOKS) == ["underline", "none", True]
    saved = len(talk.first.token_ids) - 1 - talk.first.rounds
    assert shown(tab, "length") == f"{talk.first.acceptance_length:.2f}" and shown(tab, "saved") == str(saved)
    assert float(shown(tab, "speed")) > 0
    assert talk.first.text in shown(tab, "status"), "read out to those who do not see it"

    tab.evaluate("Object.assign(document.getElementById('k'), {value: 2}).dispatchEvent(new Event('input'))")
    tab.evaluate("document.querySelector('[value=both]').click()")
    ask(tab, SECOND)
    helped, alone = tab.evaluate(SHADES)
    assert letters(helped) == talk.shades(talk.second)
    assert "".join(text for text, _ in alone) == talk.second.text and not any(drafted for _, drafted in alone)
    verdict = tab.evaluate("document.querySelector('.verdict').textContent")
    assert f"✓ The two texts are equal, token for token ({len(talk.second.token_ids)} tokens)" in verdict

    rates = []
    for i in range(K):
        could = [talk.first, talk.second] if i < 2 else [talk.first]
        share = sum(out.accepted_per_position[i] for out in could) / sum(out.num_drafts for out in could)
        rates.append(f"position {i + 1}: {int(100 * share + 0.5)}%")
    chart = tab.evaluate("document.querySelector('#chart svg').getAttribute('aria-label')")
    assert chart == f"Drafts accepted in this conversation. {', '.join(rates)}."
    assert not tab.said and {url.removeprefix(smol.url) for url in tab.asked} == {
        "/",
        "/peagle/info",
        "/v1/chat/completions",
    }


def test_escape_stops_the_answer_and_the_server(tab: Tab, smol: Served) -> None:
    visit(tab, smol, tokens=800)
    send(tab, "Tell me a long story about a fox.")
    wait(tab, "document.querySelectorAll('#turns .text span').length > 3")
    assert not tab.evaluate("document.getElementById('stop').hidden")
    press(tab, "Escape", 27)
    wait(tab, "document.querySelector('.foot').textContent.includes('stopped')", 10)
    assert tab.evaluate("document.getElementById('stop').hidden && !document.querySelector('.error')")
    smol.check_nothing_left()
    send(tab, "And another one.")
    wait(tab, "document.querySelectorAll('.turn:last-child .text span').length > 3")
    tab.evaluate("document.getElementById('reset').click()")
    smol.check_nothing_left()
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 0 and shown(tab, "saved") == "–"
    assert tab.evaluate("document.activeElement.id") == "ask"


def test_sampled_texts_are_equal_too(tab: Tab, small: Served) -> None:
    visit(tab, small)
    tab.evaluate("document.getElementById('temperature').value = 2")
    tab.evaluate("document.querySelector('[value=both]').click()")
    texts = set()
    for _ in range(3):
        ask(tab, "zq")
        turn = tab.evaluate("document.querySelector('.turn:last-child').innerText")
        assert "token for token" in turn, (turn, tab.said)
        one, other = tab.evaluate("[...document.querySelectorAll('.turn:last-child .text')].map((e) => e.textContent)")
        assert one == other
        texts.add(one)
        tab.evaluate("document.getElementById('reset').click()")
    assert len(texts) > 1, "they were sampled"


def test_it_fits_and_reads_on_every_screen(tab: Tab, small: Served) -> None:
    visit(tab, small)
    for state in ("empty", "answered"):
        if state == "answered":
            tab.evaluate("document.querySelector('[value=both]').click()")
            ask(tab, PROMPT)
            pretend(
                tab, "new Response('{\"error\": {\"message\": \"no\"}}', {status: 429, headers: {'Retry-After': '60'}})"
            )
            ask(tab, "Tall" + "y" * 200)
        for width, dark in LOOKS:
            tab.look(width, dark)
            where = f"{state}, {width} px, {'dark' if dark else 'light'}"
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{where}: scrolls sideways"
            texts = tab.evaluate(READ_TEXTS)
            assert len(texts) > 20
            dim = [(text, round(ratio, 2)) for text, ratio, _, _ in texts if ratio < 4.5]
            assert not dim, f"{where}: {dim[:5]}"
            assert not [text for text, _, outside, _ in texts if outside], where
            assert min(height for *_, height in texts) >= 10, where
            small_ones = tab.evaluate(
                "[...document.querySelectorAll('button, input')].filter((e) => e.checkVisibility())"
                ".map((e) => [e.id || e.textContent, (e.closest('label') ?? e).getBoundingClientRect().height])"
                ".filter(([, high]) => high < 24)"
            )
            assert not small_ones, f"{where}: too small for a finger: {small_ones}"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    tab.evaluate("document.querySelector('.answer').classList.add('busy')")
    assert tab.evaluate("getComputedStyle(document.querySelector('.busy .text'), '::after').animationName") == "none"


def test_the_keyboard_alone_is_enough(tab: Tab, small: Served) -> None:
    visit(tab, small)
    assert tab.evaluate("document.activeElement.id") == "ask"
    tab.call("Input.insertText", text="one")
    press(tab, "Enter", 13, modifiers=8)
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 0
    tab.call("Input.insertText", text="two")
    assert tab.evaluate("document.getElementById('ask').value") == "one\ntwo"
    press(tab, "Enter", 13)
    wait(tab, "document.getElementById('stop').hidden && !!document.querySelector('.said')")
    assert tab.evaluate("document.querySelector('.said').textContent") == "one\ntwo"
    tab.evaluate(
        "document.activeElement.blur(); getSelection().removeAllRanges(); document.querySelector('.skip').focus()"
    )
    order = []
    for _ in range(16):
        order.append(tab.evaluate(FOCUSED))
        press(tab, "Tab", 9)
    names = [name for name, _ in order if name]
    wanted = ["Skip to your message", "log", "Copy", "ask", "send", "reset", "mode", "k", "temperature", "max-tokens"]
    assert [name for name in names if name in [*wanted, "system", "key"]][:12] == [*wanted, "system", "key"], names
    assert all(seen for name, seen in order if name in ("Copy", "send", "reset", "mode", "k", "key", "ask")), order


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("new Response('{\"error\": {\"message\": \"max_tokens: must be at least 1\"}}', {status: 400})",
         "The server refuses this: max_tokens: must be at least 1"),
        ("new Response('<h1>Bad gateway</h1>', {status: 502})", "The server failed (502). <h1>Bad gateway</h1>"),
        ("new Response('data: {\"error\": {\"message\": \"the engine failed\", \"code\": 500}}\\n\\n')",
         "The server failed (500). the engine failed"),
        ("new Response('data: {\"choices\": [{\"delta\": {\"content\": \"half\"}}]}\\n\\n')",
         "The connection was lost in the middle of the answer."),
        ("Promise.reject(new TypeError('Failed to fetch'))",
         "The server does not answer. Is it still running, and is the network up?"),
    ],
)  # fmt: skip
def test_trouble_is_told_in_words_and_can_be_tried_again(tab: Tab, small: Served, response: str, words: str) -> None:
    visit(tab, small)
    pretend(tab, response)
    ask(tab, PROMPT)
    assert last_error(tab) == words
    assert tab.evaluate("document.querySelector('.error').getAttribute('role')") == "alert"
    tab.evaluate("document.querySelector('.error button').click()")
    wait(tab, "document.getElementById('stop').hidden && !document.querySelector('.error')")
    _, _, whole = small.ask("/v1/chat/completions", chat_body(PROMPT))
    assert tab.evaluate("document.querySelector('.text').textContent") == whole["choices"][0]["message"]["content"]


def chat_body(*talk: str) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(talk)]
    return {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0}


def test_a_full_server_says_when_to_come_back(tab: Tab, small: Served) -> None:
    visit(tab, small)
    pretend(
        tab, "new Response('{\"error\": {\"message\": \"256 wait.\"}}', {status: 429, headers: {'Retry-After': '2'}})"
    )
    ask(tab, PROMPT)
    assert last_error(tab) == "The server has all it can do. 256 wait."
    assert tab.evaluate("document.querySelector('.error button').disabled")
    assert re.fullmatch(r"Try again in [12] s", tab.evaluate("document.querySelector('.error button').textContent"))
    wait(tab, "!document.querySelector('.error button').disabled", 10)
    # what was not answered is no part of the conversation
    ask(tab, "Now")
    _, _, whole = small.ask("/v1/chat/completions", chat_body("Now"))
    answers = tab.evaluate("[...document.querySelectorAll('.text')].map((e) => e.textContent)")
    assert answers == [whole["choices"][0]["message"]["content"]]


def test_text_stays_text(tab: Tab, small: Served) -> None:
    visit(tab, small)
    tokens = {"token_ids": [1, 2], "texts": [HOSTILE[:40], HOSTILE[40:]], "drafted": [False, True]}
    event = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop", "peagle": tokens}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    pretend(tab, f"new Response({json.dumps(body)})")
    ask(tab, HOSTILE)
    assert tab.evaluate("[...document.querySelectorAll('.said, .text')].map((e) => e.textContent)") == [
        HOSTILE,
        HOSTILE,
    ]
    pretend(tab, f"new Response(JSON.stringify({{error: {{message: {json.dumps(HOSTILE)}}}}}), {{status: 400}})")
    ask(tab, "again")
    assert last_error(tab) == f"The server refuses this: {HOSTILE}"
    assert tab.evaluate("window.hit === undefined && !document.querySelector('main img, main b')")
    # nor would a script run that somebody got into the page, or a request leave for elsewhere
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 1'}))"
    )
    assert tab.evaluate("window.hit === undefined")
    assert tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert any("Content Security Policy" in said for said in tab.said)


def test_a_key_stays_in_memory(tab: Tab) -> None:
    with Served(api_key="sesame") as server:
        tab.look(1280)
        tab.open(server.url + "/")
        assert "wants an API key" in wait(tab, "document.querySelector('#about.away')?.textContent")
        ask(tab, PROMPT)
        assert last_error(tab) == "The server wants an API key: give it under Settings."
        assert tab.evaluate("document.activeElement.id") == "key"
        tab.call("Input.insertText", text="sesame")
        tab.evaluate("document.querySelector('.error button').click()")
        wait(tab, "document.getElementById('stop').hidden && document.querySelector('.text')?.textContent")
        assert not tab.evaluate("document.querySelector('.error')") and shown(tab, "about").startswith(MODEL)
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('sesame')]"
        assert tab.evaluate(kept) == [0, 0, "", False]
