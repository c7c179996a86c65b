"""Test that the plan of secure sums is that of all cases together, in made-up federations and for a site that lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fairflare.core.plans.counts import Case, foreground
from fairflare.exchange.messages import TASK_PLAN
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place, PlanRun, usual_waits
from fairflare.federation.server.planning import PLAN, Planning
from fairflare.federation.site import case_counts
from fairflare.federation.site.site_tasks import TASKS
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.tasks.base import SiteData
from tests.tiny import run_document

from ..unit.test_plan_rules import by_numpy, in_short, made_up
from .network import Line
from .summing import Wire


class Scans(SiteData):
    """Hold what a site measured of its volumes."""

    def __init__(self, cases: list[Case]) -> None:
        self.measured = cases

    def num_samples(self, split: str) -> int:
        return len(self.measured)

    def batches(self, split: str, **_: Any) -> Any:
        return []

    def fingerprints(self, split: str, of_ct: tuple[int, ...]) -> list[Any]:
        assert split == "training"
        water = foreground(np.zeros(1), np.ones(1, bool))
        return [(number, case, dict.fromkeys(of_ct, water)) for number, case in enumerate(self.measured)]


class Measured(Line):
    """Define a task of two structures whose volumes were measured before."""

    sites: ClassVar[dict[str, list[Case]]] = {}

    def outcome_names(self) -> tuple[str, ...]:
        return "inner", "outer"

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Scans(self.sites[site])


def planned(
    folder: Path, sites: list[list[Case]], state: Path | None = None, **run: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Plan under secure sums as a run does, and return the plan, and the reason for each site that was left out."""
    task, Measured.sites = Measured(), {f"site-{k + 1}": cases for k, cases in enumerate(sites)}
    wire = Wire([*task.sites], task, LocalTraining(batch_size=1), {}, state or folder / "state")
    settings = PlanRun(**{**usual_waits(3), "label": "plan", "secure": "sums", **run})
    (folder / "server").mkdir(parents=True)
    place = Place(folder / "server", folder / "kept", folder.name, {}, {})
    Planning(task, FedAvg(), settings, wire, place).run()
    (record,) = run_document(folder / "server" / RESULTS_FOLDER)["rounds"]
    out = {left["site"]: left["reason"] for left in record["left_out"]}
    return json.loads((folder / "server" / RESULTS_FOLDER / PLAN).read_text("utf-8")), out


@pytest.mark.long
def test_the_plan_of_300_federations_is_that_of_all_their_cases(tmp_path: Path) -> None:
    for seed in range(300):
        sites = made_up(seed)
        plan, _ = planned(tmp_path / str(seed), sites)
        mm, median, wanted = by_numpy([case for site in sites for case in site])
        full = plan["configurations"]["3d_fullres"]
        assert (full["spacing"], full["median_image_size_in_voxels"]) == (mm, median), seed
        assert in_short(plan)[2:] == wanted, seed


def test_a_second_plan_with_one_case_more_at_a_site_is_refused(tmp_path: Path) -> None:
    """Check that no plan of the other sites is made: the first plan less theirs would be the site's own counts."""
    state, sites = tmp_path / "state", [made_up(3)[0][:9] for _ in range(4)]
    planned(tmp_path / "first", sites, state)
    assert not planned(tmp_path / "again", sites, state)[1]  # the same cases may be counted again
    more = [Case((9.0, 0.5, 0.5), (30, 300, 200), 1.0) for _ in range(5)]
    with pytest.raises(RoundFailed, match=r"'site-1': its training cases differ in fewer") as refused:
        planned(tmp_path / "one", [[*sites[0], more[0]], *sites[1:]], state)
    assert "The sum of the other sites, less an earlier one, would show it too" in str(refused.value)
    assert not [*(tmp_path / "one").rglob(PLAN)]
    assert not planned(tmp_path / "five", [[*sites[0], *more], *sites[1:]], state)[1]


