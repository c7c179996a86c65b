"""Test which sites are called behind in results, tables and page, and with what certainty."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fairflare.base.cases.sampling import BINS
from fairflare.core.statistics.inequality import mean_interval
from fairflare.reporting.documents import encode_value
from fairflare.reporting.layout import interval, print_cell
from fairflare.reporting.standing import CASES, ERRORS, WITHIN
from fairflare.reporting.table import fairness_table
from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.page.material import describe_run
from fairflare_lab.page.write import build, write_report
from tests.sections import standing_of, upgraded
from tests.unit.report_runs import document, on_sites, read, read_all, write_run

INFO = {"primary_metric": "balanced_accuracy", "higher_is_better": {}, "metric_range": [0, 1]}


def classes(support: dict[str, int], recalls: dict[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return a site's metrics and reports, with its images as cases."""
    images = sum(support.values())
    right = sum(support[c] * recalls[c] for c in recalls)
    mean = statistics.fmean(recalls.values())
    metrics = {"balanced_accuracy": mean, "accuracy": right / images, **{f"recall_{c}": r for c, r in recalls.items()}}
    return metrics, {"images": images, "test_cases": images, "standard_error": 0.02, "class_support": support}


def of_classes(*sites: tuple[dict[str, int], dict[str, float]], **info: Any) -> dict[str, Any]:
    told = {f"site-{k}": classes(*site) for k, site in enumerate(sites, 1)}
    found = standing_of({s: m for s, (m, _) in told.items()}, {s: said for s, (_, said) in told.items()}, INFO | info)
    assert found is not None
    return found


def scores(*counts: tuple[int, int]) -> list[int]:
    found = [0] * BINS
    for place, count in counts:
        found[place] = count
    return found


def of_dice(values: dict[str, float], said: dict[str, Any], **info: Any) -> dict[str, Any]:
    found = standing_of({s: {"dice": v} for s, v in values.items()}, said, {"primary_metric": "dice"} | info)
    assert found is not None
    return found


