"""Test that nothing a site sends depends on records of classes, findings or structures with too few cases.

Sites differ in such records alone, and answer a server that chooses the model. Their answers to check, train and
validate are compared byte by byte, without the update, the time, and what is measured of a site's own trained model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.utils import fobs
from PIL import Image
from scipy.special import log_softmax

from fairflare.base.task import Task
from fairflare.exchange.messages import SiteReply, SiteTask, encode_reply
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import LocalTransport, run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import metric_values, withheld_names

from .test_floor import reporting

LEAST = 5
SMALL = {"image_size": [33, 33], "features": [4, 4, 8, 8], "num_classes": 3}
STILL: dict[str, Any] = {"learning_rate": 1e-9, "batch_size": 4, "local_epochs": 1}
SPLITS = ("training", "validation", "test")
OF_OWN_MODEL = ("train_loss", "accuracy", "clamped", "own_metric", "rescue_factor", "cost")  # measured as it trains
OF_METHOD: dict[str, dict[str, Any]] = {
    "fair_lora": {"fairlora_attribute": "sex"}, "group_dro": {"dro_attribute": "sex"},
    "flex_fair": {"flexfair_attribute": "age", "flexfair_over": "both", "flexfair_measure": "demographic_parity"},
    "fed_lwr_last_layer": {"only_layer": "head"},
}  # fmt: skip


def written(folder: Path, items: Mapping[str, Sequence[Mapping[str, Any]]], **more: Any) -> dict[str, Any]:
    """Write a site's datalist, and an image for each name in it that depends on the name alone."""
    folder.mkdir(parents=True)
    for entry in (entry for entries in items.values() for entry in entries):
        rng = np.random.default_rng([*entry["image"].encode()])
        Image.fromarray(rng.integers(0, rng.integers(40, 255), (33, 33), np.uint8)).save(folder / entry["image"])
    (folder / "datalist.json").write_text(json.dumps({**more, **items}))
    return {"data_root": str(folder), "min_cases": LEAST}


