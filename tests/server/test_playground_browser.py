"""The playground in Chromium against a real server: a conversation with SmolLM2, the keyboard, small screens, errors.

Texts, shades and statistics are compared with the engine's. Errors of the server are faked by a route in the browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Route, expect
from serving_support import MODEL, PROMPT, K, LocalServer
from test_report_browser import READ_TEXTS

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from scripts.browser import Tab, open_browser

pytestmark = pytest.mark.browser

TOKENS = 24
FIRST, SECOND = "What is the capital of France?", "Name three things to see there."
LOOKS = [(1280, False), (1280, True), (800, True), (400, False), (320, True)]
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script> & </p><b>bold</b>'
# Every character of the last answers, with whether it is shaded.
SHADES = """
[...document.querySelectorAll(".turn:last-child .text")].map((text) =>
  [...text.querySelectorAll("span")].map((span) => [span.textContent, span.className === "draft-token"]))
"""
DRAFTED_LOOKS = """
(() => {
  const style = (name) => getComputedStyle(document.querySelector(`#turns .${name}`));
  const [drafted, own] = [style("draft-token"), style("target-token")];
  return [drafted.textDecorationLine, own.textDecorationLine, drafted.backgroundColor !== own.backgroundColor];
})()
"""
REACHED = "() => 'reached', (error) => error.name"
FOCUSED = """
(() => {
  const e = document.activeElement;
  if (e === document.body) return ["", false];
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.width > 0;
  return [e.id || e.name || e.textContent.trim().slice(0, 30), seen];
})()
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_browser(local=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def small() -> Iterator[LocalServer]:
    with LocalServer() as server:
        yield server


class Talk:
    """SmolLM2 with its expected outputs."""

    def __init__(self) -> None:
        options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 1024}
        self.llm = LLM("smollm2-135m", "smollm2-135m-p-eagle", K, **options)
        self.first = self.answer({"role": "user", "content": FIRST})
        said = {"role": "assistant", "content": self.first.text}
        self.second = self.answer(
            {"role": "user", "content": FIRST}, said, {"role": "user", "content": SECOND}, draft_tokens=2
        )

    def answer(self, *messages: dict[str, str], draft_tokens: int = K) -> CompletionOutput:
        params = SamplingParams(max_tokens=TOKENS, max_speculative_tokens=draft_tokens)
        return self.llm.chat(list(messages), params)[0].outputs[0]

    def shades(self, out: CompletionOutput) -> list[tuple[str, bool]]:
        detokenizer = Detokenizer(lambda ids: self.llm.tokenizer.decode(ids, skip_special_tokens=True))
        texts = detokenizer.add_separately(out.token_ids, final=True)
        return letters(list(zip(texts, out.is_draft_token, strict=True)))


@pytest.fixture(scope="module")
def talk(smollm2: Any) -> Talk:
    return Talk()


@pytest.fixture(scope="module")
def smol(talk: Talk) -> Iterator[LocalServer]:
    with LocalServer(lambda: talk.llm, served_model_name="smollm2-135m") as server:
        yield server


def letters(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(letter, bool(flag)) for text, flag in parts for letter in text]


def visit(tab: Tab, server: LocalServer, tokens: int = TOKENS) -> None:
    tab.set_screen(1280)
    tab.open(server.url + "/")
    expect(tab.page.locator("#about")).to_have_text(re.compile(f"^{server.settings.served_model_name}"))
    tab.page.get_by_label("Max tokens").fill(str(tokens))


def send(tab: Tab, words: str) -> None:
    tab.page.get_by_label("Your message").fill(words)
    tab.page.keyboard.press("Enter")


def ask(tab: Tab, words: str) -> None:
    turns = tab.page.locator(".turn")
    before = turns.count()
    send(tab, words)
    assert turns.count() == before + 1
    answered(tab)


def answered(tab: Tab) -> None:
    expect(button(tab, "Send")).to_be_visible()


def button(tab: Tab, name: str) -> Locator:
    return tab.page.get_by_role("button", name=name, exact=True)


def side_by_side(tab: Tab) -> None:
    tab.page.get_by_role("radio", name="compare").check()


def texts_of(tab: Tab, selector: str) -> list[str]:
    """Exact texts: `expect` would fold whitespace."""
    return tab.page.locator(selector).all_text_contents()


def last_error(tab: Tab) -> str:
    return tab.page.locator(".turn:last-child").get_by_role("alert").locator("p").text_content(timeout=10_000)


def pretend(tab: Tab, **response: Any) -> None:
    """Fakes the next response, or aborts the next request."""

    def say(route: Route) -> None:
        route.fulfill(**response) if response else route.abort()

    tab.page.route("**/v1/chat/completions", say, times=1)


def test_the_policy_names_the_script_and_the_style() -> None:
    page = files("peagle.server").joinpath("static/index.html").read_text(encoding="utf-8")
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
        assert len(found) == 1
        wanted = f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()}'"
        assert wanted in page, f"the policy of index.html must say: {wanted}"
    assert "unsafe" not in page and "innerHTML" not in page and "localStorage" not in page


