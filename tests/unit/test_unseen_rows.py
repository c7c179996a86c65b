"""Test benchmarks/unseen.py: a comparison that leaves sites out becomes rows seen, unseen and adapted."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.unseen import rows

from fairflare_lab.compare.left_out import Unseen
from tests.unit.report_runs import document, write_run

UNSEEN = {"A": 0.5, "B": 0.6, "C": 0.4}
ADAPTED = {"A": 0.7, "B": 0.8, "C": 0.3}


def comparison(folder: Path, seeds: int, labels: Sequence[str] = ("FedAvg",), lacks: str = "") -> Path:
    """Make models that have, at each other site, 0.6 plus a tenth for each place between them."""
    for label, seed in itertools.product(labels, range(seeds)):
        for site in UNSEEN:
            name = f"{label}-seed{seed}-without-{site}"
            place = folder / "runs" / name
            seen = {other: 0.6 + 0.1 * abs(ord(other) - ord(site)) + 0.01 * seed for other in UNSEEN if other != site}
            results = document(label, seed, seen)
            results["resampled"] = {other: [value, value + 0.02] for other, value in seen.items()}
            results["resampled_units"] = {other: {"unit": "images", "count": 9} for other in seen}
            write_run(place, results)
            plan = {"plan": {"method": "fed_avg", "label": label, "seed": seed}, "held_out": site}
            (place / "run.json").write_text(json.dumps(plan))
            at = Unseen(
                site=site, metrics={"dice": UNSEEN[site] + 0.01 * seed}, adapted={"dice": ADAPTED[site] + 0.01 * seed},
                resampled=[0.1, 0.2], adapted_resampled=[0.3, 0.4], unit="images", units=9,
            )  # fmt: skip
            if name != lacks:
                at.write(place / "server" / "simulate_job" / "fairflare")
    names = [path.name for path in folder.glob("runs/*")]
    (folder / "provenance.json").write_text(json.dumps({"sessions": [{"runs": names}, {"runs": ["another"]}]}))
    return folder


def table(out: Path) -> dict[str, dict[str, str]]:
    return {line["method"]: line for line in csv.DictReader((out / "table.csv").open())}


def test_a_site_that_is_seen_has_the_mean_of_the_runs_that_it_was_part_of(tmp_path: Path) -> None:
    rows(comparison(tmp_path / "c", 2), tmp_path / "out")
    found = table(tmp_path / "out")
    assert list(found) == ["FedAvg, seen", "FedAvg", "FedAvg, adapted"]
    # Seeds add 0 and 0.01. A is one place from B and two from C: (0.7 + 0.8) / 2; B is one from both.
    seen = {"A": 0.755, "B": 0.705, "C": 0.755}
    for row, values in (("FedAvg, seen", seen), ("FedAvg", UNSEEN), ("FedAvg, adapted", ADAPTED)):
        for site, value in values.items():
            shift = 0.0 if row == "FedAvg, seen" else 0.005
            assert float(found[row][f"{site} mean"]) == pytest.approx(value + shift), (row, site)
    differences = list(csv.DictReader((tmp_path / "out" / "differences.csv").open()))
    (gain,) = (d for d in differences if d["method"] == "FedAvg, adapted" and d["measure"] == "average")
    assert gain["reference"] == "FedAvg"
    assert float(gain["mean"]) == pytest.approx(0.1)  # (0.2 + 0.2 - 0.1) / 3
    sessions = json.loads((tmp_path / "out" / "provenance.json").read_text())["sessions"]
    assert len(sessions) == 1


def test_a_row_that_lacks_a_run_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(comparison(tmp_path / "c", 3, ("FedAvg", "FedGA"), lacks="FedGA-seed1-without-B"), tmp_path / "out")
    said = capsys.readouterr().out
    assert "FedGA, seed 1: runs are missing, left out" in said
    assert "FedGA: fewer than 3 seeds, left out" in said
    assert list(table(tmp_path / "out")) == ["FedAvg, seen", "FedAvg", "FedAvg, adapted"]
