"""Test the classification task: settings, a site's images or its phantom, batches, metrics, initial weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.data.datalist import DataError, write_datalist
from fairflare.tasks.classification import ClassificationTask, phantom_index
from fairflare.tasks.networks import Classifier
from fairflare.tasks.scores.metrics import classification_metrics
from fairflare_lab.phantoms import PHANTOMS, PhantomPlan
from fairflare_lab.phantoms import class_site as phantom_site

from .image_files import all_of, heavy_imports, refusal

# Five classes; about 60 images to draw for a site.
SMALL: dict[str, Any] = {
    "image_size": (32, 32), "features": (4, 4, 8, 8), "phantom": "fundus", "phantom_sites": 5,
    "phantom_samples": 90, "phantom_test": 40, "partition": "iid",
}  # fmt: skip
OWN: dict[str, Any] = {"image_size": (32, 32), "features": (4, 4, 8, 8), "num_classes": 3, "augmentation": ["flip"]}

pytestmark = pytest.mark.usefixtures("one_thread")


def folder(root: Path, splits: Mapping[str, Sequence[int]] | None = None, size: tuple[int, int] = (40, 48)) -> Path:
    """Make a site with random images; ``splits`` are their labels."""
    labels = {"training": (0, 1, 2, 0, 0, 1, 2), "validation": (0, 1), "test": (2, 2, 0)} if splits is None else splits
    rng = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    entries: dict[str, list[dict[str, Any]]] = {}
    for split, numbers in labels.items():
        entries[split] = []
        for index, number in enumerate(numbers):
            name = f"images/{split}_{index}.png"
            Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8)).save(root / name)
            entries[split].append({"image": name, "label": number})
    write_datalist(root / "datalist.json", entries)
    return root


def refused(task: ClassificationTask, settings: dict[str, Any], site: str = "hospital-a") -> DataError:
    return refusal(lambda: task.open_site(site, settings), settings, site, (".png", "images/"))


class Fixed(torch.nn.Module):
    """Define a network that returns the logits that the inputs hold."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


# --- a site's own folder ------------------------------------------------------------------------------------


def test_images_and_labels_of_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    data = ClassificationTask(**OWN).open_site("a", {"data_root": str(root)})
    assert not data.synthetic
    assert data.description == "images of the site's own folder: 7 training, 2 validation, 3 test"
    inputs, targets = all_of(data, "training")
    assert inputs.shape == (7, 3, 32, 32)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert targets.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert inputs.min() >= 0
    assert inputs.max() <= 1
    original = np.asarray(Image.open(root / "images/training_0.png")) / 255
    np.testing.assert_allclose(inputs[0].mean((1, 2)), original.mean((0, 1)), atol=0.01)
    exact = ClassificationTask(**{**OWN, "image_size": (40, 48)}).open_site("a", {"data_root": str(root)})
    np.testing.assert_allclose(all_of(exact, "training")[0][0].permute(1, 2, 0), original, atol=1e-6)


def test_class_counts(tmp_path: Path) -> None:
    task = ClassificationTask(**OWN)
    data = task.open_site("a", {"data_root": str(folder(tmp_path / "a"))})
    for split, counts in {"training": [3, 2, 2], "validation": [1, 1, 0], "test": [1, 0, 2]}.items():
        found = data.class_counts(split)
        assert found is not None
        assert found.dtype == torch.int64
        assert found.tolist() == counts
    with pytest.raises(ValueError, match=r"^split.* got 'tests'"):
        data.class_counts("tests")


def test_a_site_numbers_its_classes_differently(tmp_path: Path) -> None:
    root = str(folder(tmp_path / "a", {"training": (10, 20, 30, 40), "validation": (20,), "test": (40,)}))
    numbers = {"10": 2, "20": 0, "30": 1, "40": 1}
    data = ClassificationTask(**OWN).open_site("a", {"data_root": root, "class_numbers": numbers})
    assert all_of(data, "training")[1].tolist() == [2, 0, 1, 1]
    counts = data.class_counts("training")
    assert counts is not None
    assert counts.tolist() == [1, 2, 1]