def test_a_conversation_with_smollm2(tab: Tab, talk: Talk, smol: LocalServer) -> None:
    visit(tab, smol)
    ask(tab, FIRST)
    assert letters(tab.evaluate(SHADES)[0]) == talk.shades(talk.first) and any(talk.first.is_draft_token)
    assert tab.evaluate(DRAFTED_LOOKS) == ["underline", "none", True]
    saved = len(talk.first.token_ids) - 1 - talk.first.num_decode_steps
    assert texts_of(tab, "#length, #saved") == [f"{talk.first.acceptance_length:.2f}", str(saved)]
    assert float(texts_of(tab, "#speed")[0]) > 0
    assert talk.first.text in texts_of(tab, "p[role=status]")[0], "announced to screen readers"

    tab.page.get_by_role("slider", name="Draft tokens per step").fill("2")
    side_by_side(tab)
    ask(tab, SECOND)
    helped, alone = tab.evaluate(SHADES)
    assert letters(helped) == talk.shades(talk.second)
    assert "".join(text for text, _ in alone) == talk.second.text and not any(drafted for _, drafted in alone)
    equal = f"✓ Both outputs are equal, token for token ({len(talk.second.token_ids)} tokens)"
    assert equal in texts_of(tab, ".verdict")[0]

    rates = []
    for i in range(K):
        could = [talk.first, talk.second] if i < 2 else [talk.first]
        share = sum(out.num_accepted_tokens_per_pos[i] for out in could) / sum(out.num_drafts for out in could)
        rates.append(f"position {i + 1}: {int(100 * share + 0.5)}%")
    chart = f"Acceptance rate by position. {', '.join(rates)}."
    expect(tab.page.get_by_role("img", name=chart, exact=True)).to_be_visible()
    assert not tab.console_messages and {url.removeprefix(smol.url) for url in tab.requests} == {
        "/",
        "/peagle/info",
        "/v1/chat/completions",
    }


def test_escape_aborts_the_request(tab: Tab, smol: LocalServer) -> None:
    visit(tab, smol, tokens=800)
    newest = tab.page.locator(".turn:last-child .text span").nth(3)
    send(tab, "Tell me a long story about a fox.")
    expect(newest).to_be_attached()
    assert button(tab, "Stop").is_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator(".foot")).to_contain_text("stopped", timeout=10_000)
    assert button(tab, "Stop").is_hidden() and not tab.page.get_by_role("alert").count()
    smol.check_engine_idle()
    send(tab, "And another one.")
    expect(newest).to_be_attached()
    button(tab, "Reset").click()
    smol.check_engine_idle()
    assert not tab.page.locator(".turn").count() and texts_of(tab, "#saved") == ["–"]
    expect(tab.page.get_by_label("Your message")).to_be_focused()


def test_sampled_outputs_are_equal_too(tab: Tab, small: LocalServer) -> None:
    visit(tab, small)
    tab.page.get_by_label("Temperature").fill("2")
    side_by_side(tab)
    texts = set()
    for _ in range(3):
        ask(tab, "zq")
        turn = tab.page.locator(".turn").inner_text()
        assert "token for token" in turn, (turn, tab.console_messages)
        one, other = texts_of(tab, ".turn .text")
        assert one == other
        texts.add(one)
        button(tab, "Reset").click()
    assert len(texts) > 1, "they were sampled"


def test_it_is_readable_on_every_screen(tab: Tab, small: LocalServer) -> None:
    visit(tab, small)
    for state in ("empty", "answered"):
        if state == "answered":
            side_by_side(tab)
            ask(tab, PROMPT)
            pretend(tab, status=429, headers={"Retry-After": "60"}, json={"error": {"message": "no"}})
            ask(tab, "Tall" + "y" * 200)
        for width, dark in LOOKS:
            tab.set_screen(width, dark)
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
    tab.evaluate("document.querySelector('.answer').classList.add('busy')")
    blinks = "getComputedStyle(document.querySelector('.busy .text'), '::after').animationName"
    assert tab.evaluate(blinks) == "blink"
    tab.page.emulate_media(reduced_motion="reduce")
    assert tab.evaluate(blinks) == "none"


