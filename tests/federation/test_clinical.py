"""Test the clinical figures of a classifier: at a site, withheld, checked, in results, in tables and on the page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, brier_score_loss, confusion_matrix, roc_auc_score

from fairflare.core.cells import Cell
from fairflare.core.statistics.areas import ALL, OPERATING, area_interval, delong
from fairflare.core.statistics.group_sums import find_hidden_parts
from fairflare.core.statistics.intervals import wilson
from fairflare.federation.site.clinical import (
    COLUMNS,
    OF_CLASSES,
    OVER_ALL,
    ClinicalTable,
    read_clinical,
)
from fairflare.methods.base.reports import ReportError
from fairflare.reporting.documents import RunResults, encode_value
from fairflare.reporting.results import find_results, read_results
from fairflare.reporting.sites.clinical import MOST_ROWS, clinical_of, clinical_table, clinical_words
from fairflare.reporting.table import fairness_table
from fairflare_lab.page.write import write_run_page
from tests.federation.test_resampling import SITES, done, plan
from tests.sections import clinical_before

AT = [f"_at_{side}_{share:.2f}" for side, share in OPERATING]


def told(made: Any, model: torch.nn.Module, site: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    batches = made.task.open_site(site, {}).batches(split, batch_size=7)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        return labels.numpy(), torch.softmax(model.eval()(images).double(), 1).numpy()


def test_figures_of_a_run_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("classification")
    local = {"sites": {"site-3": {"metrics_by_class": False}}}
    results, model = done(made, tmp_path, local)
    found, names = results["clinical"], made.task.outcome_names()
    assert list(found) == SITES
    assert list(found["site-3"]) == [ALL]  # by class nothing leaves
    for site in SITES:
        labels, scores = told(made, model, site, "test")
        one_hot = np.eye(5)[labels]
        brier = sum(brier_score_loss(one_hot[:, c], scores[:, c]) for c in range(5))
        assert found[site][ALL]["brier"] == pytest.approx(brier)
        sure, right = scores.max(1), scores.argmax(1) == labels
        within = [(sure >= k / 15) & ((sure < (k + 1) / 15) | (k == 14)) for k in range(15)]
        ece = sum(abs(right[own].sum() - sure[own].sum()) for own in within) / len(labels)
        assert found[site][ALL]["ece"] == pytest.approx(ece)
        assert sum(row[0] for row in found[site][ALL]["calibration"]) == len(labels)
    for site in SITES[:2]:
        labels, scores = told(made, model, site, "test")
        own, known = told(made, model, site, "validation")
        assert list(found[site]) == [ALL, *names]
        for c, name in enumerate(names):
            of, truth = found[site][name], labels == c
            assert of["auc"] == pytest.approx(roc_auc_score(truth, scores[:, c]), abs=1e-6)
            assert of["pr_auc"] == pytest.approx(average_precision_score(truth, scores[:, c]), abs=1e-6)
            assert of["prevalence"] == pytest.approx(truth.mean())
            matrix = confusion_matrix(truth, scores.argmax(1) == c, labels=[True, False])
            assert [[of["tp"], of["fn"]], [of["fp"], of["tn"]]] == matrix.tolist()
            assert (of["cases_with"], of["cases_without"]) == (truth.sum(), (~truth).sum())  # each image is a case
            _, variance = delong(truth, scores[:, c][None])
            assert of["auc_variance"] == pytest.approx(variance[0, 0], rel=1e-4)
            ends = area_interval(of["auc"], of["auc_variance"], of["cases_with"], of["cases_without"])
            assert (of["auc_low"], of["auc_high"]) == pytest.approx(ends)
            # The threshold is of the validation split: the least that tells 90 % of those without the class right.
            without, marks = known[own != c, c], np.unique(known[:, c])
            if len(without):
                high = [mark for mark in marks if (without < mark).mean() >= 0.9]
                mark = min(high, default=math.inf)
                sides = (scores[truth, c] >= mark).mean(), (scores[~truth, c] < mark).mean()
                assert [of[f"{side}{AT[0]}"] for side in ("sensitivity", "specificity")] == pytest.approx(sides)
                assert of[f"threshold{AT[0]}"] == (pytest.approx(round(mark, 3)) if high else None)
                _, *limits = wilson(np.array([sides[0] * truth.sum()]), np.array([truth.sum()]), 0.05)[0]
                assert [of[f"sensitivity{AT[0]}_{end}"] for end in ("low", "high")] == pytest.approx(limits, abs=1e-9)
            if len(without) < len(own):
                mark = max(mark for mark in marks if (known[own == c, c] >= mark).mean() >= 0.9)
                assert of[f"specificity{AT[1]}"] == pytest.approx((scores[~truth, c] < mark).mean())
            for side, count in zip(AT, (len(without), len(own) - len(without)), strict=True):
                assert (of[f"specificity{side}"] is None) == (count == 0)
    path = find_results(tmp_path)
    read = read_results(path)
    text = fairness_table(read)
    assert len(clinical_table(read).rows) == 11 <= MOST_ROWS
    assert "PR-AUC (share)" in text
    assert "Behind PR-AUC stands the share of the class" in text
    assert "behind the semicolon stands what the test split attains" in text
    monkeypatch.delenv("FAIRFLARE_REPORT", raising=False)
    write_run_page(read, tmp_path)
    before, after = (tmp_path / "report.html").read_text().split("PR-AUC (share)")
    assert before.rindex("<details") > before.rfind("</details")  # on demand
    assert "Thresholds of the operating points are each site" in after
    assert "; the lowest is that of site-" in text
    assert "PR-AUC" not in fairness_table(read, metric="accuracy")


def test_segmentation_has_none_and_other_models_are_not_measured(tmp_path: Path) -> None:
    results, _ = done(plan("segmentation"), tmp_path)
    assert results["clinical"] == {}
    assert "PR-AUC" not in fairness_table(read_results(find_results(tmp_path)))


# ------------------------------------------------------------------------------------------------ at the site


def table(counts: list[int], validation: list[int] | None = None, patients: int = 0) -> ClinicalTable:
    """Give images whose class is likely, each of a patient of its own, or of one of several."""
    random, splits = np.random.default_rng(0), {}
    for split, of in (("test", counts), ("validation", validation or counts)):
        labels = np.repeat(np.arange(len(of)), of)
        scores = random.random((len(labels), len(of))) + 0.4 * np.eye(len(of))[labels]
        whose = np.arange(len(labels)) % patients if patients else np.arange(len(labels))
        splits[split] = (labels, scores / scores.sum(1, keepdims=True), whose)
    return ClinicalTable(splits)


def stats(sent: dict[str, Any], classes: list[str] | None = None) -> dict[str, Any]:
    return {OVER_ALL: None, OF_CLASSES: None, "classes": classes, **sent}


def test_classes_with_few_cases_stay_with_those_that_would_tell_them() -> None:
    sent, kept = table([20, 12, 9, 3]).sent(5, True)
    rows = np.reshape(sent[OF_CLASSES], (4, len(COLUMNS)))
    # Of class 3 there are too few, and class 2 hides it: its counts would be the difference to all images.
    assert np.isnan(rows).all(1).tolist() == [False, False, True, True]
    assert kept == [f"{split}/class {c}" for split in ("clinical test", "clinical validation") for c in (2, 3)]
    whole, none = table([20, 12, 9, 3]).sent(1, True)
    assert np.isfinite(whole[OF_CLASSES]).all()
    assert none == []


def test_thresholds_stay_where_the_validation_split_has_few_cases() -> None:
    sent, kept = table([20, 20, 20], [20, 12, 2]).sent(5, True)
    rows = np.reshape(sent[OF_CLASSES], (3, len(COLUMNS)))
    points = [place for place, name in enumerate(COLUMNS) if "_at_" in name]
    assert np.isnan(rows[:, points]).all(1).tolist() == [False, True, True]
    assert np.isfinite(np.delete(rows, points, 1)).all()
    assert kept == ["clinical validation/class 1", "clinical validation/class 2"]


def test_classes_that_a_site_does_not_annotate_have_no_figures() -> None:
    """Nobody's silence is a label: no image there is one without the class."""
    made = table([20, 12, 0])
    assert np.isfinite(np.reshape(made.sent(1, True)[0][OF_CLASSES], (3, -1))[2, 2])
    sent, kept = ClinicalTable(made.splits, (0, 1)).sent(1, True)
    assert np.isnan(np.reshape(sent[OF_CLASSES], (3, -1))).all(1).tolist() == [False, False, True]
    assert kept == []


