"""Test runs in the columns of a paper's table."""

from __future__ import annotations

from typing import Any

import numpy as np

from fairflare.tasks.classification import ClassificationTask
from fairflare_lab.compare.paper_table import paper_table
from fairflare_lab.papers.presets import tables
from tests.unit.report_runs import document, read_all

VALUES = {"FedAvg": {"a": 0.8, "b": 0.6}, "Ours": {"a": 0.75, "b": 0.71}}
DICE = tables()["fed_lwr"].columns


def runs(**test: Any) -> list[dict[str, Any]]:
    """Return two rows with seeds 0 and 1; the second seed is 0.02 better."""
    found = []
    for label, values in VALUES.items():
        for seed in (0, 1):
            found.append(document(label, seed, {site: value + 0.02 * seed for site, value in values.items()}))
    return found


def cells(text: str) -> list[list[str]]:
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_dice_by_site_average_and_deviation() -> None:
    text = paper_table("Table 1", DICE, read_all(runs()), style="markdown")
    head, *rows = cells(text)
    assert head == ["method", "a", "b", "Avg.", "Std."]
    for row in rows:
        by_seed = np.array([[VALUES[row[0]][s] + 0.02 * seed for s in ("a", "b")] for seed in (0, 1)]) * 100
        wanted = [*by_seed.T, by_seed.mean(1), by_seed.std(1)]
        assert row[1:] == [f"{column.mean():.2f} ± {column.std():.2f}" for column in wanted]
    assert "Table 1, in percent, of the last model" in text


def in_splits(run: dict[str, Any], **splits: float) -> dict[str, Any]:
    """Return the run with dice on further test splits, larger than the site's own by so much."""
    for site, values in run["test"].items():
        for split, more in splits.items():
            values[f"{split}/dice"] = run["test"][site]["dice"] + more
    return run


def test_the_first_metric_that_is_there_and_what_is_absent_by_name() -> None:
    columns = [
        {"title": "B-acc", "metric": ["global/dice", "common/dice"], "of": "mean"},
        {"title": "Tail", "metric": ["global/tail", "common/tail"], "of": "mean"},
        {"title": "Average", "metric": "clean/dice+corrupted/dice", "of": "mean"},
    ]
    found = [in_splits(run, common=0.01, clean=0.1, corrupted=-0.3) for run in runs()]
    text = paper_table("T", columns, read_all(found), style="markdown")
    head, first, _ = cells(text)
    assert head == ["method", "B-acc", "Tail", "Average"]
    assert first == ["FedAvg", "72.00 ± 1.00", "-", "61.00 ± 1.00"]
    assert "B-acc: common/dice, as no run has global/dice." in text
    assert "ABSENT, as no run measured it: Tail (global/tail or common/tail)." in text
    found[0] = in_splits(found[0], **{"global": 0.2})
    assert "no figure of the global test, which is of the common model (if there is one): " in paper_table(
        "T", columns, read_all(found)
    )
    assert cells(paper_table("T", columns, read_all(found), style="markdown"))[1][1] == "90.00"


def test_the_last_rounds_of_all_runs_are_pooled() -> None:
    column = {"title": "AUC", "metric": "dice", "of": "mean", "last": True}
    found = runs()[:2]
    before = [0.5, 0.54]
    for run, value in zip(found, before, strict=True):
        run["rounds"][0]["test"] = {site: {"dice": value} for site in run["test"]}
        run["last_rounds"] = {"rounds": [0, 1], "test": {}}
    pooled = np.array([*before, 0.7, 0.72]) * 100
    text = paper_table("T", [column], read_all(found), style="markdown")
    assert cells(text)[1] == ["FedAvg", f"{pooled.mean():.2f} ± {pooled.std():.2f}"]
    assert "of the models of the last rounds that were tested" in text
    del found[0]["last_rounds"]
    assert cells(paper_table("T", [column], read_all(found), style="markdown"))[1][1] == "71.00 ± 1.00"


def test_every_column_is_of_a_metric_that_the_task_measures() -> None:
    task = ClassificationTask(phantom="endoscopy")
    known = {metric.name for metric in task.declared_metrics()} | {"dice"}
    assert len(tables()) > 20
    for table in tables().values():
        assert table.columns, table.name
        for column in table.columns:
            wanted = column["metric"] if isinstance(column["metric"], list) else [column["metric"]]
            for part in (part for metric in wanted for part in metric.split("+")):
                assert part.rpartition("/")[2] in known, (table.name, part)
            assert column["of"] in ("site", "mean", "std")
