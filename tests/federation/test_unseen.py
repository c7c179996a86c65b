"""Sites that are left out in turn, and what a model is worth there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare_lab.cli.compare.series import Entry, Run, Series, leaving_out
from fairflare_lab.compare.at_left_out import RUN_DIR, at_unseen, without
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import unseen_table
from tests.unit.report_runs import read

SMALL = {"local_epochs": 1, "image_size": [32, 32], "phantom_cases": 0.2}


def series(*methods: str, sites: int = 3) -> Series:
    rows = [Entry(method) for method in methods]
    return Series(rows, seeds=[0], task="segmentation", sites=sites, rounds=1, settings=SMALL, bootstrap=0)


def test_every_site_is_left_out_once() -> None:
    runs = leaving_out(series("fed_avg", "solo"), "each").runs()
    assert [run.name for run in runs[:3]] == [
        "fed_avg-seed0-without-site-1", "solo-seed0-without-site-1", "fed_avg-seed0-without-site-2",
    ]  # fmt: skip
    assert len({run.name for run in runs}) == 6
    assert runs[2].plan["sites"] == ["site-1", "site-3"]


def test_synthetic_images_stay_dealt_to_all_sites() -> None:
    runs = leaving_out(Series([Entry("fed_avg")], task="classification", sites=4, rounds=1), "each").runs()
    assert {run.make().task.phantom_sites for run in runs} == {4}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sites", "told", "message"),
    [
        (3, "site-9", "--hold-out.*site-9"),
        (3, "site-1,site-1", "site-1"),
        (2, "each", "leaves a site out of 2, and a round needs 2"),
        (3, ",", "--hold-out"),
    ],
)
def test_what_cannot_be_left_out(sites: int, told: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaving_out(series("fed_avg", sites=sites), told)


def test_a_block_is_taken_out() -> None:
    local = {"device": "cpu", "sites": {"a": {"x": 1}, "b": {}}}
    assert without(local, "a") == {"device": "cpu", "sites": {"b": {}}}
    assert set(local["sites"]) == {"a", "b"}


@pytest.mark.long
def test_the_last_model_is_tested_where_it_was_not(tmp_path: Path) -> None:
    run = leaving_out(series("fed_avg"), "site-3").runs()[0]
    run_local(run.make(), tmp_path)
    found = at_unseen(run.plan, tmp_path, "site-3", {})
    # The same site, with a loop of its own.
    task = run.make().task
    data = make_plan(**run.plan).task.open_site("site-3", {})
    model = task.build_model()
    model.load_state_dict(torch.load(tmp_path / RUN_DIR / "FL_global_model.pt", weights_only=True)["model"])
    model.eval()
    losses = []
    with torch.no_grad():
        for images, targets in ((batch[0], batch[1]) for batch in data.batches("test", batch_size=1)):
            losses.append(float(task.loss(model(images), targets)))
    assert found.images == len(losses) == data.num_samples("test")
    assert found.metrics["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-4)
    with pytest.raises(ValueError, match="was part of the run"):
        at_unseen(run.plan, tmp_path, "site-1", {})


def document(seed: int, values: dict[str, float]) -> dict[str, Any]:
    metrics = {site: {"dice": value} for site, value in values.items()}
    info = {"label": "x", "seed": seed, "primary_metric": "dice", "metrics": {"dice": True}, "sites": list(values)}
    return {"status": "completed", "info": info, "test": metrics}


def test_the_table() -> None:
    found = [
        (document(0, {"b": 0.8, "c": 0.6}), Unseen(site="a", metrics={"dice": 0.5})),
        (document(0, {"a": 0.9, "c": 0.7}), Unseen(site="b", metrics={"dice": 0.3})),
        (document(1, {"b": 0.6, "c": 0.6}), Unseen(site="a", metrics={"dice": 0.6})),
        (document(1, {"a": 0.8, "c": 0.8}), Unseen(site="b", metrics={"dice": 0.4})),
    ]
    head, row = (
        line.split(",") for line in unseen_table([(read(**run), at) for run, at in found], style="csv").splitlines()
    )
    cells = dict(zip(head, row, strict=True))
    assert float(cells["seen mean"]) == pytest.approx((0.75 + 0.7) / 2)
    assert float(cells["unseen mean"]) == pytest.approx(0.45)
    assert float(cells["unseen sd"]) == pytest.approx(0.05)
    assert float(cells["unseen worst mean"]) == pytest.approx(0.35)
    assert float(cells["gap mean"]) == pytest.approx(0.725 - 0.45)
    assert float(cells["b mean"]) == pytest.approx(0.35)
    assert "seeds 1 lack runs" in unseen_table([(read(**run), at) for run, at in found[:3]], style="markdown")


def test_runs_of_other_comparisons_keep_their_names() -> None:
    assert Run(Entry("fed_avg"), 2, {}).name == "fed_avg-seed2"