def test_groups_in_a_sites_own_numbers_are_not_held_against_the_tasks(tmp_path: Path) -> None:
    """Merge five own classes into two: the own groups name class 4, which the task does not have, and are not used."""
    root = folder(tmp_path / "a", {"training": (0, 1, 4), "validation": (3,), "test": (2,)})
    content = json.loads((root / "datalist.json").read_text(encoding="utf-8"))
    (root / "datalist.json").write_text(json.dumps({**content, "class_groups": {"tail": [4]}}), encoding="utf-8")
    two = ClassificationTask(**{**OWN, "num_classes": 2})
    numbers = {"0": 0, "1": 1, "2": 1, "3": 0, "4": 0}
    data = two.open_site("a", {"data_root": str(root), "class_numbers": numbers})
    assert (all_of(data, "training")[1].tolist(), data.class_groups) == ([0, 1, 0], None)
    assert "class_groups: class of 'tail' must be" in str(refused(two, {"data_root": str(root)}))


def test_a_label_that_is_no_class(tmp_path: Path) -> None:
    """Check that the site refuses at its opening, before any image is read."""
    root = str(folder(tmp_path / "a", {"training": (0, 1), "validation": (0, 3), "test": (1,)}))
    error = refused(ClassificationTask(**OWN), {"data_root": root})
    assert str(error) == (
        f"site 'hospital-a': image '{root}/images/validation_1.png' of split 'validation' has the label 3; the task "
        "has the classes 0 to 2. Correct the datalist, num_classes of the task, or 'class_numbers' of the site"
    )
    assert error.public == "site 'hospital-a': a label of split 'validation' is no class of the task (num_classes=3)"
    error = refused(ClassificationTask(**OWN), {"data_root": root, "class_numbers": {"3": 1, "0": 0}})
    assert "training_1.png' of split 'training' has the label 1; 'class_numbers' in the site's" in str(error)
    assert "fairflare.json knows [0, 3]" in str(error)
    assert error.public == "site 'hospital-a': a label of split 'training' is no class of the task (num_classes=3)"