def test_the_keyboard_alone_is_enough(tab: Tab, small: LocalServer) -> None:
    tab.set_screen(1280)
    tab.open(small.url + "/")
    message, keyboard = tab.page.get_by_label("Your message"), tab.page.keyboard
    expect(message).to_be_focused()
    expect(tab.page.locator("#about")).to_contain_text(MODEL)
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    assert not tab.page.locator(".turn").count()
    keyboard.type("two")
    assert message.input_value() == "one\ntwo"
    keyboard.press("Enter")
    expect(tab.page.locator(".message")).to_be_visible()
    answered(tab)
    assert texts_of(tab, ".message") == ["one\ntwo"]
    tab.page.get_by_role("link", name="Skip to the message field").focus()
    order = []
    for _ in range(16):
        order.append(tab.evaluate(FOCUSED))
        keyboard.press("Tab")
    names = [name for name, _ in order if name]
    wanted = [
        "Skip to the message field",
        "conversation",
        "Copy",
        "message",
        "send",
        "reset",
        "mode",
        "k",
        "temperature",
        "max-tokens",
    ]
    assert [name for name in names if name in [*wanted, "system", "key"]][:12] == [*wanted, "system", "key"], names
    assert all(seen for name, seen in order if name in ("Copy", "send", "reset", "mode", "k", "key", "message")), order


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (
            {"status": 400, "json": {"error": {"message": "max_tokens: must be at least 1"}}},
            "The server refuses the request: max_tokens: must be at least 1",
        ),
        ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "The server failed (502). <h1>Bad gateway</h1>"),
        (
            {"body": 'data: {"error": {"message": "the engine failed", "code": 500}}\n\n'},
            "The server failed (500). the engine failed",
        ),
        (
            {"body": 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'},
            "The connection was lost during the response.",
        ),
        ({}, "The server does not respond. Is it running, and is the network up?"),
    ],
)
def test_errors_are_shown_and_can_be_retried(
    tab: Tab, small: LocalServer, response: dict[str, Any], words: str
) -> None:
    visit(tab, small)
    pretend(tab, **response)
    ask(tab, PROMPT)
    assert last_error(tab) == words
    button(tab, "Try again").click()
    expect(tab.page.get_by_role("alert")).to_have_count(0)
    answered(tab)
    _, _, whole = small.request("/v1/chat/completions", chat_body(PROMPT))
    assert texts_of(tab, ".text") == [whole["choices"][0]["message"]["content"]]
    assert not tab.page.get_by_role("alert").count()


def chat_body(*talk: str) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(talk)]
    return {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0}


def test_retry_after_an_overload(tab: Tab, small: LocalServer) -> None:
    visit(tab, small)
    pretend(tab, status=429, headers={"Retry-After": "3"}, json={"error": {"message": "256 wait."}})
    ask(tab, PROMPT)
    again = tab.page.get_by_role("alert").get_by_role("button")
    assert again.is_disabled() and re.fullmatch(r"Try again in [123] s", again.inner_text())
    assert last_error(tab) == "The server is overloaded. 256 wait."
    expect(again).to_be_enabled(timeout=10_000)
    # a failed turn is not part of the conversation
    ask(tab, "Now")
    _, _, whole = small.request("/v1/chat/completions", chat_body("Now"))
    assert texts_of(tab, ".text") == [whole["choices"][0]["message"]["content"]]


def test_text_stays_text(tab: Tab, small: LocalServer) -> None:
    visit(tab, small)
    tokens = {"token_ids": [1, 2], "texts": [HOSTILE[:40], HOSTILE[40:]], "is_draft_token": [False, True]}
    event = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop", "peagle": tokens}]}
    pretend(tab, body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
    ask(tab, HOSTILE)
    assert texts_of(tab, ".message, .text") == [HOSTILE, HOSTILE]
    pretend(tab, status=400, json={"error": {"message": HOSTILE}})
    ask(tab, "again")
    assert last_error(tab) == f"The server refuses the request: {HOSTILE}"
    assert tab.evaluate("window.hit === undefined && !document.querySelector('main img, main b')")
    # nor would a script run that somebody got into the page, or a request leave for elsewhere
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 1'}))"
    )
    assert tab.evaluate("window.hit === undefined")
    assert tab.evaluate(f"fetch('http://127.0.0.1:9/').then({REACHED})") == "TypeError"
    for directive in ("script-src", "connect-src"):
        assert any("Content Security Policy" in said and directive in said for said in tab.console_messages), directive


def test_a_key_stays_in_memory(tab: Tab) -> None:
    with LocalServer(api_key="sesame") as server:
        tab.set_screen(1280)
        tab.open(server.url + "/")
        expect(tab.page.locator("#about.unreachable")).to_contain_text("requires an API key")
        ask(tab, PROMPT)
        assert last_error(tab) == "The server requires an API key: enter it under Settings."
        expect(tab.page.get_by_label("API key")).to_be_focused()
        tab.page.keyboard.type("sesame")
        button(tab, "Try again").click()
        expect(tab.page.locator(".text")).not_to_be_empty()
        answered(tab)
        assert not tab.page.get_by_role("alert").count() and texts_of(tab, "#about")[0].startswith(MODEL)
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('sesame')]"
        assert tab.evaluate(kept) == [0, 0, "", False]


def test_only_this_address_can_be_reached(tab: Tab, small: LocalServer, tmp_path: Path) -> None:
    page = tmp_path / "asks.html"
    page.write_text("<!doctype html><title>asks</title>")
    tab.open(page)
    with socket.create_server(("127.0.0.2", 0)) as server:
        elsewhere = f"http://127.0.0.2:{server.getsockname()[1]}/"
        for url, answer in ((small.url + "/", "reached"), (elsewhere, "TypeError")):
            how = "{mode: 'no-cors', signal: AbortSignal.timeout(20000)}"
            assert tab.evaluate(f"fetch({json.dumps(url)}, {how}).then({REACHED})") == answer, tab.console_messages
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert elsewhere in tab.requests
