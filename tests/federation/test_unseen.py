"""Test a run's model at a site that was left out, and the runs that leave sites out in turn."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.transports.local import run_local
from fairflare_lab.cli.compare.series import Entry, Run, Series, leaving_out
from fairflare_lab.compare.at_left_out import RUN_DIR, drop_site, evaluate_unseen
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import unseen_table
from tests.unit.report_runs import read

SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "phantom_sites": 3}


def trained(folder: Path, method: str, **settings: Any) -> tuple[dict[str, Any], Plan, dict[str, torch.Tensor]]:
    given = {
        "method": method, "task": "segmentation", "sites": ["site-1", "site-2"], "num_rounds": 1,
        "settings": {**{k: v for k, v in SMALL.items() if k != "phantom_sites"}, **settings},
    }  # fmt: skip
    plan = make_plan(**given)
    run_local(plan, folder)
    return given, plan, torch.load(folder / RUN_DIR / "FL_global_model.pt", weights_only=True)["model"]


def measured(plan: Plan, state: dict[str, torch.Tensor], *, adapted: bool) -> float:
    """Return Dice at site-3 by a plain loop; adapted: with statistics of all training images, norm after norm."""
    network, data = plan.task.build_model(), plan.task.open_site("site-3", own_settings({}, "site-3"))
    network.load_state_dict(state)
    network.eval()
    with torch.no_grad():
        if adapted:
            images = torch.cat([inputs for inputs, *_ in data.batches("training", batch_size=1000)])
            norms = {n: m for n, m in network.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
            order: list[str] = []
            hooks = [m.register_forward_pre_hook(lambda *_, name=n: order.append(name)) for n, m in norms.items()]
            network(images)
            for hook in hooks:
                hook.remove()
            for name in order:
                seen: list[torch.Tensor] = []
                hook = norms[name].register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].double()))
                network(images)
                hook.remove()
                values = seen[0].transpose(0, 1).flatten(1)
                norms[name].running_mean.copy_(values.mean(1))  # type: ignore[union-attr, operator]
                norms[name].running_var.copy_(values.var(1))  # type: ignore[union-attr, operator]
        metrics = plan.task.evaluate(network, data.batches("test", batch_size=4), torch.device("cpu"))
    return float(metrics[plan.task.primary_metric])


def test_the_figure_is_that_of_the_saved_model_at_the_site_that_was_not_there(tmp_path: Path) -> None:
    given, plan, state = trained(tmp_path, "fed_avg")
    found = evaluate_unseen(given, tmp_path, "site-3", {})
    assert found.metrics["dice"] == pytest.approx(measured(plan, state, adapted=False), abs=1e-6)
    assert found.adapted["dice"] == pytest.approx(measured(plan, state, adapted=True), abs=1e-4)
    assert found.metrics["dice"] != found.adapted["dice"]
    assert Unseen.read(tmp_path / RUN_DIR / "fairflare") == found
    # The loss with a loop of its own, one image at a time.
    task, data = plan.task, plan.task.open_site("site-3", {})
    model = task.build_model().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        losses = [float(task.loss(model(batch[0]), batch[1])) for batch in data.batches("test", batch_size=1)]
    assert found.images == len(losses) == data.num_samples("test")
    assert found.metrics["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-4)
    with pytest.raises(ValueError, match="'site-2' was part of the run"):
        evaluate_unseen(given, tmp_path, "site-2", {})


@pytest.mark.parametrize(
    ("method", "settings", "adapts"),
    [("solo", {}, False), ("fed_bn", {}, False), ("fed_avg", {"norm_statistics": "site"}, True)],
)
def test_what_stays_at_the_sites_has_no_figure(
    method: str, settings: dict[str, Any], adapts: bool, tmp_path: Path
) -> None:
    given, plan, state = trained(tmp_path, method, **settings)
    found = evaluate_unseen(given, tmp_path, "site-3", {})
    assert not found.metrics
    assert "no common model" in found.reason
    assert bool(found.adapted) == adapts
    if adapts:
        assert found.adapted["dice"] == pytest.approx(measured(plan, state, adapted=True), abs=1e-4)


def series(*methods: str, sites: int = 3, task: str = "segmentation") -> Series:
    return Series([Entry(method) for method in methods], seeds=[0, 1], sites=sites, task=task, rounds=1)


def test_every_site_is_left_out_in_turn() -> None:
    runs = leaving_out(series("fed_avg", "solo"), "each").runs()
    assert [(run.name, run.held_out) for run in runs] == [
        (f"{method}-seed{seed}-without-site-{number}", f"site-{number}")
        for seed in (0, 1) for number in (1, 2, 3) for method in ("fed_avg", "solo")
    ]  # fmt: skip
    for run in runs:
        assert run.plan["sites"] == [site for site in ("site-1", "site-2", "site-3") if site != run.held_out]
    assert Run(Entry("fed_avg"), 2, {}).name == "fed_avg-seed2"  # other comparisons keep their names


def test_synthetic_images_stay_dealt_to_all_sites() -> None:
    runs = leaving_out(series("fed_avg", sites=4, task="classification"), "each").runs()
    assert {run.make().task.phantom_sites for run in runs} == {4}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sites", "told", "message"),
    [
        (3, "site-9", "--hold-out.*site-9"),
        (3, "site-1,site-1", "site-1"),
        (2, "each", "leaves a site out of 2.*give .*3 sites"),
        (3, ",", "--hold-out"),
        (3, "", "--hold-out"),
    ],
)
def test_what_cannot_be_left_out(sites: int, told: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaving_out(series("fed_avg", sites=sites), told)


def test_a_block_is_taken_out() -> None:
    local = {"device": "cpu", "sites": {"a": {"x": 1}, "b": {}}}
    assert drop_site(local, "a") == {"device": "cpu", "sites": {"b": {}}}
    assert set(local["sites"]) == {"a", "b"}


def document(seed: int, values: dict[str, float]) -> dict[str, Any]:
    metrics = {site: {"dice": value} for site, value in values.items()}
    info = {"label": "x", "seed": seed, "primary_metric": "dice", "metrics": {"dice": True}, "sites": list(values)}
    return {"status": "completed", "info": info, "test": metrics}


def test_the_table() -> None:
    found = [
        (document(0, {"b": 0.8, "c": 0.6}), Unseen(site="a", metrics={"dice": 0.5}, adapted={"dice": 0.75})),
        (document(0, {"a": 0.9, "c": 0.7}), Unseen(site="b", metrics={"dice": 0.3}, adapted={"dice": 0.5})),
        (document(1, {"b": 0.6, "c": 0.6}), Unseen(site="a", metrics={"dice": 0.6}, adapted={"dice": 0.7})),
        (document(1, {"a": 0.8, "c": 0.8}), Unseen(site="b", metrics={"dice": 0.4}, adapted={"dice": 0.7})),
    ]
    (cells,) = csv.DictReader(unseen_table([(read(**run), at) for run, at in found], style="csv").splitlines())
    assert float(cells["seen mean"]) == pytest.approx((0.75 + 0.7) / 2)
    assert float(cells["unseen mean"]) == pytest.approx(0.45)
    assert float(cells["unseen sd"]) == pytest.approx(0.05)
    assert float(cells["unseen worst mean"]) == pytest.approx(0.35)
    assert float(cells["gap mean"]) == pytest.approx(0.725 - 0.45)
    assert float(cells["adapted mean"]) == pytest.approx((0.625 + 0.7) / 2)
    assert float(cells["b mean"]) == pytest.approx(0.35)
    assert "seeds 1 lack runs" in unseen_table([(read(**run), at) for run, at in found[:3]], style="markdown")
