"""Test the synthetic federations for classification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fairflare.base.described import describe_settings
from fairflare.base.settings import field_names
from fairflare.data.corruptions import CORRUPTIONS, corrupt, image_seed
from fairflare.data.partitions import SHARD_MODES, iid_partition, stratified_split
from fairflare.tasks.classification import ClassificationTask
from fairflare_lab.phantoms import PHANTOMS, PhantomPlan, class_site, classes
from fairflare_lab.phantoms.camera import Camera, camera_of
from fairflare_lab.phantoms.classes import class_counts

from .test_settings import refused_beyond

PLAN = PhantomPlan(image_size=32, num_samples=240, num_test=64)


def forget() -> None:
    """Empty the caches: a site's images must not depend on earlier draws."""
    for cached in ("_pool", "_test", "_partition", "_test_images"):
        getattr(classes, cached).cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


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
    """Check 5.5 of the spec: head > 700, medium 70 to 700, tail < 70 images in 80 % of HyperKvasir: 7, 9, 7 classes."""
    phantom = PHANTOMS["endoscopy"]
    assert {name: len(members) for name, members in phantom.groups.items()} == {"head": 7, "medium": 9, "tail": 7}
    for name, members in phantom.groups.items():
        for c in members:
            n = 0.8 * phantom.counts[c]
            assert name == ("head" if n > 700 else "medium" if n >= 70 else "tail")


# counts


def test_class_counts_worked_by_hand() -> None:
    assert class_counts([900, 90, 10], 100, 5) == (86, 9, 5)  # 5 first, then 95 as 10 : 1 = 86.36, 8.64
    assert class_counts([3, 1], 8, 1) == (6, 2)
    assert class_counts([5, 1, 1], 6, 2) == (2, 2, 2)
    with pytest.raises(ValueError, match="5 images are too few for 3 classes"):
        class_counts([5, 1, 1], 5, 2)


@pytest.mark.parametrize("name", list(PHANTOMS))
def test_long_tail_and_every_class_in_the_test_set(name: str) -> None:
    plan = PhantomPlan(phantom=name, image_size=32, num_samples=2000, num_test=400)
    sites = [class_site(plan, k) for k in range(plan.num_sites)]
    own = np.concatenate([site.labels[split] for site in sites for split in ("training", "validation")])
    counts = np.bincount(own, minlength=len(plan.kind.counts))
    assert counts.sum() == plan.num_samples
    assert counts.min() >= plan.min_class
    order = np.argsort(plan.kind.counts)
    assert (np.diff(counts[order]) >= 0).all()
    for site in sites:
        np.testing.assert_array_equal(site.labels["test_common"], sites[0].labels["test_common"])
    tested = np.bincount(sites[0].labels["test_common"], minlength=len(plan.kind.counts))
    assert (tested.sum(), tested.min()) == (plan.num_test, plan.min_class_test)


# sites


def test_a_site_is_the_same_whoever_was_drawn_before() -> None:
    first = class_site(PLAN, 3)
    training = first.images["training"].copy()
    test = first.images["test"].copy()
    forget()
    for index in range(PLAN.num_sites):
        class_site(PLAN, index).images["validation"]
    again = class_site(PLAN, 3)
    np.testing.assert_array_equal(again.images["training"], training)
    np.testing.assert_array_equal(again.images["test"], test)
    other = class_site(replace(PLAN, seed=1), 3)
    assert (other.images["test"][:10] != test[:10]).any(axis=(1, 2, 3)).all()


def test_splits_share_no_image_and_match_their_labels() -> None:
    seen: set[bytes] = set()
    total = 0
    for index in range(PLAN.num_sites):
        site = class_site(PLAN, index)
        for split in ("training", "validation", "test"):
            images, labels = site.images[split], site.labels[split]
            assert images.shape == (len(labels), 32, 32, 3)
            assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
            assert len(labels) >= 1
            seen |= {image.tobytes() for image in images}
            total += len(images)
    assert total == len(seen) == PLAN.num_samples + PLAN.num_sites * PLAN.num_own_test
    assert not seen & {image.tobytes() for image in class_site(PLAN, 0).images["test_common"]}