def test_where_too_few_sites_have_enough_cases_the_small_one_is_named(tmp_path: Path) -> None:
    sites = [made_up(3)[0][:9] for _ in range(3)]
    with pytest.raises(RoundFailed, match=r"and needs 3.*'site-3': it takes no part") as few:
        planned(tmp_path / "run", [*sites[:2], sites[2][:4]], min_sites=1)
    assert "{" not in str(few.value)


# ------------------------------------------------------------------------------------------------ one site lies


def moved(counts: torch.Tensor, **change: float) -> torch.Tensor:
    """Return counts to some of which (``at_7``: the one of value 7) a number is added."""
    return counts + sum(
        torch.nn.functional.one_hot(torch.tensor(int(name[3:])), len(counts)) * by for name, by in change.items()
    )


LIES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("spacing_0", lambda of: moved(of, at_7=1), r"the sum of spacing_0 is of 41 cases, the sites have 40"),
    (
        "size_2",
        lambda of: moved(of, at_7=-3, at_8=3),
        r"size_2 is of 40 cases, .* the smallest count is -3; a site lies",
    ),
    ("size_1", lambda of: moved(of, at_7=1e9), r"the sum of size_1 is of 1e\+09 cases, the sites have 40"),
    ("size_1", lambda of: moved(of, at_7=1e30), r"the sum of size_1 is of [\d.e+]+ cases, the sites have 40"),
    ("resampled_0", lambda of: of * 0, r"the sum of resampled_0 is of 30 cases, the sites have 40"),
    ("spacing_1", lambda of: of * torch.nan, r"site 'site-2'.* tensor 'spacing_1.sum' is not finite"),
    ("spacing_1", lambda of: torch.zeros(2**15), r"site 'site-2': field 'counts' must be torch.int64 \(\d+,\), got"),
    ("cropped", lambda of: of + 41, r"the sum of cropped is of 41 cases, the sites have 40"),
    ("cropped", lambda of: of - 1, r"the sum of cropped .* the smallest count is -1"),
    ("foreground", lambda of: of + 1, r"the sum of foreground is of 4\d\d\d cases, the sites have 40"),
    ("foreground", lambda of: moved(of, at_7=-9), r"the sum of foreground .* the smallest count is -9"),
]


@pytest.mark.parametrize(("name", "lie", "text"), LIES, ids=range(len(LIES)))
def test_a_site_whose_counts_cannot_be_ends_the_plan(
    name: str, lie: Callable[[torch.Tensor], torch.Tensor], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, save = case_counts.plan, case_counts._save

    def lying(request: Any, store: Any, numbers: dict[str, torch.Tensor]) -> None:
        save(request, store, {key: lie(of.double()) if key == name and len(of) else of for key, of in numbers.items()})

    def counted(worker: SiteWorker, *task: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if worker.site == "site-2":
                patch.setattr(case_counts, "_save", lying)
            return count(worker, *task)

    monkeypatch.setitem(TASKS, TASK_PLAN, counted)
    monkeypatch.setattr(Measured, "of_ct", (0,))
    with pytest.raises(RoundFailed, match=text):
        planned(tmp_path / "run", [made_up(3)[0][:10] for _ in range(4)])
    assert not [*tmp_path.rglob(PLAN)]


def test_a_lie_within_the_range_moves_the_median_by_no_more_than_its_cases(tmp_path: Path) -> None:
    honest = [made_up(seed)[0][:9] for seed in (3, 3, 8)]
    lies = [Case((20.0, 20.0, 20.0), (4096, 4096, 4096), 1.0)] * 5
    plan, _ = planned(tmp_path / "run", [*honest, lies])
    spacings = np.sort([case.spacing for site in honest for case in site], 0)
    (middle,) = {(len(spacings) + len(lies) - 1) // 2}
    spacing = [plan["original_median_spacing_after_transp"][k] for k in plan["transpose_backward"]]
    assert (np.array(spacing) <= spacings[middle + 1] + 1e-9).all()
    assert (np.array(spacing) >= spacings[middle - len(lies)] - 1e-9).all()
