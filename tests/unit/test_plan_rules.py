"""Test nnU-Net's plan: the rules against what nnU-Net's own planner gave, and counts of sites against all cases."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairflare.core.plans.counts import (
    Case,
    Counts,
    count_values,
    foreground,
    intensities,
    merge_counts,
    quantile,
    total,
)
from fairflare.core.plans.document import Answers, plan_of
from fairflare.core.plans.rules import (
    coarsest_first,
    configuration,
    memory_count,
    resampled_size,
    target_spacing,
    topology,
)
from fairflare.tasks.volumes.plan_file import read_plan

STORED = json.loads(Path(__file__).with_name("nnunet_plans.json").read_text("utf-8"))
Cases = list[tuple[tuple[float, ...], tuple[int, ...]]]


def in_digits(rows: Any) -> str:
    return " ".join("".join(map(str, row)) for row in rows)


def fingerprint(seed: int) -> tuple[list[list[float]], list[list[int]], int, int]:
    """Draw spacings in mm and sizes of some cases, the memory in GB, and the number of classes with the background."""
    rng = np.random.default_rng(seed)
    mm, size = 10 ** rng.uniform(-0.5, 0.9, 3), rng.choice([20, 40, 100, 250, 512], 3)
    cases = int(rng.integers(3, 60))
    spacings = np.round(mm * rng.uniform(0.8, 1.25, (cases, 3)), 3).tolist()
    sizes = np.maximum(2, size * rng.uniform(0.8, 1.25, (cases, 3))).astype(int).tolist()
    return spacings, sizes, int(rng.choice([4, 8, 8, 11, 16, 24, 40])), int(rng.integers(2, 8))


def patches() -> Iterator[tuple[list[float], list[int]]]:
    rng = np.random.default_rng(2026)
    for _ in range(2000):
        axes = int(rng.integers(2, 4))
        yield np.round(10 ** rng.uniform(-0.7, 1, axes), 3).tolist(), rng.integers(1, 700, axes).tolist()


def of_cases(cases: Sequence[Case], least: int = 1, parts: int = 1) -> Answers:
    """Return the answers of sites that have these cases in turn; ``least``: the runs of a site without secure sums."""
    sites = [cases[part::parts] for part in range(parts)]

    def summed(kind: str, target: Sequence[float] = ()) -> list[Counts]:
        each = ([merge_counts(axis, least) for axis in count_values(site, kind, target)] for site in sites)
        return [total(axis) for axis in zip(*each, strict=True)]

    first = Answers(summed("spacing"), summed("size"))
    return Answers(first.spacing, first.size, summed("resampled", first.target))


def cases_of(pairs: Cases) -> list[Case]:
    return [Case(spacing, size, 1.0) for spacing, size in pairs]


def in_short(plan: dict[str, Any]) -> list[Any]:
    both = plan["configurations"]["3d_fullres"], plan["configurations"]["2d"]
    row: list[Any] = ["".join(map(str, plan["transpose_forward"])), int(both[0]["batch_dice"])]
    for one in both:
        network = one["architecture"]["arch_kwargs"]
        row += [
            one["patch_size"], one["batch_size"], in_digits(network["strides"]), in_digits(network["kernel_sizes"])
        ]  # fmt: skip
    return row


# ------------------------------------------------------------------------------------------------ the rules


def test_the_topology_is_that_of_nnunets_own_planner_in_2000_draws() -> None:
    found = hashlib.sha256()
    for spacing, patch in patches():
        size, strides, kernels = topology(spacing, patch)
        found.update(f"{list(size)} {in_digits(strides)} {in_digits(kernels)}\n".encode())
    assert found.hexdigest() == STORED["topologies"]


def test_the_plan_is_that_of_nnunets_own_planner_for_200_fingerprints() -> None:
    for seed, wanted in enumerate(STORED["plans"]):
        spacings, sizes, memory, outputs = fingerprint(seed)
        cases = cases_of([(tuple(mm), tuple(size)) for mm, size in zip(spacings, sizes, strict=True)])
        plan = plan_of(of_cases(cases, parts=3), channels=["MR"], outputs=outputs, memory=memory)
        assert in_short(plan) == wanted, seed
    assert len(STORED["plans"]) == 200


A: Cases = [((3, 0.5, 0.5), (21, 384, 384))] * 8
B: Cases = [((3, 0.5, 0.5), (19, 384, 384))] * 6 + [((3.3, 0.56, 0.56), (24, 320, 320))] * 4
C: Cases = [((3, 0.34, 0.34), (27, 1024, 672))] * 7
OF_A = "111 122 122 222 222 122 122", "133 133 333 333 333 333 333"
SEVEN = [
    (A, 8, (3, 0.5, 0.5), (21, 384, 384), [16, 320, 320], 2, *OF_A),
    (B, 8, (3, 0.5, 0.5), (19, 384, 384), [16, 320, 320], 2, *OF_A),
    (C, 8, (3, 0.34, 0.34), (27, 1024, 672), [12, 448, 320], 2,
     "111 122 122 122 222 122 122", "133 133 133 333 333 333 333"),
    (A + B + C, 8, (3, 0.5, 0.5), (21, 384, 384), [16, 320, 320], 2, *OF_A),
    (A + B + C, 24, (3, 0.5, 0.5), (21, 384, 384), [24, 384, 384], 2, *OF_A),
    ([((1, 1, 1), (36, 50, 35))] * 60, 8, (1, 1, 1), (36, 50, 35), [40, 56, 40], 2,
     "111 222 222 222", "333 333 333 333"),
    ([((1, 0.78, 0.78), (432, 512, 512))] * 60, 8, (1, 0.78, 0.78), (432, 512, 512), [128, 128, 128], 2,
     "111 222 222 222 222 222", "333 333 333 333 333 333"),
    ([((10, 1.4, 1.4), (9, 256, 216))] * 50 + [((5, 1.4, 1.4), (18, 256, 216))] * 10, 8, (5, 1.4, 1.4),
     (18, 256, 216), [20, 256, 224], 3, "111 122 222 222 122 122", "133 333 333 333 333 333"),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "memory", "spacing", "shape", "patch", "batch", "strides", "kernels"), SEVEN)
def test_the_worked_examples(
    cases: Cases, memory: int, spacing: Any, shape: Any, patch: Any, batch: int, strides: str, kernels: str
) -> None:
    plan = plan_of(of_cases(cases_of(cases), parts=2), channels=["MR"], outputs=3, memory=memory)
    full = plan["configurations"]["3d_fullres"]
    assert (tuple(full["spacing"]), tuple(full["median_image_size_in_voxels"])) == (spacing, shape)
    assert in_short(plan)[2:6] == [patch, batch, strides, kernels]


def made_up(seed: int, digits: int | None = 3) -> list[list[Case]]:
    """Draw the cases of 3 to 6 sites of one kind of scan, whose protocols differ by a quarter and cases by a tenth.

    Args:
        seed: of the draw.
        digits: to which spacings are rounded.
    """
    rng = np.random.default_rng(seed)
    mm, size = SEVEN[int(rng.choice([0, 2, 5, 6, 7]))][0][0]
    sites = []
    for _ in range(int(rng.integers(3, 7))):
        usual, voxels = mm * rng.uniform(0.8, 1.25, 3), size * rng.uniform(0.8, 1.25, 3)
        spacings = usual * rng.choice([0.95, 1, 1, 1.05], (int(rng.integers(5, 40)), 3))
        spacings = spacings if digits is None else np.round(spacings, digits)
        sizes = (voxels * rng.uniform(0.9, 1.1, spacings.shape)).astype(int)
        sites.append(cases_of([*zip(map(tuple, spacings.tolist()), map(tuple, sizes.tolist()), strict=True)]))
    return sites


def by_numpy(cases: Sequence[Case], memory: float = 8, outputs: int = 3) -> tuple[list[float], list[float], list[Any]]:
    """Return target spacing, median shape, and both configurations of all cases in one place, without counts."""
    spacings, sizes = [case.spacing for case in cases], [case.size for case in cases]
    middle, tenth = np.percentile(spacings, 50, 0), np.percentile(spacings, 10, 0)
    target = target_spacing(middle, np.percentile(sizes, 50, 0), tenth)
    shape = np.percentile([resampled_size(case.size, case.spacing, target) for case in cases], 50, 0)
    order = coarsest_first(target)
    mm, median = [target[axis] for axis in order], [float(shape[axis]) for axis in order]
    row: list[Any] = []
    for first in (0, 1):
        voxels = math.prod(median) * len(cases)
        one = configuration(mm[first:], median[first:], voxels=voxels, outputs=outputs, memory=memory)
        row += [list(one.patch), one.batch, in_digits(one.strides), in_digits(one.kernels)]
    return mm, median, row


@pytest.mark.long
def test_spacings_that_are_no_whole_thousandths_are_planned_to_half_a_thousandth() -> None:
    alike = 0
    for seed in range(300):
        sites = made_up(seed, digits=None)
        cases = [case for site in sites for case in site]
        plan = plan_of(of_cases(cases, parts=len(sites)), channels=["MR"], outputs=3, memory=8)
        mm, _, wanted = by_numpy(cases)
        assert plan["configurations"]["3d_fullres"]["spacing"] == pytest.approx(mm, abs=5.01e-4)
        alike += in_short(plan)[2:6] == wanted[:4]
    assert alike >= 298  # a median at the edge of a voxel may fall on its other side


def test_cases_alike_keep_their_voxels_where_their_spacing_is_rounded() -> None:
    cases = cases_of([((3.0, 0.2703125, 0.2703125), (24, 640, 640))] * 9)
    plan = plan_of(of_cases(cases, parts=3), channels=["MR"], outputs=2, memory=24)
    assert plan["configurations"]["3d_fullres"]["median_image_size_in_voxels"] == [24, 640, 640]
    assert plan["configurations"]["2d"]["patch_size"] == by_numpy(cases, 24, 2)[2][4] == [640, 640]


def test_the_memory_counts_layers_as_by_hand() -> None:
    # Two stages on 8 voxels: 2 x 32 x 8 and 2 x 64 x 4 in the encoder, (1 + 2) x 32 x 8 above, 3 outputs x 8.
    assert memory_count((8, 1, 1), [(1, 1, 1), (2, 1, 1)], 3) == 512 + 512 + 768 + 24


# ------------------------------------------------------------------------------------------------ counts


def test_quantiles_of_counts_are_numpys() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 40):
        values = rng.integers(1, 30, n)
        for share in (0, 0.1, 0.5, 0.9, 1):
            assert quantile(Counts(values.tolist()), share) == np.quantile(values, share)
            assert quantile(Counts(values.tolist()), share, 1000) == np.quantile(values / 1000, share)


def test_runs_stand_for_enough_cases_and_lose_none() -> None:
    counts = Counts({7: 2, 9: 1, 12: 4, 40: 1})
    assert merge_counts(counts, 3) == {7: 4, 12: 4}  # 7 7 9 12 and 12 12 12 40, by their lower medians 7 and 12
    assert merge_counts(counts, 9) == {}
    assert merge_counts(counts, 1) == counts


def test_the_sum_of_histograms_keeps_the_smallest_hospitals_organ() -> None:
    # Three hospitals of 40, 12 and 6 cases around 110, 55 and 160 HU; the mean of the sites' percentiles clips at 171.
    rng = np.random.default_rng(1)
    sites = [(40, 110, 25), (12, 55, 20), (6, 160, 60)]
    histogram, values, ends = np.zeros(4096), [], []
    for cases, middle, spread in sites:
        own = np.zeros(4096)
        for _ in range(cases):
            image = rng.normal(middle, spread, 4000)
            own += foreground(image, np.ones(4000, bool))
            values.append(np.round(image))
        histogram += own
        ends.append(intensities(own)["percentile_99_5"])
    every, found = np.concatenate(values), intensities(histogram)
    wanted = {
        "mean": every.mean(),
        "std": every.std(),
        "median": np.median(every),
        "min": every.min(),
        "max": every.max(),
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    for name, percent in (("percentile_00_5", 0.5), ("percentile_99_5", 99.5)):
        assert found[name] == pytest.approx(np.percentile(every, percent), abs=1)
    mean = sum(of[0] * end for of, end in zip(sites, ends, strict=True)) / 58
    assert mean < found["percentile_99_5"] - 20
    assert ends[2] > mean + 50


def test_values_outside_hu_count_at_the_ends() -> None:
    found = foreground(np.array([-5000.0, 9000, 0, 0]), np.ones(4, bool))
    assert (found[0], found[-1], found[1024], found.sum()) == (0.25, 0.25, 0.5, 1)
    assert foreground(np.zeros(3), np.zeros(3, bool)).sum() == 0


# ------------------------------------------------------------------------------------------------ reading


def changed(*path: Any, to: Any) -> dict[str, Any]:
    plan: Any = plan_of(of_cases(cases_of(A)), channels=["MR"], outputs=3, memory=8)
    place = plan
    for key in path[:-1]:
        place = place[key]
    if to is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return dict(plan)


def test_a_plan_is_read_as_it_was_made() -> None:
    plan = read_plan(json.loads(json.dumps(changed("x", to=1))))
    assert (plan.full.patch_size, plan.axes, plan.foreground) == ((16, 320, 320), "SAR", {})
    assert plan.full.network["features"] == [32, 64, 128, 256, 320, 320, 320]
    assert math.prod(plan.full.network["strides"][3]) == 8


FULL = ("configurations", "3d_fullres")
NETWORK = (*FULL, "architecture", "arch_kwargs")
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("configurations",), KeyError, "has no 'configurations'"),
    (FULL, KeyError, "has no '3d_fullres'"),
    ((*FULL, "patch_size"), [16, 320], r"3d_fullres.patch_size"),
    ((*FULL, "patch_size"), [17, 320, 320], r"patch_size \[17, 320, 320\] must be divisible by \[4, 64, 64\]"),
    ((*FULL, "spacing"), [3, -0.5, 0.5], r"spacing.1: .* got -0.5"),
    ((*FULL, "normalization_schemes"), ["RGBTo01Normalization"], "normalization_schemes.0"),
    ((*FULL, "use_mask_for_norm"), [], "use_mask_for_norm must have an entry for each channel"),
    ((*FULL, "architecture", "network_class_name"), "x.ResidualEncoderUNet", "network_class_name"),
    (
        (*NETWORK, "nonlin_kwargs"),
        {"inplace": True, "negative_slope": 0.2},
        "nonlin_kwargs must be .* 'negative_slope': 0.2",
    ),
    ((*NETWORK, "norm_op_kwargs"), {"eps": 0.001, "affine": True}, "norm_op_kwargs must be .* got {'eps': 0.001"),
    ((*NETWORK, "n_stages"), 6, "n_stages must be 7"),
    ((*NETWORK, "kernel_sizes"), [[2, 3, 3]] * 7, "kernel_sizes must be odd"),
    ((*NETWORK, "strides"), [[1, 1, 1]], "as many features, kernels and strides as stages"),
    (("transpose_forward",), [0, 1, 1], r"transpose_forward must be an order of 0, 1, 2, got \[0, 1, 1\]"),
    ((*FULL, "normalization_schemes"), ["CTNormalization"], "foreground_intensity_properties_per_channel.0.mean"),
]


@pytest.mark.parametrize(("path", "value", "text"), WRONG)
def test_a_wrong_plan_is_refused_by_its_entry(path: tuple[Any, ...], value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_plan(changed(*path, to=value))


def test_the_smallest_and_largest_values_count_at_the_ends() -> None:
    case = Case((0.0002, 0.001, 25.0), (1, 2, 5000), 1.0)
    assert case.steps("spacing") == [1, 1, 20_000]
    assert case.steps("size") == [1, 2, 4096]