def test_without_metrics_by_class_only_figures_of_all_classes_leave() -> None:
    sent, kept = table([20, 20]).sent(1, False)
    assert (list(sent), kept) == ([OVER_ALL], [])
    found = read_clinical("a", stats(sent), 2, 40)
    assert found is not None
    assert list(found) == [ALL]


def test_of_two_classes_the_second_is_looked_for_and_patients_are_the_cases() -> None:
    sent, _ = table([30, 30], patients=15).sent(1, True)
    found = read_clinical("a", stats(sent, ["well", "ill"]), 2, 60)
    assert found is not None
    assert list(found) == [ALL, "ill"]
    of = found["ill"]
    assert (of["cases_with"], of["squares_with"], of["cases_without"]) == (15, 60, 15)
    labels, scores, whose = table([30, 30], patients=15).splits["test"]
    _, variance = delong(labels == 1, scores[:, 1][None], whose)
    assert of["auc_variance"] == pytest.approx(variance[0, 0])
    shown = clinical_before(clinical_of({"a": found})[0])["a"]["ill"]
    wide, narrow = (
        shown[f"sensitivity{AT[0]}_high"] - shown[f"sensitivity{AT[0]}_low"],
        np.subtract(*wilson(np.array([of[f"tp{AT[0]}"]]), np.array([30.0]), 0.05)[0, :0:-1]),
    )
    assert wide > 1.2 * narrow  # 30 images of 15 patients are no 30 cases


