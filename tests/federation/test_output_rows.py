"""Runs of sites that annotate different structures: whose output rows are in the model, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fairflare.federation.collecting.collector import Collector
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.check import Check
from fairflare.federation.transports.local import run_local
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from fairflare.tasks.segmentation import SegmentationTask
from tests.federation.test_findings import run as run_findings
from tests.federation.test_findings import site as findings_site
from tests.tiny import model_in, run_document
from tests.unit.test_census import masks_site

SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "num_classes": 2, "local_epochs": 1, "batch_size": 4,
    "learning_rate": 0.05,
}  # fmt: skip
WEIGHT, BIAS = "final_conv.weight", "final_conv.bias"
PART: dict[str, Any] = {"A": [1], "B": "all", "C": [1]}
TOLD = "averaged over the sites that annotate it (class_2: B)"


class Dies(Listener):
    """End a run before its second round, as a killed server would."""

    def round_started(self, current_round: int) -> None:
        if current_round == 1:
            raise KeyboardInterrupt


def run(
    folder: Path,
    structures: dict[str, Any] | None = None,
    method: str = "fed_avg",
    listeners: tuple[Any, ...] = (),
    **more: Any,
) -> Path:
    """Run three sites, of which B has twice the images; return the folder of the results."""
    local = {
        site: {"data_root": str(folder / site), "structures": said} if (folder / site).exists() else
        masks_site(folder / site, (1, 2) if said == "all" else tuple(said), 8 if site == "B" else 4, structures=said)
        for site, said in (structures or PART).items()
    }  # fmt: skip
    form = {"num_rounds": 1, "bootstrap": 0, "keep_local_models": True, "settings": SETTINGS, **more}
    plan = make_plan(method, task="segmentation", sites=[*local], **form)
    return run_local(plan, folder / "run", {"sites": local}, listeners=[*listeners])


def sent(results: Path, current_round: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    folder = results / "local_models" / f"round_{current_round:04d}"
    return {file.stem.removeprefix("local_model_"): load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def test_rows_are_averaged_over_the_sites_that_annotate_them(tmp_path: Path) -> None:
    """Compare every number of the output layer, and of another one, with a loop over what the sites sent."""
    results = run(tmp_path)
    models, made, found = sent(results), model_in(results), run_document(results)
    told = found["rounds"][0]["site_weights"]
    assert sorted(models) == sorted(told) == ["A", "B", "C"]
    assert told["B"] > told["A"]
    for name in (WEIGHT, BIAS):
        assert torch.equal(made[name][1], models["B"][name][1])
        mean = sum(told[site] * models[site][name][0].double() for site in told)
        torch.testing.assert_close(made[name][0], mean.float())
    inner = "conv_0.conv_0.conv.weight"
    torch.testing.assert_close(made[inner], sum(told[s] * models[s][inner].double() for s in told).float())
    assert found["info"]["output_rows"] == {"class_2": ["B"]}
    assert TOLD in " ".join(fairness_table(read_results(results)).split())


@pytest.mark.parametrize("method", ["fed_lwr", "q_fed_avg", "scaffold"])
def test_every_kind_of_rule_gets_the_annotators_row(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check layer weights, steps, server states: the model's row moves in the direction of its one annotator.

    With weight decay the rows of A and C move, too, though they have no loss of structure 2.
    """
    began: list[Any] = []
    begin = Collector.begin

    def noted(self: Collector, *numbers: int, **more: Any) -> None:
        began.append(more["received"])
        begin(self, *numbers, **more)

    monkeypatch.setattr(Collector, "begin", noted)
    results = run(tmp_path, method=method)
    models, made, received = sent(results), model_in(results), began[0][WEIGHT][1]
    own, moved = models["B"][WEIGHT][1] - received, made[WEIGHT][1] - received
    assert float(torch.nn.functional.cosine_similarity(own.flatten(), moved.flatten(), dim=0)) == pytest.approx(
        1, abs=1e-5
    )
    if method == "fed_lwr":  # a mean
        torch.testing.assert_close(moved, own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [{"aggregate": "median"}, {"max_weight": 0.5}, {"max_update_norm": 3.0}])
