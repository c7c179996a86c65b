"""Test ``output=softmax`` of nnU-Net's task: its loss by loops in NumPy, masks by the largest output, and refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.datalist import DataError
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.parts.consistency import Consistency
from fairflare.prediction.predictor import load_predictor
from fairflare.tasks.shared.structures import SegmentationSite
from fairflare.tasks.volumes.nnunet import NnUNetTask
from tests.tiny import run_document
from tests.unit.test_nnunet_task import plan

SMALL = {"phantom_cases": 0.1, "local_steps": 2, "output": "softmax", "num_classes": 2}


def task(**settings: Any) -> NnUNetTask:
    return NnUNetTask(**{"plan": plan(), "num_classes": 2, "output": "softmax", **settings})


def drawn(size: int = 8) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Return outputs of two patches, their labels (-1: does not count), and the targets of two structures."""
    rng = np.random.default_rng(7)
    outputs, labels = rng.normal(size=(2, 3, size, size, size)), rng.integers(-1, 3, (2, size, size, size))
    labels[1, :2] = -1  # more in the second patch
    targets = np.stack([np.where(labels < 0, -1, labels == k) for k in (1, 2)], 1)
    return torch.tensor(outputs).float(), labels, torch.tensor(targets).float()


def by_hand(outputs: np.ndarray, labels: np.ndarray, of_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute 1 - Dice of each patch (or of the batch) and structure, and the mean cross-entropy of each patch."""
    each = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    entropies = []
    parts = np.zeros((2, len(outputs), 2))  # twice the overlap, the sum; of patches and structures
    for patch, (probable, of) in enumerate(zip(each, labels, strict=True)):
        logs = [-np.log(probable[(of[place], *place)]) for place in np.ndindex(of.shape) if of[place] >= 0]
        entropies.append(np.mean(logs))
        for k in (1, 2):
            inside = probable[k][of >= 0]
            parts[:, patch, k - 1] = 2 * inside[of[of >= 0] == k].sum(), inside.sum() + (of == k).sum()
    parts = parts.sum(1, keepdims=True) if of_batch else parts
    return 1 - (parts[0] + 1e-5) / (parts[1] + 1e-5), np.array(entropies)


@pytest.mark.parametrize("of_batch", [False, True])
def test_the_loss_is_nnunets_by_loops(of_batch: bool) -> None:
    outputs, labels, targets = drawn()
    made = copy.deepcopy(plan())
    made["configurations"]["3d_fullres"]["batch_dice"] = of_batch
    dices, entropies = by_hand(outputs.double().numpy(), labels, of_batch)
    assert task(plan=made).loss(outputs, targets).item() == pytest.approx(dices.mean() + entropies.mean(), abs=1e-5)
    dices, entropies = by_hand(outputs.double().numpy(), labels, False)
    each = task().sample_losses(outputs, targets)
    assert each.tolist() == pytest.approx((dices.mean(1) + entropies).tolist(), abs=1e-5)
    assert task().structure_losses(outputs, targets).tolist() == pytest.approx(
        dices.mean(0) + entropies.mean(), abs=1e-5
    )


def test_each_resolution_counts_by_its_weight() -> None:
    outputs, labels, targets = drawn()
    half, coarsest = (drawn(size)[0] for size in (4, 2))
    vars(outputs)["coarser"] = [half, coarsest]
    nearest = labels[:, 1::2, 1::2, 1::2]
    fine, coarse = (
        sum(part.mean() for part in by_hand(one.double().numpy(), of, False))
        for one, of in ((outputs, labels), (half, nearest))
    )
    assert task().loss(outputs, targets).item() == pytest.approx((2 * fine + coarse) / 3, abs=1e-5)


def test_gradients_pass_all_outputs_but_where_nothing_counts() -> None:
    outputs, labels, targets = drawn()
    task().loss(outputs.requires_grad_(), targets).backward()
    assert outputs.grad is not None
    moved = outputs.grad.abs().sum(1) > 0
    assert torch.equal(moved, torch.tensor(labels >= 0))
    assert (outputs.grad.abs().sum((0, 2, 3, 4)) > 0).all()  # also the background's


def test_a_patch_of_which_nothing_counts_has_no_entropy() -> None:
    outputs, _, targets = drawn()
    found = task().sample_losses(outputs, torch.full_like(targets, -1))
    assert found.tolist() == pytest.approx([0, 0], abs=1e-5)


def test_the_most_probable_is_marked_though_its_probability_is_below_half() -> None:
    logs = torch.tensor([[0.3, 0.3, 0.4], [0.4, 0.35, 0.25], [0.1, 0.2, 0.7], [0.34, 0.36, 0.3]]).log()
    outputs = logs.T.reshape(1, 3, 4, 1, 1)
    probabilities = task().probabilities(outputs)
    assert torch.allclose(probabilities.flatten(2), logs.exp().T[1:][None])
    assert task().decide(probabilities).flatten(2).tolist() == [[[0, 0, 0, 1], [1, 0, 1, 0]]]
    assert torch.equal(task().probabilities(outputs[0]), probabilities[0])
    assert task().decide(probabilities[0]).flatten(1).tolist() == [[0, 0, 0, 1], [1, 0, 1, 0]]
    plain = task(output="sigmoid")
    assert plain.decide(probabilities) is probabilities
    drawn_outputs = drawn()[0]
    marked = task().decide(task().probabilities(drawn_outputs))
    wanted = torch.stack([drawn_outputs.argmax(1) == k for k in (1, 2)], 1)
    assert torch.equal(marked > 0.5, wanted)


def test_evaluation_is_of_the_largest_output() -> None:
    outputs, labels, targets = drawn()

    class Given(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return outputs[images[:, 0, 0, 0, 0].long()]

    learned = task()
    learned.__dict__["outputs"] = lambda model, inputs: model(inputs)
    images = torch.arange(2.0).view(2, 1, 1, 1, 1)
    found = learned.evaluate(Given(), [(images[k : k + 1], targets[k : k + 1]) for k in (0, 1)], "cpu")
    marked, counts = outputs.argmax(1).numpy(), labels >= 0
    dices = []
    for n, k in np.ndindex(2, 2):
        here, there = (marked[n] == k + 1) & counts[n], labels[n] == k + 1
        dices.append(2 * (here & there).sum() / (here.sum() + there.sum()))
    assert [found["dice_class_1"], found["dice_class_2"]] == pytest.approx(np.reshape(dices, (2, 2)).mean(0).tolist())
    assert found["loss"] == pytest.approx(float(learned.sample_losses(outputs, targets).mean()), abs=1e-5)


def test_the_network_has_an_output_of_the_background_at_each_resolution() -> None:
    images = torch.randn(1, 1, 20, 24, 24)
    outputs = task().build_model()(images)
    assert [heads.shape[1] for heads in (outputs, *vars(outputs)["coarser"])] == [3, 3]
    task().check_outputs(task().build_model().eval(), images)
    with pytest.raises(DataError, match=r"\(1, 3, 20, 24, 24\) .*num_classes=2"):
        task().check_outputs(task(output="sigmoid").build_model().eval(), images)


def test_structures_that_share_a_label_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got labels=\[\[1, 2\], \[2\]\]; name each"):
        task(labels=[[1, 2], [2]])
    assert task(labels=[[1, 3], [2]]).exclusive
    with pytest.raises(ValueError, match="output must be one of"):
        task(output="argmax")


def test_synthetic_structures_exclude_each_other() -> None:
    data = task(phantom_cases=0.2).open_site("x", {"phantom": True})
    targets = torch.cat([targets for _, targets in data.batches("training", batch_size=2, shuffle_seed=3)])
    assert targets.clamp(min=0).sum(1).max() == 1
    assert targets.clamp(min=0).sum((0, 2, 3, 4)).min() > 0


def test_a_mean_teacher_compares_softmaxes() -> None:
    data = SimpleNamespace(lists=(), num_samples=lambda split: 1)
    run: Any = SimpleNamespace(task=task(), data=data, current_round=0, num_rounds=1)
    term = Consistency(SimpleNamespace(batch_size=1, augment=False), run, torch.nn.Identity())  # type: ignore[arg-type]
    outputs = drawn()[0]
    assert torch.equal(term.probable(outputs), outputs.softmax(1)[:, 1:])


# ------------------------------------------------------------------------------------------------ whole runs


def volumes(folder: Path, labels: tuple[int, ...]) -> dict[str, Any]:
    """Write a site's volumes and masks with these labels."""
    folder.mkdir(parents=True)
    rng, lists = np.random.default_rng([*folder.name.encode()]), dict[str, list[Any]]()
    for number, split in enumerate(("training", "training", "validation", "test")):
        mask = np.zeros((24, 24, 20), np.uint8)
        for label in labels:
            mask[4 : 4 + 6 * label, 6:14, 4:12][mask[4 : 4 + 6 * label, 6:14, 4:12] == 0] = label
        image = (rng.normal(100, 10, mask.shape) + 60 * mask).astype(np.float32)
        for name, array in (("image", image), ("mask", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([4.0, 4, 4, 1])), folder / f"{name}{number}.nii.gz")
        lists.setdefault(split, []).append({"image": f"image{number}.nii.gz", "label": f"mask{number}.nii.gz"})
    (folder / "datalist.json").write_text(json.dumps(lists), "utf-8")
    return {"data_root": str(folder)}


def test_sites_that_annotate_different_structures_are_refused_before_the_first_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"site 'a': .*output=softmax, which may"):
        task().read_annotated("a", SegmentationSite(structures=[1]))
    assert task().read_annotated("a", SegmentationSite(structures="all")) == (0, 1)
    sites = {"a": {**volumes(tmp_path / "a", (1,)), "structures": [1]}, "b": volumes(tmp_path / "b", (1, 2))}
    learned = make_plan("fed_avg", task="nnunet", sites=["a", "b"], num_rounds=1, settings={"plan": plan(), **SMALL})
    with pytest.raises(RoundFailed, match=r"check, .*site 'a': key 'structures' "):
        run_local(learned, tmp_path / "run", {"sites": sites})
    assert "site 'a': structures does not name all, and task (Task) has output=softmax" in caplog.text
    assert not [*tmp_path.rglob("*.pt")]


