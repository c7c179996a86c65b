"""Test how a run is planned: the number of sites that synthetic data are dealt to."""

from __future__ import annotations

import pytest

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from tests.tiny import run_document

TINY = {
    "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom": "fundus", "phantom_samples": 120, "phantom_test": 40,
    "phantom_own_test": 20, "partition": "iid", "corrupted_sites": 1, "local_epochs": 1, "batch_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "sites", "settings", "wanted"),
    [
        ("fed_mas", 0, {}, 4),  # as many as its job has
        ("fed_ism", 0, {}, 5),
        ("fed_mas", 8, {}, 8),
        ("fed_ism", 2, {}, 2),
        ("fed_mrl", ["north-1", "south-2", "west-3"], {}, 3),
        ("fed_mas", None, {}, 4),  # nobody knows how many will connect: as many as its job has
        ("fed_mas", 3, {"phantom_sites": 20}, 20),  # asked for
    ],
)
def test_synthetic_data_are_dealt_to_the_sites_of_the_run(method, sites, settings, wanted):
    assert make_plan(method, sites=sites, settings=settings).task.phantom_sites == wanted


OWN_TASK = """
import torch
from fairflare.tasks.base import Metric
from fairflare.tasks.base import Task as Base

class Task(Base):
    primary_metric = "dice"

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(1, 1))

    def loss(self, outputs, targets):
        return outputs.mean()

    def declared_metrics(self):
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model, batches, device):
        return {"dice": 0.5}

    def open_site(self, site, settings):
        raise AssertionError
"""


@pytest.mark.parametrize(
    "method", [name for name, m in all_methods().items() if name != "fed_lwr_last_layer" and "adapters" not in m.learns]
)  # named layer
def test_a_task_of_ones_own_need_not_have_what_the_small_job_sets(method, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_TASK)
    assert make_plan(method, task_file=file, sites=2, num_rounds=20).task.primary_metric == "dice"
    with pytest.raises(ValueError, match="has no setting 'max_pool'"):  # what somebody asks for is another matter
        make_plan(method, task_file=file, sites=2, num_rounds=20, settings={"max_pool": True})


def test_other_tasks_have_no_such_number():
    assert not hasattr(make_plan("fed_lwr", sites=3).task, "phantom_sites")


@pytest.mark.many
@pytest.mark.parametrize("sites", [2, 6])
def test_every_site_has_its_share_and_a_test_of_its_own(tmp_path, sites):
    """Check that the last site is the corrupted one for any number of sites, and that all data are dealt."""
    plan = make_plan("fed_avg", task="classification", sites=sites, num_rounds=1, settings=TINY)
    results = run_document(run_local(plan, tmp_path))
    names = [f"site-{number}" for number in range(1, sites + 1)]
    assert sorted(results["test"]) == names
    data = [plan.task.open_site(name, {}) for name in names]
    assert sum(d.num_samples("training") + d.num_samples("validation") for d in data) == 120
    own = [results["test"][name]["loss"] for name in names]
    assert len({round(value, 9) for value in own}) == sites
    assert results["fairness"]["loss"]["std"] > 0
    for split, sharing in (("common", names[:-1]), ("clean", names), ("corrupted", names)):
        values = {results["test"][name][f"{split}/loss"] for name in sharing}
        assert len(values) == 1, split
    last = results["test"][names[-1]]
    assert last["common/loss"] == last["corrupted/loss"] != last["clean/loss"]