def of_classes(folder: Path, rare: int, counts: Sequence[int] = (20, 8), called: str = "") -> dict[str, Any]:
    """Write lists with so many images of the first classes, and ``rare`` of the last one among them."""
    items = {
        split: sorted(
            ({"image": f"{called}{split}{number:02}{label}.png", "label": label, "sex": "mf"[number % 2],
              "age": str(number // 2 % 2)}
             for label, count in enumerate((*counts, rare)) for number in range(count)),
            key=lambda item: str(item["image"]),
        )
        for split in SPLITS
    }  # fmt: skip
    groups = {
        name: {"kind": "category", "values": values} for name, values in (("sex", ["m", "f"]), ("age", ["0", "1"]))
    }
    return written(folder, items, class_names=["a", "b", "rare"], attributes=groups)


def model(task: Task, seed: int) -> dict[str, torch.Tensor]:
    """Return the state of a new model."""
    torch.manual_seed(seed)
    return dict(task.build_model().state_dict())


def saying(task: Task, *logits: float) -> dict[str, torch.Tensor]:
    """Return the state of a model that says the same of every image."""
    state = {name: torch.zeros_like(tensor) for name, tensor in model(task, 0).items()}
    state["head.bias"] += torch.tensor(logits)
    return state


def answer(task: Task, own: Mapping[str, Any], name: str, state: Mapping[str, torch.Tensor], place: Path) -> Any:
    """Ask one site; return its answer."""
    worker = SiteWorker("site-1", task, LocalTraining(**STILL), own, place)
    groups: Any = {"groups": ("sex", "age"), "group_bins": 100, "calibration_bins": 5} if task.has_classes else {}
    more = {"validate": {"measure": ("test", "validation"), "resample": 10, **groups}}.get(name, {})
    reply = worker.perform(SiteTask(name, dict(state), 0, 1, 0, run="r", **more))
    assert reply.status == "ok", reply.reason
    return reply


def sent(reply: SiteReply) -> bytes:
    """Return the bytes of an answer without the update and the time."""
    message = encode_reply(reply, 0)
    stats = {key: value for key, value in message.meta["stats"].items() if key != "seconds"}
    return bytes(fobs.dumps([message.meta | {"stats": stats}, message.metrics]))


def alike(task: Task, sites: Sequence[Mapping[str, Any]], states: Sequence[Any], place: Path) -> None:
    """Check that sites give equal bytes to each model, and other ones where they have no floor."""
    for number, state in enumerate(states):
        for name in ("check", "train", "validate") if number == 0 else ("validate",):
            told = [sent(answer(task, own, name, state, place / f"{number}{k}")) for k, own in enumerate(sites)]
            assert {*told} == {told[0]}, (number, name)
    for name in ("check", "train", "validate"):  # or this test would not see them
        first, last = ({**sites[k], "min_cases": 1} for k in (0, -1))
        assert sent(answer(task, first, name, states[0], place / "a")) != sent(
            answer(task, last, name, states[0], place / "b")
        )


# ------------------------------------------------------------------------------------------------ classes


def classifier(**more: Any) -> ClassificationTask:
    return ClassificationTask(image_size=(33, 33), features=(4, 4, 8, 8), **more)


def test_no_model_tells_anything_of_a_class_with_few_cases(tmp_path: Path) -> None:
    """Check constant models, one whose losses are (0, 1, 100), and two that differ on hidden images alone."""
    task = classifier(num_classes=3)
    sites = [of_classes(tmp_path / str(rare), rare) for rare in (0, 1, 4)]
    weighed = saying(task, 100.0, 99.0, 0.0)  # its losses of the classes are about 0.3, 1.3 and 100.3
    states = [saying(task, 9.0, 0.0, 0.0), saying(task, 0.0, 0.0, 9.0), weighed, model(task, 1)]
    alike(task, sites, states, tmp_path / "state")
    losses = -log_softmax([100.0, 99.0, 0.0])
    for own in sites:
        reply = answer(task, own, "validate", weighed, tmp_path / "w")
        assert metric_values(reply.metrics)["loss"] == pytest.approx((20 * losses[0] + 8 * losses[1]) / 28, rel=1e-6)
        assert reply.num_samples == 28
        assert metric_values(reply.metrics)["balanced_accuracy"] == 0.5  # 1/3 told that there are three classes


def test_two_questions_that_differ_on_hidden_images_alone_have_one_answer(tmp_path: Path) -> None:
    """Check models that differ in what they say of the last class, and one visible image that tells."""
    task, own = classifier(num_classes=3), of_classes(tmp_path / "a", 4)
    other = of_classes(tmp_path / "b", 4)
    hidden, shown = (sorted(Path(other["data_root"]).glob(f"*{label}.png")) for label in (2, 0))
    state, before = model(task, 1), sent(answer(task, own, "validate", model(task, 1), tmp_path / "s"))
    for pictures, same in ((hidden, True), (shown[:1], False)):
        for picture in pictures:
            Image.fromarray(np.full((33, 33), 200, np.uint8)).save(picture)
        assert (sent(answer(task, other, "validate", state, tmp_path / f"s{same}")) == before) == same


@pytest.mark.many
@pytest.mark.parametrize("name", reporting())
def test_no_report_of_a_method_depends_on_hidden_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare what two sites say in check and train; the server's model is the first one of the run."""
    told: list[dict[Any, Any]] = []
    measured = LocalTransport._answer

    def watched(self: LocalTransport, site: str, task: str, request: Any) -> Any:
        message = measured(self, site, task, request)
        meta = dict(message.meta) | {"report": dict(message.meta.get("report") or {})}
        meta["stats"] = {key: value for key, value in meta.get("stats", {}).items() if key != "seconds"}
        for key in OF_OWN_MODEL:
            meta["report"].pop(key, None)
        if task in ("check", "train"):
            told[-1][site, task] = bytes(fobs.dumps([meta, message.metrics]))
        return message

    monkeypatch.setattr(LocalTransport, "_answer", watched)
    sites = ["site-1", "site-2"]
    settings = {**SMALL, **STILL, **OF_METHOD.get(name, {})}
    for rare in (0, 4):
        told.append({})
        local = {"sites": {site: of_classes(tmp_path / f"{rare}{site}", rare, called=site) for site in sites}}
        plan = make_plan(name, task="classification", sites=sites, num_rounds=1, settings=settings)
        run_local(replace(plan, run=replace(plan.run, experiment="e")), tmp_path / f"run{rare}", local)
    assert told[0].keys() == told[1].keys() == {(site, task) for site in sites for task in ("check", "train")}
    assert [key for key, value in told[0].items() if told[1][key] != value] == []


# ------------------------------------------------------------------------------------------------ other shapes


def of_findings(folder: Path, rare: int) -> dict[str, Any]:
    """Write lists of two findings that 8 images have and 8 lack, and of a last one that ``rare`` images have."""
    items = {}
    for split in SPLITS:
        items[split] = [
            {"image": f"{split}{k:02}.png", "label": [int(k % 2 == 0), int(k < 8), int(k < rare) if rare else None]}
            for k in range(16)
        ]
        items[split] += [{"image": f"{split}9{k}.png", "label": [None, None, 1]} for k in range(rare - 1)]
    return written(folder, items, class_names=["f", "g", "rare"])


def test_no_model_tells_anything_of_a_finding_with_few_cases(tmp_path: Path) -> None:
    task = classifier(findings=["f", "g", "rare"], num_classes=None)
    sites = [of_findings(tmp_path / str(rare), rare) for rare in (0, 1, 2)]
    alike(task, sites, [saying(task, 0.0, 0.0, 9.0), model(task, 1)], tmp_path / "state")
    reply = answer(task, sites[2], "validate", saying(task, 0.0, 0.0, 9.0), tmp_path / "w")
    assert metric_values(reply.metrics)["loss"] == pytest.approx(np.log(2))  # of the two others alone
    assert reply.num_samples == 16


def of_masks(folder: Path, rare: int) -> dict[str, Any]:
    """Write lists of ten images with a structure, of which ``rare`` have a small second one."""
    items = {split: [{"image": f"{split}{k}.png", "label": f"m{split}{k}.png"} for k in range(10)] for split in SPLITS}
    own = written(folder, items)
    for split in SPLITS:
        for k in range(10):
            mask = np.zeros((33, 33), np.uint8)
            mask[4:20, 4 : 9 + k] = 1
            mask[22:30, 22:30] = 2 if k < rare else 0
            Image.fromarray(mask).save(folder / f"m{split}{k}.png")
    return own


def test_no_model_tells_anything_of_a_structure_with_few_cases(tmp_path: Path) -> None:
    """Check that the channel is left out: what is not a hidden structure counts as it did."""
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4), num_classes=2, metrics=("dice", "iou"))
    sites = [of_masks(tmp_path / str(rare), rare) for rare in (0, 1, 4)]
    alike(task, sites, [model(task, seed) for seed in (1, 2)], tmp_path / "state")
    told = answer(task, sites[1], "validate", model(task, 1), tmp_path / "w")
    values = metric_values(told.metrics)
    assert values["dice"] == values["dice_class_1"]
    assert {"dice_class_2", "iou_class_2", "loss_class_2"} <= {*withheld_names(told.metrics)}
    alone = answer(task, {**sites[0], "min_cases": 1, "structures": [1]}, "validate", model(task, 1), tmp_path / "v")
    assert values["loss"] == metric_values(alone.metrics)["loss"]
    said = answer(task, sites[1], "check", {}, tmp_path / "c").report
    assert said["measured"] == ["class_1"]


