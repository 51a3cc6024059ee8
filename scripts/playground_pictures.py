#!/usr/bin/env python3
"""Pictures of the playground for the documentation: a real conversation with a running server, in headless Chromium.

    peagle serve -d smollm2-135m-p-eagle -k 7 &
    python scripts/playground_pictures.py http://127.0.0.1:8000 -k 3

Writes playground-light.png and playground-dark.png (1280 px) and playground-phone.png (400 px) to docs/images.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from browser import Tab, browser, find_chromium
from playwright.sync_api import expect

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
ALONE = "Write a Python function that returns the n-th Fibonacci number."
COMPARED = "How does it work?"
LOOKS = (("playground-light", 1280, 900, False), ("playground-dark", 1280, 900, True))
PHONE = ("playground-phone", 400, 860, False)
LONGEST_MS = 300_000


def ask(tab: Tab, words: str) -> None:
    message = tab.page.get_by_label("Your message")
    message.fill(words)
    message.press("Enter")
    expect(tab.page.locator("#stop")).to_be_visible()
    expect(tab.page.locator("#stop")).to_be_hidden(timeout=LONGEST_MS)


def pictures(url: str, drafts: int | None, tokens: int, out: Path) -> list[Path]:
    """What a person sees, not the whole page."""
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with browser(local=True) as tab:
        tab.look(1280)
        tab.open(url)
        expect(tab.page.locator("#about")).to_contain_text("drafter")
        tab.page.get_by_label("Longest answer").fill(str(tokens))
        if drafts is not None:
            tab.page.get_by_role("slider", name="Drafts a round").fill(str(drafts))
        ask(tab, ALONE)
        tab.look(PHONE[1], PHONE[3], height=PHONE[2])
        tab.evaluate("scrollTo(0, 0)")
        taken.append(out / f"{PHONE[0]}.png")
        tab.page.screenshot(path=taken[-1])
        tab.look(1280)
        tab.page.get_by_role("radio", name="side by side").check()
        ask(tab, COMPARED)
        for name, width, height, dark in LOOKS:
            tab.look(width, dark, height=height)
            tab.evaluate("document.getElementById('end').scrollIntoView({block: 'nearest'})")
            taken.append(out / f"{name}.png")
            tab.page.screenshot(path=taken[-1])
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of the playground for the documentation.")
    parser.add_argument("url", help="a running server, with a drafter")
    parser.add_argument("-k", type=int, help="drafts a round (the server's)")
    parser.add_argument("--tokens", type=int, default=110, help="longest answer")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder they go to (docs/images)")
    given = parser.parse_args()
    if find_chromium() is None:
        print("pictures: no Chromium here (Debian: apt-get install chromium), and none in CHROMIUM", file=sys.stderr)
        return 1
    for path in pictures(given.url, given.k, given.tokens, given.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