def test_a_run_is_trained_tested_and_predicts_its_largest_output(tmp_path: Path) -> None:
    sites = {name: volumes(tmp_path / name, (1, 2)) for name in ("a", "b")}
    settings = {"plan": plan(), **SMALL}
    folder = run_local(
        make_plan("fed_lwr", task="nnunet", sites=["a", "b"], num_rounds=1, settings=settings), tmp_path / "run",
        {"sites": sites},
    )  # fmt: skip
    results = run_document(folder)
    assert results["status"] == "completed"
    assert {"dice_class_1", "dice_class_2", "loss_class_2"} <= set(results["test"]["a"])
    image = tmp_path / "a" / "image3.nii.gz"
    predictor = load_predictor(folder.parent)
    (found,) = predictor(image)
    assert found.probabilities.shape[0] == 2
    assert float(found.probabilities.sum(0).max()) < 1
    made = CliRunner().invoke(app, ["predict", str(folder.parent), str(image), "--out", str(tmp_path / "out")])
    assert made.exit_code == 0, made.output
    mask = np.asarray(nibabel.load(tmp_path / "out" / "image3_mask.nii.gz").dataobj)
    every = torch.cat([1 - found.probabilities.sum(0, keepdim=True), found.probabilities])
    assert np.array_equal(mask.swapaxes(0, 1), every.argmax(0).numpy())
    refused = CliRunner().invoke(
        app, ["predict", str(folder.parent), str(image), "--out", str(tmp_path / "new"), "--threshold", "0.4"]
    )
    assert refused.exit_code == 2
    assert "--threshold: of this model's structures the most probable is marked (output=softmax)" in refused.stderr
    again = CliRunner().invoke(app, ["predict", str(folder.parent), "--as", "nnunet", str(tmp_path / "nnunet")])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "nnunet" / "dataset.json").read_text())["labels"] == {
        "background": 0, "class_1": 1, "class_2": 2,
    }  # fmt: skip
