"""Sites with images and too few labels (``unlabelled=consistency``): formulas, steps, weights, runs."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.base.site_data import UNLABELLED
from fairflare.core.weighting import counted_samples, normalise, ramp
from fairflare.data.datalist import DataError, load_datalist
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import LocalLoop
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import TwoPhase
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.parts.consistency import CERTAIN, Consistency, TrainedOn, still_statistics, strong
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from fairflare.tasks.segmentation import SegmentationTask
from tests.shapes import of_a_training, one_each
from tests.tiny import run_document
from tests.unit.test_census import masks_site

from .examples import anchor_message, begun, take, train_message

SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "num_classes": 2, "batch_size": 4, "learning_rate": 0.05,
    "unlabelled": "consistency",
}  # fmt: skip


def sites(folder: Path) -> dict[str, Any]:
    """Write A with 5 labels, B with 2 and 3 images without labels, C with 5 of these alone; return their settings."""
    local = {site: masks_site(folder / site, (1, 2), 5) for site in "ABC"}
    for site, kept in (("B", 2), ("C", 0)):
        file = folder / site / "datalist.json"
        content = json.loads(file.read_text())
        content[UNLABELLED] = [{"image": entry["image"]} for entry in content["training"][kept:]]
        content["training"] = content["training"][:kept]
        if not kept:
            content |= {"validation": [], "test": []}
        file.write_text(json.dumps(content))
    return local


def run(folder: Path, method: str = "fed_avg", **more: Any) -> tuple[dict[str, Any], str]:
    """Run two rounds at the three sites; return the results and the table."""
    plan = make_plan(method, task="segmentation", sites=list("ABC"), settings={**SETTINGS, **more}, num_rounds=2)
    results = run_local(plan, folder / "run", {"sites": sites(folder)})
    return run_document(results), fairness_table(read_results(results))


# ------------------------------------------------------------------------------------------------ formulas


def test_the_worked_numbers() -> None:
    """Compare ramp and shares with the numbers of the specification, at R = 12 of 40 rounds."""
    found = [ramp(t, 40) for t in (0, 3, 6, 9, 12, 39)]
    assert found == pytest.approx([0.006738, 0.060055, 0.286505, 0.731616, 1, 1], abs=5e-7)
    for share, expected in (
        (ramp(0, 40), (0.795178, 0.200804, 0.004018)), (1.0, (0.421053, 0.263158, 0.315789)),
    ):  # fmt: skip
        counts = {s: counted_samples(*n, share) for s, n in {"a": (40, 0), "b": (10, 30), "c": (0, 60)}.items()}
        assert tuple(normalise(counts).values()) == pytest.approx(expected, abs=5e-7)


class Made:
    """Stand for the data of a site: six images without labels, and no others where ``labels`` is 0."""

    lists = ("training", "validation", "test", UNLABELLED)

    def __init__(self, labels: int, shape: tuple[int, ...]) -> None:
        self.labels, self.images = labels, torch.rand(6, *shape, generator=torch.Generator().manual_seed(3))

    def num_samples(self, split: str) -> int:
        return 6 if split == UNLABELLED else self.labels

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int, augment: bool = False) -> Any:
        assert split == UNLABELLED
        order = torch.randperm(6, generator=torch.Generator().manual_seed(shuffle_seed))
        return [(own, own) for own in self.images[order].split(batch_size)]


def part(kind: str, model: nn.Module, labels: int = 4, shape: tuple[int, ...] = (1, 4, 4), t: int = 0) -> Consistency:
    """Return the term of round ``t`` of 40 of a half with batches of 2."""
    of: Any = SimpleNamespace(
        site="a", task=SimpleNamespace(consistency=kind), data=Made(labels, shape), current_round=t, num_rounds=40,
        seed=5, first_pass=True, on_device=lambda tensor: tensor,
    )  # fmt: skip
    found = Consistency.make(LocalTraining(batch_size=2, unlabelled="consistency"), of, model)
    assert found is not None
    return found


def test_the_mean_teacher_is_that_of_a_slow_loop() -> None:
    """Compare three steps with their own small mean teacher: views, targets, weight and the exponential mean."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 3, padding=1)
    teacher: Any = [p.detach().clone() for p in model.parameters()]
    found, optimizer = part("teacher", model, t=6), torch.optim.SGD(model.parameters(), 0.5)
    batches = [
        b for number in (5, 6) for b, _ in Made(4, (1, 4, 4)).batches(UNLABELLED, batch_size=2, shuffle_seed=number)
    ]
    for step in range(1, 5):
        torch.manual_seed(step)
        loss = found.term(model, torch.zeros(0))
        torch.manual_seed(step)
        noise = (torch.randn(2, 1, 4, 4) / 10).clamp(-0.2, 0.2)
        target = torch.sigmoid(nn.functional.conv2d(batches[step - 1] + noise, teacher[0], teacher[1], padding=1))
        away = torch.sigmoid(model(batches[step - 1])) - target
        assert loss.item() == pytest.approx(math.exp(-5 / 4) * (away**2).mean().item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.update_teacher(model)
        alpha = min(1 - 1 / (step + 1), 0.99)
        teacher = [
            alpha * old + (1 - alpha) * new.detach() for old, new in zip(teacher, model.parameters(), strict=True)
        ]
        for mine, own in zip(teacher, found.teacher.parameters() if found.teacher else (), strict=True):
            torch.testing.assert_close(mine, own.detach())


def test_fix_match_is_that_of_a_slow_loop() -> None:
    """Compare the term with a loop over images, of some of which the model is sure; a second pass is alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    for p in model.parameters():
        p.data *= 12
    found = part("fixmatch", model)
    loss = found.term(model, torch.zeros(0))
    (order,) = [b for b, _ in Made(4, (1, 4, 4)).batches(UNLABELLED, batch_size=14, shuffle_seed=5)]
    likely = model(order).softmax(1)
    total, sure = 0.0, 0
    for image, row in zip(found.view, likely, strict=True):
        if row.max() >= CERTAIN:
            sure += 1
            total -= torch.log_softmax(model(image[None]), 1)[0, row.argmax()].item()
    assert 0 < sure < 6
    assert (found.sure, found.seen) == (sure, 6)
    assert loss.item() == pytest.approx(total / 6, rel=1e-5)
    found.run.first_pass = False
    assert found.term(model, torch.zeros(0)).item() == loss.item()


def test_a_strong_view_keeps_the_form_of_two_and_three_dimensions() -> None:
    for shape in ((3, 1, 8, 6), (2, 3, 4, 6, 8)):
        images = torch.rand(shape)
        changed = strong(images)
        assert changed.shape == images.shape
        assert 0 <= changed.min() <= changed.max() <= 1
        assert ((changed == 0.5).flatten(1).float().mean(1) >= 0.5 ** (len(shape) - 2)).all()


def test_unlabelled_batches_leave_running_statistics() -> None:
    """Check that a norm goes by its batch, in training mode, and keeps its running values."""
    norm = nn.BatchNorm2d(2)
    before, inputs = copy.deepcopy(norm.state_dict()), torch.rand(4, 2, 3, 3) + 5
    with still_statistics(norm):
        assert abs(float(norm(inputs).mean())) < 1e-5
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())
    norm(inputs)
    assert norm.num_batches_tracked == 1


def test_no_sure_answer_is_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """Check that a site without labels whose model is sure of nothing makes no step, and is left out of the round."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    before, term = copy.deepcopy(model.state_dict()), part("fixmatch", model, labels=0)
    of: Any = term.run
    of.unlabelled, of.scale, of.device, of.skipped_steps, of.epoch = term, None, torch.device("cpu"), 0, 0
    loop = LocalLoop(LocalTraining(optimizer="adam"), of, model, torch.optim.Adam(model.parameters()))
    loop._step(of.data.images, torch.zeros(6))
    assert loop.unsure == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(SiteError, match=r"round 0: the model predicts none of .*6 ") as raised:
        term.report(SimpleNamespace(more={}, num_steps=0))  # type: ignore[arg-type]
    assert raised.value.skipped


# ------------------------------------------------------------------------------------------------ the server


@pytest.mark.parametrize("method", list(all_methods().values()), ids=lambda m: m.name)
def test_every_rule_weighs_as_if_the_site_were_not_there(method: Any, tmp_path: Path) -> None:
    """Check that a site without labels gets its share of the samples, and leaves the others' weights in proportion."""
    found = []
    for alone in (False, True):
        rule = method.rule(**method.server)
        rule.memory_folder = tmp_path / f"memory-{alone}"
        collector = begun(rule, tmp_path / str(alone), 1, sites=("a", "b", "c") if alone else ("a", "b"))
        for site in ("a", "b"):
            take(collector, site, train_message(site, rule=rule, current_round=1))
        if alone:
            counts = {site: collector._round.trained[site].num_samples or 0 for site in ("a", "b")}
            collector.context = RunContext(reported={"c": {"training": 0, UNLABELLED: 60}})
            message = train_message("c", rule=rule, current_round=1)
            message.meta["report"] = {}
            message.meta["num_samples"] = None
            message.meta["stats"] = {"kept": 1.0, "without_labels": True}
            take(collector, "c", message)
        if isinstance(rule, TwoPhase):
            for site in ("a", "b"):
                collector.keep_anchor(site, collector.read_anchor(site, anchor_message(site, rule, current_round=1)))
        found.append(collector.aggregate()[1])
    plain, joined = found
    unlabelled = 0.286505 * 0.5 * 60  # round 1 of 5, of which 2 rise
    part_c = unlabelled / (sum(counts.values()) + unlabelled)
    for one, other in [(plain.sites, joined.sites)] if plain.sites else zip(
        (plain.layers or {}).values(), (joined.layers or {}).values(), strict=True
    ):  # fmt: skip
        assert one is not None
        assert other is not None
        assert other["c"] == pytest.approx(part_c, rel=1e-5)
        assert all(other[site] == pytest.approx((1 - part_c) * one[site], rel=1e-5) for site in ("a", "b"))
    if joined.buffers:
        assert joined.buffers["c"] == 0


@pytest.mark.parametrize(
    ("stats", "problem"),
    [
        ({"kept": 1.5}, "'kept' must lie in"), ({"kept": math.nan}, "'kept' must be finite"),
        ({"kept": "all"}, "'kept' must be a number"), ({"without_labels": 1}, "'without_labels' must be true or false"),
    ],
)  # fmt: skip
def test_hostile_values_are_refused(stats: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Refuse a share outside [0, 1] and a flag that is none, with site and field."""
    rule = all_methods()["fed_avg"].rule()
    message = train_message("a", rule=rule)
    message.meta["stats"] = stats
    with pytest.raises(ReportError, match=problem):
        begun(rule, tmp_path, 0).read_training("a", message)


# ------------------------------------------------------------------------------------------------ runs


def test_a_run_from_files_to_the_table(tmp_path: Path) -> None:
    """Train at a site without labels, weigh it by its images, and never call it the worst."""
    found, text = run(tmp_path)
    first, last = found["rounds"]
    assert first["site_weights"] == pytest.approx(normalise({
        site: counted_samples(*n, math.exp(-5)) for site, n in {"A": (5, 0), "B": (2, 3), "C": (0, 5)}.items()
    }))  # fmt: skip
    assert last["site_weights"] == pytest.approx({"A": 5 / 11, "B": 3.5 / 11, "C": 2.5 / 11})
    assert "kept" not in last["train"]["A"]
    assert last["train"]["B"]["kept"] == 1.0
    assert last["train"]["C"]["without_labels"]
    assert found["test"]["C"] == {}
    assert found["fairness"]["dice"]["worst_site"] != "C"
    assert "in the last round by B (100% of its pseudo-labels counted), C (100% of" in " ".join(text.split())


@pytest.mark.many
@pytest.mark.parametrize("method", one_each(of_a_training, "segmentation"))
def test_every_shape_of_training_runs_with_a_site_without_labels(method: str, tmp_path: Path) -> None:
    """Run methods whose rule and training know nothing of unlabelled images."""
    found, _ = run(tmp_path, method)
    assert not [left for record in found["rounds"] for left in record["left_out"]]
    assert all(record["train"]["C"]["without_labels"] for record in found["rounds"])


def test_the_setting_off_says_that_images_lie_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Say once how many images are not used; and refuse a site that has no others."""
    local = sites(tmp_path)
    settings = {key: value for key, value in SETTINGS.items() if key != "unlabelled"}
    plan = make_plan("fed_avg", task="segmentation", sites=list("AB"), settings=settings, num_rounds=1)
    with caplog.at_level(logging.INFO):
        run_local(plan, tmp_path / "run", {"sites": {site: local[site] for site in "AB"}})
    assert caplog.text.count("3 unlabelled images lie unused; unlabelled=consistency") == 1
    plan = make_plan("fed_avg", task="segmentation", sites=list("ABC"), settings=settings, num_rounds=1)
    with pytest.raises(RoundFailed, match=r"'C': .* no labelled .* set unlabelled="):
        run_local(plan, tmp_path / "again", {"sites": local})


def test_an_interrupted_round_has_the_same_bits(tmp_path: Path) -> None:
    """Save the teacher and the place among the unlabelled images, and go on with both."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 3, padding=1)

    def steps(term: Consistency, model: nn.Module, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            loss = term.term(model, torch.zeros(0))
            losses.append(loss.item())
            for p in model.parameters():
                (gradient,) = torch.autograd.grad(loss, p, retain_graph=True)
                p.data -= 5 * gradient
            term.update_teacher(model)
        return losses

    whole, first, again = (
        part("teacher", copy.deepcopy(model), t=12),
        part("teacher", model, t=12),
        copy.deepcopy(model),
    )
    expected = steps(whole, copy.deepcopy(model), range(7))
    begun_with = steps(first, again, range(4))
    kept = copy.deepcopy(first.state())
    resumed = part("teacher", model, t=12)
    resumed.load_state(kept)
    assert begun_with + steps(resumed, again, range(4, 7)) == expected


# ------------------------------------------------------------------------------------------------ datalists


def changed(folder: Path, **content: Any) -> Any:
    """Return B's datalist, read after a change."""
    sites(folder)
    file = folder / "B" / "datalist.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    return load_datalist(folder / "B", site="B")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"image": "training0.png", "label": "training0_mask.png"}, "entry 0 of 'unlabelled' has a 'label'"),
        ({"image": "lost.png"}, "entry 0 of 'unlabelled', .*lost.png'"),
        ({"label": 3}, "entry 0 of 'unlabelled' has no .*'image'"),
        ({"image": "test0.png"}, "is in both 'test' and 'unlabelled'"),
        ({"image": "training4.png", "patient": "p"}, "'p' is in both 'test' and 'unlabelled'"),
    ],
)  # fmt: skip
def test_wrong_entries_are_named(entry: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Name the entry and what to do; a patient of the test is a leak."""
    test = [{"image": "test0.png", "label": "test0_mask.png", "patient": "p"}]
    with pytest.raises(DataError, match=problem):
        changed(tmp_path, unlabelled=[entry], test=test)


def test_training_may_share_patients(tmp_path: Path) -> None:
    """Accept a person of whom some images have labels; an empty training without unlabelled images is refused."""
    training = [{"image": "training0.png", "label": "training0_mask.png", "patient": "p"}]
    own = changed(tmp_path / "a", training=training, unlabelled=[{"image": "training4.png", "patient": "p"}])
    assert [sample.label for sample in own.splits[UNLABELLED]] == [None]
    with pytest.raises(DataError, match="split 'training' is empty"):
        changed(tmp_path / "b", training=[], unlabelled=[])
    with pytest.raises(DataError, match="split 'validation' is empty"):
        changed(tmp_path / "c", validation=[])


def test_unlabelled_images_are_shown_as_training_without_targets(tmp_path: Path) -> None:
    """Read them by the task's own readers; the proxy shows them as training images."""
    local = sites(tmp_path)
    data: Any = SegmentationTask(num_classes=2, image_size=(32, 32)).open_site("C", local["C"])
    assert data.num_samples(UNLABELLED) == TrainedOn(data).num_samples("training") == 5
    (inputs, targets), *_ = TrainedOn(data).batches("training", batch_size=5)
    assert tuple(inputs.shape) == (5, 1, 32, 32)
    assert tuple(targets.shape) == (5, 2, 32, 32)
    assert not targets.any()
