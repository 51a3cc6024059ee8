"""A tab of headless Chromium, by Playwright.

Knows nothing about reports or the playground. Needs Debian's `chromium`, or another one by CHROMIUM; Playwright brings
none here. The browser may reach nothing outside: whatever asks for the network is refused and noted in `Tab.asked`.
Only this machine's own servers can be reached, and only where `browser(local=True)` asks for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import CDPSession, FloatRect, Page, expect, sync_playwright

NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ANSWER_MS = 60_000


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Tab:
    """One page of one browser. `said` is what its console and its errors held, `asked` which addresses it wanted."""

    page: Page
    devtools: CDPSession
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self.said.clear()
        self.asked.clear()
        self.page.goto(page.resolve().as_uri() if isinstance(page, Path) else page)

    def look(
        self, width: int, dark: bool = False, media: Literal["screen", "print"] = "screen", height: int = 900
    ) -> None:
        """As on a screen of this width; a narrow one is a phone's, which Playwright sets for new pages only."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools.send("Emulation.setDeviceMetricsOverride", size)
        scheme: Literal["dark", "light"] = "dark" if dark else "light"
        self.page.emulate_media(media=media, color_scheme=scheme, reduced_motion="no-preference")

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def screenshot(self, out: Path, selector: str | None = None, height: int | None = None) -> None:
        """The whole page, its first `height` pixels, or the first element that the selector finds."""
        if selector is not None:
            self.page.locator(selector).first.screenshot(path=out)
            return
        top = FloatRect(x=0, y=0, width=self.evaluate("innerWidth"), height=height) if height is not None else None
        self.page.screenshot(path=out, full_page=True, clip=top)


@contextmanager
def browser(local: bool = False) -> Iterator[Tab]:
    """One at a time: Playwright runs one event loop in a thread."""
    chromium = find_chromium()
    assert chromium is not None, "no Chromium here (Debian: apt-get install chromium), and none in CHROMIUM"
    expect.set_options(timeout=ANSWER_MS)
    with sync_playwright() as playwright:
        # No sandbox: it runs as root in containers, and the pages are our own.
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", NOBODY_ELSE])
        with launched, launched.new_context(offline=not local, no_viewport=True) as context:
            context.set_default_timeout(ANSWER_MS)
            page = context.new_page()
            tab = Tab(page, context.new_cdp_session(page))
            page.on("console", lambda message: tab.said.append(message.text))
            page.on("pageerror", lambda error: tab.said.append(str(error)))
            page.on("request", lambda request: tab.asked.append(request.url))
            yield tab
