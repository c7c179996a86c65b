"""Test a trainer of FLARE's introduction, little changed, in a method that asks the sites twice a round."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_script_in_rounds import check_model, complete, lwr_weights, run_script

EXAMPLES = ROOT / "docs" / "examples"
PLAIN, FAIR = "hello_flare.py", "hello_flare_fair.py"
MOST = 8  # changed lines


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return added and removed lines; empty lines and the docstring at the top do not count."""
    found = list(difflib.ndiff(before.splitlines()[1:], after.splitlines()[1:]))
    new, gone = ([line[2:] for line in found if line.startswith(mark) and line[2:].strip()] for mark in ("+ ", "- "))
    return new, gone


def test_few_lines_are_new() -> None:
    new, _ = changed((EXAMPLES / PLAIN).read_text(), (EXAMPLES / FAIR).read_text())
    assert len(new) <= MOST, new
    page = (ROOT / "docs" / "own_script.md").read_text()
    (diff,) = [part for part in re.findall(r"```diff\n(.*?)```", page, re.DOTALL) if "site.receive" in part]
    assert {line[1:].strip() for line in diff.splitlines() if line.startswith("+")} == {line.strip() for line in new}


@pytest.mark.e2e
@pytest.mark.long
def test_in_our_rounds(tmp_path: Path) -> None:
    """Check Fed-LWR, which asks sites twice a round; test_script_in_rounds has a loss and step of a method's own."""
    run = run_script(tmp_path, "fed_lwr", train_script=EXAMPLES / FAIR, num_rounds=6)
    results = run.results
    assert len(complete(run)) == 6
    steps = [[of["num_steps"] for of in record["train"].values()] for record in results["rounds"]]
    assert steps == [[steps[0][0]] * 2] * 6  # as many in every round, at both sites
    assert steps[0][0] > 0
    assert results["test"]["site-1"]["accuracy"] > 0.5  # of four classes
    weights = lwr_weights(run)
    last = {layer: shares for (number, layer), shares in weights.items() if number == 5}
    assert {*last} == {"conv", "fc1", "fc2"}
    assert all(shares["site-1"] != 0.5 for shares in last.values())
    check_model(run, last)
    half = results["info"]["config"]["training"]
    assert half["path"].endswith("LayerSimilarityReport")  # the whole configuration, also of the sites' half