def test_further_test_lists(tmp_path: Path) -> None:
    labels = {"training": (0, 1), "validation": (0,), "test": (1, 2), "test_dark": (2,), "test_blurred": (1, 2, 0)}
    data = ClassificationTask(**OWN).open_site("a", {"data_root": str(folder(tmp_path / "a", labels))})
    assert data.test_splits == ("test", "test_blurred", "test_dark")
    for split in data.test_splits:
        assert all_of(data, split)[1].tolist() == list(labels[split])
        assert data.num_samples(split) == len(labels[split])
    with pytest.raises(ValueError, match=r"^split.* got 'test_drak'"):
        data.num_samples("test_drak")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"class_numbers": {"nevus": 0}},
            "class_numbers must be a dict of an integer to an integer >= 0 or nothing; entry 'nevus' is 'nevus'",
        ),
        ({"class_numbers": {"1": 3}}, "class_numbers: class must be an integer in [0, 2], got 3"),
    ],
)
def test_bad_settings_of_a_folder(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    error = refused(ClassificationTask(**OWN), {"data_root": str(folder(tmp_path / "a")), **settings})
    assert message in str(error)


# --- the phantom --------------------------------------------------------------------------------------------


def test_phantom_of_a_site() -> None:
    task = ClassificationTask(**SMALL)
    data = task.open_site("site-5", {})
    plan = PhantomPlan(
        phantom="fundus", image_size=32, num_sites=5, num_samples=90, num_test=40, partition="iid"
    )  # fmt: skip
    drawn = phantom_site(plan, 4)
    assert data.synthetic
    assert data.test_splits == ("test", "test_clean", "test_common", "test_corrupted")
    assert data.description.startswith("SYNTHETIC spots, classes of Messidor-2")
    assert "not patient data" in data.description
    for split in drawn.labels:
        inputs, targets = all_of(data, split)
        assert inputs.shape == (len(drawn.labels[split]), 3, 32, 32)
        np.testing.assert_array_equal((inputs.permute(0, 2, 3, 1) * 255).round().byte(), drawn.images[split])
        assert targets.tolist() == drawn.labels[split].tolist()
        assert targets.dtype == torch.int64
        counts = data.class_counts(split)
        assert counts is not None
        assert counts.tolist() == np.bincount(drawn.labels[split], minlength=5).tolist()
        assert f"{len(targets)} {split}" in data.description
    assert "(site 5 of 5)" in data.description
    common = all_of(data, "test_common")[0]
    assert torch.equal(common, all_of(data, "test_corrupted")[0])  # the last site is corrupted
    assert not torch.equal(common, all_of(data, "test_clean")[0])
    clean = task.open_site("site-1", {})
    assert torch.equal(all_of(clean, "test_common")[0], all_of(data, "test_clean")[0])


def test_the_phantom_in_grey_and_not_square() -> None:
    data = ClassificationTask(**SMALL).open_site("site-2", {})
    colour, _ = all_of(data, "validation")
    grey, _ = all_of(ClassificationTask(**SMALL, in_channels=1).open_site("site-2", {}), "validation")
    luminance = (colour * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(grey, luminance, atol=0.5 / 255 + 1e-6, rtol=0)
    wide = ClassificationTask(**{**SMALL, "image_size": (32, 48)}).open_site("site-2", {})
    inputs, targets = all_of(wide, "validation")
    assert inputs.shape == (len(targets), 3, 32, 48)
    assert 0 <= inputs.min() < inputs.max() <= 1


def test_the_site_decides_about_its_phantom() -> None:
    task = ClassificationTask(**SMALL, phantom_seed=1)
    chosen = task.open_site("north", {"phantom_seed": 2, "phantom_site": 3})
    same = ClassificationTask(**SMALL, phantom_seed=2).open_site("site-3", {})
    assert torch.equal(all_of(chosen, "validation")[0], all_of(same, "validation")[0])
    other = task.open_site("site-3", {})
    assert not torch.equal(all_of(chosen, "validation")[0], all_of(other, "validation")[0])


def test_phantom_index() -> None:
    assert [phantom_index(name, None, 12) for name in ("site-1", "site-12", "hospital7", "3", "a-2b-05")] == [
        0, 11, 6, 2, 4
    ]  # fmt: skip
    assert phantom_index("site-9", 2, 5) == 1


@pytest.mark.parametrize(
    ("site", "settings", "got"),
    [
        ("site-9", {}, 9),
        ("site-0", {}, 0),
        ("hospital-a", {}, None),
        ("site-1", {"phantom_site": 6}, 6),
        ("site-1", {"phantom_site": "2"}, "2"),
        ("site-1", {"phantom_site": True}, True),
    ],
)
def test_a_site_that_the_phantom_does_not_have(site: str, settings: dict[str, Any], got: Any) -> None:
    error = refused(ClassificationTask(**SMALL), settings, site)
    assert f"phantom_site must be one of the phantom's 5 sites (phantom_sites), from 1; got {got!r}" in str(error)
    assert "name the site site-1 to site-5" in str(error)
    assert "'data_root'" in str(error)
    assert error.public == f"site '{site}': key 'phantom_site' in the site file is not usable"


def test_a_phantom_of_other_classes_does_not_stand_in() -> None:
    error = refused(ClassificationTask(**{**SMALL, "num_classes": 3}), {}, "site-1")
    assert "the synthetic fundus has 5 classes where the task has num_classes=3; set 'data_root'" in str(error)
    assert error.public == "site 'site-1': no data folder is set, and the synthetic data do not fit the task"
    assert ClassificationTask(**{**SMALL, "num_classes": 5}).open_site("site-1", {}).synthetic


def test_a_partition_that_cannot_be_says_so_to_the_server_too() -> None:
    task = ClassificationTask(**{**SMALL, "partition": "shards", "shard_mode": "complement"})
    error = refused(task, {}, "site-1")
    assert "fewer than min_site=10" in str(error)
    assert "the phantom cannot be made" in error.public


# --- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["phantom", "folder"])
def test_augmentation_is_seeded_and_keeps_the_labels(kind: str, tmp_path: Path) -> None:
    settings = {} if kind == "phantom" else {"data_root": str(folder(tmp_path / "a"))}
    flips = {**(SMALL if kind == "phantom" else OWN), "augmentation": ["flip"]}
    data = ClassificationTask(**flips).open_site("site-1", settings)
    torch.manual_seed(3)
    first = all_of(data, "training", shuffle_seed=2**40 + 1, augment=True)
    torch.rand(5)  # somebody else's random numbers
    np.random.rand(5)  # noqa: NPY002
    again = all_of(data, "training", shuffle_seed=2**40 + 1, augment=True)
    plain = all_of(data, "training", shuffle_seed=2**40 + 1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], plain[1])
    flipped = [not torch.equal(a, b) for a, b in zip(first[0], plain[0], strict=True)]
    assert all(
        torch.equal(a, b.flip(-1) if turned else b) for a, b, turned in zip(first[0], plain[0], flipped, strict=True)
    )
    assert 0.1 < np.mean(flipped) < 0.9
    full = {**flips, "augmentation": ["flip", "affine", "intensity"]}
    strong = ClassificationTask(**full).open_site("site-1", settings)
    inputs, targets = all_of(strong, "training", shuffle_seed=1, augment=True)
    assert type(inputs) is type(targets) is torch.Tensor
    assert targets.dtype == torch.int64
    assert not torch.equal(inputs, all_of(strong, "training", shuffle_seed=2, augment=True)[0])
    none = ClassificationTask(**{**flips, "augmentation": []}).open_site("site-1", settings)
    assert torch.equal(
        all_of(none, "training", shuffle_seed=1, augment=True)[0], all_of(none, "training", shuffle_seed=1)[0]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"image_size": (32, 32)},
        {"image_size": (33, 33), "max_pool": True},
        {"image_size": (64, 64), "network": "densenet121"},
    ],
)
def test_the_smallest_images_train_in_a_batch_of_one(arguments: dict[str, Any]) -> None:
    """Check the last batch of an epoch with one image, whose last feature map needs more than one value."""
    task = ClassificationTask(**{**OWN, **arguments})
    model = task.build_model().train()
    loss = task.loss(model(torch.rand(1, 3, *task.image_size)), torch.tensor([2]))
    loss.backward()
    assert math.isfinite(loss.item())


