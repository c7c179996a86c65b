"""Test a MONAI bundle's task on a site's volumes: patches, whole volumes, metric; against MONAI's own parts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.metrics import DiceMetric, MeanIoU
from monai.networks.utils import one_hot

from fairflare.base.cases.resampling import draws, units_of
from fairflare.base.task import SiteData
from fairflare.cli.data.doctor import sealing
from fairflare.data.datalist import DataError
from fairflare.federation.plan.plan import make_plan
from fairflare.tasks.bundle import MonaiBundleTask, seal_settings
from fairflare_lab.phantoms import ABDOMEN
from fairflare_lab.sets.phantoms import prepare_phantom
from tests.bundles import train_config, write_bundle, write_volumes

pytestmark = pytest.mark.usefixtures("one_thread")


def task_of(folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> MonaiBundleTask:
    found = make_plan("fed_avg", monai_bundle=write_bundle(folder, config), sites=2, settings=settings).task
    assert isinstance(found, MonaiBundleTask)
    return found


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MonaiBundleTask:
    return task_of(tmp_path_factory.mktemp("bundle") / "b")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_volumes(tmp_path_factory.mktemp("site"))


@pytest.fixture
def data(task: MonaiBundleTask, settings: dict[str, Any]) -> SiteData:
    return task.open_site("site-1", settings)


def gone_through(data: SiteData, split: str = "training", **how: Any) -> list[torch.Tensor]:
    batches = list(data.batches(split, **{"batch_size": 2, **how}))
    return [tensor for batch in batches for tensor in batch]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


# ------------------------------------------------------------------------------------------------ data


def test_patches_and_whole_volumes(data: SiteData) -> None:
    assert [data.num_samples(split) for split in ("training", "validation", "test")] == [3, 2, 2]
    assert "3 training, 2 validation, 2 test" in data.description
    assert data.class_counts("training") is None
    patches = list(data.batches("training", batch_size=2, shuffle_seed=0, augment=True))
    assert [tuple(inputs.shape) for inputs, _ in patches] == [(4, 1, 16, 16, 16), (2, 1, 16, 16, 16)]  # 2 of each
    measured = list(data.batches("training", batch_size=2))
    assert [len(inputs) for inputs, _ in measured] == [2, 1]  # one of each
    assert len(measured) == len(data.batches("training", batch_size=2)) == 2
    whole = list(data.batches("validation", batch_size=8))
    assert [tuple(inputs.shape[2:]) for inputs, _ in whole] == [(20, 18, 17), (21, 19, 18)]  # one at a time
    for inputs, targets in (*patches, *measured, *whole):
        assert type(inputs) is type(targets) is torch.Tensor
        assert inputs.device.type == "cpu"  # whatever device the bundle's transforms name
        assert inputs.dtype == torch.float32
        assert inputs.shape[2:] == targets.shape[2:]
        assert set(targets.unique().tolist()) <= {0, 1}
    assert data.order("test", 1) in ([0, 1], [1, 0])
    assert data.order("training", 1) is None  # an image may give several patches


def test_a_seed_decides_and_nothing_else(data: SiteData, task: MonaiBundleTask, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = gone_through(data, shuffle_seed=5, augment=True)
    assert same(first, gone_through(data, shuffle_seed=5, augment=True))
    assert not same(first, gone_through(data, shuffle_seed=6, augment=True))
    measured = gone_through(data)
    assert same(measured, gone_through(data))
    assert torch.equal(before, torch.get_rng_state())
    for more in ({"cache_bytes": 0}, {"num_workers": 3}, {"cache_bytes": 40_000, "num_workers": 2}):
        other = task.open_site("site-1", {**settings, **more})
        assert same(first, gone_through(other, shuffle_seed=5, augment=True))
        assert same(measured, gone_through(other))
    alone = gone_through(data, shuffle_seed=5, augment=True, batch_size=1)
    assert torch.equal(torch.cat(first[::2]), torch.cat(alone[::2]))


def test_every_epoch_has_cuts_and_changes_of_its_own(data: SiteData) -> None:
    """Check two seeds that put the images into the same order."""
    count = data.num_samples("training")
    orders = [torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(100)]
    other = orders.index(orders[0], 1)
    assert not same(*(gone_through(data, shuffle_seed=seed, augment=True) for seed in (0, other)))


def test_what_is_measured_on_is_not_changed_at_random(data: SiteData) -> None:
    """Check the same patch for any order, with grey values that occur in the volume."""
    inputs = torch.cat(gone_through(data, batch_size=1)[::2])
    other = torch.cat(gone_through(data, batch_size=1, shuffle_seed=4)[::2])
    assert sorted(map(float, inputs.flatten(1).sum(1))) == sorted(map(float, other.flatten(1).sum(1)))
    assert inputs.max() <= 1  # RandScaleIntensityd, which always changes, was left out
    assert torch.cat(gone_through(data, shuffle_seed=0, augment=True)[::2]).max() > 1


def test_a_volume_that_cannot_be_read(task: MonaiBundleTask, tmp_path: Path) -> None:
    settings = write_volumes(tmp_path)
    (tmp_path / "images" / "training1.nii").write_bytes(b"no volume")
    data = task.open_site("site-1", settings)
    with pytest.raises(DataError, match=r"site-1': .*training1.nii' .*'training'") as refused:
        list(data.batches("training", batch_size=1))
    assert "training1" not in refused.value.public
    assert "an image of split 'training' cannot be prepared by the MONAI bundle's transforms" in refused.value.public


PLACED = np.diag([1.0, 1.0, 2.0, 1.0])
FROM_BEHIND = np.array([[-1.0, 0, 0, 19], [0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]])  # the first axis runs back


def mask_with(folder: Path, affine: Any, turned: bool) -> dict[str, Any]:
    """Write volumes whose first training mask has this affine; turned: its voxels are stored as the affine says."""
    settings = write_volumes(folder)
    for kind, of in (("images", PLACED), ("labels", affine)):
        file = folder / kind / "training0.nii"
        array = np.array(nibabel.load(file).dataobj)  # a copy: the file is written anew
        back = turned and kind == "labels"
        nibabel.save(nibabel.Nifti1Image(array[::-1] if back else array, of), file)
    return settings


@pytest.mark.parametrize(
    ("affine", "turned", "message"),
    [
        (PLACED, False, None),
        (FROM_BEHIND, True, "otherwise.*`Orientationd` on both keys"),
        (np.eye(4), False, "the label is not where the image is"),
        (PLACED + np.array([[0, 0, 0, 0], [0, 0, 0, 3], [0] * 4, [0] * 4]), False, "the label is not where the image"),
    ],
)
def test_a_label_that_does_not_lie_on_its_image(
    task: MonaiBundleTask, tmp_path: Path, affine: Any, turned: bool, message: str | None
) -> None:
    """Check that a bundle's transforms leave it in place, and that learning and measuring go voxel on voxel."""
    data = task.open_site("site-1", mask_with(tmp_path, affine, turned))
    if message is None:
        assert len(gone_through(data)) == 4
        return
    with pytest.raises(DataError, match=message) as refused:
        gone_through(data)
    assert "training0" in str(refused.value)


