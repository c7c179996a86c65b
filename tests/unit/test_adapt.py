"""Test ``fairflare adapt`` on images of a hospital that did not train, and models without what stays at the sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from fairflare.cli import commands as cli
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.predictor import PERSONAL_NOTE, load_predictor
from fairflare.prediction.saved_model import find_model, read_model

SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3}
COUNT = 11  # not a multiple of the batch size

pytestmark = pytest.mark.usefixtures("one_thread")


def fairflare(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of a run of one round, which is made once."""

    @cache
    def made(method: str, **settings: object) -> Path:
        plan = make_plan(method, task="segmentation", sites=2, num_rounds=1, settings={**SMALL, **settings})
        folder = tmp_path_factory.mktemp(method) / "run"
        run_local(plan, folder)
        return folder

    return made


@pytest.fixture(scope="module")
def common(run: Callable[..., Path]) -> Path:
    return run("fed_avg")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return images of an unlike scanner: bright, with little contrast."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = random.uniform(150, 220, (32, 32)) + 30 * (random.uniform(size=(32, 32)) > 0.9)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    return folder


def reference(place: Path, images: Path) -> dict[str, torch.Tensor]:
    """Compute statistics norm by norm in the order of execution, over all pictures in one batch, in NumPy."""
    predictor = load_predictor(place)
    network = predictor.network.eval()
    batch = torch.stack([predictor.task.read_input(file, None) for file in sorted(images.iterdir())])
    order: list[str] = []
    norms = {n: m for n, m in network.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
    hooks = [m.register_forward_pre_hook(lambda *_, name=n: order.append(name)) for n, m in norms.items()]
    with torch.no_grad():
        network(batch)
    for hook in hooks:
        hook.remove()
    found: dict[str, torch.Tensor] = {}
    for name in order:
        seen: list[np.ndarray] = []
        hook = norms[name].register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].numpy()))
        with torch.no_grad():
            network(batch)
        hook.remove()
        (values,) = seen
        values = np.moveaxis(values.astype(np.float64), 1, 0).reshape(values.shape[1], -1)
        found[f"{name}.running_mean"] = torch.tensor(values.mean(1)).float()
        found[f"{name}.running_var"] = torch.tensor(values.var(1, ddof=1)).float()
        norms[name].load_state_dict(
            {"running_mean": found[f"{name}.running_mean"], "running_var": found[f"{name}.running_var"]}, strict=False
        )
    return found


