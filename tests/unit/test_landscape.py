"""The loss around a model: directions, grid, what a picture must not depend on, and the command."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from fairflare.cli import app
from fairflare.core.objectives.landscape import coordinates, direction, filter_norms, numbers, surface
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.landscape import Grid, landscape_at, load_trained, mean_loss
from fairflare.reporting.landscape import draw
from fairflare.tasks.classification import ClassificationTask

SEGMENTATION = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}
CLASSES = {
    "phantom": "fundus", "image_size": [32, 32], "features": [4, 4, 8, 8], "phantom_samples": 60, "phantom_test": 40,
    "partition": "iid", "corrupted_sites": 0, "local_epochs": 1,
}  # fmt: skip


class Net(nn.Module):
    """All kinds of layers, ReLU between them; ``head`` may be left out."""

    def __init__(self, seed: int = 0, head: int | None = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.head = None if head is None else nn.Linear(4, head)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(inputs)).relu()
        found = self.up(self.deep(found).relu()).relu().mean((2, 3))
        return found if self.head is None else self.head(found)


def filters(model: nn.Module, values: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Every filter by itself, cut out by hand: what makes one output channel."""
    found = []
    for name, module in model.named_modules():
        weight = values.get(f"{name}.weight")
        if weight is None:
            continue
        if isinstance(module, nn.ConvTranspose2d):
            inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
            for group in range(module.groups):
                found += [(name, weight[group * inputs : (group + 1) * inputs, o]) for o in range(outputs)]
        else:
            found += [(name, weight[o]) for o in range(len(weight))]
    return found


# ------------------------------------------------------------------------------------------------ directions


def test_every_filter_is_as_long_as_the_models() -> None:
    model = Net()
    found = direction(model, seed=3)
    assert set(found) == {"conv.weight", "deep.weight", "up.weight", "head.weight"}  # no bias, nothing of a norm
    own = filters(model, {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1})
    drawn = filters(model, found)
    assert [name for name, _ in own].count("up") == 4  # output channels
    assert len(own) == len(drawn) == 4 + 6 + 4 + 3
    for (name, weights), (_, along) in zip(own, drawn, strict=True):
        assert float(along.norm()) == pytest.approx(float(weights.norm()), rel=1e-5), name
        assert not torch.allclose(along, weights)
    assert {name: norms.shape for name, norms in filter_norms(model).items()} == {
        "conv.weight": (4, 1, 1, 1), "deep.weight": (6, 1, 1, 1), "up.weight": (6, 2, 1, 1), "head.weight": (3, 1),
    }  # fmt: skip


def test_a_filter_of_zeros_stays() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0] = 0
    found = direction(model, 0)["weight"]
    assert (found[0] == 0).all()
    assert float(found[1].norm()) == pytest.approx(float(model.weight[1].detach().norm()), rel=1e-5)


def test_directions_are_drawn_again_from_their_seed() -> None:
    model = Net()
    again = direction(model, 1)
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    for name, tensor in direction(model, 1).items():
        assert torch.equal(tensor, again[name])
    assert torch.equal(state, torch.random.get_rng_state())
    for other in (direction(model, 2), direction(model, 1, number=1)):
        assert all(not torch.allclose(again[name], tensor) for name, tensor in other.items())


def test_two_models_get_the_same_draws() -> None:
    """Each scaled to its own filters; another head, or none, changes nothing of the rest."""
    first, second = Net(seed=0), Net(seed=1, head=7)
    one, other = direction(first, 5), direction(second, 5)
    for (name, a), (_, b) in zip(filters(first, one), filters(second, other), strict=False):
        if name == "head":
            break
        assert torch.allclose(a / a.norm(), b / b.norm(), atol=1e-6), name
        assert not torch.allclose(a.norm(), b.norm())
    without = direction(Net(seed=0, head=None), 5)
    assert all(torch.equal(tensor, one[name]) for name, tensor in without.items())
    assert set(one) - set(without) == {"head.weight"}


