"""Test the two files of ``docs/new_method.md``, verbatim, as a plugin: in every command, and FedAvgM against a loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fairflare.recipes as fairflare_recipes
from fairflare.cli.commands import app
from fairflare.exchange.messages import Message
from fairflare.federation.server.rounds import Stopped
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.base import catalog
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import Rule
from tests.federation.network import SITES, Run, good, number
from tests.tiny import VOLUMES

ROOT = Path(__file__).parents[2]
TINY = {**VOLUMES, "phantom_cases": 0.3}
SETS = [f"--set={name}={json.dumps(value)}" for name, value in TINY.items()]
METHODS = {"fed_avg_m": ("FedAvgM", "beta=0.5"), "term": ("TERM", "t=2.0")}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install both files as a package."""
    page = (ROOT / "docs" / "new_method.md").read_text()
    blocks = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.DOTALL))
    assert sorted(blocks) == sorted(METHODS)
    site = tmp_path / "site-packages"
    (site / "newcomer").mkdir(parents=True)
    (site / "newcomer" / "__init__.py").touch()
    for name, code in blocks.items():
        (site / "newcomer" / f"{name}.py").write_text(code)
    info = site / "newcomer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1.0\n")
    points = [f"{name} = newcomer.{name}" for name in METHODS]
    (info / "entry_points.txt").write_text("\n".join(["[fairflare.methods]", *points, ""]))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    catalog._plugins.cache_clear()
    yield site
    monkeypatch.undo()
    catalog._plugins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "newcomer"]:
        del sys.modules[name]


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("name", METHODS)
def test_listed_described_exported_and_a_recipe(name: str, plugin: Path) -> None:
    title, setting = METHODS[name]
    assert f"{name} {title}" in command("list")
    assert f"{title}, at the server: {title}" in command("describe", name)
    command("export", name, "--out", "jobs", "--preinstalled", "--set", setting)
    server = (Path("jobs") / name / "app" / "config" / "config_fed_server.json").read_text()
    key, value = setting.split("=")
    rule = json.loads(server)["workflows"][0]["args"]["rule"]
    assert (rule["path"], rule["args"][key]) == (f"newcomer.{name}.{title}", float(value))
    recipe = getattr(fairflare_recipes, f"{title}Recipe")
    try:
        assert getattr(recipe(**{key: float(value)}).plan.rule, key) == float(value)
    finally:
        vars(fairflare_recipes).pop(recipe.__name__, None)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_run_and_compared(name: str, plugin: Path, tmp_path: Path) -> None:
    title, setting = METHODS[name]
    short = ["--sites", 2, "--rounds", 2, "--in-process", *SETS]
    command("run", name, "--set", setting, *short)
    (file,) = (tmp_path / "runs" / f"{name}-seed0").rglob("results.json")
    assert json.loads(file.read_text())["status"] == "completed"
    assert f"published setting: {title} has none" in command("run", name, "--paper", "-w", "published", *short)
    done = subprocess.run(
        [
            sys.executable, "-m", "fairflare.cli", "compare", "fed_avg", f"{name}:{setting}", "--seeds", "1", "--sites",
            "2", "--rounds", "1", *SETS,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(plugin)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{name} ({setting.removesuffix('.0')}" in " ".join(done.stdout.split())


# ------------------------------------------------------------------------------------------------ FedAvgM's numbers


def made(**settings: Any) -> Rule:
    return all_methods()["fed_avg_m"].rule(**settings)


def update(site: str, current_round: int, name: str, like: torch.Tensor) -> np.ndarray:
    rng = np.random.default_rng([number(site), current_round, sum(map(ord, name))])
    return rng.normal(size=tuple(like.shape)).astype(np.float32)


def trains(site: str, name: str, task: Message) -> Message:
    reply = good(site, name, task)
    if name == "train":
        reply.params = {n: torch.from_numpy(update(site, task.current_round, n, t)) for n, t in task.params.items()}
    return reply


def looped(start: dict[str, torch.Tensor], shares: dict[str, float], beta: float) -> dict[str, np.ndarray]:
    """Compute the algorithm of Hsu et al., one number after the other."""
    found = {}
    for name, tensor in start.items():
        w = tensor.double().numpy().reshape(-1).copy()
        v = [0.0] * len(w)
        for current_round in range(3):
            sent = {site: update(site, current_round, name, tensor).reshape(-1) for site in SITES}
            for i in range(len(w)):
                delta = 0.0
                for site in SITES:
                    delta += shares[site] * float(sent[site][i])
                v[i] = beta * v[i] + delta
                w[i] = w[i] + v[i]
        found[name] = w.reshape(tuple(tensor.shape))
    return found


@pytest.mark.parametrize(
    ("settings", "bounds", "shares"),
    [
        ({}, {}, (1 / 6, 2 / 6, 3 / 6)),  # sites have 10, 20 and 30 images
        ({"weighting": "uniform"}, {}, (1 / 3, 1 / 3, 1 / 3)),
        ({}, {"max_weight": 0.4}, (0.2, 0.4, 0.4)),
    ],
)
def test_momentum_against_a_loop_and_a_run_that_was_killed(
    settings: Any, bounds: Any, shares: Any, plugin: Path, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "a", trains, rule=made(beta=0.7, **settings), num_rounds=3, **bounds)()
    start = {name: tensor.clone() for name, tensor in whole.net.tasks[0].params.items()}
    found = whole.model()["model"]
    for name, expected in looped(start, dict(zip(SITES, shares, strict=True)), 0.7).items():
        np.testing.assert_allclose(found[name].double().numpy(), expected, rtol=0, atol=5e-6)

    def killed(site: str, name: str, task: Message) -> Message:
        cut.net.abort = task.current_round == 2
        return trains(site, name, task)

    cut = Run(tmp_path / "b", killed, rule=made(beta=0.7, **settings), num_rounds=3, experiment="e", **bounds)
    with pytest.raises(Stopped):
        cut()
    rest = Run(tmp_path / "b", trains, rule=made(beta=0.7, **settings), num_rounds=3, experiment="e", **bounds)()
    assert [name for name, _ in rest.net.asked] == ["train", "validate"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())


def test_momentum_of_a_median(plugin: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, trains, rule=made(beta=0.5, weighting="uniform"), num_rounds=2, aggregate="median")()
    for name, start in run.net.tasks[0].params.items():
        v, w = 0.0, start.double().numpy()
        for current_round in range(2):
            middle = np.median([update(site, current_round, name, start).astype(float) for site in SITES], axis=0)
            v = 0.5 * v + middle
            w = w + v
        np.testing.assert_allclose(run.model()["model"][name].double().numpy(), w, rtol=0, atol=2e-6)


def test_under_a_stock_controller_it_acts_or_is_refused(plugin: Path) -> None:
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

    def sent(site: str, kind: ParamsType, value: float) -> FLModel:
        params = {"w": torch.full((2,), value), "bn.running_mean": torch.full((1,), value)}
        return FLModel(params=params, params_type=kind, current_round=0, meta={"client_name": site})

    aggregator = FairAggregator(rule=made(beta=0.5, weighting="uniform"))
    for current_round, expected in enumerate((2.0, 3.0, 3.5)):
        aggregator.reset_stats()
        for site, value in (("a", 1.0), ("b", 3.0)):
            aggregator.accept_model(sent(site, ParamsType.DIFF, value))
        params = aggregator.aggregate_model().params
        assert params["w"].tolist() == [expected] * 2, current_round
        assert params["bn.running_mean"].tolist() == [2.0]  # no momentum in what no optimizer trains
    aggregator.reset_stats()
    for site in "ab":
        aggregator.accept_model(sent(site, ParamsType.FULL, 1.0))
    with pytest.raises(RuntimeError, match=r'FedAvgM needs updates here: params_transfer_type="DIFF" in the recipe'):
        aggregator.aggregate_model()


def test_the_weights_of_term(plugin: Path, tmp_path: Path) -> None:
    losses = {"site-1": 1.0, "site-2": 3.0, "site-3": 2.0}

    def said(site: str, name: str, task: Message) -> Message:
        reply = trains(site, name, task)
        if name == "train":
            reply.meta["report"] = {"probe_loss": losses[site]}
        return reply

    run = Run(tmp_path, said, rule=all_methods()["term"].rule(t=0.5), num_rounds=1)()
    parts = {"site-1": 10 * np.exp(0.5), "site-2": 20 * np.exp(1.5), "site-3": 30 * np.exp(1.0)}
    expected = {site: part / sum(parts.values()) for site, part in parts.items()}
    assert run.results["rounds"][0]["site_weights"] == pytest.approx(expected, rel=1e-6)
