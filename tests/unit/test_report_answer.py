"""Test the page's first sentence, its digits, and its style for print."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairflare.reporting.documents import Inequality, SiteStanding
from fairflare.reporting.layout import Table, interval, number
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.page import words, write
from fairflare_lab.page.material import read_material
from tests.unit.report_runs import read

TEMPLATES = Path(write.__file__).parent / "templates"


@pytest.mark.parametrize(
    ("value", "half", "told"),
    [
        (0.6628, 0.0303, "0.66 ± 0.03"), (0.6628, 0.3, "0.7 ± 0.3"), (0.66284, 0.0012, "0.663 ± 0.001"),
        (12.34, 3.0, "12 ± 3"), (0.6628, float("nan"), "0.663"), (0.6628, 0.0, "0.663 ± 0.000"),
        (0.8282, 1e-5, "0.828 ± 0.000"), (1e-5, 2e-6, "1e-05 ± 2e-06"), (0.00123, float("nan"), "0.0012"),
        (12.345, float("nan"), "12.3"), (1234.5, float("nan"), "1234"), (1e-14, float("nan"), "0.000"),
        (float("nan"), 0.1, "-"), (None, 0.1, "-"),
    ],
)  # fmt: skip
def test_digits_end_where_the_interval_begins(value, half, told):
    assert number(value, half) == told


@pytest.mark.parametrize(
    ("low", "high", "mean", "told"),
    [
        (0.7123, 0.8567, None, "[0.712, 0.857]"), (-2.01, 1.15, -0.43, "-0.4 [-2.0, +1.1]"),
        (0.005, 0.055, 0.03, "+0.030 [+0.005, +0.055]"), (float("nan"), 0.5, 0.0462, "+0.046"), (None, None, None, "-"),
    ],
)  # fmt: skip
def test_an_interval_decides_its_own_digits(low, high, mean, told):
    assert interval(low, high, mean) == told


def _material(verdict: str, behind: list[str], higher: bool = True, together: float = 0.5) -> Any:
    sign = 1 if higher else -1
    sites = {
        "A": SiteStanding(value=0.7 + sign * 0.03, expected=0.7),
        "C": SiteStanding(value=0.7 - sign * 0.07, expected=0.7),
    }
    said = {
        "metric": "dice", "test": "t", "behind": behind, "ahead": [], "chance_gap": 0.05, "sites": sites,
        "p_value": together, "level": 0.95,
    }  # fmt: skip
    document = read(info={"label": "FedAvg", "primary_metric": "dice"})
    document.inequality = Inequality.model_construct(**said)
    row = SimpleNamespace(label="FedAvg", runs=[document], summaries=[])
    row.at = lambda site: SimpleNamespace(mean=sites[site].value)
    rows = [row]
    rows.append(SimpleNamespace(label="B", runs=[], summaries=[]))
    one = SimpleNamespace(label="B", measure="std", verdict=verdict, mean=-0.0412, low=-0.0512, high=-0.0312)
    return SimpleNamespace(tested=True, reference="FedAvg", rows=rows, metric="dice", higher=higher, differences=[one])


@pytest.mark.parametrize("higher", [True, False])
def test_the_answer_says_who_is_fairer_and_who_is_behind(higher):
    where = "the lowest Dice, 0.630, 0.07 below" if higher else "the highest Dice, 0.770, 0.07 above"
    assert words.answer(_material("within noise", ["C"], higher)) == (
        f"No method was shown to be fairer than FedAvg on these data. With FedAvg, site C has {where} the 0.700 "
        "expected if all sites were equal. Chance does not explain that."
    )
    fairer = words.answer(_material("better", [], higher))
    assert fairer.startswith("Fairer than FedAvg on these data: B (spread -0.04 ± 0.01). With FedAvg, site C has ")
    end = "lowest of equally good sites would be about 0.05 below" if higher else "would be about 0.05 above"
    assert "That may be chance: the " in fairer
    assert fairer.endswith(f"{end}.")


def test_a_headline_has_the_verdict_of_the_test_under_it():
    """Check that headline and test do not contradict each other where no site is behind but all are unequal."""
    said = words.answer(_material("within noise", [], together=0.015))
    assert said.endswith("Together the sites are more unequal than chance explains (p = 0.015).")
    assert "may be chance" not in said
    assert "more unequal" not in words.answer(_material("within noise", ["C"], together=0.015))


@pytest.mark.parametrize("share", [1, 0.5])
def test_a_model_that_finds_nothing_is_not_praised(share):
    material = _material("within noise", [])
    run = material.rows[0].runs[0]
    run.info.higher_is_better = {"dice": True}
    zero = run.model_copy(update={"test": {"A": {"dice": 0.0}, "C": {"dice": 0.0}}})
    other = run.model_copy(update={"test": {"A": {"dice": 0.0}, "C": {"dice": 0.2 * (1 - share)}}})
    material.rows[0].runs = [zero, other]
    said = words.answer(material)
    assert said.endswith("With FedAvg, nothing was learnt: Dice is 0 at every site.") == (share == 1)


@pytest.mark.parametrize(
    ("site", "gap", "behind", "told"),
    [
        ("C", 0.07, [], "FedAvg: site C has the lowest Dice, 0.600, 0.07 below the 0.670 expected if all sites were"),
        ("site-3", 0.07, ["site-3"], "FedAvg: site-3 has the lowest Dice, 0.600, 0.07 below"),
        ("C", 0.0041, [], "FedAvg: no site is 0.01 or more below expectation. That may be chance: the lowest of equal"),
        ("C", 0.0041, ["C"], "FedAvg: site C has the lowest Dice, 0.600, 0.004 below"),
    ],
)
def test_of_one_run_the_answer_is_a_sentence_that_says_something(site, gap, behind, told):
    material = _material("within noise", behind)
    material.reference = ""
    del material.rows[1:]
    found = material.rows[0].runs[0].inequality.sites
    found[site] = SiteStanding(value=0.6, expected=0.6 + gap)
    if site != "C":
        del found["C"]
    assert words.answer(material).startswith(told)


@pytest.mark.parametrize(("also", "told"), [("worst", "without a loss"), ("average", "without a loss")])
def test_a_smaller_spread_that_costs_somebody_is_not_fairer(also, told):
    material = _material("better", [])
    material.differences.append(SimpleNamespace(label="B", measure=also, verdict="worse", mean=-0.1, low=-0.2, high=0))
    said = words.answer(material)
    assert said.startswith(f"No method was fairer than FedAvg {told}: B (spread -0.04 ± 0.01, but a worse average")
    assert "Fairer than" not in said


def test_runs_that_leave_sites_out_are_no_seeds(tmp_path: Path) -> None:
    for site in ("A", "B"):
        place = tmp_path / "runs" / f"x-seed0-without-{site}" / "fairflare"
        place.mkdir(parents=True)
        (place / "results.json").write_text("{}")
        Unseen(site=site).write(place)
    with pytest.raises(ValueError, match=r"only runs that each leave a site out|cannot be read"):
        read_material(tmp_path)


def _rules(css: str) -> dict[str, str]:
    """Return declarations by selector within ``@media print``."""
    block = css[css.index("@media print {") + len("@media print {") :]
    found: dict[str, str] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", block):
        for selector in selectors.split(","):
            found[selector.strip()] = found.get(selector.strip(), "") + body
    return found


def test_paper_has_what_the_words_mean_and_whole_rows():
    rules = _rules((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    assert "content-visibility: visible" in rules[".terms::details-content"]
    assert "display: none" not in rules.get("details", "")
    assert "break-inside: avoid" in rules["tr"]
    assert "table-header-group" in rules["thead"]
    assert "break-after: avoid" in rules["h2"]
    assert "break-after: avoid" in rules["caption"]
    for whole in ("td.n", "thead th"):  # 0.159 is not broken into 0.1 and 59
        assert "overflow-wrap: normal" in rules[whole]


def test_a_heading_stands_where_most_of_its_column_does() -> None:
    """Check that numbers and their headings are on the right, words on the left; a settings' column has both."""
    rows = [["a", 0.5, "auto", None], ["b", 0.25, 3, None], ["c", "not known", "adam", None], ["d", 0.125, None, None]]
    assert list(Table("t", "Told.", ["", "p", "value", "none"], rows).numeric) == [False, True, False, False]