def test_a_bundle_that_turns_image_and_label_takes_both_ways_of_storing_one(tmp_path: Path) -> None:
    config = train_config()
    config["train"]["deterministic_transforms"][1:1] = [
        {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]},
        {"_target_": "Orientationd", "keys": ["image", "label"], "axcodes": "RAS"},
    ]
    del config["train"]["deterministic_transforms"][3]
    task = task_of(tmp_path / "b", config)
    plain = task.open_site("site-1", mask_with(tmp_path / "plain", PLACED, turned=False))
    back = task.open_site("site-1", mask_with(tmp_path / "back", FROM_BEHIND, turned=True))
    assert same(gone_through(plain), gone_through(back))


def test_what_a_site_may_not_list_or_set(task: MonaiBundleTask, tmp_path: Path) -> None:
    settings = write_volumes(tmp_path)
    with pytest.raises(DataError, match=r"'data_root' is not set, .*MONAI bundle"):
        task.open_site("site-1", {})
    with pytest.raises(DataError, match="unknown key 'decoded_bytes'"):
        task.open_site("site-1", {**settings, "decoded_bytes": 3})
    content = json.loads((tmp_path / "datalist.json").read_text())
    content["test"][0]["slice"] = 3
    (tmp_path / "datalist.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="split 'test' names slices of volumes"):
        task.open_site("site-1", settings)


def classifier() -> dict[str, Any]:
    """Return the configuration of a classifier as the model zoo writes them: the label is no file."""
    config = train_config(dims=2, classes=3)
    config["network_def"] = {"_target_": "DenseNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 3}
    config["network_def"] |= {"init_features": 8, "growth_rate": 4, "block_config": [1, 1]}
    config["loss"] = {"_target_": "torch.nn.CrossEntropyLoss"}
    config["train"]["deterministic_transforms"] = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Resized", "keys": "image", "spatial_size": [32, 32]},
    ]
    config["train"]["random_transforms"] = []
    config["validate"]["inferer"] = {"_target_": "SimpleInferer"}
    picks = "$monai.handlers.from_engine(['pred', 'label'])"
    config["validate"]["key_metric"] = {"acc": {"_target_": "ignite.metrics.Accuracy", "output_transform": picks}}
    return config


def test_a_class_number_is_the_label_where_the_bundle_loads_none(tmp_path: Path) -> None:
    """Check a classification bundle, sealed, on a datalist as prepare writes it; accuracy by hand."""
    task = MonaiBundleTask(**seal_settings(write_bundle(tmp_path / "b", classifier()), ["train"]))
    settings = write_volumes(tmp_path / "site", size=(20, 18))
    file = tmp_path / "site" / "datalist.json"
    content = json.loads(file.read_text())
    for split in ("training", "validation", "test"):
        for number, entry in enumerate(content[split]):
            entry["label"] = number % 3
    file.write_text(json.dumps(content))
    data = task.open_site("a", settings)
    inputs, targets = next(iter(data.batches("training", batch_size=3)))
    assert (inputs.shape, targets.tolist()) == ((3, 1, 32, 32), [0, 1, 2])
    model = task.build_model().eval()
    task.check_site(model, data, "cpu")
    found = task.evaluate(model, data.batches("test", batch_size=2), "cpu")
    right = [int(model(image).argmax(1) == label) for image, label in data.batches("test", batch_size=1)]
    # Accuracy is of one-hot vectors over the three classes, as ignite's: two of three entries of a wrong one differ.
    assert found["accuracy"] == pytest.approx(np.mean([1 if hit else 1 / 3 for hit in right]))
    content["training"][0]["label"] = 3
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"up to 3, .*network has 3 channels"):
        task.check_site(model, task.open_site("a", settings), "cpu")
    content["training"][0]["label"] = "labels/training0.nii"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="'label' of entry 0 of 'training' must"):
        task.open_site("a", settings)
    assert "a class's number" in next(f.text for f in sealing(tmp_path / "b", {}) if f.what == "data it wants")


