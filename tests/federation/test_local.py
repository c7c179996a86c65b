"""Test a federation in one process: the same rounds and site halves as elsewhere, without FLARE."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.task_files import TASKS_BY_KIND
from fairflare.federation.server.rounds import Stopped
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from tests.tiny import FUNDUS, RESULTS, model_in, run_document, without_times

from .network import Heard

SITES = ["site-1", "site-2", "site-3"]
METRICS = {"accuracy", "balanced_accuracy", "auc_ovo", "auc_ovr", "f1_macro", "loss"}
TINY = {**FUNDUS, "phantom_sites": 3}


def run(folder: Path, method: str = "fed_avg", local: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    settings = {**TINY, **options.pop("settings", {})}
    plan = make_plan(method, task="classification", sites=3, settings=settings, **{"num_rounds": 2, **options})
    return run_document(run_local(plan, folder, local))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fed_avg")
    run(folder)
    return folder


@pytest.mark.long
def test_the_tasks_file_is_kept_and_named(averaged: Path, tmp_path: Path) -> None:
    """Check the task's file, as settings alone would not record what was learned."""
    file = tmp_path / "mine.py"
    file.write_text("from fairflare.tasks.classification import ClassificationTask as Task\n")
    run(tmp_path / "run", task_file=file, num_rounds=1)
    kept = tmp_path / "run" / "server" / "simulate_job" / "task.py"
    assert kept.read_text() == file.read_text()
    usual = averaged / "server" / "simulate_job"
    found = run_document(usual / "fairflare")["info"]["task_file"]
    template = TASKS_BY_KIND["classification"]
    assert found == {"name": template.name, "sha256": hashlib.sha256(template.read_bytes()).hexdigest()}
    assert (usual / "task.py").read_bytes() == template.read_bytes()


def test_fed_avg(averaged: Path) -> None:
    results = run_document(averaged / RESULTS)
    assert results["status"] == "completed"
    assert results["info"]["synthetic"] is True
    assert results["info"]["primary_metric"] == "balanced_accuracy"
    assert results["info"]["sites"] == SITES
    assert [r["accepted"] for r in results["rounds"]] == [SITES, SITES]
    assert sorted(results["test"]) == SITES
    for metrics in results["test"].values():
        for quality in ("", "clean/", "corrupted/"):
            assert {quality + name for name in METRICS} <= set(metrics)
        assert all(0 <= value <= 1 for name, value in metrics.items() if not name.endswith("loss"))
    test = results["test"]
    assert len({metrics["loss"] for metrics in test.values()}) == len(SITES)  # each on a test set of its own
    quality = {site: {part: parts(test[site], part) for part in ("common", "clean", "corrupted")} for site in SITES}
    assert quality["site-1"]["clean"] == quality["site-3"]["clean"] != quality["site-3"]["corrupted"]
    assert quality["site-1"]["corrupted"] == quality["site-3"]["corrupted"]
    assert quality["site-1"]["common"] == quality["site-1"]["clean"]
    assert quality["site-3"]["common"] == quality["site-3"]["corrupted"]  # the corrupted site
    assert {"balanced_accuracy", "clean/auc_ovo", "corrupted/auc_ovo"} <= set(results["fairness"])
    assert all(
        metrics.keys() >= {"balanced_accuracy", "loss"} for metrics in results["rounds"][1]["validation"].values()
    )


def parts(metrics: dict[str, float], split: str) -> dict[str, float]:
    return {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith(f"{split}/")}


def test_twice_the_same(averaged: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(99)  # somebody else's random numbers
    again = run(tmp_path)
    assert torch.get_num_threads() == threads
    first = run_document(averaged / RESULTS)
    assert without_times(first) == without_times(again)
    models = model_in(averaged / RESULTS), model_in(tmp_path / RESULTS)
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], tensor) for name, tensor in models[1].items())
    other = run(tmp_path / "other", seed=1)
    assert without_times(other["test"]) != without_times(first["test"])