# ------------------------------------------------------------------------------------------------ groups


def linked(reply: SiteReply, names: Sequence[str], bins: int) -> int:
    """Count the images that two attributes' histograms tell apart: alone in a bin of a class in a group of both."""
    parts = 2
    table = np.reshape(reply.stats["group_histogram"], (len(names), parts, 2, bins))
    found = 0
    for label, place in np.argwhere(np.nansum(table[: len(names)], axis=(0, 2)) > 0):
        of = [name.partition("=")[0] for k, name in enumerate(names) if table[k, label, 0, place] == 1]
        found += Counter(of) == {"sex": 1, "age": 1}
    return found


def test_no_image_is_linked_over_two_attributes(tmp_path: Path) -> None:
    """Check 60 test images in 100 bins; without a floor most are told by class, sex, age and score."""
    task, own = classifier(num_classes=2), of_classes(tmp_path / "a", 0, (30, 30))
    listed = Path(own["data_root"]) / "datalist.json"
    content = json.loads(listed.read_text())
    listed.write_text(json.dumps(content | {"class_names": ["a", "b"]}))
    state, network = model(task, 1), task.build_model()
    network.load_state_dict(state)
    _, scores = task.outcomes(network, task.open_site("a", {"data_root": own["data_root"]}), "test", "cpu")
    odds = np.log(scores[:, 1] / scores[:, 0])
    state["head.weight"] /= odds.std()
    state["head.bias"] = torch.tensor([0.0, float(state["head.bias"].diff() - odds.mean()) / odds.std()])
    names = ["sex=m", "sex=f", "sex=unknown", "age=0", "age=1", "age=unknown"]
    found = {}
    for least in (1, LEAST):
        reply = answer(task, {**own, "min_cases": least}, "validate", state, tmp_path / f"s{least}")
        if least == 1:  # sums in parts of the cases, which add up
            folds = np.reshape(reply.stats["group_histogram"], (len(names), -1, 2, 2, 100))
            reply.stats["group_histogram"] = folds.sum(1).reshape(-1).tolist()
        found[least] = linked(reply, names, 100)
        counts = np.reshape(reply.stats["group_histogram"], (len(names), 2, 2, 100))
        assert least == 1 or np.nanmin(np.where(counts > 0, counts, np.nan)) >= LEAST
    print(f"linked over two attributes without and with min_cases={LEAST}: {found[1]} and {found[LEAST]} of 60 images")
    assert found[1] > 10
    assert found[LEAST] == 0
