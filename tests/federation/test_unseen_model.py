"""What a run's model is worth at a site that was not there, and the runs that leave sites out in turn."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.transports.local import run_local
from fairflare_lab.cli.compare.series import Entry, Series, leaving_out
from fairflare_lab.compare.at_left_out import at_unseen
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import unseen_table
from tests.unit.report_runs import read

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "phantom_sites": 3}


def trained(folder: Path, method: str, **settings: Any) -> tuple[dict[str, Any], Plan, dict[str, torch.Tensor]]:
    given = {
        "method": method, "task": "segmentation", "sites": ["site-1", "site-2"], "num_rounds": 1,
        "settings": {**{k: v for k, v in SMALL.items() if k != "phantom_sites"}, **settings},
    }  # fmt: skip
    plan = make_plan(**given)
    run_local(plan, folder)
    file = folder / "server" / "simulate_job" / "FL_global_model.pt"
    return given, plan, torch.load(file, weights_only=True)["model"]


def measured(plan: Plan, state: dict[str, torch.Tensor], *, adapted: bool) -> float:
    """Dice at site-3 by a plain loop; adapted: its statistics one norm after the other, all training images at once."""
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
    found = at_unseen(given, tmp_path, "site-3", {})
    assert found.metrics["dice"] == pytest.approx(measured(plan, state, adapted=False), abs=1e-6)
    assert found.adapted["dice"] == pytest.approx(measured(plan, state, adapted=True), abs=1e-4)
    assert found.metrics["dice"] != found.adapted["dice"]
    assert Unseen.read(tmp_path / "server" / "simulate_job" / "fairflare") == found
    with pytest.raises(ValueError, match="'site-2' was part of the run"):
        at_unseen(given, tmp_path, "site-2", {})


@pytest.mark.parametrize(
    ("method", "settings", "adapts"),
    [("solo", {}, False), ("fed_bn", {}, False), ("fed_avg", {"norm_statistics": "site"}, True)],
)
def test_what_stays_at_the_sites_has_no_figure(
    method: str, settings: dict[str, Any], adapts: bool, tmp_path: Path
) -> None:
    given, plan, state = trained(tmp_path, method, **settings)
    found = at_unseen(given, tmp_path, "site-3", {})
    assert not found.metrics
    assert "no common model" in found.reason
    assert bool(found.adapted) == adapts
    if adapts:
        assert found.adapted["dice"] == pytest.approx(measured(plan, state, adapted=True), abs=1e-4)


def series(**more: Any) -> Series:
    return Series([Entry("fed_avg")], seeds=[0, 1], sites=3, task="segmentation", rounds=1, **more)


def test_every_site_is_left_out_in_turn() -> None:
    runs = leaving_out(series(), "each").runs()
    assert [(run.seed, run.held_out) for run in runs] == [
        (seed, f"site-{number}") for seed in (0, 1) for number in (1, 2, 3)
    ]
    for run in runs:
        assert run.held_out not in run.plan["sites"]
        assert len(run.plan["sites"]) == 2
        assert run.name.endswith(f"-without-{run.held_out}")


@pytest.mark.parametrize(("told", "wrong"), [("site-9", "site-9"), ("", "hold-out"), ("site-1,site-1", "site-1")])
def test_sites_that_cannot_be_left_out(told: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        leaving_out(series(), told)


def test_two_sites_are_too_few() -> None:
    two = Series([Entry("fed_avg")], seeds=[0], sites=2, task="segmentation", rounds=1)
    with pytest.raises(ValueError, match="give the comparison 3 sites or more"):
        leaving_out(two, "each")


def test_the_table_has_seen_and_unseen_side_by_side(tmp_path: Path) -> None:
    trained(tmp_path, "fed_avg")
    document = json.loads((tmp_path / "server" / "simulate_job" / "fairflare" / "results.json").read_text())
    seen = [by["dice"] for by in document["test"].values()]
    found = [
        (document, Unseen(site="A", metrics={"dice": 0.5}, adapted={"dice": 0.75}, images=3)),
        (document, Unseen(site="B", metrics={"dice": 0.25}, adapted={"dice": 0.5}, images=3)),
    ]
    (row,) = csv.DictReader(unseen_table([(read(**run), at) for run, at in found], style="csv").splitlines())
    numbers = {name: float(value) for name, value in row.items() if value and name not in ("method", "seeds")}
    mean = sum(seen) / len(seen)
    for name, value in {
        "seen": mean,
        "unseen": 0.375,
        "unseen worst": 0.25,
        "gap": mean - 0.375,
        "adapted": 0.625,
    }.items():
        assert any(key.startswith(name) and numbers[key] == pytest.approx(value, abs=1e-6) for key in numbers), name
