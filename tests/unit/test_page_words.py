"""Test every sentence of the page against ``page_words.txt``, in which it was read and found true.

After a change that is meant: ``python -m tests.unit.test_page_words``, and read what changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairflare_lab.page.material import read_material
from fairflare_lab.page.write import build
from tests.unit.report_runs import document, write_comparison, write_run

STORED = Path(__file__).with_name("page_words.txt")
SITES = ("site-1", "site-2", "site-10")
WHOLE = ("one run", "a run that failed", "methods")  # of the others the head alone


def rich(label: str = "fed_x", seed: int = 0, shift: float = 0.0) -> dict[str, Any]:
    """Make a run with all that a page can show."""
    run = document(label, seed, {site: 0.4 + shift + 0.07 * k for k, site in enumerate(SITES)})
    for n, record in enumerate(run["rounds"]):
        record["site_weights"] = dict(zip(SITES, (0.6 - 0.1 * n, 0.3, 0.1 + 0.1 * n), strict=True))
        record["layers"] = {"conv": {s: {"weight": 0.1 * k, "dissimilarity": 1e-3 * k} for k, s in enumerate(SITES)}}
        record["reports"] = {s: {"mu": 0.1 * n, "own": k + n, "fixed": k} for k, s in enumerate(SITES)}
    run["rounds"][1]["left_out"] = [{"site": "site-2", "phase": "train", "reason": "loss is nan"}]
    run["rounds"][1]["accepted"] = ["site-1", "site-10"]
    for site, images in (("site-1", 4), ("site-2", 4 + seed)):
        run["info"]["said"][site]["images"]["test"] = images
    run["rounds"][1]["warnings"] = [{"site": "site-1", "kind": "majority", "value": 0.6, "used": 0.6, "text": "Half."}]
    return run | {"validation": {s: {"dice": 0.5} for s in SITES}}


def pages(folder: Path) -> Iterator[tuple[str, Any]]:
    """Return pages whose sentences differ, each with its topic and its material."""
    yield "one run", read_material(write_run(folder / "one", rich()))
    yield "one run, by its loss", read_material(folder / "one", metric="loss")
    failed = rich() | {"status": "failed", "reason": "no disk", "test": None, "rounds": []}
    yield "a run that failed", read_material(write_run(folder / "failed", failed))
    yield "a run that goes on", read_material(write_run(folder / "running", failed | {"status": "running"}))
    methods = {"a": 0.0, "b": 0.1, "x, q=1": -0.05, "x, q=2": 0.2}
    runs = [rich(name, seed, shift + 0.01 * seed) for name, shift in methods.items() for seed in (0, 1)]
    runs[2]["info"]["synthetic"], runs[-1]["status"] = False, "failed"
    yield "methods", read_material(write_comparison(folder / "methods", runs))
    yield "methods, by their loss", read_material(folder / "methods", metric="loss", reference="b")
    yield "one seed", read_material(write_comparison(folder / "seed", [rich("a"), rich("b", shift=0.1), rich("c", 1)]))


def words(folder: Path) -> str:
    """Return all words of a page except its tables."""
    lines = []
    for about, material in pages(folder):
        page = build(material)
        lines += [f"# {about}", page.title, *(f"{word}: {told}" for word, told in page.facts), page.synthetic]
        lines += page.first
        lines += page.problems
        for section in page.sections if about in WHOLE else ():
            lines += [f"## {section.title}", *(f"- {note}" for note in section.notes)]
            for part in section.parts:
                lines += [f"{part.name}: {part.caption}"]
    return "\n".join(filter(None, lines)).replace(str(folder), "FOLDER") + "\n"


def test_every_sentence_is_as_it_was_read(tmp_path: Path) -> None:
    assert words(tmp_path).splitlines() == STORED.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        STORED.write_text(words(Path(made)), encoding="utf-8")
