#!/usr/bin/env python3
"""Takes the pictures of a report for the documentation in headless Chromium.

    python scripts/screenshots.py benchmarks/results/h200-{speed,acceptance}.json
    python scripts/screenshots.py RESULT.json ... --out docs/images

Writes report-light.png and report-dark.png (the top of the page, 1280 pixels wide), report-phone.png (400 pixels wide)
and one picture per figure, named by its title.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from browser import find_chromium, open_browser

from peagle.errors import UserError
from peagle.report.build import write_report

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
PAGE_HEIGHT = 1400  # pixels of the page in the first pictures
VIEWS = (("report-light", 1280, False), ("report-dark", 1280, True), ("report-phone", 400, False))


def take_screenshots(results: list[Path], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with tempfile.TemporaryDirectory() as folder, open_browser() as tab:
        page = Path(folder) / "report.html"
        write_report(results, page, None)
        tab.set_screen(VIEWS[0][1])
        tab.open(page)
        for name, width, dark in VIEWS:
            tab.set_screen(width, dark)
            paths.append(out / f"{name}.png")
            tab.screenshot(paths[-1], height=PAGE_HEIGHT)
        tab.set_screen(1280)
        titles = tab.page.locator("figure h3").all_text_contents()
        for i, (figure, title) in enumerate(zip(tab.page.locator("figure").all(), titles, strict=True)):
            name = f"report-{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}"
            num_before = titles[:i].count(title)  # figures of other sections with the same title
            paths.append(out / f"{name}{f'-{num_before + 1}' if num_before else ''}.png")
            figure.screenshot(path=paths[-1])
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes the pictures of a report for the documentation.")
    parser.add_argument("results", nargs="+", type=Path, help="results of eval, bench, tune or plan")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="output folder (docs/images)")
    args = parser.parse_args()
    if find_chromium() is None:
        print("screenshots: Chromium is missing (Debian: apt-get install chromium, or set CHROMIUM)", file=sys.stderr)
        return 1
    try:
        for path in take_screenshots(args.results, args.out):
            print(path)
    except UserError as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
