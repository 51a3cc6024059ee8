#!/usr/bin/env python3
"""Takes the documentation's picture of the playground: a conversation with a running server, in headless Chromium.

    peagle serve -d smollm2-135m-p-eagle -k 7 &
    python scripts/playground_pictures.py http://127.0.0.1:8000

Writes docs/images/playground-light.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from browser import NO_CHROMIUM, Tab, find_chromium, open_browser
from playwright.sync_api import expect

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "playground-light.png"
DEFAULT_PROMPT = "Write a Python function that returns the n-th Fibonacci number."
TIMEOUT_MS = 300_000


def send_message(tab: Tab, text: str) -> None:
    message = tab.page.get_by_label("Your message")
    message.fill(text)
    message.press("Enter")
    expect(tab.page.locator("#stop")).to_be_visible()
    expect(tab.page.locator("#stop")).to_be_hidden(timeout=TIMEOUT_MS)


def take_picture(url: str, prompt: str, k: int | None, max_tokens: int, out: Path) -> str:
    """Compares one response with and without draft tokens. Returns the comparison's sentence."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_browser(local=True) as tab:
        tab.set_screen(1280)
        tab.open(url)
        expect(tab.page.locator("#about")).to_contain_text("drafter")
        tab.page.get_by_label("Max tokens").fill(str(max_tokens))
        if k is not None:
            tab.page.get_by_role("slider", name="Draft tokens per step").fill(str(k))
        tab.page.get_by_role("radio", name="compare").check()
        send_message(tab, prompt)
        tab.evaluate("document.getElementById('end').scrollIntoView({block: 'nearest'})")
        tab.page.screenshot(path=out)
        return tab.page.locator(".verdict").inner_text()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the documentation's picture of the playground.")
    parser.add_argument("url", help="a running server with a drafter")
    parser.add_argument("-k", type=int, help="draft tokens per step (default: the server's)")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("--max-tokens", type=int, default=110)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    if find_chromium() is None:
        print(f"error: {NO_CHROMIUM}", file=sys.stderr)
        return 1
    print(take_picture(arguments.url, arguments.prompt, arguments.k, arguments.max_tokens, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