def test_bounds_leave_a_row_to_its_annotator(more: dict[str, Any], tmp_path: Path) -> None:
    """Expect B's row also from a median, in which two rows that never moved would win."""
    results = run(tmp_path, **more)
    torch.testing.assert_close(model_in(results)[BIAS][1], sent(results)["B"][BIAS][1])


def test_nothing_changes_where_all_sites_annotate_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check equal bits, and that nothing is said, where files say `all` and where they say nothing."""
    every = dict.fromkeys("ABC", "all")
    found = run(tmp_path / "now", every)
    monkeypatch.setattr(Check, "annotators", {})
    before = run(tmp_path / "before", every)
    assert all(torch.equal(tensor, model_in(before)[name]) for name, tensor in model_in(found).items())
    assert run_document(found)["info"]["output_rows"] == {}
    assert "output row" not in fairness_table(read_results(found))


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Check also the term of structures that a site did not annotate, which begins in the second round."""
    more: dict[str, Any] = {"settings": {**SETTINGS, "unlabelled": "consistency"}, "num_rounds": 2, "experiment": "e"}
    whole = run(tmp_path / "whole", **more)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "dies", listeners=(Dies(),), **more)
    rest = run(tmp_path / "dies", **more)
    assert run_document(rest)["info"]["resumed_at_round"] == 1
    assert run_document(rest)["info"]["output_rows"] == run_document(whole)["info"]["output_rows"] == {"class_2": ["B"]}
    assert all(torch.equal(tensor, model_in(rest)[name]) for name, tensor in model_in(whole).items())


def test_where_the_output_layer_is_unknown_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the network end in a softmax of its own: no layer's output is the network's."""
    build = SegmentationTask.build_unet
    monkeypatch.setattr(SegmentationTask, "build_unet", lambda task: Ends(build(task)))
    results = run(tmp_path)
    models, made, told = sent(results), model_in(results), run_document(results)["rounds"][0]["site_weights"]
    name = f"inside.{BIAS}"
    torch.testing.assert_close(made[name], sum(told[site] * models[site][name].double() for site in told).float())
    assert run_document(results)["info"]["output_rows"] == {}
    assert TOLD not in " ".join(fairness_table(read_results(results)).split())


class Ends(torch.nn.Module):
    """Compute something after the output layer."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside(inputs)
        return found - found.mean(1, keepdim=True)


def test_findings_that_a_site_leaves_open(tmp_path: Path) -> None:
    """Check that the row of the finding that s0 leaves open is of the other site's making."""
    local = {"s0": findings_site(tmp_path / "s0", 0, silent=1), "s1": findings_site(tmp_path / "s1", 1)}
    found = run_findings(tmp_path / "run", local, keep_local_models=True)
    assert found["info"]["output_rows"] == {"edema": ["s1"]}
    (results,) = [file.parent for file in (tmp_path / "run").rglob("results.json")]
    models, made = sent(results), model_in(results)
    (name,) = [name for name, tensor in made.items() if tensor.ndim == 2 and len(tensor) == 3]
    assert torch.equal(made[name][1], models["s1"][name][1])
    for row in (0, 2):
        torch.testing.assert_close(made[name][row], (models["s0"][name][row] + models["s1"][name][row]) / 2)


class Facts(Check):
    """Hold what hostile or silent sites may have said."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.task = SegmentationTask(num_classes=2, class_names=["one", "two"])
        none: dict[str, Any] = dict.fromkeys(("synthetic", "num_classes", "class_names", "class_groups"))
        self.facts = {
            site: {**none, "images": {}, **({} if names is None else {"annotated": names})}
            for site, names in said.items()
        }


def test_what_a_site_says_of_itself_moves_its_own_rows_only() -> None:
    """Let sites name strange structures, all of them, or none; a site that says nothing annotates all."""
    assert Facts({"A": None, "B": ["one", "two", "two"], "C": ["two", "one"]}).annotators == {}
    odd = Facts({"A": ["three", "", "ONE"], "B": None, "C": ["two"], "D": []})
    assert odd.annotators == {"one": ["B"], "two": ["B", "C"]}
    assert Facts({"A": [], "B": ["one"]}).annotators == {"one": ["B"], "two": []}
