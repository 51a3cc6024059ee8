"""A tab of headless Chromium, driven by Playwright.

Needs Debian's `chromium`, or the path of another one in $CHROMIUM. The browser reaches no network; with
`open_browser(local=True)` it reaches servers on this machine. `Tab.requests` lists every address that a page requested.
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

ONLY_LOOPBACK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
TIMEOUT_MS = 60_000
NO_CHROMIUM = "Chromium is not installed (Debian: apt-get install chromium), and $CHROMIUM names none"


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Tab:
    """One page of one browser, with the messages of its console and the addresses it requested."""

    page: Page
    devtools: CDPSession
    console_messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, page: Path | str) -> None:
        """Opens a file or an address."""
        self.console_messages.clear()
        self.requests.clear()
        self.page.goto(page.resolve().as_uri() if isinstance(page, Path) else page)

    def set_screen(
        self, width: int, dark: bool = False, media: Literal["screen", "print"] = "screen", height: int = 900
    ) -> None:
        """Emulates a screen. A narrow one is a phone's, which Playwright itself can set for new pages only."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools.send("Emulation.setDeviceMetricsOverride", size)
        scheme: Literal["dark", "light"] = "dark" if dark else "light"
        self.page.emulate_media(media=media, color_scheme=scheme, reduced_motion="no-preference")

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def screenshot(self, out: Path, selector: str | None = None, height: int | None = None) -> None:
        """Saves the whole page, its first `height` pixels, or the first element that the selector finds."""
        if selector is not None:
            self.page.locator(selector).first.screenshot(path=out)
            return
        top = FloatRect(x=0, y=0, width=self.evaluate("innerWidth"), height=height) if height is not None else None
        self.page.screenshot(path=out, full_page=True, clip=top)


@contextmanager
def open_browser(local: bool = False) -> Iterator[Tab]:
    """Opens one browser. Playwright runs one event loop per thread, so there can be only one at a time."""
    chromium = find_chromium()
    assert chromium is not None, NO_CHROMIUM
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # No sandbox: containers run it as root, and the pages are our own.
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", ONLY_LOOPBACK])
        with launched, launched.new_context(offline=not local, no_viewport=True) as context:
            context.set_default_timeout(TIMEOUT_MS)
            page = context.new_page()
            tab = Tab(page, context.new_cdp_session(page))
            page.on("console", lambda message: tab.console_messages.append(message.text))
            page.on("pageerror", lambda error: tab.console_messages.append(str(error)))
            page.on("request", lambda request: tab.requests.append(request.url))
            yield tab