@pytest.mark.parametrize("kind", ["gaussian_noise", "motion_blur"])
def test_corrupted_sites_see_a_corrupted_copy_of_the_same_test_set(kind: str) -> None:
    plan = replace(PLAN, corruption=kind, corrupted_sites=2)
    clean, corrupted = class_site(plan, 0), class_site(plan, 4)
    assert list(clean.images) == [
        "training", "validation", "test", "test_common", "test_clean", "test_corrupted"
    ]  # fmt: skip
    assert [plan.is_corrupted(k) for k in range(5)] == [False, False, False, True, True]
    for site in (clean, corrupted):
        np.testing.assert_array_equal(site.images["test_clean"], clean.images["test_common"])
        np.testing.assert_array_equal(site.images["test_corrupted"], corrupted.images["test_common"])
        np.testing.assert_array_equal(site.labels["test_corrupted"], clean.labels["test_common"])
    for number in (0, 17):
        seed = image_seed(f"{kind}/test/{number}", plan.seed)
        expected = corrupt(clean.images["test_common"][number], kind, 3, seed)
        np.testing.assert_array_equal(corrupted.images["test_common"][number], expected)
    # training images of a corrupted site are corrupted, those of a clean site are not
    same = class_site(replace(plan, severity=5), 0)
    np.testing.assert_array_equal(same.images["training"], clean.images["training"])
    worse = class_site(replace(plan, severity=5), 4)
    for split in ("training", "validation", "test"):
        np.testing.assert_array_equal(worse.labels[split], corrupted.labels[split])
        assert (worse.images[split] != corrupted.images[split]).any(axis=(1, 2, 3)).all()


@pytest.mark.many
@pytest.mark.parametrize(("kind", "share"), [("symmetric", 0.4), ("pair", 0.4), ("symmetric", 1.0), ("pair", 0.0)])
def test_label_noise_at_the_last_sites_and_in_training_only(kind: str, share: float) -> None:
    plan = replace(PLAN, label_noise_sites=2, label_noise=share, label_noise_kind=kind)
    assert [plan.has_label_noise(k) for k in range(5)] == [False, False, False, True, True]
    classes = len(plan.kind.counts)
    for k in range(5):
        right, site = class_site(PLAN, k), class_site(plan, k)
        for split in plan.splits:
            np.testing.assert_array_equal(site.images[split], right.images[split])
            if k < 3 or split != "training":
                np.testing.assert_array_equal(site.labels[split], right.labels[split])
        if k < 3:
            continue
        labels, true = site.labels["training"], right.labels["training"]
        assert (labels != true).sum() == round(share * len(true))
        further = set(((labels - true) % classes).tolist()) - {0}
        if kind == "pair":
            assert further == ({1} if share else set())
        else:
            assert len(further) > 3
        np.testing.assert_array_equal(class_site(plan, k).labels["training"], labels)  # whenever it is asked
        assert not labels.flags.writeable


def test_test_splits_by_attribute() -> None:
    plan = replace(PLAN, attributes=True, corrupted_sites=0, num_test=80)
    site = class_site(plan, 0)
    assert plan.splits == tuple(site.images)
    assert plan.splits == ("training", "validation", "test", "test_common", "test_light", "test_dark")
    light, dark = site.images["test_light"], site.images["test_dark"]
    assert len(light) + len(dark) == 80
    assert dark.mean() < 0.8 * light.mean()
    for tone in ("light", "dark"):  # equal parts within each class
        assert np.bincount(site.labels[f"test_{tone}"], minlength=8).min() >= 4
    both = np.concatenate([light, dark])
    assert {i.tobytes() for i in both} == {i.tobytes() for i in site.images["test_common"]}
    all_light, all_dark = (
        class_site(replace(plan, attribute_shares=shares), 0).images for shares in ((1.0, 0.0), (0.0, 1.0))
    )
    for split in ("training", "test"):
        assert all_dark[split].mean() < site.images[split].mean() < all_light[split].mean()


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
    sites = [class_site(plan, k) for k in range(plan.num_sites)]
    sizes = [sum(len(site.labels[s]) for s in ("training", "validation")) for site in sites]
    assert sum(sizes) == plan.num_samples
    assert min(sizes) >= plan.min_site
    if plan.partition == "iid":
        assert max(sizes) - min(sizes) <= 1
    for site in sites:
        assert len(site.labels["validation"]) == pytest.approx(
            plan.validation_fraction * (len(site.labels["training"]) + len(site.labels["validation"])), abs=8
        )


