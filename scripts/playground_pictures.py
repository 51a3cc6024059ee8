#!/usr/bin/env python3
"""Pictures of the playground for the documentation: a real conversation with a running server, in headless Chromium.

    peagle serve -d smollm2-135m-p-eagle -k 7 &
    python scripts/playground_pictures.py http://127.0.0.1:8000 -k 3

Writes playground-light.png and playground-dark.png (1280 px) and playground-phone.png (400 px) to docs/images.
"""

from __future__ import annotations

import argparse
import base64
import sys
import time
from pathlib import Path

from browser import Tab, browser, find_chromium

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
ALONE = "Write a Python function that returns the n-th Fibonacci number."
COMPARED = "How does it work?"
LOOKS = (("playground-light", 1280, 900, False), ("playground-dark", 1280, 900, True))
PHONE = ("playground-phone", 400, 860, False)
LONGEST_S = 300.0


def wait(tab: Tab, expression: str) -> None:
    ends = time.monotonic() + LONGEST_S
    while not tab.evaluate(expression):
        assert time.monotonic() < ends, f"{expression}: not within {LONGEST_S:.0f} s"
        time.sleep(0.1)


def ask(tab: Tab, words: str) -> None:
    tab.evaluate("document.getElementById('ask').focus()")
    tab.call("Input.insertText", text=words)
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
    wait(tab, "!document.getElementById('stop').hidden")
    wait(tab, "document.getElementById('stop').hidden")


def take(tab: Tab, out: Path) -> Path:
    """What a person sees, not the whole page."""
    out.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))
    return out


def pictures(url: str, drafts: int | None, tokens: int, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with browser(local=True) as tab:
        tab.look(1280)
        tab.open(url)
        wait(tab, "document.getElementById('about').textContent.includes('drafter')")
        tab.evaluate(f"document.getElementById('max-tokens').value = {tokens}")
        if drafts is not None:
            moved = f"Object.assign(document.getElementById('k'), {{value: {drafts}}})"
            tab.evaluate(f"{moved}.dispatchEvent(new Event('input'))")
        ask(tab, ALONE)
        tab.look(PHONE[1], PHONE[3], height=PHONE[2])
        tab.evaluate("scrollTo(0, 0)")
        taken.append(take(tab, out / f"{PHONE[0]}.png"))
        tab.look(1280)
        tab.evaluate("document.querySelector('[value=both]').click()")
        ask(tab, COMPARED)
        for name, width, height, dark in LOOKS:
            tab.look(width, dark, height=height)
            tab.evaluate("document.getElementById('end').scrollIntoView({block: 'nearest'})")
            taken.append(take(tab, out / f"{name}.png"))
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
