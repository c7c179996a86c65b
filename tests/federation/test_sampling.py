"""Test the sites' figures about chance in the final test: made, withheld, checked, and in the results."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from sklearn.metrics import recall_score, roc_auc_score

from fairflare.base.task import SiteData
from fairflare.data.datalist import load_datalist, write_datalist
from fairflare.exchange.messages import Message
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.sampling import SAMPLING
from fairflare.reporting.standing import CASES, ERRORS, WITHIN
from fairflare.tasks.classification import ClassificationTask
from fairflare_lab.phantoms.prostate import SLICES
from tests.federation.network import Run, good, misbehave
from tests.federation.test_resampling import SEGMENTS, SITES, done, plan


def outputs(made: Any, model: torch.nn.Module, site: str) -> tuple[Any, Any]:
    batches = made.task.open_site(site, {}).batches("test", batch_size=7)
    images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        return model.eval()(images).numpy(), targets.numpy()


def test_dice_by_hand_without_bootstrap(tmp_path: Path) -> None:
    settings = {**SEGMENTS, "phantom_cases": 0.8}  # five test cases or more at each site
    made = make_plan("fed_avg", task="segmentation", sites=3, settings=settings, num_rounds=1)
    results, model = done(made, tmp_path)
    found = results["inequality"]
    assert (found["test"], sorted(found["sites"])) == (CASES, SITES)
    assert results["info"]["metric_range"] == [0, 1]
    for site, said in found["sites"].items():
        logits, masks = outputs(made, model, site)
        common = ((logits > 0) & (masks > 0)).sum((1, 2, 3))
        slices = 2 * common / ((logits > 0).sum((1, 2, 3)) + (masks > 0).sum((1, 2, 3)))
        scores = slices.reshape(-1, SLICES).mean(1)  # of each made-up patient
        assert (said["images"], said["test_cases"]) == (len(slices), len(scores))
        assert said["standard_error"] == pytest.approx(stats.sem(scores), rel=1e-5)
        assert said["case_scores"] == np.histogram(scores, 20, (0, 1))[0].tolist()
        mean = scores.mean()
        factor = np.exp(stats.t.ppf(0.975, len(scores) - 1) * stats.sem(scores) / (mean * (1 - mean)))
        assert said["high"] / (1 - said["high"]) == pytest.approx(factor * mean / (1 - mean), rel=1e-4)
        assert said["class_support"] is None
    assert "resampled" in results
    assert results["resampled"] is None


def test_classes_by_hand_and_those_that_stay_at_home(tmp_path: Path) -> None:
    made = plan("classification")
    local = {"sites": {"site-2": {"metrics_by_class": False}}}
    results, model = done(made, tmp_path, local)
    found = results["inequality"]
    assert found["test"] == WITHIN
    for site in ("site-1", "site-3"):
        logits, labels = outputs(made, model, site)
        names = made.task.names()
        assert found["sites"][site]["class_support"] == dict(zip(names, np.bincount(labels, minlength=5), strict=True))
        right, n = logits.argmax(1) == labels, len(labels)
        recalls = recall_score(labels, logits.argmax(1), average=None, labels=np.unique(labels), zero_division=0)
        assert results["test"][site]["balanced_accuracy"] == pytest.approx(recalls.mean())
        # Of a mean of recalls: each class's variance over the square of the number of classes.
        own = [(r * (1 - r) / c) for r, c in zip(recalls, np.bincount(labels), strict=True)]
        expected = np.sqrt(n / (n - 1) * sum(own)) / len(recalls)
        assert found["sites"][site]["standard_error"] == pytest.approx(expected)
        assert 0 < right.sum() < n
    home = found["sites"]["site-2"]
    assert home["test_cases"] == home["images"] == 150
    assert all(home[key] is None for key in ("standard_error", "class_support", "case_scores", "low", "p_value"))


@pytest.mark.parametrize("metric", ["auc_ovr", "accuracy"])
def test_metrics_of_another_kind(metric: str, tmp_path: Path) -> None:
    made = plan("classification")
    task: Any = made.task
    vars(task)["primary_metric"] = metric
    data = task.open_site("site-1", {})
    torch.manual_seed(0)
    model = task.build_model()
    said = task.sampling(model, data, "cpu")
    logits, labels = outputs(made, model, "site-1")
    assert said["test_cases"] == len(labels)
    if metric == "accuracy":
        right = logits.argmax(1) == labels
        assert said["standard_error"] == pytest.approx(stats.sem(right.astype(float)))
        assert said["case_scores"] == [int((~right).sum()), *[0] * 18, int(right.sum())]
        return
    shares = torch.softmax(torch.from_numpy(logits).double(), 1).numpy()

    def area(kept: Any) -> float:
        return float(roc_auc_score(labels[kept], shares[kept], multi_class="ovr", average="weighted", labels=range(5)))

    left = np.array([area(np.arange(len(labels)) % 100 != g) for g in range(100)])
    assert said["standard_error"] == pytest.approx(np.sqrt(99 / 100 * ((left - left.mean()) ** 2).sum()))
    assert "case_scores" not in said


def images(folder: Path, patients: Sequence[str | None]) -> Path:
    folder.mkdir()
    splits: dict[str, list[dict[str, Any]]] = {"training": [], "validation": [], "test": []}
    for split in splits:
        for k, patient in enumerate(patients):
            name = f"{split}{k}.png"
            value = 40 * (k % 2) + 20 * (patient == "p")
            Image.fromarray(np.full((33, 33), value, np.uint8)).save(folder / name)
            entry: dict[str, Any] = {"image": name, "label": k % 2}
            splits[split].append(entry | ({"patient": f"{split} {patient}"} if patient else {}))
    write_datalist(folder / "datalist.json", splits)
    return folder


class Told(torch.nn.Module):
    """Define a task that predicts class 1 where an image is bright."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        bright = inputs.mean((1, 2, 3)) * 255
        return torch.stack([10 - bright, bright - 10], 1)


