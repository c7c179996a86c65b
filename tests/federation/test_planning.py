"""Test the plan of all sites: equal to that of all cases together, what leaves a site, and wrong answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.core.plans.counts import Case, foreground, intensities
from fairflare.core.plans.document import plan_of
from fairflare.exchange.messages import STATUS_OK, Message, SiteReply, SiteTask, encode_reply
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import Plan
from fairflare.federation.plan.run_settings import PlanRun, usual_waits
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.federation.server.planning import PLAN, read_counts
from fairflare.federation.site import case_counts
from fairflare.federation.site.case_counts import FIELDS
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.provision import job_classes

from ..unit.test_plan_rules import of_cases

#: For each site the spacing (to the right, front, head) and size of its cases, and the HU of its organ.
SITES = {
    "a": [((1.5, 1.5, 3.0), (20, 22, 9), 110)] * 3,
    "b": [((1.4, 1.4, 2.5), (24, 20, 10), 55), ((1.4, 1.4, 5.0), (24, 20, 8), 60)] * 2,
    "c": [((1.6, 1.6, 3.2), (18, 26, 12), 160)] * 2,
}


def volume(folder: Path, number: int, spacing: Any, size: Any, value: int) -> tuple[Case, np.ndarray]:
    """Write a CT with its mask, stored with axes to the left, back and head; return its case and its foreground."""
    image = np.random.default_rng(number).integers(-900, -500, size).astype(np.int16)
    mask = np.zeros(size, np.uint8)
    mask[5:12, 6:14, 2:7] = 1
    image[mask > 0] = value + np.arange(mask.sum()) % 40
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    for name, array in (("image", image), ("mask", mask)):
        nibabel.save(nibabel.Nifti1Image(array, affine), folder / f"{name}{number}.nii.gz")
    return Case(tuple(spacing[::-1]), tuple(size[::-1]), 1.0), foreground(image.astype(float), mask > 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[tuple[Case, Any]]]]:
    local: dict[str, Any] = {"sites": {}}
    cases = {}
    for site, listed in SITES.items():
        folder = tmp_path_factory.mktemp(site)
        cases[site] = [volume(folder, number, *one) for number, one in enumerate(listed)]
        entries = [{"image": f"image{k}.nii.gz", "label": f"mask{k}.nii.gz"} for k in range(len(listed))]
        lists = {"training": entries, "validation": entries[:1], "test": entries[:1]}
        for split in ("validation", "test"):
            lists[split] = [{**one, "patient": f"{split}"} for one in lists[split]]
            volume(folder, 90 + (split == "test"), *listed[0])
            lists[split] = [
                {"image": f"image{90 + (split == 'test')}.nii.gz", "label": f"mask{90 + (split == 'test')}.nii.gz"}
            ]
        (folder / "datalist.json").write_text(json.dumps(lists), "utf-8")
        local["sites"][site] = {"data_root": str(folder)}
    return local, cases


def planned(folder: Path, local: Mapping[str, Any], **run: Any) -> dict[str, Any]:
    file = TASKS_BY_KIND["volume_segmentation"]
    task = load_task_class(file)(intensity="window", window=(40.0, 400.0))
    settings = PlanRun(**{**usual_waits(1), "label": "plan", "min_cases": 1, **run})
    made = Plan(get_method("fed_avg"), task, FedAvg(), LocalTraining(batch_size=1), settings, sorted(SITES), file)
    return dict(json.loads((run_local(made, folder, local) / PLAN).read_text("utf-8")))


def pooled(cases: Mapping[str, list[tuple[Case, Any]]], memory: float = 8) -> dict[str, Any]:
    """Return the plan of all cases together."""
    every = [case for of in cases.values() for case, _ in of]
    answers = of_cases(every)
    histogram = sum(of for listed in cases.values() for _, of in listed)
    plan = plan_of(answers, channels=["CT"], outputs=2, memory=memory)
    plan["foreground_intensity_properties_per_channel"] = {"0": intensities(histogram)}
    return plan


def same(one: Any, other: Any) -> None:
    figures = "foreground_intensity_properties_per_channel"
    assert one[figures]["0"] == pytest.approx(other[figures]["0"], rel=1e-6)
    assert {**one, figures: {}} == {**other, figures: {}}


@pytest.mark.parametrize("secure", ["", "sums"])
def test_the_plan_of_the_sites_is_that_of_all_cases_together(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: str
) -> None:
    local, cases = data
    answers, perform = list[Any](), SiteWorker.perform

    def recorded(self: SiteWorker, request: SiteTask, *more: Any) -> Any:
        reply = perform(self, request, *more)
        answers.extend([reply] * (request.name == "plan"))
        return reply

    monkeypatch.setattr(SiteWorker, "perform", recorded)
    same(planned(tmp_path, local, secure=secure, min_sites=3 if secure else 1), pooled(cases))
    declared = {"cases"} if secure else {field.name for field in FIELDS}
    assert len(answers) == 9
    assert all({*reply.report} <= declared and not reply.metrics and reply.update is None for reply in answers)


@pytest.mark.parametrize("answers", [2, 5, 9])  # of nine, in each of the three questions
def test_a_plan_that_was_killed_is_made_again_whole(data: Any, tmp_path: Path, answers: int) -> None:
    local, cases = data

    def killed() -> None:
        perform, counts = SiteWorker.perform, iter(range(1, 100))

        def counted(self: SiteWorker, request: SiteTask, *more: Any) -> Any:
            reply = perform(self, request, *more)
            if request.name == "plan" and next(counts) == answers:
                os.kill(os.getpid(), signal.SIGKILL)
            return reply

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SiteWorker, "perform", counted)
            planned(tmp_path, local)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    assert not [*tmp_path.rglob(PLAN)]
    same(planned(tmp_path, local), pooled(cases))


def test_the_job_of_a_plan_asks_for_counts_and_carries_no_code(tmp_path: Path) -> None:
    asked = ["--set", "min_cases=3", "--set", "plan_memory=11", "--set", "num_classes=2"]
    made = CliRunner().invoke(app, ["plan", "--sites", "a,b,c", "--job", str(tmp_path), *asked])
    assert made.exit_code == 0, made.output
    job = tmp_path / "plan"
    assert json.loads((job / "meta.json").read_text())["deploy_map"] == {"app": ["server", "a", "b", "c"]}
    assert [path.name for path in (job / "app").iterdir()] == ["config"]
    (executor,) = json.loads((job / "app" / "config" / "config_fed_client.json").read_text())["executors"]
    assert executor["tasks"] == ["check", "plan"]
    (workflow,) = json.loads((job / "app" / "config" / "config_fed_server.json").read_text())["workflows"]
    settings = workflow["args"]
    assert (settings["min_cases"], settings["plan_memory"]) == (3, 11)
    assert settings["task"]["args"]["num_classes"] == 2
    named = re.findall(r'"path": "([\w.]+)"', "".join(file.read_text() for file in job.rglob("*.json")))
    assert {*named} <= {*job_classes()}  # what sites without code rights take


def test_a_site_of_too_few_cases_takes_no_part_and_is_named(data: Any, tmp_path: Path) -> None:
    local, cases = data
    plan = planned(tmp_path, local, min_cases=3)
    without = {site: of for site, of in cases.items() if site != "c"}
    assert (
        plan["configurations"]["3d_fullres"]["batch_size"]
        == pooled(without)["configurations"]["3d_fullres"]["batch_size"]
    )
    results = next(tmp_path.rglob("results.json")).read_text("utf-8")
    assert "site 'c': it takes no part in planning" in results
    assert [one for one in re.findall("site '(.)': it takes no part", results) if one != "c"] == []


def test_a_second_plan_with_one_case_more_is_refused_by_the_site(data: Any, tmp_path: Path) -> None:
    local, _ = data
    local = json.loads(json.dumps(local))
    local["state_root"] = str(tmp_path / "state")
    planned(tmp_path / "first", local, min_cases=2, experiment="first")
    planned(tmp_path / "again", local, min_cases=2, experiment="again")  # the same cases may be counted again
    root = Path(local["sites"]["a"]["data_root"])
    lists = json.loads((root / "datalist.json").read_text("utf-8"))
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "datalist.json").write_text(json.dumps({**lists, "training": lists["training"][:-1]}), "utf-8")
    for file in root.glob("*.nii.gz"):
        (copy / file.name).write_bytes(file.read_bytes())
    local["sites"]["a"]["data_root"] = str(copy)
    planned(tmp_path / "second", local, min_cases=2, experiment="second")
    results = next((tmp_path / "second").rglob("results.json")).read_text("utf-8")
    assert "site 'a': its training cases differ in fewer cases than its min_cases from those of an earlier" in results


# ------------------------------------------------------------------------------------------------ wrong answers

NAMES = [f"{kind}_{axis}" for kind in ("spacing", "size") for axis in range(3)]
GOOD: dict[str, Any] = {"cases": 4, "cropped": 0, "memory": 8} | {
    key: value for name in NAMES for key, value in ((name, [7, 9]), (f"{name}_cases", [1, 3]))
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"spacing_0_cases": [-1, 5]}, "'spacing_0_cases[0]' must lie in [1, 1e+06], got -1"),
    ({"spacing_0_cases": [10**9, 3]}, "'spacing_0_cases[0]' must lie in [1, 1e+06], got 1000000000"),
    ({"spacing_1": [0, 9]}, "'spacing_1[0]' must lie in [1, 20000], got 0"),
    ({"spacing_1": [float("nan"), 9]}, "'spacing_1[0]' must be finite, got nan"),
    ({"size_2": [7.5, 9]}, "'size_2' must hold whole numbers, got 7.5"),
    ({"size_2": [5000, 9]}, "'size_2[0]' must lie in [1, 4096], got 5000"),
    ({"size_2": [7]}, "'size_2_cases' has 2 entries, field 'size_2' has 1"),
    ({"size_2": list(range(1, 2**17))}, "'size_2' has 131071 entries, more than 100000"),
    ({"memory": 0}, "'memory' must lie in [1, 4096], got 0"),
    ({"cases": 5}, "'spacing_0_cases' has 4 cases, field 'cases' 5"),
    ({"cropped": 5}, "'cropped' is above the number of cases"),
    ({"cases": None}, "lacks the field 'cases'"),
    ({"size_0": None, "size_0_cases": None}, "the answer lacks the field 'size_0'"),
    ({"cropped": None}, "the answer lacks the field 'cropped'"),
    ({"foreground": b""}, "'foreground' has 0 entries, asked were 4096"),
    ({"foreground": b"\0" * 8}, "'foreground' has 2 entries, asked were 4096"),
    ({"foreground": np.full(4096, 1.0, "<f4").tobytes()}, "'foreground' has a sum of 4096, above the number"),
]


def message(report: Mapping[str, Any], number: int = 0) -> Message:
    return encode_reply(SiteReply(STATUS_OK, report=dict(report)), number)


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_wrong_answer_is_refused_by_site_field_and_value(changes: dict[str, Any], text: str) -> None:
    report = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    number = 2 * ("foreground" in changes)
    with pytest.raises(ReportError, match=re.escape(text)) as found:
        read_counts("x", message(report, number), number, NAMES, 1)
    assert "'x'" in str(found.value)


@pytest.mark.parametrize("number", [0, 1])
def test_a_site_whose_answer_cannot_be_is_named_and_the_plan_is_of_the_others(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    local, cases = data
    field, perform = ("spacing_0_cases", "resampled_1")[number], SiteWorker.perform

    def lying(self: SiteWorker, request: SiteTask, *more: Any) -> Any:
        reply = perform(self, request, *more)
        if request.name == "plan" and self.site == "b" and field in reply.report:
            reply.report[field] = [-value for value in reply.report[field]]
        return reply

    monkeypatch.setattr(SiteWorker, "perform", lying)
    found = planned(tmp_path, local)
    results = next(tmp_path.rglob("results.json")).read_text("utf-8")
    assert re.search(rf"'b': field '{field}\[0\]' must lie in \[1, [\d.e+]+\], got -", results)
    if not number:  # who lies later has counted in the first question
        same(found, pooled({site: of for site, of in cases.items() if site != "b"}))


def test_a_site_that_adds_cases_to_a_secure_sum_ends_the_plan(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = case_counts._save

    def lying(request: Any, store: Any, numbers: dict[str, Any]) -> None:
        name = next(iter(numbers))
        more = torch.zeros_like(numbers[name])
        more[7] = 1
        save(request, store, {**numbers, name: numbers[name] + more})

    monkeypatch.setattr(case_counts, "_save", lying)
    with pytest.raises(RoundFailed, match=r"spacing_0 is of \d+ cases, .* have 9"):
        planned(tmp_path, data[0], secure="sums", min_sites=3)
    assert not [*tmp_path.rglob(PLAN)]


def test_a_lie_within_the_range_moves_a_median_by_no_more_than_its_cases() -> None:
    honest = [Case((1.0 + k / 100, 1.0, 1.0), (50, 50, 50), 1.0) for k in range(41)]
    lie = [Case((20.0, 20.0, 20.0), (4096, 4096, 4096), 1.0)] * 4
    found = of_cases([*honest, *lie]).target[0]
    assert found == pytest.approx(1.0 + (20 + 2) / 100)  # of 45 sorted values the 23rd