@pytest.mark.long
def test_two_runs_in_one_folder_do_not_write_over_each_other(averaged: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    class Second(Listener):
        def round_started(self, current_round: int) -> None:
            with pytest.raises(RuntimeError) as caught:
                run(tmp_path, experiment=f"other-{current_round}")
            refused.append(str(caught.value))

    plan = make_plan("fed_avg", task="classification", sites=3, settings=TINY, num_rounds=2)
    results = run_document(run_local(plan, tmp_path, listeners=[Second()]))
    assert len(refused) == 2
    assert "is in use by another run (process " in refused[0]
    assert refused[0].endswith("wait until that run is over, or give this one another folder")
    first = run_document(averaged / RESULTS)
    assert without_times(results) == without_times(first)


def test_a_site_with_bad_data_is_left_out_by_name(tmp_path: Path) -> None:
    secret = tmp_path / "nowhere"
    local = {"phantom": True, "sites": {"site-2": {"data_root": str(secret), "phantom": False}}}
    results = run(tmp_path, local=local, require_all_sites=False)
    assert results["status"] == "completed"
    assert [r["accepted"] for r in results["rounds"]] == [["site-1", "site-3"]] * 2
    for record in results["rounds"]:
        assert [(gone["site"], gone["phase"]) for gone in record["left_out"]] == [("site-2", "train")]
        assert "'site-2': the data folder does not exist" in record["left_out"][0]["reason"]
    assert sorted(results["test"]) == ["site-1", "site-3"]
    assert [gone["site"] for gone in results["left_out"]] == ["site-2"]
    assert str(secret) not in json.dumps(results)


def test_too_few_good_sites_fail_with_the_reason(tmp_path: Path) -> None:
    local = {"sites": {site: {"data_root": str(tmp_path / "nowhere")} for site in SITES[:2]}}
    local["sites"]["site-3"] = {"phantom": True}
    with pytest.raises(RuntimeError, match=r"(?s)site-1.*the data folder"):
        run(tmp_path, local=local, min_sites=2)
    results = run_document(tmp_path / RESULTS)
    assert results["status"] == "failed"
    assert "'site-2': the data folder does not exist" in results["reason"]


def test_sites_are_needed(tmp_path: Path) -> None:
    plan = make_plan("fed_avg", task="classification", sites=None, settings=TINY)
    with pytest.raises(ValueError, match="give the number or the names"):
        run_local(plan, tmp_path)


# ------------------------------------------------------------------------------------------------ how it goes


def test_told_to_stop(tmp_path: Path) -> None:
    """Check a stop while the second site trains: no site is asked further, and the results record a failed run."""
    heard = Heard()
    plan = make_plan("fed_avg", task="classification", sites=3, num_rounds=2, settings=TINY)

    def stop() -> bool:
        return ("site", "train", 0, "site-1") in heard.told

    with pytest.raises(Stopped, match="the job was aborted"):
        run_local(plan, tmp_path, listeners=[heard], should_stop=stop)
    run_dir = tmp_path / "server" / "simulate_job"
    results = run_document(run_dir / "fairflare")
    assert results["status"] == "failed"
    assert results["rounds"] == []
    assert "before_aggregation" not in heard.told
    assert not list((run_dir / "fairflare" / "staging").glob("*.safetensors"))
    assert not {"staging", "lock"} & {path.name for path in run_dir.rglob("*")}, "nothing that only the run needed"


def left_out(results: dict[str, Any]) -> dict[str, str]:
    return {gone["site"]: gone["reason"] for gone in results["rounds"][0]["left_out"]}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"device": ["cpu"]}, "site 'site-2': setting 'device' is ['cpu'], which is not usable here"),
        ({"num_threads": True}, "site 'site-2': setting 'num_threads' must be an integer >= 1, got True"),
        ({"state_root": 5}, "site 'site-2': train failed with TypeError: "),
    ],
)
def test_a_wrong_setting_of_a_site_costs_that_site_its_round(tmp_path: Path, setting: Any, reason: str) -> None:
    local = {"sites": {"site-2": setting}}
    results = run(tmp_path, local=local, num_rounds=1, experiment="e", require_all_sites=False)
    assert results["status"] == "completed"
    assert list(left_out(results)) == ["site-2"]
    assert left_out(results)["site-2"].startswith(reason)


@pytest.mark.long
def test_each_site_has_its_own_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every round, as the workers are made in the first round."""
    used: list[tuple[str, int]] = []
    original = LocalTraining.train

    def train(self: LocalTraining, run: Any, model: Any) -> Any:
        used.append((run.site, torch.get_num_threads()))
        return original(self, run, model)

    monkeypatch.setattr(LocalTraining, "train", train)
    run(tmp_path, local={"sites": {"site-2": {"num_threads": 2}}})
    assert used == [("site-1", 1), ("site-2", 2), ("site-3", 1)] * 2


@pytest.mark.long
def test_a_plan_can_be_run_again(tmp_path: Path) -> None:
    """Check that the rule's state of one run does not affect the next run."""
    plan = make_plan("fed_ism", task="classification", sites=3, num_rounds=2, settings=TINY)
    first, second = (run_local(plan, tmp_path / name) for name in ("first", "second"))
    weights = [[r["site_weights"] for r in run_document(folder)["rounds"]] for folder in (first, second)]
    assert weights[0] == weights[1]
