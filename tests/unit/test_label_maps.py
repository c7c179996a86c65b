"""Test whether a class is the same thing at every site."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestCentroid

from fairflare.core.statistics.label_maps import describe_mix_up, features_of, label_maps

CLASSES, SITES = 5, [f"site-{k}" for k in range(1, 6)]


def data(seed: int, count: int = 120, noise: float = 2.0, sites: list[str] | None = None):
    """Draw classes around common centres; every site has a scanner of its own and classes in unequal parts."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, 12))
    features, labels = {}, {}
    for site in sites or SITES:
        labels[site] = rng.choice(CLASSES, count, p=0.5 * rng.dirichlet([1.0] * CLASSES) + 0.5 / CLASSES)
        features[site] = centres[labels[site]] + rng.normal(size=12) * 2 + noise * rng.normal(size=(count, 12))
    return features, labels


def test_honest_sites_are_left_alone() -> None:
    certain = [site for seed in range(40) for site, one in label_maps(*data(seed)).items() if one.certain]
    assert certain == []


def test_few_images_are_no_evidence() -> None:
    """Check noise, of which some map always explains more than the labels do."""
    found = [one for seed in range(20) for one in label_maps(*data(seed, count=12, noise=20.0)).values()]
    assert max(one.explained - one.agreement for one in found) > 0.3
    assert not any(one.certain for one in found)


def named(count: int) -> dict[int, str]:
    return {number: f"class {number}" for number in range(count)}


def test_a_shift_is_found_and_named() -> None:
    for seed in range(5):
        features, labels = data(seed)
        labels["site-3"] = (labels["site-3"] + 1) % CLASSES
        found = label_maps(features, labels)
        assert [site for site, one in found.items() if one.certain] == ["site-3"]
        one = found["site-3"]
        assert one.looks_like == {label: (label - 1) % CLASSES for label in range(CLASSES)}
        assert one.explained > one.agreement + 0.2
        assert describe_mix_up(one.looks_like, named(CLASSES)) == "shifted by 1 (1 too high)"


def test_two_classes_swapped_of_five() -> None:
    features, labels = data(1, count=200, noise=1.5)
    labels["site-2"] = np.choose(labels["site-2"], [0, 3, 2, 1, 4])
    found = label_maps(features, labels)
    assert [site for site, one in found.items() if one.certain] == ["site-2"]
    names = dict(enumerate(["mel", "nv", "bcc", "ak", "df"]))
    assert describe_mix_up(found["site-2"].looks_like, names) == "swapped: 'nv' and 'ak'"


def test_two_wrong_sites_of_five() -> None:
    features, labels = data(2)
    for site in ("site-1", "site-4"):
        labels[site] = (labels[site] + 2) % CLASSES
    assert {site for site, one in label_maps(features, labels).items() if one.certain} == {"site-1", "site-4"}


def test_agreement_is_that_of_a_nearest_centroid_classifier() -> None:
    """Compare two sites with scikit-learn's classifier by the other site's class means, on centred features."""
    features, labels = data(3, sites=SITES[:2])
    found = label_maps(features, labels)
    centred, within = {}, []
    for site in features:
        means = np.stack([features[site][labels[site] == c].mean(0) for c in range(CLASSES)])
        centred[site] = features[site] - means.mean(0)
        within.append(features[site] - means[labels[site]])
    scale = np.concatenate(within).std(0)
    for site, other in (SITES[:2], SITES[1::-1]):
        probe = NearestCentroid().fit(centred[other] / scale, labels[other])
        right = probe.predict(centred[site] / scale) == labels[site]
        expected = np.mean([right[labels[site] == c].mean() for c in range(CLASSES)])
        assert found[site].agreement == pytest.approx(expected)


def test_odd_cases() -> None:
    features, labels = data(4)
    labels["site-1"][:] = 2  # one class alone tells nothing
    assert set(label_maps(features, labels)) == set(SITES[1:])
    assert label_maps({"a": features["site-2"]}, {"a": labels["site-2"]}) == {}
    assert label_maps({}, {}) == {}
    lone = {**labels, "site-5": labels["site-5"] + 10}  # classes that nobody else has
    assert "site-5" not in label_maps(features, lone)
    constant = {site: np.ones_like(values) for site, values in features.items()}
    assert not any(one.certain for one in label_maps(constant, labels).values())


def test_words() -> None:
    assert describe_mix_up({0: 1, 1: 0}, named(2)) == "swapped: 'class 0' and 'class 1'"
    assert describe_mix_up({0: 1, 1: 2, 2: 0}, named(3)) == "shifted by 1 (1 too low)"
    assert describe_mix_up({0: 1, 1: 2, 2: 0, 3: 3}, named(4)).startswith("mixed up: 'class 0' looks like 'class 1', ")


def test_features_of_a_picture() -> None:
    picture = np.random.default_rng(0).random((3, 48, 40))
    found = features_of(picture)
    assert found.shape == (3 * 128,)
    assert found[:3] == pytest.approx(picture[:, :6, :5].mean((1, 2)))
    assert found[-3:] == pytest.approx(picture[:, -6:, -5:].std((1, 2)))
    assert features_of(picture[:, :5, :5]).shape == (3 * 50,)
