"""Test classification metrics: worked numbers, an independent AUC, classes that do not occur."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
import sklearn.metrics as skm
from hypothesis import given
from hypothesis import strategies as st

from fairflare.tasks.scores.metrics import MEANINGS, classification_metrics

Array = npt.NDArray[np.floating]


def one_hot(found: Sequence[int], classes: int) -> Array:
    return np.eye(classes)[list(found)]


def metrics_of(targets: Sequence[int], probabilities: Array, **options: object) -> dict[str, float]:
    names = [f"c{index}" for index in range(probabilities.shape[1])]
    return classification_metrics(np.asarray(targets), probabilities, class_names=names, **options)  # type: ignore[arg-type]


def draw(rng: np.random.Generator, classes: int, present: Sequence[int], n: int = 60) -> tuple[list[int], Array]:
    """Draw every class of ``present`` at least once; shares are in 64ths, so that ties are exact."""
    targets = [*present, *rng.choice(present, n - len(present)).tolist()]
    leaning = 0.95 * rng.dirichlet(np.ones(classes), n) + 0.05 * np.eye(classes)[targets]
    return targets, (1 + np.stack([rng.multinomial(64 - classes, row) for row in leaning])) / 64


# --- AUC by counting ----------------------------------------------------------------------------------------


def share_of_ordered_pairs(positive: Array, negative: Array) -> float:
    """Return how often a positive sample has the higher score; a tie counts half."""
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in positive for b in negative]
    return sum(wins) / len(wins)


def naive_auc(targets: Sequence[int], probabilities: Array) -> tuple[float, float]:
    """Compute macro one-versus-one and weighted one-versus-rest over the classes that occur."""
    y = np.asarray(targets)
    present = sorted(set(targets))
    p = {c: probabilities[:, c] / probabilities[:, present].sum(1) for c in present}
    pairs = [
        0.5 * (share_of_ordered_pairs(p[a][y == a], p[a][y == b]) + share_of_ordered_pairs(p[b][y == b], p[b][y == a]))
        for a, b in combinations(present, 2)
    ]
    rest = [(int((y == c).sum()), share_of_ordered_pairs(p[c][y == c], p[c][y != c])) for c in present]
    return sum(pairs) / len(pairs), sum(n * area for n, area in rest) / len(y)


@pytest.mark.parametrize(
    ("classes", "present"),
    [(2, (0, 1)), (3, (0, 1, 2)), (5, (0, 1, 2, 3, 4)), (5, (1, 3, 4)), (5, (0, 4)), (8, (7, 2))],
)
def test_areas_against_counting(classes: int, present: tuple[int, ...]) -> None:
    rng = np.random.default_rng(classes + len(present))
    for _ in range(4):
        targets, probabilities = draw(rng, classes, present)
        found = metrics_of(targets, probabilities)
        ovo, ovr = naive_auc(targets, probabilities)
        assert found["auc_ovo"] == pytest.approx(ovo, abs=1e-12)
        assert found["auc_ovr"] == pytest.approx(ovr, abs=1e-12)
        assert 0 < ovo < 1


def test_areas_are_restricted_to_the_classes_that_occur() -> None:
    """Check class 2, which never occurs: without renormalising, scores 0.3 > 0.2 of class 1 would be swapped."""
    probabilities = np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    found = metrics_of([0, 1], probabilities)
    assert found["auc_ovo"] == found["auc_ovr"] == 1.0
    assert found["accuracy"] == 0.5  # a class that does not occur can still be said
    assert {name for name in found if name.startswith("recall_")} == {"recall_c0", "recall_c1"}


# --- the worked numbers -------------------------------------------------------------------------------------


def test_worked_numbers_of_the_specification() -> None:
    """Check y = 00001122, found = 00111222: recalls 2/4, 1/2, 2/2; precisions 2/2, 1/3, 2/3; F1 2/3, 2/5, 4/5."""
    found = metrics_of([0, 0, 0, 0, 1, 1, 2, 2], one_hot([0, 0, 1, 1, 1, 2, 2, 2], 3))
    expected = {
        "accuracy": 0.625, "balanced_accuracy": 0.666667, "precision": 0.75, "recall": 0.625, "f1": 0.633333,
        "f1_macro": 0.622222, "f1_harmonic": 0.681818, "precision_macro": 2 / 3, "recall_c0": 0.5, "recall_c1": 0.5,
        "recall_c2": 1.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert set(found) == {*MEANINGS, "recall_c0", "recall_c1", "recall_c2"}
    assert all(type(value) is float for value in found.values())


LABELS = st.integers(0, 4)


@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=30))
def test_labels_give_scikit_learns_metrics(pairs: list[tuple[int, int]]) -> None:
    targets, said = (list(column) for column in zip(*pairs, strict=True))
    found = metrics_of(targets, one_hot(said, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are only predicted
        expected = {
            "accuracy": skm.accuracy_score(targets, said),
            "balanced_accuracy": skm.balanced_accuracy_score(targets, said),
            "precision": skm.precision_score(targets, said, average="weighted", zero_division=0),
            "recall": skm.recall_score(targets, said, average="weighted", zero_division=0),
            "f1": skm.f1_score(targets, said, average="weighted", zero_division=0),
            "precision_macro": skm.precision_score(targets, said, average="macro", zero_division=0),
            "f1_macro": skm.f1_score(targets, said, average="macro", zero_division=0),
        }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-12), name


def test_one_class_has_no_area() -> None:
    found = metrics_of([1, 1, 1, 1], one_hot([1, 1, 1, 0], 3))
    assert not {"auc_ovo", "auc_ovr", "recall_c0", "recall_c2"} & set(found)
    assert found["accuracy"] == found["balanced_accuracy"] == found["recall_c1"] == 0.75


def test_right_everywhere_is_1_everywhere() -> None:
    found = metrics_of([0, 1, 2, 2, 1], one_hot([0, 1, 2, 2, 1], 3), groups={"a": [0], "b": [1, 2]})
    assert set(found.values()) == {1.0}


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_lies_in_0_to_1_and_weighted_recall_is_accuracy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    targets, probabilities = draw(rng, 6, (0, 2, 3, 5), n=40)
    before = probabilities.copy()
    for shares in (probabilities, one_hot(targets, 6), probabilities.astype(np.float32)):
        found = metrics_of(targets, shares, groups={"few": [0, 1], "many": [2, 3, 5]})
        assert all(0.0 <= value <= 1.0 for value in found.values())
        assert found["recall"] == pytest.approx(found["accuracy"], abs=1e-12)
    order = rng.permutation(len(targets))
    shuffled = metrics_of(np.asarray(targets)[order].tolist(), probabilities[order])
    assert shuffled == pytest.approx(metrics_of(targets, probabilities), abs=1e-12)
    assert np.array_equal(before, probabilities)


# --- groups of classes --------------------------------------------------------------------------------------


def test_groups_by_hand() -> None:
    """Check recalls 1/2, 1, 0 | 1/4: head 0.75, tail (0 + 1/4) / 2 = 0.125, all 0.4375; not the mean of classes."""
    targets = [0, 0, 1, 2, 3, 3, 3, 3]
    found = metrics_of(targets, one_hot([0, 1, 1, 0, 3, 0, 0, 0], 4), groups={"head": [0, 1], "tail": [2, 3]})
    assert found["head"] == 0.75
    assert found["tail"] == 0.125
    assert found["all"] == 0.4375


def test_groups_with_classes_that_do_not_occur() -> None:
    groups = {"head": [0, 1], "medium": [2], "tail": [3, 4]}
    found = metrics_of([0, 0, 3, 3], one_hot([0, 1, 3, 3], 5), groups=groups)
    assert found["head"] == 0.5
    assert found["tail"] == 1.0
    assert "medium" not in found
    assert found["all"] == 0.75
    none = metrics_of([0, 0], one_hot([0, 1], 5), groups={"tail": [4]})
    assert not {"tail", "all"} & set(none)
    assert "all" not in metrics_of([0, 0], one_hot([0, 1], 5), groups={})


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "probabilities", "message"),
    [
        ([], np.zeros((0, 3)), "^the number of samples.* got 0$"),
        ([0, 1], np.zeros((3, 3)), r"got \(2,\) and \(3, 3\)"),
        ([[0, 1]], np.zeros((1, 3)), r"got \(1, 2\) and \(1, 3\)"),
        ([0, 3], np.zeros((2, 3)), "^class numbers.* got 3$"),
        ([-1, 2], np.zeros((2, 3)), "^class numbers.* got -1$"),
    ],
)
def test_refused(targets: list[int], probabilities: Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics_of(targets, probabilities)


def test_one_name_for_each_class() -> None:
    with pytest.raises(ValueError, match=r"probabilities \(n, 2\) are needed"):
        classification_metrics(np.array([0, 1, 2]), np.eye(3), class_names=["a", "b"])