def on_channels(number: int) -> dict[str, Any]:
    config = train_config()
    config["network_def"]["in_channels"] = number
    return config


def crooked() -> dict[str, Any]:
    config = train_config()
    config["network_def"]["in_channels"] = 2
    config["train"]["deterministic_transforms"].append({"_target_": "SqueezeDimd", "keys": "image", "dim": 0})
    return config


@pytest.mark.parametrize(
    ("config", "state", "text"),
    [
        (on_channels(1), "ok", "yes: it trains at sites that permit no code (export --preinstalled); tried on 96 x 96 "
         "x 96, 1 channel(s), a file as the label"),
        (on_channels(2), "ok", "tried on 96 x 96 x 96, 2 channel(s), a file as the label"),
        (classifier(), "ok", "tried on 96 x 96, 1 channel(s), the number of a class as the label"),
        (crooked(), "problem", "no: its parts can be made, but site 'trial': image '"),
    ],
)  # fmt: skip
def test_a_bundle_is_called_sealed_after_a_step_from_a_datalist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], state: str, text: str
) -> None:
    """Check what is said, that the optimizer took one step, and that nothing is left behind."""
    steps: list[int] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(MonaiBundleTask, "make_optimizer", counting(MonaiBundleTask.make_optimizer, steps))
    (said,) = (one for one in sealing(write_bundle(tmp_path / "b", config), {}) if one.what == "sealed")
    assert said.state == state
    assert text in said.text
    assert steps == [1] * (state == "ok")
    assert not [*(tmp_path / "t").iterdir()]


