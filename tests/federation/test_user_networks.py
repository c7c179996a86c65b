"""Test users' own networks that cannot be trained or averaged, or do not fit the task: they are refused early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.federation.server.first_model import build
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask
from tests.methods.support import SEGMENTATION, at_site, initial, request

Make = Callable[[], nn.Module]


class Net(nn.Module):
    """Define a network for masks, (n, 1, h, w), with one more parameter or buffer."""

    def __init__(self, outputs: int = 1, **more: torch.Tensor) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, outputs, 3, padding=1)
        for name, tensor in more.items():
            self.register_buffer(name, tensor, persistent=not name.startswith("own"))

    def forward(self, images: torch.Tensor) -> Any:
        return self.conv(images)


class Grows(Net):
    def forward(self, images: torch.Tensor) -> Any:
        self.log = torch.cat([self.log, torch.zeros(1)])
        return super().forward(images)


class Pair(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images), images


class Complex(Net):
    def __init__(self, as_real: bool) -> None:
        super().__init__()
        both = torch.ones(2, dtype=torch.complex64)
        self.z = nn.Parameter(torch.view_as_real(both) if as_real else both)

    def forward(self, images: torch.Tensor) -> Any:
        z = torch.view_as_complex(self.z) if self.z.dtype == torch.float32 else self.z
        return super().forward(images) * z.real.mean()


def lazy(seen: bool) -> nn.Module:
    net = nn.Sequential(nn.LazyConv2d(4, 3, padding=1), nn.LazyConv2d(1, 1))
    if seen:
        net(torch.zeros(1, 1, 32, 32))
    return net


def with_nan() -> nn.Module:
    net = Net()
    net.conv.weight.data[0] = torch.nan
    return net


def task_of(make: Make, base: type = SegmentationTask, **settings: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def build_model(self) -> nn.Module:
            return make()

    return Own(**settings)


INF = torch.tensor([float("-inf"), 0.0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lazy(False), r"'0\.weight' has no size.*LazyConv2d"),
        (lambda: Complex(False), r"'z' is torch\.complex64.*view_as_real"),
        (lambda: Net(turn=torch.ones(2, dtype=torch.complex64)), r"'turn' is torch\.complex64"),
        (lambda: Net().half(), r"'conv\.weight' is torch\.float16.*bf16"),
        (lambda: Net(mask=INF), "'mask' is a buffer .*persistent=False"),
        (with_nan, r"'conv\.weight' is not finite"),
        (lambda: Net().requires_grad_(False), r"has no parameter that is trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_where_the_network_is_built(make: Make, words: str) -> None:
    with pytest.raises(ValueError, match=rf"the network of the task \(Own\).*{words}"):
        build(task_of(make))


@pytest.mark.parametrize(
    "make",
    [
        lambda: lazy(True),
        lambda: Complex(True),
        lambda: Net(own_turn=torch.ones(2, dtype=torch.complex64)),
        lambda: Net(own_mask=INF),
        lambda: Net().bfloat16(),
        lambda: Net().double(),
        lambda: Net(table=torch.arange(3), flags=torch.tensor([True]), empty=torch.zeros(0)),
        lambda: Net(table=torch.ones(2).half()),  # is only averaged
    ],
)
def test_what_the_remedies_give_is_built(make: Make) -> None:
    assert isinstance(build(task_of(make)), nn.Module)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Net(3),
            r"gives \(1, 3, 32, 32\), and \(1, 1, 32, 32\)",
        ),
        (lambda: nn.Sequential(Net(), nn.MaxPool2d(2)), r"gives \(1, 1, 16, 16\), and \(1, 1, 32, 32\)"),
        (Pair, r"gives a tuple, and \(1, 1, 32, 32\) is"),
        (lambda: nn.Conv2d(3, 1, 1), r"fails: RuntimeError: .*3 channels"),
        (lambda: Grows(log=torch.zeros(1)), "the size of 'log'; register_buffer"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_at_the_check(make: Make, words: str, tmp_path: Path) -> None:
    task = task_of(make, image_size=(32, 32), phantom_cases=0.3)
    worker = at_site(tmp_path, task=task)
    reply = worker.perform(request("check", {}))
    assert reply.status == "failed"
    with pytest.raises(ValueError, match=words):
        raise ValueError(reply.reason)
    with pytest.raises(ValueError, match=words):  # and so does an export, with zeros
        task.check_outputs(build(task))


def test_the_shape_of_classes_and_of_volumes() -> None:
    """Check seven outputs for eight classes, and a volume's mask with one channel too many."""
    classes = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)), ClassificationTask, num_classes=8,
                      image_size=(32, 32))  # fmt: skip
    with pytest.raises(ValueError, match=r"gives \(1, 7\), and \(1, 8\) is needed"):
        classes.check_outputs(build(classes))
    volumes = task_of(lambda: nn.Conv3d(1, 3, 1), VolumeSegmentationTask, num_classes=2)
    with pytest.raises(ValueError, match=r"\(1, 3, 32, 32, 32\), and \(1, 2, 32, 32"):
        volumes.check_outputs(build(volumes))
    volumes = task_of(lambda: nn.Conv3d(1, 2, 1), VolumeSegmentationTask, num_classes=2)
    volumes.check_outputs(build(volumes))


def test_a_network_and_a_loss_of_the_users_own_know_each_other(tmp_path: Path) -> None:
    class Own(SegmentationTask):
        def build_model(self) -> nn.Module:
            return Pair()

        def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            return super().loss(outputs[0], targets)

    reply = at_site(tmp_path, task=Own(image_size=(32, 32), phantom_cases=0.3)).perform(request("check", {}))
    assert reply.status == "ok", reply.reason


def test_initial_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from fairflare.federation.server.first_model import check_network

    with pytest.raises(ValueError, match=r"initial weights: 'conv\.weight' is not"):
        check_network(with_nan(), "the network with its initial weights")


@pytest.mark.parametrize("settings", [{"local_epochs": 2}, {"local_steps": 3}])
def test_our_own_loop_without_a_batch_is_no_training(settings: dict[str, Any], tmp_path: Path) -> None:
    """Check a user's own task whose training list is empty, as with a loader that drops its last batch."""
    task = SegmentationTask(**SEGMENTATION)
    opened = task.open_site

    def open_site(site: str, own: Any) -> Any:
        data = opened(site, own)
        batches = data.batches
        data.batches = lambda split, **more: () if split == "training" else batches(split, **more)
        return data

    vars(task)["open_site"] = open_site
    worker = at_site(tmp_path, LocalTraining(batch_size=4, **settings), task=task)
    reply = worker.perform(request("train", initial()))
    assert reply.status == "failed"
    assert reply.update is None
    assert reply.reason == (
        "site 'site-1': it sent back the model that it received in round 0, and does not count as trained: "
        "its training images gave no batch"
    )
