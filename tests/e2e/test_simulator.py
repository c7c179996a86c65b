"""Test jobs through the real FLARE simulator."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe
from tests.bundles import two_sites, write_bundle
from tests.federation.test_channels import volumes
from tests.tiny import run_document
from tests.unit.test_nnunet_task import plan as tiny_plan

from .conftest import ROOT, run_simulator, tiny_recipe

pytestmark = pytest.mark.e2e


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events*")
    found = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def global_model(run) -> dict[str, torch.Tensor]:
    path = run.workspace / "server" / "simulate_job" / "FL_global_model.pt"
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def lwr(tmp_path_factory):
    """Run two rounds with a worker for each of two sites, for several tests."""
    root = tmp_path_factory.mktemp("lwr")
    tiny_recipe("fed_lwr", settings={"local_epochs": 2}, sites=2, keep_local_models=True).export(str(root))
    run = run_simulator(root, root / "fed_lwr", threads=2)
    assert run.code == 0, run.log[-3000:]
    return run


def test_the_bits_of_one_process(lwr, tmp_path):
    here = run_local(tiny_recipe("fed_lwr", settings={"local_epochs": 2}, sites=2).plan, tmp_path / "here")
    single = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in global_model(lwr).items():
        assert torch.equal(tensor, single[name]), name
    assert lwr.results["test"] == run_document(here)["test"]


def test_table_results_and_curves(lwr):
    run = lwr
    results = run.results
    dice = {site: values["dice"] for site, values in results["test"].items()}
    assert sorted(dice) == ["site-1", "site-2"]
    mean = sum(dice.values()) / 2
    std = math.sqrt(sum((d - mean) ** 2 for d in dice.values()) / 2)
    summary = results["fairness"]["dice"]
    assert summary["mean"] == pytest.approx(mean)
    assert summary["std"] == pytest.approx(std)
    assert summary["worst"] == min(dice.values())
    assert "SYNTHETIC" in run.log
    for word in ("average", "std", "worst"):
        assert word in run.log
    assert [r["current_round"] for r in results["rounds"]] == [0, 1]
    assert results["info"]["config"]["training"]["args"]["learning_rate"] == 1e-3
    assert set(results["info"]["versions"]) >= {"fairflare", "nvflare", "torch", "monai", "python"}
    curves = of_tensorboard(run.workspace / "server" / "simulate_job" / "tb_events")
    layers = results["rounds"][0]["layers"]
    assert len(layers) == 41
    for site in dice:
        assert [step for step, _ in curves[f"train_loss/{site}"]] == [0, 1]
        assert curves[f"test_dice/{site}"][0][1] == pytest.approx(dice[site], abs=1e-6)
        tags = {
            f"validation_dice/{site}",
            *(f"{kind}/{layer}/{site}" for kind in ("cka", "weight") for layer in layers),
        }
        assert tags <= curves.keys()
    assert {"test_dice/std", "validation_dice/worst"} <= curves.keys()


@pytest.mark.long
def test_with_a_process_for_each_task_it_gives_the_same_bits(job, simulate, tmp_path):
    """Do one round where FLARE starts a process for each task, as workers are fewer than sites."""
    same = {"sites": 2, "num_rounds": 1, "settings": {"local_epochs": 1}}
    run = simulate(job("fed_lwr", **same), threads=1)
    assert run.code == 0, run.log[-3000:]
    # Check, training, anchor and test of the two sites.
    assert run.log.count("ClientTaskWorker started to run") >= 8
    whole = run_local(tiny_recipe("fed_lwr", **same).plan, tmp_path / "whole")
    single = torch.load(whole.parent / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in global_model(run).items():
        assert torch.equal(tensor, single[name]), name
    assert run.results["test"] == run_document(whole)["test"]
    (there,), (here,) = run.results["rounds"], run_document(whole)["rounds"]
    assert there["layers"] == here["layers"]


@pytest.mark.long
def test_the_task_of_a_plan_gives_the_bits_of_one_process(tmp_path):
    settings = {
        "plan": tiny_plan(), "num_classes": 2, "phantom_cases": 0.2, "local_steps": 1, "batch_size": 1, "overlap": 0.0,
    }  # fmt: skip
    recipe = FairRecipe("fed_lwr", task="nnunet", sites=2, num_rounds=1, settings=settings)
    recipe.export(str(tmp_path / "jobs"))
    run = run_simulator(tmp_path, tmp_path / "jobs" / recipe.name, threads=2)
    assert run.code == 0, run.log[-3000:]
    here = run_local(recipe.plan, tmp_path / "here")
    single = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
    assert global_model(run).keys() == single.keys()
    assert all(torch.equal(tensor, single[name]) for name, tensor in global_model(run).items())
    assert run.results["test"] == run_document(here)["test"]


OWN_TASK = """
import torch
from monai.networks.nets import AttentionUnet

from fairflare.tasks.base import SiteData
from fairflare.tasks.segmentation import SegmentationTask


class Discs(SiteData):
    synthetic = True
    description = "bright discs on noise"

    def __init__(self, site):
        g = torch.Generator().manual_seed(int(site.split("-")[1]))
        centre = torch.rand(16, 2, 1, 1, generator=g) * 16 + 8
        y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        self.masks = (((y - centre[:, :1]) ** 2 + (x - centre[:, 1:]) ** 2) < 36).float()
        self.images = self.masks + 0.2 * torch.randn(16, 1, 32, 32, generator=g)
        self.parts = {"training": slice(0, 8), "validation": slice(8, 10), "test": slice(10, 16)}

    def num_samples(self, split):
        return len(self.images[self.parts[split]])

    def batches(self, split, *, batch_size, shuffle_seed=None, augment=False):
        images, masks = self.images[self.parts[split]], self.masks[self.parts[split]]
        if shuffle_seed is not None:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(shuffle_seed))
            images, masks = images[order], masks[order]
        return list(zip(images.split(batch_size), masks.split(batch_size)))


