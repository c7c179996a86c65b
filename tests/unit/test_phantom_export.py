"""Test ``fairflare phantom``: files hold what a task draws, and are marked as synthetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.data.own_images import kind_by_manifest
from fairflare.data.datalist import SPLITS
from fairflare.tasks.base import SiteData
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare_lab.phantoms import PhantomPlan
from fairflare_lab.sets.phantoms import prepare_phantom

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same(drawn: SiteData, stored: SiteData) -> None:
    for split in ("training", "validation", *drawn.test_splits):
        (images, targets), (others, labels) = (
            next(iter(data.batches(split, batch_size=10_000))) for data in (drawn, stored)
        )
        assert torch.equal(images, others)
        assert torch.equal(targets, labels)


def test_the_prostate(tmp_path: Path) -> None:
    written = prepare_phantom("prostate", tmp_path, sites=["site-2", "elsewhere"], seed=3, cases=0.4)
    for site, folder in written.items():
        task = SegmentationTask(phantom_seed=3, phantom_cases=0.4)
        stored = task.open_site(site, {"data_root": str(folder)})
        assert stored.synthetic
        assert "SYNTHETIC" in stored.description
        assert_same(task.open_site(site, {}), stored)
        content = json.loads((folder / "datalist.json").read_text())
        people = [{entry["patient"] for entry in content[split]} for split in SPLITS]
        assert len(set.union(*people)) == sum(map(len, people))
        assert all(len(content[split]) == 4 * len(found) for split, found in zip(SPLITS, people, strict=True))


def test_classes(tmp_path: Path) -> None:
    small = {"num_samples": 120, "num_test": 64, "num_own_test": 40, "corrupted_sites": 1, "min_site": 5}
    small |= {"label_noise_sites": 1, "label_noise": 0.3}
    plan = PhantomPlan(phantom="dermoscopy", num_sites=2, **small)
    written = prepare_phantom("dermoscopy", tmp_path, sites=2, plan=plan, seed=1, image_size=32)
    task = ClassificationTask(
        image_size=(32, 32), phantom_sites=2, phantom_samples=120, phantom_test=64, phantom_own_test=40,
        phantom_seed=1, label_noise_sites=1, label_noise=0.3,
    )  # fmt: skip
    for site, folder in written.items():
        drawn, stored = task.open_site(site, {}), task.open_site(site, {"data_root": str(folder)})
        assert drawn.test_splits == ("test", "test_clean", "test_common", "test_corrupted")
        assert_same(drawn, stored)
        assert stored.class_names == tuple(task.names())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [found["corrupted"] for found in manifest["sites"].values()] == [False, True]
    assert [found.get("label_noise") for found in manifest["sites"].values()] == [None, 0.3]


def test_the_attribute_of_a_person_is_in_the_datalist(tmp_path: Path) -> None:
    args = ["phantom", "dermoscopy7", "--out", str(tmp_path), "--sites", "2", "--size", "32"]
    for setting in ("attributes=true", "num_samples=80", "num_test=56", "num_own_test=28", "attribute_noise=0.3"):
        args += ["--set", setting]
    told = CliRunner().invoke(app, args)
    assert told.exit_code == 0
    assert "A run on it needs: --task classification --set num_classes=7" in told.stdout
    task = ClassificationTask(
        phantom="dermoscopy7", image_size=(32, 32), phantom_sites=2, phantom_samples=80, phantom_test=56,
        phantom_own_test=28, attributes=True, attribute_noise=0.3, num_classes=7,
    )  # fmt: skip
    for site in ("site-1", "site-2"):
        drawn, stored = task.open_site(site, {}), task.open_site(site, {"data_root": str(tmp_path / site)})
        assert stored.attributes == drawn.attributes == {"tone": ("light", "dark", "unknown")}
        assert_same(drawn, stored)
        for split in ("training", "validation", *drawn.test_splits):
            assert list(stored.group_numbers(split, "tone")) == list(drawn.group_numbers(split, "tone"))
        assert {*stored.group_numbers("test", "tone")} == {0, 1}
    counted = CliRunner().invoke(app, ["check-data", str(tmp_path)])
    light = list(drawn.group_numbers("test", "tone")).count(0)
    assert f"test by tone: light {light}, dark {28 - light}" in counted.stdout
    assert kind_by_manifest(tmp_path / "fairflare.json", {"task": None}) == {"task": "classification"}
    few = {"num_sites": 2, "num_samples": 80, "num_test": 56, "num_own_test": 28}
    plan = PhantomPlan(phantom="dermoscopy7", **few)
    prepare_phantom("dermoscopy7", tmp_path, sites=2, plan=plan, image_size=32, overwrite=True)
    assert "attributes" not in (tmp_path / "site-1" / "datalist.json").read_text()


def test_the_names_and_groups_of_a_stored_phantom_are_its_own(tmp_path: Path) -> None:
    plan = PhantomPlan(
        phantom="endoscopy", num_sites=1, num_samples=100, num_test=184, num_own_test=92, corrupted_sites=0
    )
    folder = prepare_phantom("endoscopy", tmp_path, sites=1, plan=plan, image_size=32)["site-1"]
    task = ClassificationTask(image_size=(32, 32), num_classes=23)  # its own phantom is another
    suited = task.suited_to(task.open_site("site-1", {"data_root": str(folder)}))
    assert suited.names()[0] == "bbps-2-3"
    assert [len(members) for members in suited.groups().values()] == [7, 9, 7]


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(
        app, ["phantom", "prostate", "--out", str(tmp_path / "p"), "--sites", "2", "--size", "32", "--cases", "0.2"]
    )
    assert done.exit_code == 0, done.output
    assert "SYNTHETIC images, no patient data" in done.output
    assert "site-2 (site-2): 16 training, 4 validation, 4 test" in done.output
    few = ["--sites", "2", "--size", "32", "--set", "num_samples=80", "--set", "num_test=40"]
    classes = run(app, ["phantom", "fundus", "--out", str(tmp_path / "c"), *few])
    assert classes.exit_code == 0, classes.output
    assert "NOTE" not in classes.output  # nobody's patients are in made-up images
    again = run(app, ["phantom", "prostate", "--out", str(tmp_path / "p"), "--sites", "2"])
    assert again.exit_code == 2
    assert "is there already" in again.output
    for arguments, message in (
        (["prostat"], "did you mean 'prostate'"),
        (["fundus", "--cases", "2"], "--cases is of the prostate"),
        (["fundus", "--set", "num_sample=3"], "did you mean 'num_samples'"),
        (["prostate", "--set", "num_samples=3"], "--set is of phantoms with classes"),
    ):
        done = run(app, ["phantom", *arguments, "--out", str(tmp_path / "x")])
        assert done.exit_code == 2
        assert message in done.output
