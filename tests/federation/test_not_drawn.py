"""Test what a site learns of structures that it does not annotate (``unlabelled=consistency``)."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.methods.base.training import LocalTraining
from fairflare.methods.parts.consistency import Consistency, NotDrawn
from fairflare.tasks.segmentation import SegmentationTask
from tests.federation.test_output_rows import SETTINGS, run
from tests.tiny import model_in, run_document


def part(model: nn.Module, annotated: tuple[int, ...] | None, t: int, unlabelled: Any = "consistency") -> Any:
    """Return the term of round ``t`` of 40 at a site that annotates these of three structures."""
    task = SegmentationTask(num_classes=3).annotating(annotated)
    data = SimpleNamespace(lists=("training",), num_samples=lambda split: 4)
    of: Any = SimpleNamespace(site="a", task=task, data=data, current_round=t, num_rounds=40, seed=5, first_pass=True)
    return Consistency.make(LocalTraining(unlabelled=unlabelled), of, model)


@pytest.mark.parametrize("t", [1, 30])
def test_the_term_is_that_of_a_slow_loop(t: int) -> None:
    """Compare a changed model with the received one by Dice loss, image by image, over structures 1 and 3 alone."""
    torch.manual_seed(t)
    received, images = nn.Conv2d(1, 3, 3, padding=1), torch.rand(2, 1, 5, 4)
    term, model = part(received, (1,), t), copy.deepcopy(received)
    assert term.term(model, images).item() < 1e-5  # both answer alike
    with torch.no_grad():
        model.weight += 1.0
    loss = term.term(model, images)
    wanted, tiny = 0.0, 1e-5
    for image in images:
        found, target = (net(image[None])[0].sigmoid().detach() for net in (model, received))
        for number in (0, 2):
            p, g = found[number].flatten().tolist(), target[number].flatten().tolist()
            apart = sum(abs(a - b) for a, b in zip(p, g, strict=True))
            wanted += apart / (sum(p) + sum(g) + tiny)
    assert loss.item() == pytest.approx(wanted / 4, rel=1e-4)
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad[1].abs().max() == 0
    assert all(model.weight.grad[k].abs().max() > 0 for k in (0, 2))
    before = copy.deepcopy(term.teacher.state_dict())
    term.update_teacher(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in term.teacher.state_dict().items())


def test_the_term_of_masks_is_the_dice_loss() -> None:
    """Compare the term with the task's own loss, for a received model whose every probability is 0 or 1."""
    received = nn.Conv2d(1, 3, 1)
    received.weight.data[:], received.bias = 1000.0, nn.Parameter(torch.full((3,), -500.0))
    term, model, images = part(received, (1,), 1), nn.Conv2d(1, 3, 1), torch.rand(2, 1, 5, 4)
    expected = term.others.loss(model(images), received(images).sigmoid().round())
    assert term.term(model, images).item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_term_is_0_where_neither_model_finds_a_structure() -> None:
    received = nn.Conv2d(1, 3, 1)
    received.weight.data[:], received.bias = 0.0, nn.Parameter(torch.full((3,), -500.0))
    term, images = part(received, (1,), 1), torch.rand(2, 1, 5, 4)
    assert term.others.loss(received(images), torch.zeros(2, 3, 5, 4)).item() == pytest.approx(0, abs=1e-5)
    assert term.term(received, images).item() == 0


def test_there_is_no_term_where_all_is_annotated_or_nothing_asked_for() -> None:
    model = nn.Conv2d(1, 3, 1)
    assert part(model, (0, 2), 0) is None  # the first round's model knows nothing
    assert isinstance(part(model, (0, 2), 1), NotDrawn)
    for annotated, unlabelled in ((None, "consistency"), ((0, 1, 2), "consistency"), ((1,), "")):
        assert part(model, annotated, 1, unlabelled) is None


def test_a_run_learns_otherwise_by_it(tmp_path: Path) -> None:
    """Expect other bits of a partly annotated federation from the second step on, as the first model is the teacher."""
    twice = {**SETTINGS, "local_epochs": 2}
    ways = (twice, {**twice, "unlabelled": "consistency"})
    plain, with_it = (model_in(run(tmp_path / str(k), settings=how, num_rounds=2)) for k, how in enumerate(ways))
    assert not all(torch.equal(tensor, with_it[name]) for name, tensor in plain.items())


def test_a_run_says_nothing_of_unlabelled_images_that_it_has_not(tmp_path: Path) -> None:
    results = run_document(run(tmp_path, settings={**SETTINGS, "unlabelled": "consistency"}, method="fed_lwr"))
    assert results["status"] == "completed"
    assert "kept" not in results["rounds"][0]["train"]["A"]