def test_labels_of_a_site_by_the_definition() -> None:
    """Check the pool in random order, dealt to the sites, then split by class, each step from its own seed."""
    plan = replace(PLAN, partition="iid", corrupted_sites=0, seed=5, validation_fraction=0.3)
    counts = class_counts(plan.kind.counts, plan.num_samples, plan.min_class)
    ordered = np.concatenate([np.full(n, c) for c, n in enumerate(counts)])
    pool = np.random.default_rng(image_seed("pool", 5)).permutation(ordered)
    for index, mine in enumerate(iid_partition(pool, plan.num_sites, seed=5)):
        parts = stratified_split(pool[mine], (0.7, 0.3), seed=image_seed(f"split/{index}", 5))
        site = class_site(plan, index)
        for split, part in zip(("training", "validation"), parts, strict=True):
            np.testing.assert_array_equal(site.labels[split], pool[mine][part])
        for place in (0, len(parts[0]) - 1):
            number = mine[parts[0][place]]
            rng = np.random.default_rng(image_seed(f"dermoscopy/pool/{number}", 5))
            drawn = PHANTOMS["dermoscopy"].draw(int(pool[number]), rng, 32, "light")
            expected = camera_of(index).take(drawn[None])[0]
            np.testing.assert_array_equal(site.images["training"][place], expected)
        # Its own test set: the proportions of its images, as its camera sees other scenes.
        has = np.bincount(pool[mine], minlength=8)
        present = np.flatnonzero(has)
        wanted = np.zeros(8, int)
        wanted[present] = class_counts(has[present].tolist(), plan.num_own_test, 4)
        np.testing.assert_array_equal(np.bincount(site.labels["test"], minlength=8), wanted)
        rng = np.random.default_rng(image_seed(f"dermoscopy/test/{index}/7", 5))
        drawn = PHANTOMS["dermoscopy"].draw(int(site.labels["test"][7]), rng, 32, "light")
        np.testing.assert_array_equal(site.images["test"][7], camera_of(index).take(drawn[None])[0])


# cameras


def test_a_camera_by_hand() -> None:
    grey = np.full((1, 8, 8, 3), 64, np.uint8)
    np.testing.assert_array_equal(Camera(balance=(2.0, 1.0, 0.5)).take(grey)[0, 0, 0], [128, 64, 32])
    # contrast: x + k (x^2 (3 - 2x) - x); at a quarter 0.15625 - 0.25, so 0.25 -+ 0.046875
    quarter, white, black = (np.full((1, 8, 8, 3), value, np.uint8) for value in (64, 255, 0))
    assert Camera(contrast=0.5).take(quarter)[0, 0, 0, 0] == round(255 * (64 / 255 - 0.5 * 0.0940))
    assert Camera(contrast=-0.5).take(quarter)[0, 0, 0, 0] == round(255 * (64 / 255 + 0.5 * 0.0940))
    for contrast in (-0.5, 0.5):
        assert (Camera(contrast=contrast).take(white) == 255).all()
        assert (Camera(contrast=contrast).take(black) == 0).all()
    dark = Camera(vignetting=0.4).take(white)[0, :, :, 0]
    assert dark[0, 0] == round(255 * (1 - 0.4 * 0.875**2))  # pixels' centres: 7/8 and 1/8 of the half width
    assert dark[3, 3] == round(255 * (1 - 0.4 * 0.125**2))
    dot = np.zeros((1, 33, 33, 3), np.uint8)
    dot[0, 16, 16] = 255
    seen = Camera(blur=2 / 33).take(dot)[0, :, :, 1].astype(float)
    assert seen[16, 16] == pytest.approx(255 / (2 * np.pi * 2**2), abs=1)  # a Gaussian of two pixels
    assert seen[16, 18] / seen[16, 16] == pytest.approx(np.exp(-0.5), abs=0.06)
    assert (Camera(blur=0.05).take(quarter) == 64).all()


@pytest.mark.parametrize("name", list(PHANTOMS))
def test_cameras_differ_visibly_but_mildly(name: str) -> None:
    """Check mean colour differences in levels of 255: between sites, and to the camera of the common test."""
    kind = PHANTOMS[name]
    drawn = np.stack([kind.draw(k % len(kind.class_names), np.random.default_rng(k), 48) for k in range(24)])
    seen = [camera_of(site).take(drawn).astype(float) for site in range(20)]
    assert all(2 < np.abs(image - drawn).mean() < 30 for image in seen)
    for a in range(8):
        for b in range(a):
            assert np.abs(seen[a] - seen[b]).mean() > 2