# ------------------------------------------------------------------------------------------------ the surface


class Quadratic(nn.Module):
    """A matrix of weights, whose loss is a quadratic form."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.weight = nn.Parameter(torch.from_numpy(rng.normal(size=(3, 4))))
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
        half = rng.normal(size=(12, 12))
        self.hessian = half @ half.T
        self.target = rng.normal(size=12)

    def loss(self) -> float:
        x = self.weight.detach().numpy().ravel() - self.target
        return float(0.5 * x @ self.hessian @ x + self.bias.detach().sum())


def test_a_quadratic_loss_has_its_closed_form() -> None:
    model = Quadratic()
    first, second = (direction(model, 4, number) for number in (0, 1))
    places = coordinates(0.8, 7)
    found = surface(model, model.loss, first, second, places)
    w0 = model.weight.detach().numpy().ravel()
    d, e = (chosen["weight"].numpy().ravel() for chosen in (first, second))

    def closed(a: float, b: float) -> float:
        x = w0 + a * d + b * e - model.target
        return float(0.5 * x @ model.hessian @ x + 3)

    expected = np.array([[closed(a, b) for b in places] for a in places])
    assert found == pytest.approx(expected, rel=1e-12)
    said = numbers(found, places)
    assert said["loss"] == pytest.approx(closed(0, 0), rel=1e-12)
    assert said["curvature"] == pytest.approx(d @ model.hessian @ d + e @ model.hessian @ e, rel=1e-9)
    rises = {(a, b): closed(a, b) - closed(0, 0) for a in places for b in places if (a, b) != (0, 0)}
    full = [rise for (a, b), rise in rises.items() if math.hypot(a, b) <= 0.8 + 1e-12]
    half = [rise for (a, b), rise in rises.items() if math.hypot(a, b) <= 0.4 + 1e-12]
    assert 4 <= len(half) < len(full) < 48
    assert said["mean_rise"] == pytest.approx(np.mean(full), rel=1e-9)
    assert said["mean_rise_half"] == pytest.approx(np.mean(half), rel=1e-9)
    assert said["max_rise"] == pytest.approx(max(full), rel=1e-9)


def test_the_model_is_what_it_was() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps: list[int] = []
    surface(model, lambda: 1.0, direction(model, 0), direction(model, 0, 1), coordinates(1, 5), steps.append)
    assert steps == list(range(1, 26))
    calls = []

    def fail() -> float:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return 1.0

    with pytest.raises(MemoryError):
        surface(model, fail, direction(model, 0), direction(model, 0, 1), coordinates(1, 5))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def cross_entropy(model: nn.Module) -> Callable[[], float]:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 5, generator=rng)
    targets = torch.randint(3, (16,), generator=rng)

    @torch.no_grad()
    def loss() -> float:
        return float(nn.functional.cross_entropy(model(inputs), targets))

    return loss


def test_the_picture_does_not_depend_on_the_scale_of_relu_layers() -> None:
    """One layer times c, the next divided by c: the same function, so the same picture. Plain directions fail it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double().float()
    scaled = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for parameter in scaled[0].parameters():
            parameter.mul_(16)
        scaled[2].weight.div_(16)
    places = coordinates(1, 5)

    def picture(model: nn.Module, like: nn.Module) -> Any:
        return surface(model, cross_entropy(model), direction(like, 0), direction(like, 0, 1), places)

    assert picture(scaled, scaled) == pytest.approx(picture(plain, plain), rel=1e-5)
    assert picture(scaled, plain) != pytest.approx(picture(plain, plain), rel=1e-2)  # without the normalisation