# --- loss and metrics ---------------------------------------------------------------------------------------


def test_losses() -> None:
    task = ClassificationTask(**OWN)
    outputs = torch.tensor([[0.0, math.log(3.0), 0.0], [0.0, 0.0, math.log(2.0)]])  # shares 1/5 3/5 1/5; 1/4 1/4 1/2
    targets = torch.tensor([1, 0])
    assert task.sample_losses(outputs, targets).tolist() == pytest.approx([math.log(5 / 3), math.log(4)])
    assert float(task.loss(outputs, targets)) == pytest.approx((math.log(5 / 3) + math.log(4)) / 2)


def test_evaluate_on_fixed_outputs() -> None:
    """Check targets 0 0 1 2 with predictions 0 1 1 2."""
    task = ClassificationTask(**OWN, class_names=["a", "b", "c"], class_groups={"often": [0], "rare": [1, 2]})
    shares = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.15, 0.6, 0.25], [0.1, 0.1, 0.8]])
    targets = torch.tensor([0, 0, 1, 2])
    batches = [(shares[:3].log(), targets[:3]), (shares[3:].log(), targets[3:])]
    found = task.evaluate(Fixed(), batches, "cpu")
    assert found["accuracy"] == 0.75
    assert found["balanced_accuracy"] == pytest.approx(2.5 / 3)
    assert (found["recall_a"], found["recall_b"], found["recall_c"]) == (0.5, 1.0, 1.0)
    assert (found["often"], found["rare"], found["all"]) == (0.5, 1.0, 0.75)
    assert found["loss"] == pytest.approx(-float(torch.tensor([0.6, 0.2, 0.6, 0.8]).log().mean()), rel=1e-6)
    # Pair (0, 1): both of 0.6, 0.2 above 0.15; 0.6 above one of 0.3, 0.7: 0.75. (0, 2) and (1, 2) are in order.
    assert found["auc_ovo"] == pytest.approx((0.75 + 1 + 1) / 3)
    expected = classification_metrics(
        targets.numpy(), shares.numpy(), class_names=["a", "b", "c"], groups={"often": [0], "rare": [1, 2]}
    )
    assert {name: value for name, value in found.items() if name != "loss"} == pytest.approx(expected)
    assert task.primary_metric in found
    assert all(type(value) is float for value in found.values())


