"""Headless Chromium, spoken to over a pipe in its own protocol (Chrome DevTools Protocol).

Knows nothing about reports, and only the standard library. Needs Debian's `chromium`, or another one by CHROMIUM.
The browser may reach nothing outside: whatever asks for the network is refused and noted in `Tab.asked`. Only this
machine's own servers can be reached, and only where `browser(local=True)` asks for it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it runs as root in containers; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ANSWER_S = 60.0


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Tab:
    """One page of one browser. `said` is what its console and its errors held, `asked` which addresses it wanted."""

    write: int
    read: int
    session: str = ""
    number: int = 0
    buffer: bytes = b""
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    loaded: bool = False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        return self._until(self.number)

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self.said.clear()
        self.asked.clear()
        self.loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        deadline = time.monotonic() + ANSWER_S
        while not self.loaded:
            assert time.monotonic() < deadline, f"{page} was not loaded"
            self._take(self._message(deadline))

    def look(self, width: int, dark: bool = False, media: str = "screen", height: int = 900) -> None:
        """As on a screen of this width."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, out: Path, selector: str | None = None, height: int | None = None) -> None:
        """The whole page, its first `height` pixels, or the first element that the selector finds."""
        whole = self.evaluate("document.documentElement.scrollHeight")
        shown = whole if height is None else min(height, whole)
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": shown, "scale": 1}
        if selector is not None:
            found = self.evaluate(
                f"(() => {{const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return [b.left + scrollX, b.top + scrollY, b.width, b.height]})()"
            )
            clip.update(zip(("x", "y", "width", "height"), found, strict=True))
        taken = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self, out: Path) -> None:
        self.call("Emulation.setEmulatedMedia", media="print")
        printed = self.call(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        out.write_bytes(base64.b64decode(printed["data"]))

    def _until(self, number: int) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while True:
            message = self._message(deadline)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        """What the browser says unasked."""
        method, about = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded":
            self.said.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer within {ANSWER_S:.0f} s"
            got = os.read(self.read, 1 << 20)
            assert got, "Chromium has ended"
            self.buffer += got
        one, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextmanager
def browser(local: bool = False) -> Iterator[Tab]:
    chromium = find_chromium()
    assert chromium is not None, "no Chromium here (Debian: apt-get install chromium), and none in CHROMIUM"
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The pipe has to be at 3 and 4 in the browser; a shell puts it there, whatever numbers it has here.
        moved = f'exec "$0" "$@" 3<&{their_read} 4>&{their_write}'
        process = subprocess.Popen(
            ["bash", "-c", moved, chromium, *FLAGS, NOBODY_ELSE, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        tab = Tab(our_write, our_read)
        try:
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            tab.call(
                "Network.emulateNetworkConditions",
                offline=not local,
                latency=0,
                downloadThroughput=-1 if local else 0,
                uploadThroughput=-1 if local else 0,
            )
            yield tab
        finally:
            os.close(our_write)
            os.close(our_read)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
