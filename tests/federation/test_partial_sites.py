"""Sites that annotate different structures: a run from their files to the table, in one process."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairflare.cli.run.view import RunView
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from tests.tiny import run_document
from tests.unit.test_census import masks_site

SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "num_classes": 2, "local_epochs": 1, "batch_size": 4,
    "learning_rate": 0.05,
}  # fmt: skip
ONE, TWO = "class_1", "class_2"
DICE, LOSS = "dice", "loss"


def run(
    folder: Path,
    structures: dict[str, Any],
    method: str = "fed_avg",
    own: dict[str, Any] | None = None,
    every: tuple[int, ...] = (1, 2),
    **more: Any,
) -> tuple[dict[str, Any], str]:
    """Three sites whose masks mark what their files say, ``every`` of them for "all"; ``own``: more settings of B."""
    local = {
        site: masks_site(folder / site, every if said == "all" else tuple(said), 4, structures=said)
        | (own or {} if site == "B" else {})
        for site, said in structures.items()
    }
    form = {"settings": SETTINGS | more, "num_rounds": 2, "bootstrap": 5}
    made = make_plan(method, task="segmentation", sites=list(structures), **form)
    shown = io.StringIO()
    with RunView(Console(file=shown, width=200), metric=DICE, directions={DICE: True}) as view:
        results = run_local(made, folder / "run", {"sites": local}, listeners=[view])
    (folder / "shown.txt").write_text(shown.getvalue())
    return run_document(results), fairness_table(read_results(results))


def test_what_all_have_is_compared(tmp_path: Path) -> None:
    """Compare sites of a model that has hardly learnt structure 2, which B alone annotates: B's Dice is lowest."""
    found, text = run(tmp_path, {"A": [1], "B": "all", "C": [1]}, local_epochs=10)
    assert (found["footing"]["how"], found["footing"]["shared"]) == ("shared", [ONE])
    test, validation = found["test"], [record["validation"] for record in found["rounds"]] + [found["validation"]]
    for of in (test, *validation):
        for site in "ABC":
            assert of[site][DICE] == of[site][f"{DICE}_{ONE}"]
            assert of[site][LOSS] == of[site][f"{LOSS}_{ONE}"]
            assert (f"{DICE}_{TWO}" in of[site]) == (site == "B")
    own = statistics.fmean(test["B"][f"{DICE}_{name}"] for name in (ONE, TWO))
    assert test["B"]["own/dice"] == pytest.approx(own)
    assert own < 0.8 < test["B"][DICE]
    assert found["fairness"][DICE]["std"] < 0.05
    assert found["fairness"]["own/dice"]["worst_site"] == ""
    made = found["best"]["round"] + 1  # the round that received the best model, if it is not the last
    assert found["best"]["value"] == pytest.approx(statistics.fmean(of[DICE] for of in validation[made].values()))
    assert found["inequality"]["sites"]["B"]["structure_support"] == {ONE: 4, TWO: 4}
    standing = found["inequality"]["sites"]["B"]  # intervals and draws are of what is compared
    assert abs(statistics.fmean(found["resampled"]["B"]) - test["B"][DICE]) < 0.05
    assert standing["value"] == test["B"][DICE]
    assert standing["low"] is None or standing["low"] <= test["B"][DICE] <= standing["high"]
    assert sum(standing["case_scores"][10:]) == 4
    assert "rest on those that all have: class_1." in " ".join(text.split())
    lines = [line for line in (tmp_path / "shown.txt").read_text().splitlines() if "done" in line]
    assert ["dice (over: class_1) 0." in line for line in lines] == [True, True]


@pytest.mark.parametrize("method", ["fed_avg", "q_fed_avg", "fair_fed"])
def test_without_a_common_structure_figures_are_adjusted(tmp_path: Path, method: str) -> None:
    found, text = run(tmp_path, {"A": [1], "B": [2], "C": "all"}, method)
    assert (found["footing"]["how"], found["footing"]["bridges"]) == ("adjusted", ["C"])
    for of in (found["test"], found["validation"], found["rounds"][1]["validation"]):
        for name in (DICE, LOSS):
            away = (of["C"][f"{name}_{ONE}"] - of["C"][f"{name}_{TWO}"]) / 2  # C alone tells structures 1 and 2 apart
            assert of["A"][name] == pytest.approx(of["A"][f"{name}_{ONE}"] - away, abs=1e-6)
            assert of["B"][name] == pytest.approx(of["B"][f"{name}_{TWO}"] + away, abs=1e-6)
            assert of["C"][name] == pytest.approx(of["C"][f"own/{name}"], abs=1e-6)
    assert "dice (adjusted)" in text
    if method == "q_fed_avg":  # relative to the mean of the sites that have a structure
        losses = [report["probe_loss"] for report in found["rounds"][1]["reports"].values()]
        assert all(0.5 < loss < 2 for loss in losses)


def test_a_site_whose_figures_by_structure_stay_there_is_in_no_comparison(tmp_path: Path) -> None:
    found, text = run(tmp_path, {"A": [1], "B": "all", "C": [1]}, own={"metrics_by_class": False})
    assert found["test"]["B"][DICE] is None
    assert found["fairness"][DICE]["excluded"] == ["B"]
    assert "B (its figures by structure are not known)" in " ".join(text.split())
    assert found["inequality"]["sites"].keys() == {"A", "C"}


def test_what_no_image_marks_is_in_no_comparison_though_the_site_looked(tmp_path: Path) -> None:
    """All that C and A have of structure 2 is empty masks: of a model that finds nothing their Dice would be 1."""
    found, text = run(tmp_path, {"A": "all", "B": [1, 2], "C": "all"}, every=(1,))
    assert found["footing"]["structures"] == {"A": [ONE], "B": [ONE, TWO], "C": [ONE]}
    for of in (found["test"], found["validation"], found["rounds"][1]["validation"]):
        assert all(of[site][DICE] == of[site][f"{DICE}_{ONE}"] for site in "ABC")
    assert " of empty masks" in text
    assert f"{found['test']['B'][f'{DICE}_{TWO}']:.2f} of 4" in text


def test_equal_sets_are_plain_to_the_bit(tmp_path: Path) -> None:
    found, _ = run(tmp_path, dict.fromkeys("ABC", "all"), "q_fed_avg")
    assert found["footing"] is None
    for of in found["test"].values():
        assert of[DICE] == pytest.approx((of[f"{DICE}_{ONE}"] + of[f"{DICE}_{TWO}"]) / 2, abs=1e-12)
        assert not any(name.startswith("own/") for name in of)