def test_a_test_set_of_one_class(tmp_path: Path) -> None:
    labels = {"training": (0, 1), "validation": (0,), "test": (2, 2, 2)}
    task = ClassificationTask(**OWN)
    data = task.open_site("a", {"data_root": str(folder(tmp_path / "a", labels))})
    found = task.evaluate(task.build_model(), data.batches("test", batch_size=2), "cpu")
    assert not {"auc_ovo", "auc_ovr", "recall_class_0"} & set(found)
    assert found["accuracy"] == found["balanced_accuracy"] == found["recall_class_2"]
    assert all(math.isfinite(value) for value in found.values())


def test_evaluate_refuses() -> None:
    task = ClassificationTask(**OWN)
    with pytest.raises(ValueError, match=r"number of batches to evaluate on.* got 0$"):
        task.evaluate(Fixed(), [], "cpu")
    with pytest.raises(ValueError, match="outputs are not finite; lower"):
        task.evaluate(Fixed(), [(torch.tensor([[0.0, math.nan, 1.0]]), torch.tensor([0]))], "cpu")


def test_names_and_groups_of_classes() -> None:
    endoscopy = ClassificationTask(phantom="endoscopy")
    assert endoscopy.classes == 23
    assert {group: len(members) for group, members in endoscopy.groups().items()} == {"head": 7, "medium": 9, "tail": 7}
    assert endoscopy.names()[0] == PHANTOMS["endoscopy"].class_names[0]
    own = ClassificationTask(phantom="endoscopy", num_classes=3)
    assert own.names() == ["class_0", "class_1", "class_2"]
    assert own.groups() == {}
    named = ClassificationTask(num_classes=2, class_names=["no", "yes"], class_groups={"rare": [1]})
    assert named.names() == ["no", "yes"]
    assert named.groups() == {"rare": [1]}


# --- initial weights ----------------------------------------------------------------------------------------


def test_initial_weights_of_the_task_and_of_the_server(tmp_path: Path) -> None:
    task = ClassificationTask(**OWN)
    states = []
    for seed, name in ((1, "task.pt"), (2, "server.pt")):
        torch.manual_seed(seed)
        states.append(task.build_model().state_dict())
        torch.save(states[-1], tmp_path / name)
    fresh = task.build_model()
    kept = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    assert task.initialise(fresh) == "random initial weights"
    assert all(torch.equal(kept[name], tensor) for name, tensor in fresh.state_dict().items())
    task = ClassificationTask(**OWN, initial_weights=str(tmp_path / "task.pt"))
    for checkpoint, expected in ((None, states[0]), (str(tmp_path / "server.pt"), states[1])):
        model = task.build_model()
        assert "encoder and head" in task.initialise(model, checkpoint)
        assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"gone.pt does not exist"):
        task.initialise(task.build_model(), str(tmp_path / "gone.pt"))
    with pytest.raises(ValueError, match=r"needs a Classifier, .*gave Linear"):
        task.initialise(torch.nn.Linear(2, 2))