def test_the_statistics_are_those_of_all_pictures_and_nothing_else_changes(
    common: Path, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "adapted.pt"
    result = fairflare("adapt", common, images, "--out", out)
    assert result.exit_code == 0, result.output
    before, after = load_predictor(common).model, read_model(out)
    expected = reference(common, images)
    assert f"{len(expected) // 2} batch norms measured on {COUNT} pictures of {COUNT} files" in result.stdout
    assert set(expected) == {name for name in after.state if name.endswith(("running_mean", "running_var"))}
    for name, tensor in after.state.items():
        if name in expected:
            torch.testing.assert_close(tensor, expected[name], rtol=2e-4, atol=1e-5)
            assert not torch.equal(tensor, before.state[name]), name
        else:
            assert torch.equal(tensor, before.state[name]), name
    assert after.adapted == COUNT
    assert f"norm statistics of {COUNT} other pictures" in after.describe()


def test_predict_takes_it_and_says_another_thing(common: Path, images: Path, tmp_path: Path) -> None:
    assert fairflare("adapt", common, images, "--out", tmp_path / "a.pt").exit_code == 0
    assert fairflare("predict", tmp_path / "a.pt", images, "--out", tmp_path / "masks").exit_code == 0
    file = min(images.iterdir())
    (was,), (now,) = load_predictor(common)(file), load_predictor(tmp_path / "a.pt")(file)
    assert not torch.allclose(was.probabilities, now.probabilities, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "settings"), [("fed_bn", {}), ("solo", {}), ("fed_avg", {"norm_statistics": "site"})]
)
def test_a_model_without_what_stays_at_the_sites_is_refused(
    method: str, settings: dict[str, object], run: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    """Check also that statistics can be measured, and that nothing else that stayed there can."""
    place = run(method, **settings)
    refused = fairflare("predict", place, images, "--out", tmp_path / "masks")
    assert refused.exit_code == 2
    model = read_model(place / "server/simulate_job/best_FL_global_model.pt")
    last = torch.load(place / "server/simulate_job/FL_global_model.pt", weights_only=True)
    stays = last["train_conf"]["stays_at_sites"]
    assert 0 < model.at_sites == stays <= len(model.state)
    (line,) = refused.stderr.splitlines()
    assert f"no model to use by itself: {stays} of its {len(model.state)} tensors are as they were" in line
    assert "norm_statistics=recalibrated" in line  # the remedy
    assert "fairflare adapt measures the statistics on images of your own" in line
    assert not (tmp_path / "masks").exists()
    adapted = fairflare("adapt", place, images, "--out", tmp_path / "a.pt")
    if settings:
        assert adapted.exit_code == 0, adapted.output
        assert fairflare("predict", tmp_path / "a.pt", images, "--out", tmp_path / "masks").exit_code == 0
    else:
        assert adapted.exit_code == 2
        assert "no model to use by itself" in adapted.stderr
        assert not (tmp_path / "a.pt").exists()


def test_that_the_figures_are_of_other_models_is_said(run: Callable[..., Path]) -> None:
    made = run("ditto") / "server/simulate_job"
    assert PERSONAL_NOTE in load_predictor(made).notes
    # A site half that the server does not know: the results alone say it.
    file = made / "FL_global_model.pt"
    content = torch.load(file, weights_only=True)
    for key in ("measured", "stays_at_sites"):
        del content["train_conf"][key]
    torch.save(content, file)
    assert PERSONAL_NOTE in load_predictor(made, "last").notes
    results = made / "fairflare" / "results.json"
    document = json.loads(results.read_text())
    document["info"]["measured"] = "common"
    results.write_text(json.dumps(document))
    assert load_predictor(made, "last").notes == []


def test_of_fed_rdn_the_input_alone_is_measured(run: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    """Compare with NumPy over all pixels; the other norms keep what the sites have averaged, as at a site."""
    place, out = run("fed_rdn"), tmp_path / "a.pt"
    assert "fairflare adapt measures" in fairflare("predict", place, images, "--out", tmp_path / "masks").stderr
    result = fairflare("adapt", place, images, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"1 batch norms measured on {COUNT} pictures" in result.stdout
    assert "as they were" not in result.output
    pixels = np.stack([np.asarray(Image.open(file)) for file in images.iterdir()]) / 255
    before, after = read_model(find_model(place)).state, read_model(out).state
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        "input_norm.running_mean", "input_norm.running_var",
    }  # fmt: skip
    assert after["input_norm.running_mean"].item() == pytest.approx(pixels.mean(), rel=1e-5)
    assert after["input_norm.running_var"].item() == pytest.approx(pixels.var(ddof=1), rel=1e-5)
    again = fairflare("adapt", out, images, "--out", tmp_path / "b.pt")  # a model that was adapted is whole
    assert "1 batch norms measured" in again.stdout
    assert fairflare("predict", tmp_path / "b.pt", images, "--out", tmp_path / "masks").exit_code == 0


def test_fed_rdn_takes_no_images_with_an_edge(run: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    result = fairflare("adapt", run("fed_rdn", resize="pad"), images, "--out", tmp_path / "a.pt")
    assert result.exit_code == 2
    assert "resize=pad puts an edge around them" in " ".join(result.stderr.split())


def test_images_that_cannot_be_read_are_named_and_one_is_too_few(common: Path, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("00.png", "01.png"):
        (folder / name).write_bytes((images / name).read_bytes())
    (folder / "02.png").write_bytes((images / "02.png").read_bytes()[:100])
    result = fairflare("adapt", common, folder, "--out", tmp_path / "a.pt")
    assert result.exit_code == 1
    assert "not used" in result.stderr
    assert "02.png" in result.stderr
    assert "2 pictures are few" in result.stderr
    (folder / "01.png").unlink()
    result = fairflare("adapt", common, folder, "--out", tmp_path / "b.pt")
    assert result.exit_code == 2
    assert "1 picture(s) can be read, and statistics need at least 2" in result.stderr
    assert not (tmp_path / "b.pt").exists()
