"""Test the primary metric on draws of the test images: sent values, refusals, and saved values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

from fairflare.base.cases.resampling import draws, units_of
from fairflare.data.datalist import DataError, load_datalist
from fairflare.exchange.messages import Message
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.transports.local import run_local
from tests.federation.network import Run, good, misbehave
from tests.tiny import FUNDUS, VOLUMES, model_in, run_document

SITES = ["site-1", "site-2", "site-3"]
COUNT = 25
SEGMENTS = {**VOLUMES, "phantom_cases": 0.3}
CLASSES = {**FUNDUS, "phantom_sites": 3}


def plan(task: str, **options: Any) -> Plan:
    settings = {"segmentation": SEGMENTS, "classification": CLASSES}[task]
    return make_plan("fed_avg", task=task, sites=3, settings=settings, **{"num_rounds": 1, **options})


def done(made: Plan, folder: Path, local: dict[str, Any] | None = None) -> tuple[dict[str, Any], torch.nn.Module]:
    results = run_local(made, folder, local)
    model = made.task.build_model()
    model.load_state_dict(model_in(results))
    return run_document(results), model


def test_the_same_draws_for_everyone_and_others_for_each_site() -> None:
    first = draws("a", 7, COUNT)
    assert first.shape == (COUNT, 7)
    assert set(np.unique(first)) == set(range(7))
    assert np.array_equal(first, draws("a", 7, COUNT))
    assert np.array_equal(first[:5], draws("a", 7, 5))
    assert not np.array_equal(first, draws("b", 7, COUNT))
    for wrong in ((0, 5), (7, 0), (7, 10_001)):
        with pytest.raises(ValueError, match="number of"):
            draws("a", *wrong)


def test_dice_of_each_image_by_hand(tmp_path: Path) -> None:
    """Compare with threshold and overlap in float64, each image by itself."""
    results, model = done(plan("segmentation", bootstrap=COUNT), tmp_path)
    assert sorted(results["resampled"]) == SITES
    made = plan("segmentation")
    for site, values in results["resampled"].items():
        scores: list[float] = []
        for images, masks in made.task.open_site(site, {}).batches("test", batch_size=1):
            with torch.no_grad():
                found = model.eval()(images).numpy() > 0
            truth = masks.numpy() > 0
            both = found.sum() + truth.sum()
            scores.append(2 * (found & truth).sum() / both if both else 1.0)
        # Four slices of each patient lie next to each other; patients are drawn, each with all of its slices.
        patients = np.array(scores).reshape(-1, 4)
        assert values == pytest.approx(patients[draws(site, len(patients), COUNT)].mean((1, 2)), abs=1e-6)
        assert results["resampled_units"][site] == {"unit": "patients", "count": len(patients)}
        assert isinstance(results["resampled_units"][site]["count"], int)
        assert results["test"][site]["dice"] == pytest.approx(np.mean(scores), abs=1e-6)


@pytest.mark.long
def test_a_metric_over_classes_on_each_draw(tmp_path: Path) -> None:
    results, model = done(plan("classification", bootstrap=COUNT), tmp_path)
    data = plan("classification").task.open_site("site-2", {})
    images, labels = (torch.cat(parts).numpy() for parts in zip(*data.batches("test", batch_size=8), strict=True))
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(images)).argmax(1).numpy()
    expected = [balanced_accuracy_score(labels[drawn], found[drawn]) for drawn in draws("site-2", len(labels), COUNT)]
    assert results["resampled"]["site-2"] == pytest.approx(expected)
    assert results["resampled_units"]["site-2"] == {"unit": "images", "count": len(labels)}


@pytest.mark.long
def test_a_site_that_keeps_its_classes_keeps_these_values_too(tmp_path: Path) -> None:
    local = {"sites": {"site-2": {"metrics_by_class": False}}}
    results, _ = done(plan("classification", bootstrap=COUNT), tmp_path / "classes", local)
    assert sorted(results["resampled"]) == sorted(results["resampled_units"]) == ["site-1", "site-3"]
    results, _ = done(plan("segmentation", bootstrap=COUNT), tmp_path / "segments", local)
    assert sorted(results["resampled"]) == SITES  # a mean over images says nothing of classes


def test_nothing_is_sent_unless_asked_for(tmp_path: Path) -> None:
    results, _ = done(plan("segmentation"), tmp_path)
    assert results["resampled"] is results["resampled_units"] is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0.5] * (COUNT - 1), f"field 'resampled' has {COUNT - 1} entries, asked for {COUNT}"),
        ([0.5] * (COUNT - 1) + [1.5], r"field 'resampled[24]' must lie in [0, 1], got 1.5"),
        ("0.5", "field 'resampled' must be a list, got str"),
    ],
)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, values: Any, reason: str) -> None:
    def says(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        return replace(reply, meta={**reply.meta, "stats": {"resampled": values}})

    run = Run(tmp_path, misbehave("site-2", "validate", says), num_rounds=1, min_sites=2, bootstrap=COUNT)()
    (gone,) = run.results["left_out"]
    assert gone["site"] == "site-2"
    assert reason in gone["reason"]
    assert run.net.tasks[-1].meta["resample"] == COUNT


def told(tmp_path: Path, **stats: Any) -> Any:
    def says(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        return replace(reply, meta={**reply.meta, "stats": {"resampled": [0.5] * COUNT, **stats}})

    return Run(tmp_path, misbehave("site-2", "validate", says), num_rounds=1, min_sites=2, bootstrap=COUNT)()


@pytest.mark.parametrize(
    ("stats", "reason"),
    [
        ({"drawn_units": "hospitals", "num_units": 3}, "field 'drawn_units' must be one of patients, volumes, images"),
        ({"drawn_units": "patients", "num_units": 0}, "field 'num_units' must lie in [1, 1e+09], got 0"),
        ({"drawn_units": "patients", "num_units": 2.5}, "field 'num_units' must be an integer, got 2.5"),
    ],
)
def test_what_was_drawn_is_checked(tmp_path: Path, stats: dict[str, Any], reason: str) -> None:
    (gone,) = told(tmp_path, **stats).results["left_out"]
    assert gone["site"] == "site-2"
    assert reason in gone["reason"]


def test_what_was_drawn_is_kept_where_it_is_told(tmp_path: Path) -> None:
    run = told(tmp_path / "a", drawn_units="patients", num_units=12)
    assert run.results["resampled_units"] == {"site-2": {"unit": "patients", "count": 12}}
    assert told(tmp_path / "b").results["resampled_units"] is None  # an older site


def test_images_of_a_patient_are_drawn_together() -> None:
    p, q, v = ("patient", "p"), ("patient", "q"), ("volume", "v")
    units = units_of([p, q, v, p, ("image", "4"), v], 6)
    assert units.kind == "cases"  # patients p and q, a picture, and the volume v where no patient is named
    assert [list(members) for members in units.members] == [[0, 3], [1], [2, 5], [4]]
    for drawn, chosen in zip(units.draw("a", COUNT), draws("a", 4, COUNT), strict=True):
        assert list(drawn) == [image for unit in chosen for image in [[0, 3], [1], [2, 5], [4]][unit]]
    assert units_of([p, p, q], 3).kind == "patients"
    assert units_of([v, ("volume", "w")], 2).kind == "volumes"
    assert units_of(["a key of one's own"], 1).kind == "cases"
    alone = units_of(None, 7)
    assert alone.kind == "images"
    assert np.array_equal(alone.draw("a", COUNT), draws("a", 7, COUNT))


def test_a_datalist_says_what_is_drawn(tmp_path: Path) -> None:
    """Check the unit of draws: patients where they are named, else volumes, else images."""
    slices = {"image": "v.nii", "label": "m.nii"}
    lists: dict[str, list[dict[str, Any]]] = {
        "patients": [{"patient": 1, "volume": "a"}, {"patient": 1, "volume": "b"}, {"patient": 2, "volume": "c"}],
        "volumes": [{"volume": "a"}, {"volume": "a"}, {**slices, "slice": 0}, {**slices, "slice": 4}],
        "images": [{}, {}],
    }
    members = {"patients": [[0, 1], [2]], "volumes": [[0, 1], [2, 3]], "images": [[0], [1]]}
    for name in ("v.nii", "m.nii", *(f"{k}.{kind}.png" for k in range(4) for kind in ("image", "mask"))):
        (tmp_path / name).write_bytes(b"")
    for kind, entries in lists.items():
        pictures = [{"image": f"{k}.image.png", "label": f"{k}.mask.png", **e} for k, e in enumerate(entries)]
        rest = [{"image": f"{k}.image.png", "label": f"{k}.mask.png"} for k in (3,)]
        listed = {"training": [], "validation": [], "test": pictures}
        (tmp_path / "list.json").write_text(json.dumps(listed | dict.fromkeys(("training", "validation"), rest)))
        problems: list[DataError] = []
        cases = load_datalist(tmp_path, "list.json", site="s", problems=problems).cases("test")
        found = units_of(cases, len(cases))
        assert found.kind == kind
        assert [list(indices) for indices in found.members] == members[kind]


def test_an_undefined_draw_is_null(tmp_path: Path) -> None:
    def says(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        return replace(reply, meta={**reply.meta, "stats": {"resampled": [math.nan, 0.5]}})

    run = Run(tmp_path, misbehave("site-2", "validate", says), num_rounds=1, min_sites=2, bootstrap=2)()
    assert run.results["resampled"] == {"site-2": [None, 0.5]}
