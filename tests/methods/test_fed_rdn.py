"""Test FedRDN: worked numbers, what is padding, who is drawn, own statistics in tests, who is refused, a killed run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.core.features.adapting import network_of
from fairflare.core.features.input_norm import InputNorm, pool_pixels, put_before
from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fed_rdn import FedRDN, RandomStatistics
from fairflare.tasks.adapters import RandomInputs
from fairflare.tasks.base import SiteData

from .own import SITES, Plane, killed, run

HALF: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 4, "keep_optimizer_state": False}
LEVEL = {"site-1": 0.2, "site-2": 0.6}


class Pictures(SiteData):
    """Hold pictures of one channel, as bright as their site; those of class 1 are brighter in one half."""

    def __init__(self, site: str) -> None:
        g = torch.Generator().manual_seed(int(site[-1]))
        self.targets = torch.arange(8) % 2
        self.inputs = LEVEL[site] + 0.2 * torch.rand(8, 1, 4, 4, generator=g)
        self.inputs[:, :, :2] += 0.1 * self.targets[:, None, None, None]

    def num_samples(self, split: str) -> int:
        return len(self.inputs)

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        return list(zip(self.inputs.split(batch_size), self.targets.split(batch_size), strict=True))


class Seen(torch.nn.Sequential):
    """Classify pictures, and remember what was given to it behind the norm."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        SEEN.append((self.training, images.detach().clone()))
        for layer in self:
            images = layer(images)
        return images


SEEN: list[tuple[bool, torch.Tensor]] = []


class Bright(Plane):
    """Learn whose half is brighter."""

    adapters = RandomInputs()

    def build_model(self) -> torch.nn.Module:
        nn = torch.nn
        return put_before(Seen(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 2)))

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Pictures(site)

    def evaluate(self, model: Any, batches: Iterable[Any], device: Any) -> dict[str, float]:
        return super().evaluate(model, list(batches), device)


@pytest.mark.parametrize("places", [(2, 2), (2, 2, 2)])
def test_an_image_is_normalised_by_its_own_statistics_or_those_drawn(places: tuple[int, ...]) -> None:
    """Check the pixel 0.5 with means .4 and .6, deviations .1 and .2: own 1, the other's -.5; 2D and 3D."""
    norm = InputNorm(1)
    norm.running_mean.fill_(0.4)
    norm.running_var.fill_(0.01)
    images = torch.full((5, 1, *places), 0.5)  # five images: a batch whose length is that of a volume's shape
    assert norm(images).flatten().tolist() == pytest.approx([1.0] * images.numel())
    norm.sites = torch.tensor([[[0.4], [0.1]], [[0.6], [0.2]]])
    torch.manual_seed(0)
    drawn = torch.cat([norm(images) for _ in range(40)]).flatten(1)
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))  # one site for all pixels of an image
    found = drawn[:, 0].round(decimals=4)
    assert set(found.tolist()) == {1.0, -0.5}
    assert 60 < int((found == 1).sum()) < 140  # uniformly
    assert len({tuple(batch.tolist()) for batch in found.split(5)}) > 5  # not one for each batch
    norm.eval()
    assert norm(images).flatten().tolist() == pytest.approx([1.0] * images.numel())
    norm.running_var.zero_()
    assert norm(images).flatten().tolist() == pytest.approx([0.1] * images.numel())


def test_statistics_are_of_pixels_without_padding() -> None:
    """Check .223607 of (.2, .4) and (.6, .8), where the mean of the images' deviations is .1."""
    images = torch.tensor([[0.2, 0.4, 0.0], [0.6, 0.8, 0.0]]).reshape(2, 1, 1, 3)
    targets = torch.tensor([[0.0, 1.0, -1.0], [0.0, 0.0, -1.0]]).reshape(2, 1, 1, 3)
    for batches in ([(images, targets)], [(images[:1], targets[:1]), (images[1:], targets[1:])]):
        mean, variance = pool_pixels(batches) or (None, None)
        assert mean is not None
        assert variance is not None
        assert float(mean) == pytest.approx(0.5)
        assert float(variance.sqrt()) == pytest.approx(0.223607, abs=1e-6)
    mean, _ = pool_pixels([(images, torch.zeros(2))]) or (None, None)
    assert mean is not None
    assert float(mean) == pytest.approx(1 / 3)
    assert pool_pixels([]) is None


