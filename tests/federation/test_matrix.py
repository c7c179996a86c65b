"""Every model of a run at every site, against a plain loop over the files that the sites kept."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.series import Entry, Series, with_alone
from fairflare.federation.transports.local import run_local
from fairflare.federation.transports.matrix import at_every_site
from fairflare.reporting.compare.matrix import RunMatrix
from fairflare.reporting.results import read_results

pytestmark = pytest.mark.usefixtures("one_thread")
SITES = ["site-1", "site-2"]
RUN_DIR = Path("server") / "simulate_job"
#: At another rate both networks find nothing, and all figures are the same.
SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "learning_rate": 0.02}


def trained(folder: Path, method: str) -> tuple[dict[str, Any], Plan, dict[str, Any]]:
    given = {
        "method": method, "task": "segmentation", "sites": SITES, "num_rounds": 2, "settings": {**SMALL},
        "experiment": "compare", "bootstrap": 0,
    }  # fmt: skip
    local = {"state_root": str(folder / "state"), "checkpoint_root": str(folder / "checkpoints")}
    plan = make_plan(**given)
    run_local(plan, folder, local)
    return given, plan, local


def mean_loss(plan: Plan, state: dict[str, torch.Tensor], site: str) -> float:
    """Of the test split, an image at a time."""
    network, data = plan.task.build_model(), plan.task.open_site(site, {})
    network.load_state_dict(state)
    network.eval()
    with torch.no_grad():
        losses = [float(plan.task.loss(network(x), y)) for x, y, *_ in data.batches("test", batch_size=1)]
    return math.fsum(losses) / len(losses)


def kept(folder: Path, site: str, name: str) -> dict[str, torch.Tensor]:
    (run,) = (path for path in (folder / "state" / "compare" / site).iterdir() if path.is_dir())
    found: dict[str, torch.Tensor] = torch.load(run / f"{name}.000001.pt", weights_only=True)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "file", "common", "alone"),
    [("fed_avg", "", True, False), ("solo", "parts", False, True), ("fed_bn", "parts", False, False),
     ("ditto", "own_model", True, False)],
)  # fmt: skip
def test_each_model_is_tested_at_each_site(method: str, file: str, common: bool, alone: bool, tmp_path: Path) -> None:
    given, plan, local = trained(tmp_path, method)
    found = at_every_site(given, tmp_path, local)
    assert RunMatrix.read(tmp_path / RUN_DIR / "fairflare") == found
    assert found.alone == alone
    assert [model.of for model in found.models] == [*([""] if common else []), *(SITES if file else [])]
    shared = torch.load(tmp_path / RUN_DIR / "FL_global_model.pt", weights_only=True)["model"]
    figures = set()
    for model in found.models:
        state = {**shared, **(kept(tmp_path, model.of, file) if model.of else {})}
        for site in SITES:
            loss = model.tests[site]["loss"]
            assert loss == pytest.approx(mean_loss(plan, state, site), rel=1e-4), (model.of, site)
            figures.add(loss)
    assert len(figures) == len(found.models) * len(SITES)
    tested = read_results(tmp_path / RUN_DIR / "fairflare")["test"]
    for site in SITES:  # at home it is what the run measured
        (home,) = (m for m in found.models if m.of == (site if file else ""))
        assert home.tests[site]["dice"] == pytest.approx(tested[site]["dice"], abs=1e-6)


@pytest.mark.long
def test_a_model_that_a_site_has_not_kept_is_named(tmp_path: Path) -> None:
    given, _, local = trained(tmp_path, "solo")
    shutil.rmtree(tmp_path / "state" / "compare" / "site-2")
    with pytest.raises(RuntimeError, match="site 'site-2' has not kept its own model"):
        at_every_site(given, tmp_path, local)


def test_what_sites_have_alone_is_a_row_of_its_own() -> None:
    series = Series([Entry("fed_avg")], task="segmentation", sites=2, rounds=1)
    assert [entry.label for entry in with_alone(series).entries] == ["fed_avg", "solo"]
    both = Series([Entry("solo"), Entry("fed_avg")], task="segmentation", sites=2, rounds=1)
    assert with_alone(both) is both