def test_no_score_of_an_image_is_sent() -> None:
    made = table([20, 20])
    sent, _ = made.sent(1, True)
    numbers = {value for values in sent.values() for value in values}
    for labels, scores, _ in made.splits.values():
        assert len(labels) == 40
        assert not numbers & {*scores.reshape(-1).tolist()}


# ------------------------------------------------------------------------------------------------ at the server


def changed(place: str, value: float) -> dict[str, Any]:
    sent, _ = table([20, 12]).sent(1, True)
    sent[OF_CLASSES][COLUMNS.index(place)] = value
    return stats(sent, ["a", "b"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("auc", 1.5), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("auc_variance", 2.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("tp", 40.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("cases_with", 13.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("squares_with", 145.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("tp_at_specificity_0.90", 20.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
        (("tn_at_sensitivity_0.90", 0.0), f"field '{OF_CLASSES}' cannot be of 32 images"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(change: tuple[str, float], reason: str) -> None:
    assert read_clinical("a", changed("auc", 0.5), 2, 32)
    with pytest.raises(ReportError, match=r"site 'a': ") as refused:
        read_clinical("a", changed(*change), 2, 32)
    assert reason in str(refused.value)


def test_vectors_of_another_length_and_sums_of_more_images_are_refused() -> None:
    sent, _ = table([20, 12]).sent(1, True)
    for field, size in ((OVER_ALL, 46), (OF_CLASSES, len(COLUMNS))):
        with pytest.raises(ReportError, match=rf"field '{field}' has {size - 1} entries, expected {size}"):
            read_clinical("a", stats({**sent, field: sent[field][1:]}, ["a", "b"]), 2, 32)
    with pytest.raises(ReportError, match="'classes' has 3 entries, expected 2"):
        read_clinical("a", stats(sent, ["a", "b", "c"]), 2, 32)
    with pytest.raises(ReportError, match=f"field '{OVER_ALL}' cannot be of 31 images"):
        read_clinical("a", stats(sent, ["a", "b"]), 2, 31)
    assert read_clinical("a", stats({}), 2, 32) is None


def both(shift: float) -> RunResults:
    """Give two sites, the second of which is worse the larger the shift is."""
    random, found = np.random.default_rng(1), {}
    for site, away in (("a", 1.5), ("b", 1.5 - shift)):
        labels = np.arange(200) % 2
        marks = 1 / (1 + np.exp(-random.normal(size=200) - away * labels))
        scores = np.stack([1 - marks, marks], 1)
        split = (labels, scores, np.arange(200))
        sent, _ = ClinicalTable({"test": split, "validation": split}).sent(1, True)
        found[site] = read_clinical(site, stats(sent, ["well", "ill"]), 2, 200)
    cells, vectors = clinical_of(found)
    return RunResults.model_validate(encode_value({"cells": cells, "vectors": vectors}, "x"))


def test_the_words_name_the_lowest_area_and_whether_it_may_be_chance() -> None:
    apart, alike = (both(shift) for shift in (1.2, 0.0))
    words, p = clinical_words(apart)
    assert words.startswith("The sites' AUCs of ill differ by more than chance explains (p < 0.001, Cochran's Q on ")
    assert "; the lowest is that of b: " in words
    found = [clinical_before(run.cells) for run in (apart, alike)]
    assert p == found[0]["a"]["ill"]["auc_p_value"]
    assert clinical_words(alike)[0].startswith("The sites' AUCs of ill may differ by chance (p = ")
    of: list[Any] = [run[site]["ill"]["auc_p_value"] for run in found for site in ("a", "b")]
    assert of[0] == of[1] < 0.01
    assert of[2] == of[3] > 0.05
    lines = list(csv.reader(io.StringIO(clinical_table(apart).csv())))
    row = dict(zip(*lines[:2], strict=True))
    assert float(row["auc_low"]) < float(row["auc"]) < float(row["auc_high"])
    assert float(row[f"specificity{AT[0]}"]) >= 0.9  # of the very images that the threshold is of
    assert clinical_words(RunResults())[0] == ""


def test_many_rows_are_left_to_the_report() -> None:
    of_site = [cell for cell in both(0.0).cells if cell.site == "a"]
    sites = [f"site-{number}" for number in range(MOST_ROWS + 1)]
    cells = [replace(cell, site=site) for site in sites for cell in (Cell("accuracy", value=0.5), *of_site)]
    assert len(clinical_table(RunResults(cells=cells)).rows) == MOST_ROWS + 1
    assert "PR-AUC" not in fairness_table(RunResults(cells=cells))
    assert "PR-AUC" in fairness_table(RunResults(cells=[cell for cell in cells if cell.site != "site-0"]))


def test_a_class_that_is_not_annotated_has_one_dash_in_a_cell() -> None:
    figures = {ALL: {"calibration": [], "brier": math.nan, "ece": math.nan}, "ill": dict.fromkeys(COLUMNS, math.nan)}
    cells, _ = clinical_of({"a": figures})
    row = clinical_table(RunResults.model_validate(encode_value({"cells": cells}, "x"))).rows[0]
    assert [getattr(cell, "text", cell) for cell in row] == ["a", "ill", *["-"] * 5, None, None]


def test_hidden_classes_are_those_of_groups() -> None:
    """Check that the floor is that of ``groups``, for one group of all people."""
    labels, _, whose = table([20, 12, 9, 3]).splits["test"]
    cases: list[Hashable] = whose.tolist()
    assert find_hidden_parts(cases, labels, 0 * labels, frozenset(), 5, 4) == {2, 3}