def test_images_of_a_patient_are_one_case(tmp_path: Path) -> None:
    patients = ["p", "p", "q", "q", "q", None]
    folder = images(tmp_path / "a", patients)
    task: Any = ClassificationTask(image_size=(33, 33), num_classes=2, in_channels=1)
    data: SiteData = task.open_site("a", {"data_root": str(folder)})
    whose: Sequence[Hashable] | None = data.cases("test")
    assert whose is not None
    assert len(set(whose)) == 3
    assert whose[0] == whose[1] != whose[2]
    vars(task)["primary_metric"] = "accuracy"
    said = task.sampling(Told(), data, "cpu")
    # Told: wrong, and five times right. By patient 1/2 of two, 3/3 and 1/1; the mean over images is 5/6.
    of_patients = np.array([1 - 2 * 5 / 6, 3 - 3 * 5 / 6, 1 - 5 / 6]) / 6
    assert (said["test_cases"], said["class_support"]) == (3, [3, 3])
    assert said["standard_error"] == pytest.approx(np.sqrt(3 / 2 * (of_patients**2).sum()))
    assert said["case_scores"] == [int(place == 10) + 2 * int(place == 19) for place in range(20)]
    alone = load_datalist(images(tmp_path / "b", [None] * 4), site="b", class_labels=True)
    assert len(set(alone.cases("test"))) == 4


def test_slices_of_a_volume_are_one_case(tmp_path: Path) -> None:
    folder = images(tmp_path / "a", [None] * 4)
    listed = json.loads((folder / "datalist.json").read_text())
    for k, entry in enumerate(listed["test"]):
        entry["volume"] = "v" if k < 3 else "w"
    (folder / "datalist.json").write_text(json.dumps(listed))
    found = load_datalist(folder, site="a", class_labels=True)
    assert found.cases("test") == [("volume", "v")] * 3 + [("volume", "w")]
    assert {kind for kind, _ in found.cases("training")} == {"image"}


# ------------------------------------------------------------------------------------------------ at the server

SAID: dict[str, Any] = {
    "test_cases": 4, "standard_error": 0.1, "case_scores": [0] * 10 + [4] + [0] * 9,
    "classes": ["a", "b"], "class_support": [3, 1],
}  # fmt: skip


def says(stats_: dict[str, Any], count: int | None = 4) -> Any:
    def answer(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        return replace(reply, meta={**reply.meta, "stats": stats_, "num_samples": count})

    return answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"test_cases": 0}, "field 'test_cases' must lie in [1, 1e+06], got 0"),
        ({"test_cases": 5}, "field 'case_scores' counts 4, the site has 5"),
        ({"test_cases": 5, "case_scores": None}, "field 'test_cases' is 5, of 4 test images"),
        ({"standard_error": -0.1}, "field 'standard_error' must lie in [0, inf]"),
        ({"case_scores": [4]}, "field 'case_scores' has 1 entries, not 20"),
        ({"case_scores": [0.5] * 8 + [0] * 12}, "field 'case_scores' must hold whole numbers"),
        ({"case_scores": [-1] + [0] * 18 + [5]}, "field 'case_scores[0]' must lie in [0, 1e+06]"),
        ({"class_support": [3, 2]}, "field 'class_support' counts 5, the site has 4"),
        ({"class_support": [4]}, "field 'class_support' has 1 entries, field 'classes' has 2"),
        ({"classes": ["a", "a"]}, "field 'classes' must hold at most 10000 different printable names"),
        ({"classes": ["a", "b\n"]}, "field 'classes' must hold at most 10000 different printable names"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    answer = says({**SAID, **change})
    run = Run(tmp_path, misbehave("site-2", "validate", answer), num_rounds=1, min_sites=2)()
    (gone,) = run.results["left_out"]
    assert gone["site"] == "site-2"
    assert reason in gone["reason"]


def test_what_is_said_is_in_the_results_and_every_part_can_be_missing(tmp_path: Path) -> None:
    run = Run(tmp_path / "all", misbehave("site-2", "validate", says(SAID)), num_rounds=1, min_sites=2)()
    own = run.results["inequality"]["sites"]["site-2"]
    assert own["class_support"] == {"a": 3, "b": 1}
    assert (own["images"], own["test_cases"], own["standard_error"]) == (4, 4, 0.1)
    assert run.results["inequality"]["test"] is None  # nobody else says anything
    for number, field in enumerate((*(f.name for f in SAMPLING), "num_samples")):
        said = {k: v for k, v in SAID.items() if k != field and not (field == "classes" and k == "class_support")}
        answer = says(said, None if field == "num_samples" else 4)
        run = Run(tmp_path / str(number), misbehave("site-2", "validate", answer), num_rounds=1, min_sites=2)()
        assert not run.results["left_out"], field
    run = Run(tmp_path / "none", good, num_rounds=1, min_sites=2)()
    assert run.results["inequality"] is None


def test_sites_without_case_scores_are_compared_by_their_errors(tmp_path: Path) -> None:
    def answer(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        if name != "validate":
            return reply
        return replace(reply, meta={**reply.meta, "stats": {"test_cases": 50, "standard_error": 0.02}})

    run = Run(tmp_path, answer, num_rounds=1, min_sites=2)()
    found = run.results["inequality"]
    assert (found["test"], found["behind"][:1]) == (ERRORS, ["site-1"])  # 0.2, 0.4 and 0.6
