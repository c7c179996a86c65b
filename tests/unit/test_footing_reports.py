"""Test tables, verdict and page for sites that annotate different structures."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pytest

from fairflare.base.cases.sampling import BINS
from fairflare.core.fairness import summarize
from fairflare.core.statistics.footing import Footing
from fairflare.reporting.documents import encode_value
from fairflare.reporting.table import class_table, fairness_table, summary_of, table_of
from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.page.material import describe_run
from fairflare_lab.page.write import build
from tests.sections import standing_of
from tests.unit.report_runs import document, on_sites, read, read_all

#: The model finds cellavision's nucleus, which that site did not annotate: as zeros it would be the worst.
CELLS = {
    "bccd": {"dice": 0.485, "dice_nucleus": 0.148, "dice_cytoplasm": 0.823},
    "cellavision": {"dice": 0.637, "dice_cytoplasm": 0.637},
    "jtsc": {"dice": 0.863, "dice_cytoplasm": 0.863},
}
ABC = {
    "A": {"dice": 0.8, "dice_s1": 0.8}, "B": {"dice": 0.6, "dice_s2": 0.6},
    "C": {"dice": 0.6, "dice_s1": 0.7, "dice_s2": 0.5},
}  # fmt: skip


def run(
    metrics: dict[str, dict[str, float]],
    support: dict[str, dict[str, int]] | None = None,
    label: str = "fed_avg",
    cases: int = 30,
) -> Any:
    structures = {site: frozenset(n.removeprefix("dice_") for n in of if "_" in n) for site, of in metrics.items()}
    footing = Footing(structures, "dice").drop_empty(support or {})
    made = document(label, 0, {site: of["dice"] for site, of in metrics.items()})
    made["test"] = footing.make_comparable(metrics)
    said = {
        site: {"images": cases, "test_cases": cases, "standard_error": 0.02, "case_scores": [0] * (BINS - 1) + [cases],
               "structure_support": (support or {}).get(site)}
        for site in metrics
    }  # fmt: skip
    made["info"]["shown_metrics"] = ["dice"]
    made["info"]["higher_is_better"] |= {"dice_<class>": True}
    made["inequality"] = standing_of(made["test"], said, made["info"], footing)
    made["footing"] = encode_value(footing.as_dict(), "x") if footing.differs else None
    return made


def words(made: Any) -> str:
    return " ".join(fairness_table(read(**made)).split())


def test_a_site_is_not_the_worst_for_what_it_did_not_annotate() -> None:
    made = run(CELLS, {site: {name[5:]: 12 for name in of if "_" in name} for site, of in CELLS.items()})
    assert {site: of["dice"] for site, of in made["test"].items()} == {
        "bccd": 0.823, "cellavision": 0.637, "jtsc": 0.863,
    }  # fmt: skip
    said = words(made)
    assert "Figures of sites rest on those that all have: cytoplasm." in said
    assert "spread of Dice nucleus are over 1 of 3 sites, without cellavision (not annotated there, or in " in words(
        made | {"info": made["info"] | {"shown_metrics": ["dice", "dice_nucleus"]}}
    )
    assert "(bccd: cytoplasm, nucleus; cellavision: cytoplasm; jtsc: cytoplasm)" in said


def test_structures_stand_beside_their_support_with_worst_and_spread_over_those_that_have_them() -> None:
    support = {"bccd": {"nucleus": 0, "cytoplasm": 12}, "cellavision": {"cytoplasm": 9}}
    made = run(CELLS, support)
    said = words(made)
    assert "bccd 0.15 of empty masks 0.82 of 12" in said
    assert "cellavision - 0.64 of 9" in said
    assert "jtsc - 0.86 of ?" in said
    assert "nucleus; " not in said  # no image marks it: in no comparison
    assert "average - 0.774" in said
    assert "worst site - cellavision?" in said
    page = build(describe_run(read(**made)))
    (table,) = (p for s in page.sections for p in s.parts if p.name == "structures")
    rows = list(csv.DictReader(io.StringIO(table.csv())))  # type: ignore[union-attr]
    assert rows[0]["nucleus test images"] == "empty masks"
    assert rows[1]["cytoplasm"] == "0.637"


def test_adjusted_figures_are_marked_and_the_bridge_is_named() -> None:
    made = run(ABC)
    results = read(**made)
    assert "dice (adjusted)" in table_of(results).columns
    assert [row[1] for row in table_of(results).rows] == pytest.approx([0.7, 0.7, 0.6])
    assert summary_of(results, "dice").worst_site == "C"
    assert "That the others can be compared rests on C alone." in words(made)
    assert not results.inequality.test  # how sure the adjustment is is not known
    assert not results.inequality.behind
    own = results.inequality.sites["A"]
    assert (own.low, own.high) == (None, None)
    said = words(made)
    assert "worst site C?" in said
    assert "so that there are no intervals and no test of who is behind." in said
    assert "Without an interval" not in said


def test_sites_that_nothing_links_are_ranked_within() -> None:
    made = run({"A": {"dice": 0.2, "dice_s1": 0.2}, "B": {"dice": 0.6, "dice_s2": 0.6},
                "C": {"dice": 0.5, "dice_s2": 0.5}})  # fmt: skip
    results = read(**made)
    of = summary_of(results, "dice")
    assert of.worst_site == ""
    assert of.std != of.std
    assert of.mean == pytest.approx(1.3 / 3)
    page = build(describe_run(read(**made)))
    (over_time,) = (p for s in page.sections for p in s.parts if p.name == "rounds" and hasattr(p, "rows"))
    assert [math.isfinite(cell.mean) for cell in over_time.rows[0][2:5]] == [True, False, False]
    assert not results.inequality.test
    said = words(made)
    assert "worst site -" in said
    assert "No structure links B, C with other sites; ranked within: C 0.500, B 0.600." in said
    assert "No structure links A with other sites; ranked within: A 0.200." in said


def test_a_comparison_of_methods_says_it_and_has_no_worst_site_over_unlinked_ones() -> None:
    values = {"A": {"dice": 0.2, "dice_s1": 0.2}, "B": {"dice": 0.6, "dice_s2": 0.6}}
    runs = read_all([run(values), run(values, label="q_fed_avg")])
    text = " ".join(compare(runs).split())
    assert "The sites annotate, or mark, different structures, classes or findings (A: s1; B: s2)" in text
    made = comparison_of(runs)
    assert {d.measure for d in made.differences} == {"average", "A", "B"}
    assert all(row.summarise("worst").mean != row.summarise("worst").mean for row in made.rows)


def test_equal_sets_say_nothing_new() -> None:
    same = {site: {"dice": 0.5, "dice_x": 0.4, "dice_y": 0.6} for site in "AB"}
    made = run(same)
    assert made["test"] == same
    assert made["footing"] is None
    assert not any("structures" in line for line in on_sites(read(**made)))


def test_values_of_different_things_have_no_spread() -> None:
    of = summarize({"A": 0.2, "B": 0.6}, linked=False)
    assert (of.mean, of.worst_site, of.best_site) == (0.4, "", "")
    assert of.range != of.range


#: Of class_1 beta has no test image, of class_2 gamma none; class_3 is alpha's alone.
HALVES = {
    "alpha": {"dice": 0.4, "dice_class_1": 0.5, "dice_class_2": 0.3, "dice_class_3": 0.4},
    "beta": {"dice": 0.1, "dice_class_1": 0.0, "dice_class_2": 0.2},
    "gamma": {"dice": 0.2, "dice_class_1": 0.4, "dice_class_2": 0.0},
}


def test_a_structure_that_no_image_of_a_site_shows_is_in_no_figure_over_sites() -> None:
    support = {
        "alpha": {"class_1": 6, "class_2": 6, "class_3": 6}, "beta": {"class_1": 0, "class_2": 6},
        "gamma": {"class_1": 6, "class_2": 0},
    }  # fmt: skip
    made = run(HALVES, support)
    made["info"]["shown_metrics"] = ["dice", "dice_class_1", "dice_class_2", "dice_class_3"]
    results = read(**made)
    of = {name: summary_of(results, f"dice_class_{name}") for name in "123"}
    assert [(one.mean, one.worst_site) for one in of.values()] == [
        (pytest.approx(0.45), "gamma"), (pytest.approx(0.25), "beta"), (0.4, ""),
    ]  # fmt: skip
    assert math.isnan(of["3"].std)  # of a single site
    table = {row[0]: row for row in table_of(results).totals}
    small = {row[0]: row for row in class_table(results).totals}  # type: ignore[union-attr]
    places = [table_of(results).columns.index(f"dice_class_{name}") for name in "123"]
    for title, row in small.items():  # one value for one thing
        assert [str(cell) for cell in row[1:]] == [str(table[title][place]) for place in places]
    assert "0.00 of empty masks" in words(made)


def test_a_site_of_empty_masks_alone_is_in_the_table_of_structures_and_in_no_comparison() -> None:
    metrics = {**{site: dict(HALVES["gamma"]) for site in "AC"}, "B": {"dice": 0.0, "dice_class_1": 0.0}}
    support = {"A": {"class_1": 6, "class_2": 6}, "B": {"class_1": 0}, "C": {"class_1": 6, "class_2": 6}}
    said = words(run(metrics, support))
    assert "B 0.00 of empty masks -" in said
    assert "B (no image shows what it annotates)" in said
    assert "worst site B" not in said


def test_heads_say_what_comparable_figures_rest_on() -> None:
    made = run(CELLS)
    columns = table_of(read(**made)).columns
    assert (columns[1], columns[-1]) == ("dice (over: cytoplasm)", "own/dice")  # beside a site's mean over all it has
    assert table_of(read(**made), "own/dice").columns[1] == "own/dice"


def test_the_page_marks_adjusted_figures_and_claims_nothing_of_unlinked_sites() -> None:
    page = describe_run(read(**run(ABC)))
    assert (
        "In Dice (adjusted), C has the worst value, 0.600; whether chance explains that is not known: how sure an "
        "adjusted "
        "figure is is not known."
    ) in build(page).first
    sites = next(part for section in build(page).sections for part in section.parts if part.name == "sites")
    assert "interval" not in sites.caption
    apart = describe_run(read(**run({"A": {"dice": 0.2, "dice_s1": 0.2}, "B": {"dice": 0.6, "dice_s2": 0.6}})))
    assert "No structure links all sites in Dice (adjusted), so that none is called the worst." in build(apart).first