def test_rounds_draw_all_sites_and_tests_take_the_own(tmp_path: Path) -> None:
    """Check every picture that the network was given against the sites' own pixels."""
    SEEN.clear()
    made, sites = run(tmp_path, RandomStatistics(**HALF), task=Bright(), rule=FedRDN(), num_rounds=3)
    own = {}
    for site in SITES:
        pixels = Pictures(site).inputs.double()
        own[site] = pixels.mean(), pixels.std(correction=0)
        for current_round in range(3):
            report = sites.sent[site, "train", current_round].meta["report"]
            assert report["input_mean"] == pytest.approx([float(own[site][0])], abs=1e-6)
            assert report["input_std"] == pytest.approx([float(own[site][1])], abs=1e-6)
            assert not any(name.startswith("input_norm") for name in sites.sent[site, "train", current_round].params)
    assert "input_norm.running_mean" in made.model()["model"]
    told = [task.meta["directives"]["input_statistics"] for task in made.net.tasks if task.meta.get("directives")]
    assert [len(one) for one in told][:3] == [0, 2, 2]
    images = torch.cat([Pictures(site).inputs for site in SITES])
    by = {a: [(Pictures(a).inputs - own[b][0]) / own[b][1] for b in SITES] for a in SITES}

    def same(picture: torch.Tensor, a: str, b: int) -> bool:
        return any(torch.allclose(picture.double(), one.double(), atol=1e-4) for one in by[a][b])

    kinds = {
        (training, a == SITES[b])
        for training, batch in SEEN
        for picture in batch
        for a in SITES
        for b in range(2)
        if same(picture, a, b)
    }
    assert kinds == {(True, True), (True, False), (False, True)}  # never another's in a test
    assert len(images) == 16


def test_what_one_site_tells_of_its_spread_is_moderated_and_kept() -> None:
    def weigh(rule: FedRDN, told: dict[str, list[float]], **more: Any) -> None:
        reports = {site: {"input_mean": [0.5] * len(stds), "input_std": stds} for site, stds in told.items()}
        rule.weigh(RoundInputs(0, 1, sorted(told), dict.fromkeys(told, 1.0), reports, {}, {}, {}, **more))

    rule = FedRDN()
    weigh(rule, {"a": [0.1, 0.2], "b": [0.3, 0.4], "c": [0.2]})  # another number of channels than the others
    assert rule.directives(1, 2, "abc") == {"input_statistics": [[[0.5, 0.5], [0.1, 0.2]], [[0.5, 0.5], [0.3, 0.4]]]}
    weigh(rule, {"c": []})  # too few cases, so that it told none
    assert rule.state_dict()["statistics"].keys() == {"a", "b"}
    weigh(rule, {"a": [0.1, 0.1]}, moderated=lambda values, name: dict.fromkeys(values, 0.25))
    assert rule.state_dict()["statistics"]["a"] == [[0.5, 0.5], [0.25, 0.25]]
    assert rule.state_dict()["statistics"]["b"] == [[0.5, 0.5], [0.3, 0.4]]  # the absent site's stay


def test_each_site_has_its_own_mean() -> None:
    rule = FedRDN()
    reports = {site: {"input_mean": [mean], "input_std": [0.1]} for site, mean in (("a", 0.2), ("b", 0.5), ("c", 0.7))}
    rule.weigh(RoundInputs(0, 1, [*reports], dict.fromkeys(reports, 1.0), reports, {}, {}, {}))
    assert rule.directives(1, 2, "abc") == {"input_statistics": [[[0.2], [0.1]], [[0.5], [0.1]], [[0.7], [0.1]]]}


def test_what_it_cannot_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="adapters=none: set adapters=fed_rdn"):
        make_plan("fed_rdn", settings={"adapters": "none"})
    with pytest.raises(ValueError, match="set resize to 'stretch' or 'crop'"):
        make_plan("fed_rdn", task="classification", settings={"resize": "pad"})
    with pytest.raises(ValueError, match="begins with a convolution"):
        put_before(torch.nn.Linear(2, 2))
    assert make_plan("fed_rdn", settings={"resize": "pad"})  # masks say where the edge is


@pytest.mark.parametrize("kind", ["segmentation", "classification", "volume_segmentation"])
def test_networks_of_every_kind_of_task_have_the_norm_and_keep_their_names(kind: str) -> None:
    with_it, without = (network_of(make_plan(name, task=kind).task).state_dict() for name in ("fed_rdn", "fed_avg"))
    assert with_it.keys() - without.keys() == {
        "input_norm.running_mean", "input_norm.running_var", "input_norm.num_batches_tracked",
    }  # fmt: skip
    assert without.keys() <= with_it.keys()


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    half, task = RandomStatistics(**HALF), Bright()
    whole, _ = run(tmp_path / "whole", half, task=task, rule=FedRDN(), num_rounds=3)

    rest = killed(tmp_path / "cut", half, task, FedRDN(), 3)
    found = whole.model()["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())