def test_camera_shift_moves_what_is_the_sites_own_and_nothing_else() -> None:
    own, plain = class_site(PLAN, 1), class_site(replace(PLAN, camera_shift=0.0), 1)
    for split in own.images:
        np.testing.assert_array_equal(own.labels[split], plain.labels[split])
        same = np.array_equal(own.images[split], plain.images[split])
        assert same == (split in ("test_common", "test_clean", "test_corrupted")), split
        np.testing.assert_array_equal(
            own.images[split], plain.images[split] if same else camera_of(1).take(plain.images[split])
        )
    # A camera comes before the noise of a corrupted site.
    noisy, plain = class_site(PLAN, 4), class_site(replace(PLAN, camera_shift=0.0, corrupted_sites=0), 4)
    place = int(np.flatnonzero(plain.labels["test"] >= 0)[0])
    if np.array_equal(noisy.labels["test"], plain.labels["test"]):
        taken = camera_of(4).take(plain.images["test"][place][None])[0]
        seed = image_seed(f"gaussian_noise/test/4/{place}", PLAN.seed)
        np.testing.assert_array_equal(noisy.images["test"][place], corrupt(taken, "gaussian_noise", 3, seed))


@pytest.mark.parametrize(("site", "strength"), [(-1, 1.0), (1.5, 1.0), (0, -0.1), (0, 1.6), (0, float("nan"))])
def test_a_bad_camera_is_refused(site: int, strength: float) -> None:
    with pytest.raises(ValueError, match=r"site must be an integer|strength must be"):
        camera_of(site, strength)


@pytest.mark.parametrize("partition", ["dirichlet", "two_pool"])
def test_a_partition_is_drawn_again_until_no_site_is_too_small(partition: str) -> None:
    plan = replace(PLAN, partition=partition, alpha=0.4, min_site=1)

    def smallest(plan: PhantomPlan) -> int:
        sites = [class_site(plan, k) for k in range(plan.num_sites)]
        return min(sum(len(site.labels[split]) for split in ("training", "validation")) for site in sites)

    seeds = [seed for seed in range(8) if smallest(replace(plan, seed=seed)) < 30]
    assert seeds
    assert all(smallest(replace(plan, seed=seed, min_site=30)) >= 30 for seed in seeds)


def test_images_are_drawn_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = classes._draw_batch

    def counting(plan: PhantomPlan, batch: classes._Batch, *how: Any) -> np.ndarray:
        drawn.append(len(batch.places))
        return original(plan, batch, *how)

    monkeypatch.setattr(classes, "_draw_batch", counting)
    site = class_site(PLAN, 4)
    assert drawn == []
    site.images["training"]
    site.images["training"]
    assert drawn == [len(site.labels["training"])]
    for split in ("test_corrupted", "test_common", "test_clean"):
        site.images[split]
    assert drawn == [len(site.labels["training"]), PLAN.num_test, PLAN.num_test]  # in both qualities, for all sites
    with pytest.raises(ValueError, match="read-only"):
        site.images["test"][0, 0, 0, 0] = 1
    with pytest.raises(KeyError):
        site.images["test_dark"]


def test_validation_may_be_switched_off_and_is_not_empty_otherwise() -> None:
    site = class_site(replace(PLAN, validation_fraction=0.0), 0)
    assert site.images["validation"].shape == (0, 32, 32, 3)
    tiny = replace(PLAN, num_samples=104, num_sites=8, min_site=5, alpha=0.5, validation_fraction=0.02)
    assert all(len(class_site(tiny, k).labels["validation"]) >= 1 for k in range(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phantom": "fundos"}, "^phantom.* got 'fundos'"),
        ({"num_own_test": 31}, "num_own_test must be at least 32 for 8"),
        ({"label_noise_sites": 6}, "^label_noise_sites of num_sites=5.* got 6$"),
        ({"corrupted_sites": 6}, "^corrupted_sites of num_sites=5.* got 6$"),
        ({"sites": 3}, "PhantomPlan has no setting 'sites'"),
        ({"num_samples": 40}, "num_samples must be at least 50 for 8"),
        ({"phantom": "endoscopy", "num_test": 100}, "num_test must be at least 184 for 23"),
        ({"phantom": "fundus", "attributes": True}, "'fundus' has no attributes; .*dermoscopy7"),
        ({"attribute_shares": (0.5, 0.5)}, "attributes is False"),
        ({"attributes": True, "attribute_shares": (0.5, 0.4)}, "attribute_shares must be 2 shares"),
        ({"attributes": True, "attribute_shares": (1.0,)}, "attribute_shares must be 2 shares"),
        ({"attributes": True, "attribute_shares": (1.5, -0.5)}, "attribute_shares must .*; entry 1 is -0.5"),
    ],
)
def test_a_bad_plan_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PhantomPlan(), **settings)  # type: ignore[arg-type]


def test_a_plan_cannot_be_changed() -> None:
    """Check that no key of saved images changes."""
    plan = PhantomPlan()
    with pytest.raises(AttributeError, match=r"replace\(plan, seed=\.\.\.\)"):
        plan.seed = 1
    assert plan == PhantomPlan()
    assert replace(plan, seed=1).seed == 1