def test_build_model() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = ClassificationTask(**OWN, projector_dim=5, in_channels=1).build_model()
        states.append(model.state_dict()["encoder.conv1.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert isinstance(model, Classifier)
    embedded = model.embed(torch.rand(2, 1, 32, 32))
    assert embedded.shape == (2, 8)
    assert model.project(embedded).shape == (2, 5)
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 3)


# --- the constructor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": (48, 31)}, "image_size for resnet18 must be an integer >= 32, got 31"),
        (
            {"image_size": (32, 32), "max_pool": True},
            "image_size for resnet18 with max_pool must be an integer >= 33, got 32",
        ),
        ({"network": "densenet121"}, "image_size for densenet121 must be an integer >= 64, got 48"),
        (
            {"num_classes": 2, "class_names": ["a", "a"]},
            "class_names must have 2 different entries, one for each class, got ['a', 'a']",
        ),
        (
            {"num_classes": 2, "class_names": ["a", "b", "a"]},
            "class_names must have 2 different entries, one for each class, got",
        ),
        ({"class_names": ["a", "b"]}, "class_names must have 8 different entries, one for each class, got ['a', 'b']"),
        ({"class_groups": {"head": [0, 8]}}, "class_groups: class of 'head' must be an integer in [0, 7], got 8"),
        ({"class_groups": {"accuracy": [0]}}, "class_groups: 'accuracy' is the name of a metric"),
        ({"class_groups": {"all": [0]}}, "class_groups: 'all' is the name of a metric"),
        ({"phantom_samples": 40}, "phantom_samples must be at least 50 for 8 classes and 5 sites"),
        ({"phantom_test": 63}, "phantom_test must be at least 64 for 8 classes"),
        ({"phantom_own_test": 31}, "phantom_own_test must be at least 32 for 8 classes"),
        ({"phantom_min_share": 0.126}, "phantom_min_share must be in [0, 0.125], got 0.126"),
        ({"corrupted_sites": 6}, "corrupted_sites of phantom_sites=5 must be an integer in [0, 5], got 6"),
        ({"phantom": "fundus", "attributes": True}, "phantom 'fundus' has no attributes"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ClassificationTask(**arguments)
    assert message in str(caught.value)


def test_every_setting_of_the_phantom_reaches_it() -> None:
    task = ClassificationTask(
        phantom="dermoscopy7", image_size=(40, 36), phantom_sites=4, phantom_samples=300, phantom_test=100, alpha=0.5,
        partition="dirichlet", eta=0.25, shard_mode="complement", corrupted_sites=2, corruption="motion_blur",
        severity=1, label_noise_sites=1, label_noise=0.2, label_noise_kind="pair",
        attributes=True, phantom_own_test=90, phantom_min_share=0.05, camera_shift=0.5,
    )  # fmt: skip
    assert task.plan(9) == PhantomPlan(
        phantom="dermoscopy7", seed=9, image_size=40, num_sites=4, num_samples=300, num_test=100, alpha=0.5,
        partition="dirichlet", eta=0.25, shard_mode="complement", corrupted_sites=2, corruption="motion_blur",
        severity=1, label_noise_sites=1, label_noise=0.2, label_noise_kind="pair",
        attributes=True, num_own_test=90, min_class=15, camera_shift=0.5,
    )  # fmt: skip
    assert ClassificationTask(phantom_min_share=0.001).plan(0).min_class == 4  # never fewer


@pytest.mark.parametrize(
    "code",
    [
        "import fairflare.tasks.classification as c; c.ClassificationTask()",
        "import fairflare.tasks.segmentation, fairflare.data.preparers, fairflare_lab.phantoms.prostate",
    ],
)
def test_what_only_describes_a_task_imports_none_of_the_large_packages(code: str) -> None:
    assert heavy_imports(code) == "[]"