def counting(make: Any, steps: list[int]) -> Any:
    def made(task: MonaiBundleTask, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        before = [p.detach().clone() for p in parameters]
        optimizer = make(task, parameters)
        step = optimizer.step

        def counted() -> None:
            step()
            steps.append(int(not all(map(torch.equal, before, parameters))))

        optimizer.step = counted
        return optimizer  # type: ignore[no-any-return]

    return made


def test_an_image_may_be_a_list_of_files_a_channel_each(tmp_path: Path) -> None:
    """Check channels in the order of the list, a missing file, and a file that is in two splits."""
    config = train_config()
    config["network_def"]["in_channels"] = 2
    task = task_of(tmp_path / "b", config)
    settings = write_volumes(tmp_path / "site")
    file = tmp_path / "site" / "datalist.json"
    content = json.loads(file.read_text())
    for split in ("training", "validation", "test"):
        for entry in content[split]:
            first = nibabel.load(tmp_path / "site" / entry["image"])
            second = entry["image"].replace("images/", "images/other_")
            nibabel.save(
                nibabel.Nifti1Image(-first.get_fdata(dtype=np.float32), first.affine), tmp_path / "site" / second
            )
            entry["image"] = [entry["image"], second]
    file.write_text(json.dumps(content))
    data = task.open_site("a", settings)
    (image, _), *_ = data.batches("test", batch_size=1)
    assert image.shape[1] == 2
    assert torch.allclose(image[0, 0], 1 - image[0, 1], atol=1e-5)  # scaled together, x and -x add up to 1
    task.check_site(task.build_model(), data, "cpu")
    before = data.datalist.fingerprint("test")  # type: ignore[attr-defined]
    for odd, message in (
        ([content["test"][0]["image"][0], "images/nowhere.nii"], "nowhere.nii', does not exist"),
        ([content["test"][0]["image"][0], content["training"][0]["image"][1]], "is in both 'training' and 'test'"),
        ([], r"a list of 1 different files, got \[\]"),
    ):
        changed = json.loads(json.dumps(content))
        changed["test"][0]["image"] = odd
        file.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            task.open_site("a", settings)
    content["test"][0]["image"].reverse()
    file.write_text(json.dumps(content))
    assert task.open_site("a", settings).datalist.fingerprint("test") != before  # type: ignore[attr-defined]


def test_training_images_of_different_sizes(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = train_config()
    config["train"]["random_transforms"] = []
    data = task_of(tmp_path / "b", config).open_site("site-1", settings)
    with pytest.raises(DataError, match=r"one training batch \(1x2\dx\d+x\d+, 1x2\dx"):
        list(data.batches("training", batch_size=2, shuffle_seed=0, augment=True))
    assert len(list(data.batches("training", batch_size=1))) == 3


# ------------------------------------------------------------------------------------------------ evaluation


def plainly(model: torch.nn.Module, data: SiteData, metric: Any) -> tuple[float, float, torch.Tensor]:
    """Compute metric, loss and each image's values as one would write them with MONAI alone."""
    from monai.losses import DiceCELoss

    losses, model = [], model.eval()
    values = []
    with torch.no_grad():
        for inputs, targets in data.batches("test", batch_size=1):
            outputs = sliding_window_inference(inputs, (16, 16, 16), 2, model, overlap=0.25)
            losses.append(float(DiceCELoss(to_onehot_y=True, softmax=True)(outputs, targets)))
            classes = outputs.shape[1]
            found = one_hot(outputs.argmax(1, keepdim=True), classes)
            values.append(metric(found, one_hot(targets, classes)))
    return float(metric.aggregate()), sum(losses) / len(losses), torch.cat(values)


def test_metric_and_loss_are_those_of_the_bundle(task: MonaiBundleTask, data: SiteData) -> None:
    torch.manual_seed(1)
    model = task.build_model()
    metric = DiceMetric(include_background=False, reduction="mean")
    expected, loss, values = plainly(model, data, metric)
    found = task.evaluate(model, data.batches("test", batch_size=4), "cpu")
    assert found == {"dice": pytest.approx(expected, abs=1e-7), "loss": pytest.approx(loss, abs=1e-6)}
    assert 0 < expected < 1
    assert model.training is False
    drawn = task.resampled(model, data, units_of(data.cases("test"), 2).draw("site-1", 20), "cpu")
    assert drawn == pytest.approx(values[:, 0].double().numpy()[draws("site-1", 2, 20)].mean(1), abs=1e-7)
    said = task.sampling(model, data, "cpu")
    error = values[:, 0].double().numpy().std(ddof=1) / 2**0.5
    assert (said["test_cases"], said["standard_error"]) == (2, pytest.approx(error, abs=1e-7))
    assert sum(said["case_scores"]) == 2


def test_several_structures_and_one_that_is_not_there(tmp_path: Path) -> None:
    config = train_config(classes=3)
    config["validate"]["key_metric"] = {"iou": {"_target_": "MeanIoUHandler", "include_background": False}}
    task = task_of(tmp_path / "b", config)
    assert [metric.name for metric in task.declared_metrics()] == [
        "iou",
        "loss",
        "iou_organ",
        "iou_lesion",
        "iou_<class>",
    ]
    torch.manual_seed(2)
    model = task.build_model()
    both = task.open_site("s", write_volumes(tmp_path / "both", classes=3))
    found = task.evaluate(model, both.batches("test", batch_size=1), "cpu")
    metric = MeanIoU(include_background=False, reduction="mean")
    assert found["iou"] == pytest.approx(plainly(model, both, metric)[0], abs=1e-7)
    by_structure = metric.aggregate("mean_batch").tolist()
    assert [found["iou_organ"], found["iou_lesion"]] == pytest.approx(by_structure, abs=1e-7)
    one = task.open_site("s", write_volumes(tmp_path / "one", classes=2))
    found = task.evaluate(model, one.batches("test", batch_size=1), "cpu")
    assert found["iou"] == found["iou_organ"]
    assert "iou_lesion" not in found  # nobody has it: no number is made up
    none = task.open_site("s", write_volumes(tmp_path / "none", classes=1))
    with pytest.raises(DataError, match="iou is not defined on any of 2 image"):
        task.evaluate(model, none.batches("test", batch_size=1), "cpu")
    drawn = task.resampled(model, none, units_of(none.cases("test"), 2).draw("s", 3), "cpu")
    assert drawn is not None
    assert np.isnan(drawn).all()
    assert task.sampling(model, none, "cpu") == {}  # no image counts


def test_a_postprocessing_that_saves_images_is_refused(tmp_path: Path) -> None:
    config = train_config()
    steps = config["train"]["postprocessing"]["transforms"]
    steps.append({"_target_": "SaveImaged", "keys": "pred", "output_dir": str(tmp_path / "written")})
    with pytest.raises(ValueError, match=r"#postprocessing' must .*got a SaveImage"):
        task_of(tmp_path / "b", config)
    config["train"]["postprocessing"]["transforms"][-1]["_disabled_"] = True  # MONAI's own word
    task_of(tmp_path / "b", config)


def test_a_metric_of_all_images_together_has_no_image_scores(tmp_path: Path) -> None:
    config = train_config(dims=2)
    (metric,) = config["validate"]["key_metric"].values()
    metric |= {"_target_": "ConfusionMatrix", "metric_name": "sensitivity"}
    metric.pop("reduction", None)
    task = task_of(tmp_path / "b", config)
    folder = tmp_path / "s"
    write_volumes(folder, size=(24, 20), counts=(1, 1, 3))
    data, model = task.open_site("s", {"data_root": str(folder)}), task.build_model()
    found = task.evaluate(model, data.batches("test", batch_size=1), "cpu")
    assert sorted(found) == ["loss", "sensitivity"]
    assert 0 <= found["sensitivity"] <= 1
    assert task.image_scores(model, data, "cpu") is None


def test_images_are_validated_in_the_bundles_batches(tmp_path: Path) -> None:
    """Check that they need one size, as with MONAI's own loader; else batches of one image are asked for."""
    config = train_config(dims=2)
    config["validate"]["dataloader"] = {"_target_": "DataLoader", "batch_size": 2}
    task = task_of(tmp_path / "b", config)
    folder = tmp_path / "s"
    write_volumes(folder, size=(24, 20), counts=(1, 1, 3))
    data = task.open_site("s", {"data_root": str(folder)})
    with pytest.raises(DataError, match=r"test batch \(1x24x20, 1x25x21\).*batch_size"):
        list(data.batches("test", batch_size=8))
    for number in (1, 2):
        for kind in ("images", "labels"):
            (folder / kind / f"test{number}.nii").write_bytes((folder / kind / "test0.nii").read_bytes())
    data = task.open_site("s", {"data_root": str(folder)})
    assert [len(inputs) for inputs, _ in data.batches("test", batch_size=8)] == [2, 1]
    model = task.build_model()
    together = task.evaluate(model, data.batches("test", batch_size=8), "cpu")
    assert together == pytest.approx(task.evaluate(model, data.batches("test", batch_size=1), "cpu"), abs=1e-6)


# ------------------------------------------------------------------------------------------------ the phantom


def test_synthetic_volumes(tmp_path: Path, task: MonaiBundleTask) -> None:
    drawn = {site: ABDOMEN.patients(site, size=(32, 32, 24), cases=0.4) for site in ("site-1", "site-2", "a hospital")}
    again = ABDOMEN.patients("site-1", size=(32, 32, 24), cases=0.4)
    for split, volumes in drawn["site-1"].items():
        for first, second in zip(volumes, again[split], strict=True):
            assert np.array_equal(first.image, second.image)
            assert np.array_equal(first.label, second.label)
        assert volumes[0].label.max() == 2
        assert all((volume.label > 0).mean() > 0.01 for volume in volumes)
    one, two = drawn["site-1"]["test"][0], drawn["site-2"]["test"][0]
    assert one.voxel != two.voxel
    assert one.image[0].shape == one.label.shape == (32, 32, 24)
    contrast = [float(v.image[0][v.label == 2].mean() - v.image[0][v.label == 1].mean()) for v in (one, two)]
    assert contrast[0] > 100 > -100 > contrast[1]  # lesions are bright at one site and dark at the other
    written = prepare_phantom("volumes3d", tmp_path / "out", sites=2, seed=0, cases=0.4)
    data = task.open_site("site-1", {"data_root": str(written["site-1"])})
    assert data.synthetic
    assert "SYNTHETIC" in data.description
    inputs, targets = next(iter(data.batches("test", batch_size=1)))
    assert inputs.shape == (1, 1, 32, 32, 24)
    assert np.array_equal(targets[0, 0].numpy(), one.label)
    other = ABDOMEN.patients("site-1", size=(32, 32, 24), cases=0.4, seed=1)
    assert not np.array_equal(other["test"][0].label, one.label)
    with pytest.raises(ValueError, match="each of size"):
        ABDOMEN.patients("site-1", size=(8, 32, 32))