def test_plans_of_equal_settings_are_equal_and_any_other_setting_makes_another() -> None:
    """Check that images saved by plan are not shared by plans that differ anywhere."""
    base = PhantomPlan(attributes=True, partition="shards", attribute_shares=(0.5, 0.5))
    others = {
        "phantom": "dermoscopy7", "seed": 1, "image_size": 49, "num_sites": 4, "num_samples": 1999, "num_test": 399,
        "partition": "iid", "alpha": 0.9, "eta": 0.9, "shard_mode": "complement", "corrupted_sites": 2,
        "corruption": "motion_blur", "severity": 4, "validation_fraction": 0.2, "min_site": 9, "min_class": 3,
        "min_class_test": 7, "num_own_test": 149, "camera_shift": 0.5, "attribute_shares": (0.4, 0.6),
        "label_noise_sites": 1, "label_noise": 0.3, "label_noise_kind": "pair",
        "attribute_prevalence": 0.1, "attribute_noise": 0.1,
    }  # fmt: skip
    assert {*others, "attributes"} == set(field_names(PhantomPlan))
    again = PhantomPlan(attributes=True, partition="shards", attribute_shares=[0.5, 0.5])  # type: ignore[arg-type]
    assert again == base
    assert hash(again) == hash(base)
    changed = [replace(base, **{name: value}) for name, value in others.items()]  # type: ignore[arg-type]
    changed.append(replace(base, attributes=False, attribute_shares=()))
    assert len({base, *changed}) == len(others) + 2
    for plan in changed:
        assert plan != base
    assert base != "dermoscopy"


def test_an_image_of_no_class_or_attribute_is_refused() -> None:
    """Check negative numbers, which would silently be another class."""
    for name, top in (("dermoscopy", 7), ("dermoscopy7", 6), ("fundus", 4), ("endoscopy", 22)):
        for label in (-1, top + 1, True, 1.0):
            with pytest.raises(ValueError, match=rf"label must .*0, {top}\], got {label}"):
                PHANTOMS[name].draw(label, np.random.default_rng(0), 32)  # type: ignore[arg-type]
    for name in ("fundus", "endoscopy"):
        with pytest.raises(ValueError, match=rf"'{name}' has no attributes; .*dermoscopy7"):
            PHANTOMS[name].draw(0, np.random.default_rng(0), 32, "light")


# the same bits on every machine and from 0.3.0 on: colours are rounded to 8 bit, so small means are exact enough


@pytest.mark.parametrize(
    ("name", "label", "attribute", "means"),
    [
        ("dermoscopy", 0, None, (179.07, 135.44, 149.75)),
        ("dermoscopy", 4, "dark", (127.72, 77.97, 69.57)),
        ("endoscopy", 22, None, (184.65, 154.24, 136.5)),
    ],
)
def test_images_are_those_of_earlier_versions(
    name: str, label: int, attribute: str | None, means: tuple[float, float, float]
) -> None:
    image = PHANTOMS[name].draw(label, np.random.default_rng([11, label]), 48, attribute)
    np.testing.assert_allclose(image.mean((0, 1)), means, atol=0.05)


def test_a_bad_site_is_refused() -> None:
    for index in (-1, 5, True, 1.5):
        with pytest.raises(ValueError, match=rf"site.* got {index}"):
            class_site(PLAN, index)  # type: ignore[arg-type]
    starved = PhantomPlan(
        phantom="dermoscopy7", partition="shards", shard_mode="complement", num_sites=7, num_samples=300,
        corrupted_sites=0, min_site=20,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fewer than min_site=20"):
        class_site(starved, 0)


def test_a_skin_that_the_phantom_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^attribute.* got 'pink'$"):
        PHANTOMS["dermoscopy"].draw(1, np.random.default_rng(0), 32, "pink")


def test_every_declared_range_is_the_one_that_holds() -> None:
    assert refused_beyond(PhantomPlan) > 10


def test_the_choices_are_those_of_the_phantom() -> None:
    wanted, drawn = ({s.name: s.wanted for s in describe_settings(of)} for of in (ClassificationTask, PhantomPlan))
    for name, known in (("phantom", PHANTOMS), ("shard_mode", SHARD_MODES), ("corruption", CORRUPTIONS)):
        assert wanted[name] == f"one of {', '.join(map(repr, known))}"
    for name in ("partition", "shard_mode", "corruption", "label_noise_kind"):
        assert wanted[name] == drawn[name]
