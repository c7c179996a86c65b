"""The synthetic federations for classification."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairflare.data.phantoms import classes as phantom_classes
from fairflare.data.corruptions import corrupt, image_seed
from fairflare.data.phantoms.canvas import Canvas
from fairflare.data.phantoms.classes import PHANTOMS, PhantomPlan, class_counts, contact_sheet, main, phantom_site

PLAN = PhantomPlan(image_size=32, num_samples=240, num_test=64)


def forget() -> None:
    """Empty the caches: what a site gets must not depend on what was drawn before."""
    for cached in ("_pool", "_test", "_partition", "_test_images"):
        getattr(phantom_classes, cached).cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


# the canvas


@pytest.mark.parametrize("size", [48, 128])
def test_stamps_cover_the_area_of_their_discs(size: int) -> None:
    canvas = Canvas(size, np.random.default_rng(0))
    for radius in (0.1, 0.3, 0.55):
        disc = canvas.stamp(0.1, -0.2, radius)
        assert disc.sum() * canvas.pixel**2 == pytest.approx(np.pi * radius**2, rel=0.03)
        row, column = np.indices(disc.shape)
        assert (disc * column).sum() / disc.sum() == pytest.approx(1.1 / canvas.pixel - 0.5, abs=0.05)
        assert (disc * row).sum() / disc.sum() == pytest.approx(0.8 / canvas.pixel - 0.5, abs=0.05)
    half = canvas.stamp([1.0, 3.0, -40.0], [0.0, 0.0, 40.0], 0.3)  # half off the canvas, and two wholly
    assert half.sum() * canvas.pixel**2 == pytest.approx(np.pi * 0.09 / 2, rel=0.05)
    assert canvas.stamp([], [], 0.1).sum() == 0


def test_strokes_have_their_length_and_width() -> None:
    canvas = Canvas(96, np.random.default_rng(0))
    line = canvas.stroke([-0.6, 0.6], [0.0, 0.0], 0.1)
    assert line.sum() * canvas.pixel**2 == pytest.approx(1.2 * 0.1 + np.pi * 0.05**2, rel=0.08)
    two = canvas.stroke([[-0.6, 0.6], [-0.6, 0.6]], [[0.0, 0.0], [0.5, 0.5]], [[0.1], [0.1]])
    assert two.sum() == pytest.approx(2 * line.sum(), rel=0.02)


def test_noise_is_smooth_and_about_of_deviation_one() -> None:
    fields = np.stack([Canvas(64, np.random.default_rng(k)).noise(8) for k in range(60)])
    assert fields.mean() == pytest.approx(0, abs=0.1)
    assert fields.std() == pytest.approx(1, abs=0.1)
    assert np.abs(np.diff(fields, axis=1)).mean() < 0.25


# the phantoms


def test_registry() -> None:
    assert list(PHANTOMS) == ["dermoscopy", "dermoscopy7", "fundus", "endoscopy"]
    assert [len(p.class_names) for p in PHANTOMS.values()] == [8, 7, 5, 23]
    assert PHANTOMS["dermoscopy"].class_names == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert PHANTOMS["dermoscopy7"].class_names == ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    assert [sum(p.counts) for p in PHANTOMS.values()] == [25331, 10015, 1744, 10662]
    for name, phantom in PHANTOMS.items():
        assert phantom.name == name
        assert len(phantom.counts) == len(set(phantom.class_names)) == len(phantom.class_names)


def test_groups_follow_the_counts_of_a_training_fold() -> None:
    """Spec 5.5: head > 700, medium 70 to 700, tail < 70 images in 80 % of HyperKvasir: 7, 9 and 7 classes."""
    phantom = PHANTOMS["endoscopy"]
    assert {name: len(classes) for name, classes in phantom.groups.items()} == {"head": 7, "medium": 9, "tail": 7}
    for name, classes in phantom.groups.items():
        for c in classes:
            n = 0.8 * phantom.counts[c]
            assert name == ("head" if n > 700 else "medium" if n >= 70 else "tail")


@pytest.mark.parametrize("name", list(PHANTOMS))
def test_every_class_is_drawn_at_every_size_and_varies(name: str) -> None:
    phantom = PHANTOMS[name]
    for label in range(len(phantom.class_names)):
        for attribute in (None, *phantom.attributes):
            images = [phantom.draw(label, np.random.default_rng([label, k]), 40, attribute) for k in range(3)]
            for image in images:
                assert (image.shape, image.dtype) == ((40, 40, 3), np.uint8)
                assert image.std() > 8
            assert (images[0] != images[1]).any()
            np.testing.assert_array_equal(
                images[0], phantom.draw(label, np.random.default_rng([label, 0]), 40, attribute)
            )
    # the same picture at another size
    small, large = (phantom.draw(1, np.random.default_rng(3), size, None).astype(float) for size in (48, 96))
    halved = large.reshape(48, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(small - halved).mean() < 6


def test_dark_skin_is_darker_and_the_lesion_stands_out_less() -> None:
    draw = PHANTOMS["dermoscopy"].draw
    light, dark = (
        np.stack([draw(1, np.random.default_rng(k), 32, tone) for k in range(40)]).astype(float)
        for tone in ("light", "dark")
    )
    assert dark.mean() < 0.75 * light.mean()
    assert dark.std((1, 2)).mean() < light.std((1, 2)).mean()
    with pytest.raises(ValueError, match=r"unknown skin tone 'pink'\. Available: light, dark"):
        draw(1, np.random.default_rng(0), 32, "pink")


@pytest.mark.parametrize("name", list(PHANTOMS))
def test_mean_colour_does_not_decide_the_class(name: str) -> None:
    """Nearest class mean in the space of mean colours, classes equally frequent."""
    phantom = PHANTOMS[name]
    classes = len(phantom.class_names)
    each = 24
    colour = np.array(
        [
            [phantom.draw(c, np.random.default_rng([7, c, k]), 32, None).mean((0, 1)) for k in range(each)]
            for c in range(classes)
        ]
    )
    centres, tested = colour[:, : each // 2].mean(1), colour[:, each // 2 :]
    spread = colour[:, : each // 2].std((0, 1))
    distance = ((tested[:, :, None] - centres) / spread) ** 2
    right = (distance.sum(-1).argmin(-1) == np.arange(classes)[:, None]).mean(1)
    assert right.mean() < 0.45
    assert right.max() < 0.95


def test_drawing_is_fast() -> None:
    """Below 1.5 ms an image of 48 x 48 is meant; the bound leaves room for a busy machine."""
    for phantom in PHANTOMS.values():
        generators = [np.random.default_rng([1, k]) for k in range(46)]
        start = time.process_time()
        for k, rng in enumerate(generators):
            phantom.draw(k % len(phantom.class_names), rng, 48, None)
        assert (time.process_time() - start) / len(generators) < 0.006


# counts


def test_class_counts_worked_by_hand() -> None:
    assert class_counts([900, 90, 10], 100, 5) == (86, 9, 5)  # 5 first, then 95 as 10 : 1 = 86.36, 8.64
    assert class_counts([3, 1], 8, 1) == (6, 2)
    assert class_counts([5, 1, 1], 6, 2) == (2, 2, 2)
    with pytest.raises(ValueError, match="5 images are too few for 3 classes of at least 2"):
        class_counts([5, 1, 1], 5, 2)


@pytest.mark.parametrize("name", list(PHANTOMS))
def test_long_tail_and_every_class_in_the_test_set(name: str) -> None:
    plan = PhantomPlan(phantom=name, image_size=32, num_samples=2000, num_test=400)
    sites = [phantom_site(plan, k) for k in range(plan.num_sites)]
    own = np.concatenate([site.labels[split] for site in sites for split in ("training", "validation")])
    counts = np.bincount(own, minlength=len(plan.kind.counts))
    assert counts.sum() == plan.num_samples
    assert counts.min() >= plan.min_class
    order = np.argsort(plan.kind.counts)
    assert (np.diff(counts[order]) >= 0).all()
    for site in sites:
        np.testing.assert_array_equal(site.labels["test"], sites[0].labels["test"])
    tested = np.bincount(sites[0].labels["test"], minlength=len(plan.kind.counts))
    assert (tested.sum(), tested.min()) == (plan.num_test, plan.min_class_test)


# sites


def test_a_site_is_the_same_whoever_was_drawn_before() -> None:
    first = phantom_site(PLAN, 3)
    training = first.images["training"].copy()
    test = first.images["test"].copy()
    forget()
    for index in range(PLAN.num_sites):
        phantom_site(PLAN, index).images["validation"]
    again = phantom_site(PLAN, 3)
    np.testing.assert_array_equal(again.images["training"], training)
    np.testing.assert_array_equal(again.images["test"], test)
    other = phantom_site(replace(PLAN, seed=1), 3)
    assert (other.images["test"][:10] != test[:10]).any(axis=(1, 2, 3)).all()


def test_splits_share_no_image_and_match_their_labels() -> None:
    seen: set[bytes] = set()
    total = 0
    for index in range(PLAN.num_sites):
        site = phantom_site(PLAN, index)
        for split in ("training", "validation"):
            images, labels = site.images[split], site.labels[split]
            assert images.shape == (len(labels), 32, 32, 3)
            assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
            assert len(labels) >= 1
            seen |= {image.tobytes() for image in images}
            total += len(images)
    assert total == len(seen) == PLAN.num_samples
    assert not seen & {image.tobytes() for image in phantom_site(PLAN, 0).images["test"]}


def test_images_follow_their_label_not_their_place() -> None:
    """An image is a function of seed, id and label: with one more site it is at another site, but the same."""
    everywhere = {
        image.tobytes()
        for k in range(5)
        for split in ("training", "validation")
        for image in phantom_site(replace(PLAN, corrupted_sites=0), k).images[split]
    }
    moved = phantom_site(replace(PLAN, corrupted_sites=0, num_sites=6, partition="iid", validation_fraction=0.2), 5)
    assert {image.tobytes() for image in moved.images["training"]} <= everywhere


@pytest.mark.parametrize("kind", ["gaussian_noise", "motion_blur"])
def test_corrupted_sites_see_a_corrupted_copy_of_the_same_test_set(kind: str) -> None:
    plan = replace(PLAN, corruption=kind, corrupted_sites=2)
    clean, corrupted = phantom_site(plan, 0), phantom_site(plan, 4)
    assert list(clean.images) == ["training", "validation", "test", "test_clean", "test_corrupted"]
    assert [plan.is_corrupted(k) for k in range(5)] == [False, False, False, True, True]
    for site in (clean, corrupted):
        np.testing.assert_array_equal(site.images["test_clean"], clean.images["test"])
        np.testing.assert_array_equal(site.images["test_corrupted"], corrupted.images["test"])
        np.testing.assert_array_equal(site.labels["test_corrupted"], clean.labels["test"])
    for number in (0, 17):
        expected = corrupt(clean.images["test"][number], kind, 3, image_seed(f"{kind}/test/{number}", plan.seed))
        np.testing.assert_array_equal(corrupted.images["test"][number], expected)
    # training images of a corrupted site are corrupted, those of a clean site are not
    same = phantom_site(replace(plan, severity=5), 0)
    np.testing.assert_array_equal(same.images["training"], clean.images["training"])
    worse = phantom_site(replace(plan, severity=5), 4)
    for split in ("training", "validation"):
        np.testing.assert_array_equal(worse.labels[split], corrupted.labels[split])
        assert (worse.images[split] != corrupted.images[split]).any(axis=(1, 2, 3)).all()


def test_without_corrupted_sites_there_are_no_such_splits() -> None:
    assert list(phantom_site(replace(PLAN, corrupted_sites=0), 0).images) == ["training", "validation", "test"]


def test_test_splits_by_attribute() -> None:
    plan = replace(PLAN, attributes=True, corrupted_sites=0, num_test=80)
    site = phantom_site(plan, 0)
    assert plan.splits == tuple(site.images) == ("training", "validation", "test", "test_light", "test_dark")
    light, dark = site.images["test_light"], site.images["test_dark"]
    assert len(light) + len(dark) == 80
    assert dark.mean() < 0.8 * light.mean()
    for tone in ("light", "dark"):  # equal parts within each class
        assert np.bincount(site.labels[f"test_{tone}"], minlength=8).min() >= 4
    both = np.concatenate([light, dark])
    assert {i.tobytes() for i in both} == {i.tobytes() for i in site.images["test"]}
    all_light, all_dark = (
        phantom_site(replace(plan, attribute_shares=shares), 0).images["training"].mean()
        for shares in ((1.0, 0.0), (0.0, 1.0))
    )
    assert all_dark < site.images["training"].mean() < all_light


@pytest.mark.parametrize(
    "plan",
    [
        PhantomPlan(num_sites=20, corrupted_sites=4, num_samples=1200, num_test=64, image_size=32),
        PhantomPlan(phantom="dermoscopy7", num_sites=4, partition="shards", corrupted_sites=0, image_size=32),
        PhantomPlan(phantom="dermoscopy7", num_sites=4, partition="shards", shard_mode="complement", corrupted_sites=0),
        PhantomPlan(phantom="fundus", num_sites=4, partition="dirichlet", alpha=0.5, corrupted_sites=0),
        PhantomPlan(phantom="endoscopy", num_sites=8, partition="iid", corrupted_sites=0),
        PhantomPlan(phantom="endoscopy", num_sites=8, partition="dirichlet", alpha=0.5, corrupted_sites=0),
    ],
    ids=["fed_ism", "fed_mrl", "complement", "fundus", "iid", "dirichlet"],
)
def test_the_federations_of_the_papers(plan: PhantomPlan) -> None:
    sites = [phantom_site(plan, k) for k in range(plan.num_sites)]
    sizes = [sum(len(site.labels[s]) for s in ("training", "validation")) for site in sites]
    assert sum(sizes) == plan.num_samples
    assert min(sizes) >= plan.min_site
    if plan.partition == "iid":
        assert max(sizes) - min(sizes) <= 1
    for site in sites:
        assert len(site.labels["validation"]) == pytest.approx(
            plan.validation_fraction * (len(site.labels["training"]) + len(site.labels["validation"])), abs=8
        )


def test_images_are_drawn_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = phantom_classes._render

    def counting(plan: PhantomPlan, batch: object, chosen: np.ndarray, corrupted: bool) -> np.ndarray:
        drawn.append(len(chosen))
        return original(plan, batch, chosen, corrupted)  # type: ignore[arg-type]

    monkeypatch.setattr(phantom_classes, "_render", counting)
    site = phantom_site(PLAN, 4)
    assert drawn == []
    site.images["training"]
    site.images["training"]
    assert drawn == [len(site.labels["training"])]
    for split in ("test_corrupted", "test", "test_clean"):
        site.images[split]
    assert drawn == [len(site.labels["training"]), PLAN.num_test]  # the corrupted copy is made from the clean one
    with pytest.raises(ValueError, match="read-only"):
        site.images["test"][0, 0, 0, 0] = 1
    with pytest.raises(KeyError):
        site.images["test_dark"]


def test_validation_may_be_switched_off_and_is_not_empty_otherwise() -> None:
    site = phantom_site(replace(PLAN, validation_fraction=0.0), 0)
    assert site.images["validation"].shape == (0, 32, 32, 3)
    tiny = replace(PLAN, num_samples=104, num_sites=8, min_site=5, alpha=0.5, validation_fraction=0.02)
    assert all(len(phantom_site(tiny, k).labels["validation"]) >= 1 for k in range(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phantom": "xray"}, "unknown phantom 'xray'. Available: dermoscopy, dermoscopy7, fundus, endoscopy"),
        ({"partition": "random"}, "unknown partition 'random'"),
        ({"shard_mode": "x"}, "unknown shard_mode 'x'"),
        ({"corruption": "fog"}, "unknown corruption 'fog'"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"image_size": 16}, "image_size must be a whole number >= 32, got 16"),
        ({"image_size": 48.0}, "image_size"),
        ({"num_sites": 0}, "num_sites must be a whole number >= 1, got 0"),
        ({"severity": 6}, "severity must be a whole number from 1 to 5, got 6"),
        ({"corrupted_sites": 6}, "corrupted_sites must be at most num_sites=5, got 6"),
        ({"alpha": 0}, "alpha must be a number from"),
        ({"alpha": float("nan")}, "alpha"),
        ({"eta": 1.1}, "eta must be a number from 0 to 1, got 1.1"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"num_samples": 40}, "num_samples must be at least 50 for 8 classes and 5 sites"),
        ({"phantom": "endoscopy", "num_test": 100}, "num_test must be at least 184 for 23 classes"),
        ({"phantom": "fundus", "attributes": True}, "'fundus' has no attributes; these have: dermoscopy, dermoscopy7"),
        ({"attributes": "yes"}, "attributes must be True or False"),
        ({"attribute_shares": (0.5, 0.5)}, "attributes is False"),
        ({"attributes": True, "attribute_shares": (0.5, 0.4)}, "attribute_shares must be 2 shares of sum 1"),
    ],
)
def test_a_bad_plan_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PhantomPlan(), **settings)  # type: ignore[arg-type]


def test_a_bad_site_is_refused() -> None:
    for index in (-1, 5, True, 1.5):
        with pytest.raises(ValueError, match="site must be a whole number from 0 to 4"):
            phantom_site(PLAN, index)  # type: ignore[arg-type]
    starved = PhantomPlan(
        phantom="dermoscopy7", partition="shards", shard_mode="complement", num_sites=7, num_samples=300,
        corrupted_sites=0, min_site=20,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fewer than min_site=20"):
        phantom_site(starved, 0)


# the contact sheet


def test_contact_sheet_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = contact_sheet(tmp_path / "a.png", "fundus", columns=3, image_size=32)
    with Image.open(path) as sheet:
        assert sheet.size == (3 * 34, 5 * 34)
    arguments = [
        "dermoscopy",
        "--out",
        str(tmp_path / "b.png"),
        "--columns",
        "2",
        "--size",
        "32",
        "--attribute",
        "dark",
    ]
    assert main(arguments) == 0
    assert "synthetic dermoscopy-like" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fundus", "--out", str(tmp_path / "c.png"), "--size", "8"])
    with pytest.raises(SystemExit):
        main(["fundus", "--out", str(tmp_path / "c.png"), "--size", "32", "--attribute", "dark"])
    with pytest.raises(ValueError, match="unknown phantom 'xray'"):
        contact_sheet(tmp_path / "d.png", "xray")