def test_a_loss_that_is_not_finite_is_left_out_of_nothing() -> None:
    model = Quadratic()

    def loss() -> float:
        found = model.loss()
        return found if found == start else math.inf

    start = model.loss()
    found = surface(model, loss, direction(model, 0), direction(model, 0, 1), coordinates(1, 5))
    assert np.isfinite(found).sum() == 1
    said = numbers(found, coordinates(1, 5))
    assert said["loss"] == start
    assert not any(math.isfinite(value) for name, value in said.items() if name != "loss")
    with pytest.raises(ValueError, match="loss of the model itself is nan"):
        surface(model, lambda: math.nan, direction(model, 0), direction(model, 0, 1), coordinates(1, 5))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: coordinates(0, 5), "range must be"),
        (lambda: coordinates(math.nan, 5), "range must be"),
        (lambda: coordinates(1, 4), "points must be"),
        (lambda: coordinates(1, 6), "points must be odd"),
        (lambda: coordinates(1, 3), "points must be"),
        (lambda: direction(Net(), -1), "seed must be"),
        (lambda: direction(nn.BatchNorm1d(3), 0), "no parameter of two dimensions"),
        (lambda: surface(Net(), lambda: 0.0, direction(Net(), 0), direction(Net(head=None), 0), [-1, 0, 1]), "head"),
        (lambda: surface(Net(head=None), lambda: 0.0, direction(Net(), 0), direction(Net(), 0), [-1, 0, 1]), "head"),
        (lambda: numbers(np.zeros((5, 4)), coordinates(1, 5)), "losses must have shape"),
    ],
)
def test_bad_input(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_a_model_that_is_not_finite_is_named() -> None:
    model = Net()
    with torch.no_grad():
        model.deep.weight[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"'deep\.weight' of the model is not finite"):
        direction(model, 0)


# ------------------------------------------------------------------------------------------------ of runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fed_avg and fed_lwr on the same two synthetic sites, fed_bn, whose norms stay there, and a classification."""
    root = tmp_path_factory.mktemp("runs")
    for method, settings in (("fed_avg", SEGMENTATION), ("fed_lwr", SEGMENTATION), ("fed_bn", SEGMENTATION)):
        plan = make_plan(method, task="segmentation", sites=2, num_rounds=1, settings=settings)
        run_local(plan, root / method, {"phantom_seed": 5})
    plan = make_plan("fed_avg", task="classification", sites=2, num_rounds=1, settings=CLASSES)
    run_local(plan, root / "classes")
    return root


def fairflare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["landscape", *arguments])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_the_command(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    places = [str(runs / name) for name in ("fed_avg", "fed_lwr")]
    result = fairflare(*places, "--out", str(out), "--points", "5", "--range", "0.5", "--split", "test", "--last")
    assert result.exit_code == 0, result.output
    assert "SYNTHETIC" in result.output
    assert sorted(path.name for path in out.iterdir()) == [
        "landscape.csv", "landscape.png", "landscape.svg", "landscape_numbers.csv",
    ]  # fmt: skip
    assert (out / "landscape.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "landscape.svg").read_text()
    assert all(text in svg for text in ("fed_avg", "fed_lwr", "site-1", "site-2", "SYNTHETIC"))
    said = table(out / "landscape_numbers.csv")
    assert [(row["run"], row["site"]) for row in said] == [
        ("fed_avg", "site-1"), ("fed_lwr", "site-1"), ("fed_avg", "site-2"), ("fed_lwr", "site-2"),
    ]  # fmt: skip
    losses = table(out / "landscape.csv")
    assert len(losses) == 4 * 25
    for row in said:
        results = json.loads((runs / row["run"] / "server/simulate_job/fairflare/results.json").read_text())
        # The last model, on data that the run's own file describes.
        assert float(row["loss"]) == pytest.approx(results["test"][row["site"]]["loss"], rel=1e-5)
        assert row["model"] == "FL_global_model.pt"
        own = [r for r in losses if (r["run"], r["site"]) == (row["run"], row["site"])]
        grid = np.array([float(r["loss"]) for r in own]).reshape(5, 5)
        assert [float(r["second"]) for r in own[:5]] == [float(r["first"]) for r in own[::5]] == coordinates(0.5, 5)
        expected = numbers(grid, coordinates(0.5, 5))
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-12)
    refused = fairflare(*places, "--out", str(out), "--points", "5")
    assert refused.exit_code == 2
    assert "already there" in refused.stderr
    before = (out / "landscape.csv").read_bytes()
    again = fairflare(
        *places, "--out", str(out), "--points", "5", "--range", "0.5", "--split", "test", "--last", "--overwrite"
    )
    assert again.exit_code == 0
    assert (out / "landscape.csv").read_bytes() == before


@pytest.mark.long
def test_one_site_of_a_file_and_another_split(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "fairflare.json"
    file.write_text(json.dumps({"phantom": True, "phantom_seed": 5}))
    options = ("--points", "5", "--range", "0.2", "--split", "test", "--last", "--sites", "site-2")
    result = fairflare(str(runs / "fed_avg"), "--data", str(file), "--out", str(tmp_path / "a"), *options)
    assert result.exit_code == 0, result.output
    (row,) = table(tmp_path / "a" / "landscape_numbers.csv")
    results = json.loads((runs / "fed_avg/server/simulate_job/fairflare/results.json").read_text())
    assert (row["site"], row["split"]) == ("site-2", "test")
    assert float(row["loss"]) == pytest.approx(results["test"]["site-2"]["loss"], rel=1e-5)
    file.write_text(json.dumps({"phantom": True, "phantom_seed": 6}))
    result = fairflare(str(runs / "fed_avg"), "--data", str(file), "--out", str(tmp_path / "b"), *options)
    assert float(table(tmp_path / "b" / "landscape_numbers.csv")[0]["loss"]) != pytest.approx(
        float(row["loss"]), rel=1e-3
    )


def own_folder(root: Path, seed: int) -> None:
    """A site's own images with a datalist."""
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True)
    entries: dict[str, list[dict[str, str]]] = {}
    for split in SPLITS:
        entries[split] = [{"image": f"{split}{n}.png", "label": f"{split}{n}m.png"} for n in range(3)]
        for entry in entries[split]:
            Image.fromarray(rng.integers(0, 256, (32, 32), dtype=np.uint8)).save(root / entry["image"])
            Image.fromarray(rng.integers(0, 2, (32, 32), dtype=np.uint8)).save(root / entry["label"])
    write_datalist(root / "datalist.json", entries)


@pytest.mark.long
def test_own_data_in_every_form(runs: Path, tmp_path: Path) -> None:
    """A site's folder, a folder of sites, a site's file, one with blocks; a site that is not there is no other one."""
    for number, site in enumerate(("north", "south")):
        own_folder(tmp_path / "sites" / site, number)
    north = {"data_root": str(tmp_path / "sites/north")}
    (tmp_path / "own.json").write_text(json.dumps(north))
    (tmp_path / "blocks.json").write_text(json.dumps({"sites": {"north": north}}))
    losses = set()
    forms = ("sites/north", "sites", "own.json", "blocks.json")
    for number, form in enumerate(forms):
        options = (
            "--data",
            str(tmp_path / form),
            "--points",
            "5",
            "--sites",
            "north",
            "--out",
            str(tmp_path / f"{number}"),
        )
        result = fairflare(str(runs / "fed_avg"), *options)
        assert result.exit_code == 0, result.output
        assert "SYNTHETIC" not in result.stdout
        (row,) = table(tmp_path / f"{number}" / "landscape_numbers.csv")
        assert (row["site"], row["images"], row["synthetic"]) == ("north", "3", "False")
        losses.add(row["loss"])
    assert len(losses) == 1
    for form in ("sites", "blocks.json"):
        options = ("--data", str(tmp_path / form), "--sites", "norht", "--out", str(tmp_path / "x"))
        result = fairflare(str(runs / "fed_avg"), *options)
        assert result.exit_code == 2
        assert "has no site 'norht'; did you mean 'north'" in " ".join(result.stderr.split())
    result = fairflare(
        str(runs / "fed_avg"), "--data", str(tmp_path / "sites"), "--points", "5", "--out", str(tmp_path / "b")
    )
    assert [row["site"] for row in table(tmp_path / "b" / "landscape_numbers.csv")] == ["north", "south"]


def test_a_model_file_alone(runs: Path, tmp_path: Path) -> None:
    """It says nothing of its data: synthetic ones are as the task draws them, and that is said."""
    file = runs / "fed_avg/server/simulate_job/FL_global_model.pt"
    result = fairflare(str(file), "--points", "5", "--sites", "site-1", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "has no local/fairflare.json: its SYNTHETIC images are taken as the task draws them" in result.stderr


def test_classes(runs: Path, tmp_path: Path) -> None:
    """The mean loss is that of the evaluation, whatever the batches."""
    (trained,) = load_trained([runs / "classes"], "last")
    assert isinstance(trained.task, ClassificationTask)
    found = landscape_at(trained, "site-1", {}, Grid(points=5, extent=0.1))
    data = trained.task.open_site("site-1", {})
    model = trained.task.build_model()
    model.load_state_dict(trained.saved.state)
    expected = trained.task.evaluate(model, data.batches("validation", batch_size=3), "cpu")["loss"]
    assert found.numbers["loss"] == pytest.approx(expected, rel=1e-5)
    assert found.images == data.num_samples("validation")
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert mean_loss(trained.task, model, data.batches("validation", batch_size=5), "cpu") == pytest.approx(expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{runs}/fed_avg", "{runs}/classes"], "cannot be compared"),
        (["{runs}/fed_bn"], "stay at the sites"),
        (["{runs}/nothing"], "does not exist"),
        (["{runs}/fed_avg", "--points", "4"], "points must be"),
        (["{runs}/fed_avg", "--range", "-1"], "range must be"),
        (["{runs}/fed_avg", "--seed", "-1"], "seed must be"),
        (["{runs}/fed_avg", "--split", "train"], "no split 'train'; it has training, validation, test"),
        (["{runs}/fed_avg", "--sites", "3"], "--sites wants names"),
        (["{runs}/fed_avg", "--data", "{runs}/none.json"], "does not exist"),
        (["{runs}/fed_avg", "--device", "abacus"], "--device abacus"),
    ],
)
def test_mistakes_are_one_line(runs: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    given = [argument.format(runs=runs) for argument in arguments]
    result = fairflare(*given, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ")
    assert text in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_runs_that_had_other_data_are_not_compared_silently(runs: Path, tmp_path: Path) -> None:
    plan = make_plan("fed_avg", task="segmentation", sites=2, num_rounds=1, settings=SEGMENTATION)
    run_local(plan, tmp_path / "other", {"phantom_seed": 6})
    result = fairflare(str(runs / "fed_avg"), str(tmp_path / "other"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "fed_avg and other had different data; give those to use with --data" in " ".join(result.stderr.split())


def test_one_scale_of_colours_that_is_logarithmic_where_losses_are_far_apart() -> None:
    places = coordinates(1, 5)
    bowl = np.add.outer(np.square(places), np.square(places)) + 1
    holed = bowl.copy()
    holed[0, 0] = math.nan
    figure = draw({("a", "s"): bowl, ("b", "s"): holed + 1}, places, "two", False)
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "loss"
    assert bar.get_ylim() == pytest.approx((1, 4))
    figure = draw({("a", "s"): bowl, ("b", "s"): bowl * 100}, places, "two", True)
    assert figure.axes[-1].get_ylabel() == "loss (logarithmic)"
    assert figure.axes[-1].get_ylim() == pytest.approx((1, 300))
    draw({("a", "s"): np.ones((5, 5))}, places, "flat", False)
