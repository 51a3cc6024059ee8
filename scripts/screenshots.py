#!/usr/bin/env python3
"""Pictures of a report for the documentation, taken in headless Chromium.

    python scripts/screenshots.py benchmarks/results/h200-{speed,speed-vllm,acceptance}.json
    python scripts/screenshots.py RESULT.json ... --out docs/images

Writes report-light.png and report-dark.png (the top of the page at 1280 px), report-phone.png (400 px), and one
picture for each figure, named by its title. Needs Chromium; numbers in the pictures are those of the files given.
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

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
TOP = 1400  # pixels of the page that the first pictures show
LOOKS = (("report-light", 1280, False), ("report-dark", 1280, True), ("report-phone", 400, False))


def take(results: list[Path], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory() as folder, open_browser() as tab:
        page = Path(folder) / "report.html"
        write_report(results, page, None)
        tab.set_screen(LOOKS[0][1])
        tab.open(page)
        for name, width, dark in LOOKS:
            tab.set_screen(width, dark)
            taken.append(out / f"{name}.png")
            tab.screenshot(taken[-1], height=TOP)
        tab.set_screen(1280)
        titles = tab.page.locator("figure h3").all_text_contents()
        for i, (figure, title) in enumerate(zip(tab.page.locator("figure").all(), titles, strict=True)):
            name = f"report-{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}"
            again = titles[:i].count(title)  # the same figure of other runs
            taken.append(out / f"{name}{f'-{again + 1}' if again else ''}.png")
            figure.screenshot(path=taken[-1])
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of a report for the documentation.")
    parser.add_argument("results", nargs="+", type=Path, help="files that eval, bench, tune or plan wrote")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder they go to (docs/images)")
    given = parser.parse_args()
    if find_chromium() is None:
        print("screenshots: no Chromium here (Debian: apt-get install chromium), and none in CHROMIUM", file=sys.stderr)
        return 1
    try:
        for path in take(given.results, given.out):
            print(path)
    except UserError as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