def dice(count: int, place: int, error: float = 0.01) -> dict[str, Any]:
    return {
        "images": count, "test_cases": count, "standard_error": error,
        "case_scores": scores((place, count - count // 3), (place - 2, count // 3)),
    }  # fmt: skip


FAR = {"site-1": dice(30, 17), "site-2": dice(30, 17), "site-3": dice(30, 9)}
NEAR = {"site-1": dice(6, 17), "site-2": dice(6, 16), "site-3": dice(6, 16)}


# ------------------------------------------------------------------------------------------------ results


def test_the_lowest_value_of_another_mix_of_classes_is_not_behind() -> None:
    """Check one classifier (.9, .8, .4) at three sites; the site without the hard class has the highest average."""
    same = {"a": 0.9, "b": 0.8, "c": 0.4}
    found = of_classes(
        ({"a": 200, "b": 200, "c": 200}, same), ({"a": 200, "b": 200, "c": 0}, {"a": 0.9, "b": 0.8}),
        ({"a": 20, "b": 20, "c": 10}, same),
    )  # fmt: skip
    assert (found["test"], found["behind"], found["ahead"]) == (WITHIN, [], [])
    assert found["sites"]["site-2"]["expected"] == pytest.approx(0.85)
    assert found["common_classes"] == ["a", "b"]
    assert [site["common"] for site in found["sites"].values()] == pytest.approx([0.85] * 3)
    (line,) = (line for line in on_sites(read(inequality=found)) if "different classes" in line)
    assert "2 classes that all have (a, b): site-1 0.850" in line
    assert "lowest" not in line, "all are alike"


def test_a_site_alone_is_not_marked_as_worst() -> None:
    assert "worst value" not in fairness_table(read(**document("fed_avg", 0, {"site-1": 0.5})))
    assert "worst value" in fairness_table(read(**document("fed_avg", 0, {"site-1": 0.5, "site-2": 0.6})))


def test_nobody_is_worst_where_everything_stays_at_home() -> None:
    kept = {site: ["balanced_accuracy"] for site in ("site-1", "site-2")}
    info = {**INFO, "sites": [*kept], "said": {"site-1": {"min_cases": 7}}}
    assert on_sites(read(info=info, suppressed=kept)) == [
        "No site has a value of balanced accuracy: balanced accuracy stays at site-1 (suppressed: fewer than 7 "
        "cases), site-2 (suppressed: fewer cases than its min_cases)."
    ]
    test = {"site-1": {"balanced_accuracy": 0.5}, "site-2": {"balanced_accuracy": 0.6}}
    assert on_sites(read(info={**info, "privacy": {"site-1": {"unit": "patient"}}}, test=test)) == [
        "In balanced accuracy, site-1 has the worst value, 0.500; whether chance explains that is not known: under "
        "differential privacy nothing is sent that is not counted."
    ]


def test_another_site_may_be_the_lowest_over_the_common_classes() -> None:
    found = of_classes(
        ({"a": 100, "b": 100}, {"a": 0.9, "b": 0.5}),
        ({"a": 100}, {"a": 0.75}),
        ({"a": 100, "b": 9}, {"a": 0.8, "b": 1}),
    )
    assert min(found["sites"], key=lambda s: found["sites"][s]["value"]) == "site-1"
    assert "lowest at site-2." in " ".join(on_sites(read(inequality=found)))


def test_no_class_in_common_is_said() -> None:
    found = of_classes(({"a": 50}, {"a": 0.9}), ({"b": 50}, {"b": 0.5}))
    assert found["behind"] == []  # nothing can be dealt
    assert any("no class in common" in line for line in on_sites(read(inequality=found)))


def test_a_site_that_does_worse_in_its_classes_is_behind() -> None:
    mix = {"a": 100, "b": 40}
    found = of_classes((mix, {"a": 0.9, "b": 0.8}), (mix, {"a": 0.92, "b": 0.75}), (mix, {"a": 0.7, "b": 0.55}))
    assert (found["behind"], found["gap_site"]) == (["site-3"], "site-3")
    assert found["common_classes"] is None
    assert found["std"] == pytest.approx(statistics.pstdev([0.85, 0.835, 0.625]))
    assert 0 < found["chance_std"] < found["std"]
    first = found["sites"]["site-1"]
    low = [stats.binomtest(k, n).proportion_ci(method="wilson").low for k, n in ((90, 100), (32, 40))]
    assert first["low"] == pytest.approx(0.85 - 0.5 * ((0.9 - low[0]) ** 2 + (0.8 - low[1]) ** 2) ** 0.5)
    assert on_sites(read(inequality=found))[0] == (
        "In balanced accuracy, site-3 (0.625; 0.145 below the 0.770 expected if all sites were equally good; p < "
        "0.001) is "
        "behind by more than chance explains."
    )


def test_accuracy_has_wilsons_interval_with_classes_and_without() -> None:
    mix = {"a": 30, "b": 10}
    found = of_classes((mix, {"a": 0.9, "b": 0.8}), (mix, {"a": 0.8, "b": 0.5}), primary_metric="accuracy")
    expected = stats.binomtest(35, 40).proportion_ci(method="wilson")
    assert found["sites"]["site-1"]["low"] == pytest.approx(expected.low)
    at_home = {"images": 40, "test_cases": 40, "standard_error": 0.05, "case_scores": scores((0, 5), (19, 35))}
    test = {"x": {"accuracy": 35 / 40}, "y": {"accuracy": 35 / 40}}
    alone = standing_of(test, {"x": at_home, "y": at_home}, INFO | {"primary_metric": "accuracy"})
    assert alone is not None
    assert (alone["test"], alone["sites"]["x"]["low"]) == (CASES, pytest.approx(expected.low))
    assert alone["sites"]["x"]["expected"] == pytest.approx(35 / 40)


def test_images_of_one_patient_are_no_cases() -> None:
    """Check that standard errors, which know patients, are used in place of counts of dependent images."""
    test, said = {}, {}
    for site, recall in (("x", 0.9), ("y", 0.7)):
        test[site], said[site] = classes({"a": 40, "b": 40}, {"a": recall, "b": recall})
        said[site] |= {"test_cases": 10, "standard_error": 0.05}
    found = standing_of(test, said, INFO)
    assert found is not None
    assert found["test"] == ERRORS
    y = found["sites"]["y"]
    assert (y["low"], y["high"]) == pytest.approx(mean_interval(0.7, 0.05, 10, 0, 1))


def test_scores_of_cases_are_dealt() -> None:
    found = of_dice({"site-1": 0.85, "site-2": 0.85, "site-3": 0.45}, FAR, metric_range=[0, 1])
    assert (found["test"], found["behind"]) == (CASES, ["site-3"])
    assert found["sites"]["site-1"]["expected"] == pytest.approx((0.85 + 0.85 + 0.45) / 3)  # not of rounded scores


def test_a_lower_value_is_ahead_where_lower_is_better() -> None:
    values = {"site-1": 0.85, "site-2": 0.85, "site-3": 0.45}
    found = of_dice(values, FAR, higher_is_better={"dice": False}, metric_range=[0, 1])
    assert found["ahead"] == ["site-3"]
    assert "site-3" not in found["behind"]
    assert found["gap_site"] != "site-3"


def test_a_range_of_its_own_scales_the_bins() -> None:
    """Check HD95 in mm: the same counts in [0, 100]."""
    of_one = of_dice({"site-1": 0.85, "site-2": 0.8, "site-3": 0.75}, NEAR, metric_range=[0, 1])
    of_mm = of_dice({"site-1": 85, "site-2": 80, "site-3": 75}, NEAR, metric_range=[0, 100])
    assert of_mm["p_value"] == of_one["p_value"]
    assert of_mm["chance_std"] == pytest.approx(100 * of_one["chance_std"])


def test_a_site_of_one_case_has_no_interval_and_a_word() -> None:
    one = {"images": 1, "test_cases": 1, "standard_error": None, "case_scores": scores((10, 1))}
    found = of_dice({"site-1": 0.85, "site-2": 0.8, "site-3": 0.5}, {**NEAR, "site-3": one})
    told = on_sites(read(inequality=found))
    assert any(line.startswith("Without an interval, or not in the test of who is behind: site-3. ") for line in told)
    assert found["behind"] == []


def test_sites_that_say_nothing_are_named() -> None:
    found = of_dice({"site-1": 0.85, "site-2": 0.8, "site-3": 0.5}, {k: NEAR[k] for k in ("site-1", "site-2")})
    told = on_sites(read(inequality=found))
    assert any(line.startswith("Without an interval, or not in the test of who is behind: site-3. ") for line in told)
    assert found["std"] == pytest.approx(0.025)  # over those that were tested
    alone = of_dice({"site-1": 0.85, "site-2": 0.8}, {"site-1": NEAR["site-1"]})
    assert (alone["test"], alone["behind"]) == (None, [])
    assert standing_of({"x": {"dice": 0.5}}, {}, {"primary_metric": "dice"}) is None


def test_a_value_that_is_not_finite_is_in_no_test() -> None:
    found = of_dice({"site-1": 0.85, "site-2": 0.8, "site-3": float("nan")}, NEAR)
    assert sorted(found["sites"]) == ["site-1", "site-2"]


# ------------------------------------------------------------------------------------------------ tables and the page


def run(said: dict[str, Any] | None, values: tuple[float, ...] = (0.85, 0.8, 0.5), seed: int = 0, **more: Any) -> Any:
    made = document(more.pop("label", "fed_avg"), seed, dict(zip(("site-1", "site-2", "site-3"), values, strict=True)))
    if said:
        made["inequality"] = standing_of(made["test"], said, made["info"])
    return json.loads(json.dumps(made | more))


def test_the_table_has_intervals_and_names_on_sites() -> None:
    made = run(FAR, (0.85, 0.85, 0.45))
    lines = [line.split() for line in fairness_table(read(**made)).splitlines()]
    low, high = mean_interval(0.45, 0.01, 30, 0, 1)
    assert ["site-3", "0.450", f"[{low:.3f},", f"{high:.3f}]", "30", "0.550"] in lines
    assert ["worst", "site", "site-3", "-", "-", "site-3?"] in lines  # of the loss nobody says it
    assert ["std", "if", "equal", f"{made['inequality']['chance_std']:.3f}", "-", "-", "-"] in lines
    said = fairness_table(read(**made)).splitlines()[1:3]
    assert said[0] == (
        "In Dice, site-3 (0.450; 0.267 below the 0.717 expected if all sites were equally good; p < 0.001) is behind "
        "by "
        "more than chance explains."
    )
    assert said[1].startswith(
        "In Dice, site-1 (0.850; 0.133 above the 0.717 expected if all sites were equally good; p "
    )
    assert said[1].endswith(", site-2 (0.850; " + said[1].partition("(0.850; ")[2].partition(")")[0] + ") are ahead by "
                            "more than chance explains.")  # fmt: skip


def test_the_table_does_not_name_a_site_that_chance_put_last() -> None:
    made = run(NEAR, (0.85, 0.8, 0.78))
    text = fairness_table(read(**made))
    assert ["worst", "site", "site-3?", "-", "-", "site-3?"] in [line.split() for line in text.splitlines()]
    assert "?: has the worst value of its column; that it is behind in it is not tested, or not shown." in text
    assert "No site is shown to be behind in Dice. Furthest below is site-3 (0.780; 0.030 below the 0.810 " in text
    ends = interval(*(made["inequality"]["sites"]["site-3"][end] for end in ("low", "high")))
    assert f" Its interval {ends} leaves that out, which the test of all sites does not show." in text  # not: chance
    wide = {site: {**of, "standard_error": 0.05} for site, of in NEAR.items()}
    assert "). That may be chance.\n" in fairness_table(read(**run(wide, (0.85, 0.8, 0.78))))
    rows = list(csv.DictReader(io.StringIO(fairness_table(read(**made), style="csv"))))
    assert float(rows[2]["high"]) == made["inequality"]["sites"]["site-3"]["high"]
    assert rows[2]["cases"] == "6"
    other = fairness_table(read(**made), metric="loss")
    assert "interval" not in other
    assert "No site can be told" not in other


def test_recalls_stand_beside_the_number_of_images() -> None:
    made = run(None)
    told = {f"site-{k}": classes({"a": 9, "b": 3 * (k != 2)}, {"a": 2 / 3, "b": 1 / 3} if k != 2 else {"a": 2 / 3})
            for k in (1, 2, 3)}  # fmt: skip
    made["test"] = {site: metrics for site, (metrics, _) in told.items()}
    made["info"] |= {"primary_metric": "balanced_accuracy", "shown_metrics": ["balanced_accuracy"]}
    made["info"]["higher_is_better"] = {"balanced_accuracy": True}
    made["inequality"] = standing_of(made["test"], {s: said for s, (_, said) in told.items()}, made["info"])
    for style in ("text", "markdown"):
        text = " ".join(fairness_table(read(**made), style=style).replace("|", " ").split())  # type: ignore[arg-type]
        assert "recall a b" in text
        assert "site-1 0.67 of 9 0.33 of 3 site-2 0.67 of 9 -" in text
    page = build(describe_run(read(**made)))
    (table,) = (p for s in page.sections for p in s.parts if p.name == "classes")
    assert [*map(print_cell, table.rows[1])] == ["site-2", "0.67 of 9", "-"]  # type: ignore[union-attr]


def test_a_class_whose_name_has_a_blank_has_its_recall() -> None:
    told = {}
    for k in (1, 2):
        metrics, said = classes({"bone loss": 4, "b": 4}, {"bone loss": 0.75, "b": 0.5})
        metrics["recall_bone_loss"] = metrics.pop("recall_bone loss")  # as it leaves a site
        told[f"site-{k}"] = metrics, said
    made = run(None)
    made["test"] = {site: metrics for site, (metrics, _) in told.items()}
    made["info"] |= {"primary_metric": "balanced_accuracy", "shown_metrics": ["balanced_accuracy"]}
    made["info"]["higher_is_better"] = {"balanced_accuracy": True}
    found = standing_of(made["test"], {s: said for s, (_, said) in told.items()}, made["info"])
    assert found is not None
    assert found["test"] == WITHIN  # only with the counts of each class
    made["inequality"] = encode_value(found, "x")
    assert "0.75 of 4" in fairness_table(read(**made))


def test_results_of_an_earlier_version_are_read_and_say_that_nothing_is_known(tmp_path: Path) -> None:
    old = run(None)
    assert "inequality" not in old
    text = fairness_table(read(**old))
    said = (
        "In Dice, site-3 has the worst value, 0.500; whether chance explains that is not known: the task does not say"
    )
    assert said in text
    assert "interval" not in text.splitlines()[4]
    page = write_report(write_run(tmp_path / "run", old), tmp_path / "page").read_text(encoding="utf-8")
    assert said in page
    assert "Standard deviation that equal sites" not in compare(read_all([old]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.update(behind="site-3"),
        lambda found: found.update(gap_site="nobody"),
        lambda found: found.update(p_value=None),
        lambda found: found.update(test="a coin"),
        lambda found: found.update(sites=[1]),
        lambda found: found["sites"]["site-1"].update(expected="x"),
        lambda found: found["sites"]["site-1"].update(p_value="x", class_support={"a": "x"}),
        lambda found: found["sites"]["site-1"].update(class_support={"a": "x"}),
        lambda found: found["sites"].update({"site-2": 5}),
    ],
)
def test_a_damaged_part_is_refused(spoil: Any) -> None:
    made = upgraded(run(FAR, (0.85, 0.85, 0.45)))
    spoil(made["inequality"])
    with pytest.raises(ValueError, match="inequality"):
        read(**made)


def test_a_comparison_says_what_equal_sites_would_show_and_on_sites() -> None:
    runs = [run(FAR, (0.85, 0.85, 0.45), 0), run(NEAR, (0.85, 0.8, 0.78), 1)]
    chance = statistics.fmean(made["inequality"]["chance_std"] for made in runs)
    words = " ".join(compare(read_all(runs)).split())
    assert f"Standard deviation between equally good sites: fed_avg {chance:.3f} by sampling alone." in words
    assert words.startswith(
        "Beyond what chance explains in Dice: site-3 is behind, site-1 is ahead, site-2 is ahead (in 1 of 2 runs of "
        "fed_avg). In 1 of 2 runs of fed_avg, here the first: No site is shown to be behind in Dice. Furthest below is "
        "site-3 "
    )
    assert "sampling alone" not in compare(read_all(runs), metric="loss")
    assert any("sampling alone" in note for note in comparison_of(read_all(runs)).notes)