class Task(SegmentationTask):
    def build_model(self):
        return AttentionUnet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2))

    def open_site(self, site, settings):
        return Discs(site)
"""


@pytest.mark.long
def test_own_network_and_data_by_editing_task_py(simulate, tmp_path):
    """Replace ``task.py`` in the published job folder; besides, one round at two sites in place of three at six."""
    folder = tmp_path / "jobs" / "fed_lwr"
    shutil.copytree(ROOT / "jobs" / "fed_lwr", folder)
    (folder / "app" / "custom" / "task.py").write_text(OWN_TASK)
    for file, before, after in (
        ("app/config/config_fed_server.json", '"num_rounds": 3,', '"num_rounds": 1,'),
        ("meta.json", "".join(f',\n            "site-{k}"' for k in range(3, 7)), ""),
    ):
        text = (folder / file).read_text()
        assert text.count(before) == 1
        (folder / file).write_text(text.replace(before, after))
    run = simulate(folder, threads=2)
    assert run.code == 0, run.log[-3000:]
    assert sorted(run.results["test"]) == ["site-1", "site-2"]
    names = list(run.results["rounds"][0]["layers"])
    assert any("attention" in name for name in names)


@pytest.mark.long
def test_a_monai_bundle_gives_the_bits_of_one_process(simulate, tmp_path):
    """Check a bundle that the job carries, with volumes of the sites' own; Fed-LWR, two rounds."""
    local = two_sites(tmp_path / "sites")
    recipe = FairRecipe("fed_lwr", monai_bundle=write_bundle(tmp_path / "bundle"), sites=2, num_rounds=2)
    recipe.export(str(tmp_path / "jobs"))
    run = simulate(tmp_path / "jobs" / "fed_lwr", threads=2, local=local)
    assert run.code == 0, run.log[-3000:]
    here = run_local(recipe.plan, tmp_path / "here", local)
    single = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in global_model(run).items():
        assert torch.equal(tensor, single[name]), name
    document = run_document(here)
    assert run.results["test"] == document["test"]
    checksums = [found["info"]["task_file"]["monai_bundle_sha256"] for found in (run.results, document)]
    assert checksums[0] == checksums[1]
    carried = run.workspace / "server" / "simulate_job" / "app_server"
    assert (carried / "monai_bundle" / "configs" / "train.json").is_file()


@pytest.mark.long
def test_a_site_without_a_channel_gives_the_bits_of_one_process(simulate, tmp_path):
    local = {"sites": {site: volumes(tmp_path / site, ["T2w", "ADC"]) for site in ("A", "B")}}
    local["sites"]["C"] = volumes(tmp_path / "C", ["T2w"], channels=["T2w"])
    settings = {"channels": ["T2w", "ADC"], "features": [4, 4, 8, 8, 8, 4], "patches": 1, "local_epochs": 1}
    form = {"task": "volume_segmentation", "sites": [*local["sites"]], "num_rounds": 1, "settings": settings}
    recipe = FairRecipe("fed_avg", **form)
    recipe.export(str(tmp_path / "jobs"))
    run = simulate(tmp_path / "jobs" / "fed_avg", threads=3, local=local)
    assert run.code == 0, run.log[-3000:]
    here = run_local(recipe.plan, tmp_path / "here", local)
    single = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in global_model(run).items():
        assert torch.equal(tensor, single[name]), name
    assert run.results["info"]["channels"] == {"T2w": ["A", "B", "C"], "ADC": ["A", "B"]}
    assert run.results["test"] == run_document(here)["test"]


@pytest.mark.long
def test_given_models_have_the_figures_of_their_final_test(simulate, tmp_path):
    """Two models of a task of their own, whose code the job carries; of their differences, each is paired by image."""
    (tmp_path / "task.py").write_text(OWN_TASK)
    runs, names = {}, ("one", "two")
    for seed, name in enumerate(names):
        how = {"sites": 2, "num_rounds": 1, "seed": seed, "bootstrap": 50}
        recipe = FairRecipe("fed_avg", task_file=tmp_path / "task.py", settings={"local_epochs": 1}, **how)
        runs[name] = run_document(run_local(recipe.plan, tmp_path / name))
    options = ["--task-file", tmp_path / "task.py", "--last", "--sites", "site-1,site-2", "--set", "bootstrap=50"]
    places = [tmp_path / name for name in names]
    what = ["evaluate", *places, *options, "--job", tmp_path / "jobs", "--bundle"]
    assert (made := CliRunner().invoke(app, [*map(str, what)])).exit_code == 0, made.output
    run = simulate(tmp_path / "jobs" / "evaluate", threads=2)
    assert run.code == 0, run.log[-3000:]
    folders = [run.folder.parent / "evaluation" / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        found = run_document(folder / "fairflare")
        for key in ("test", "inequality", "fairness", "resampled"):
            assert found[key] == runs[name][key]
    assert runs["one"]["test"] != runs["two"]["test"]
    kept = {path.parts[-4] for name in names for path in run.workspace.rglob(f"{name}.*")}
    assert kept == {"simulate_job"}, "of the server alone"
    shown = json.loads(CliRunner().invoke(app, ["show", *map(str, folders), "--json"]).stdout)["comparison"]
    assert {one["measure"] for one in shown["differences"]} == {"average", "std", "worst", "site-1", "site-2"}
    assert all(one["p"] is not None for one in shown["differences"])
