"""Measure the results page of many sites in a browser: its size, and seconds until it is drawn.

    python benchmarks/bench_page.py [--sites 6 100 1000] [--rounds 5] [--method fed_avg fed_lwr] [--browser chromium]

A run of a network of seven numbers makes the results; the page is made from them, and opened without a window. Time
is from the browser's start to the picture of the first screen of the fully loaded page, less that of an empty page;
the least of three.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import tempfile
import time
from pathlib import Path

TASK = Path(__file__).with_name("numbers_task.py")


def drawn(browser: str, url: str, folder: Path) -> float:
    """Return the seconds until the page is loaded and drawn, the least of three."""
    found = []
    for _ in range(3):
        started = time.monotonic()
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
                   "--window-size=1280,1000", f"--screenshot={folder / 'page.png'}", url]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=180)
        found.append(time.monotonic() - started)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[6, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", nargs="+", default=["fed_avg", "fed_lwr"])
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--page", type=Path, nargs="*", default=[], help="open these pages instead")
    given = parser.parse_args()
    from fairflare.federation.plan.plan import make_plan
    from fairflare.federation.transports.local import run_local

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="fairflare_page_") as name:
        folder = Path(name)
        empty = drawn(given.browser, "about:blank", folder)
        for page in given.page:
            print(
                f"{page}: {drawn(given.browser, page.absolute().as_uri(), folder) - empty:.2f} s beyond an empty page"
            )
        if given.page:
            return
        print("| method | sites | MB | elements | seconds beyond an empty page |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for method in given.method:
            for sites in given.sites:
                run = folder / f"{method}-{sites}"
                plan = make_plan(
                    method, sites=sites, num_rounds=given.rounds, settings={"local_epochs": 1}, task_file=TASK
                )
                page = run_local(plan, run) / "report.html"
                text = page.read_text(encoding="utf-8")
                seconds = drawn(given.browser, page.absolute().as_uri(), folder) - empty
                opened = text.count("<") - text.count("</")
                print(f"| {method} | {sites} | {len(text) / 1e6:.2f} | {opened} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
