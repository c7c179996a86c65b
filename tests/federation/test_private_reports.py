"""Test reports and metrics with noise: their size against hand-computed numbers, what is counted, and what is refused.

Nothing here needs Opacus.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairflare.core.cells import Cell
from fairflare.exchange.messages import SiteReply
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.parts.probes import LossProbe
from fairflare.privacy.ledger import BOOKS, LEDGER
from fairflare.privacy.reports import losses_at, noisy_mean, one_release
from fairflare.privacy.secret import SecretDraws
from fairflare.privacy.training import PrivateLoop, PrivateUnits
from fairflare.reporting.findings import run_findings
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import metric_values, withheld_names

from ..methods.support import initial, request
from .test_private_training import PICTURES, Few, Small, by_sum, pictures, site  # noqa: F401

NOISY = {"epsilon": 1000.0, "reports": 0.5}
TASK = ClassificationTask(**{**PICTURES, "num_classes": 5})


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw zeros for the noise, so that what it is added to can be compared."""
    monkeypatch.setattr(SecretDraws, "noise", lambda self, count: np.zeros(count))


def booked(folder: Path) -> list[dict[str, Any]]:
    path = folder / "root" / BOOKS / "site-1" / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_line(folder: Path) -> str:
    lines = (folder / "root" / BOOKS / "site-1" / LEDGER).read_bytes().splitlines(keepends=True)
    return hashlib.sha256(lines[-1]).hexdigest()


# ------------------------------------------------------------------------------------------------ the mechanism


@pytest.mark.parametrize(
    ("values", "low", "high", "expected"),
    [
        ([0.5, 9.0, math.nan, -1.0], 0.0, 4.0, (0.5 + 4 + 4 + 0) / 4),
        ([0.5, -math.inf, math.inf], -4.0, 4.0, (0.5 - 4 + 4) / 3),
        ([1.0, 0.0, math.nan, 0.0], 0.0, 1.0, 0.5),
    ],
)
def test_values_are_clipped_before_their_mean(values: Any, low: float, high: float, expected: float) -> None:
    assert noisy_mean(values, low, high, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high", "sensitivity"), [(0.0, 4.0, 0.2), (-4.0, 4.0, 0.4), (0.0, 1.0, 0.05)])
def test_the_noise_is_that_of_the_sensitivity(low: float, high: float, sensitivity: float) -> None:
    """Check C2's L / n, 2 L / n and 1 / n for 20 patients, L = 4, with z = 0.1 in the middle of the range."""
    middle = (low + high) / 2
    drawn = [noisy_mean([middle] * 20, low, high, 0.1) for _ in range(3000)]
    assert np.std(drawn) == pytest.approx(0.1 * sensitivity, rel=0.06)
    assert np.mean(drawn) == pytest.approx(middle, abs=5 * 0.1 * sensitivity / math.sqrt(3000))
    for harm in (-1e30, 1e30, math.nan, math.inf):  # one patient moves it by no more
        moved = noisy_mean([harm] + [middle] * 19, low, high, 0.0) - middle
        assert abs(moved) <= sensitivity + 1e-12
    wide = [noisy_mean([middle] * 20, low, high, 100.0) for _ in range(50)]
    assert {low, high} <= {*wide}  # clipped to the range again
    assert low == min(wide)
    assert high == max(wide)


@pytest.mark.parametrize(
    ("z", "delta", "epsilon"), [(17.40, 1e-3, 0.1), (2.575, 1e-3, 1.0), (30.75, 1e-5, 0.1), (3.731, 1e-5, 1.0)]
)
def test_the_epsilon_of_one_number(z: float, delta: float, epsilon: float) -> None:
    """Compare with the specification's table, entered by hand."""
    assert one_release(z, delta) == pytest.approx(epsilon, rel=2e-3)


def test_hardly_any_privacy_is_spent_by_very_much_noise() -> None:
    assert one_release(1e6, 1e-5) == 0.0
    assert one_release(0.05, 1e-5) > 200


# ------------------------------------------------------------------------------------------------ what is reported


def few() -> Any:
    return SimpleNamespace(
        site="s", seed=0, data=Few(), store=None, current_round=0, num_rounds=1, device=torch.device("cpu"), batch=None,
        on_device=lambda tensor: tensor, directives={}, own=None, private=True,
        drop_channels=lambda inputs, *step: inputs,
        task=SimpleNamespace(
            loss=nn.functional.cross_entropy,
            sample_losses=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"),
        ),
    )  # fmt: skip


def test_losses_are_those_of_patients_at_a_distance_from_the_received_model() -> None:
    run, received, model = few(), Small(), Small()
    model.load_state_dict(received.state_dict())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = losses_at(run, PrivateUnits.find(run.data), model, dict(received.state_dict()), 0.3)
    way = {name: received.state_dict()[name] - trained[name] for name in names}
    length = torch.cat([of.flatten() for of in way.values()]).norm()
    there = copy.deepcopy(received)
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            if name in names:
                parameter += 0.3 * way[name] / length
        each = nn.functional.cross_entropy(there(run.data.inputs), run.data.targets, reduction="none")
    of = {p: [float(each[k]) for k in range(9) if run.data.patients[k] == p] for p in range(5)}
    assert found == pytest.approx([float(np.mean(of[p])) for p in range(5)], rel=1e-5)
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name])


def test_an_image_that_cannot_be_read_costs_its_patient_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = few(), Small()
    chosen = run.data.chosen
    broken = lambda split, numbers, *more: chosen(split, numbers, *more) if 6 not in numbers else 1 / 0  # noqa: E731

    def unread(*given: Any) -> Any:
        try:
            return broken(*given)
        except ZeroDivisionError:
            raise ValueError("image 6 is damaged") from None

    monkeypatch.setattr(run.data, "chosen", unread)
    found = losses_at(run, PrivateUnits.find(run.data), model, dict(model.state_dict()), 0.0)
    assert [math.isnan(value) for value in found] == [False, False, False, True, False]


def test_a_sharpness_aware_step_is_made_of_two_noised_gradients(silent: None) -> None:
    """Compare with clipped gradients by patient at the weights, and at the distance along their sum."""
    run, model = few(), Small()
    run.directives = {"search_distance": 0.2}
    half = SharpnessAwareTraining(
        optimizer="sgd", momentum=0.0, weight_decay=0.0, learning_rate=1.0, batch_size=9, keep_optimizer_state=False,
        gsam_alpha=0.0,
    )  # fmt: skip

    def clipped(net: nn.Module) -> list[torch.Tensor]:
        params = [p for p in net.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in params]
        for patient in range(5):
            own = [k for k in range(9) if run.data.patients[k] == patient]
            loss = nn.functional.cross_entropy(net(run.data.inputs[own]), run.data.targets[own], reduction="sum")
            grads = torch.autograd.grad(loss, params)
            factor = min(1.0, 0.05 / float(torch.cat([g.flatten() for g in grads]).norm()))
            for t, g in zip(total, grads, strict=True):
                t += factor * g / 5
        return total

    there, params = copy.deepcopy(model), [p for p in model.parameters() if p.requires_grad]
    first = clipped(copy.deepcopy(model))
    length = torch.cat([g.flatten() for g in first]).norm()
    with torch.no_grad():
        for p, g in zip([p for p in there.parameters() if p.requires_grad], first, strict=True):
            p += 0.2 * g / length
    before = [p.detach().clone() for p in params]
    PrivateLoop(half, run, model, 1.0, 0.05, 9).train(PrivateUnits.find(run.data))
    for p, old, g in zip(params, before, clipped(there), strict=True):
        torch.testing.assert_close(old - p.detach(), g, atol=1e-6, rtol=1e-4)


def test_a_step_that_takes_more_gradients_than_it_says_ends_the_round() -> None:
    class Greedy(LocalTraining):
        """Represent a step that nobody has counted."""

        under_dp = True

        def step(self, run: Any, model: Any, optimizer: Any, closure: Any) -> Any:
            closure()
            return super().step(run, model, optimizer, closure)

    run, model = few(), Small()
    with pytest.raises(StopIteration):
        PrivateLoop(Greedy(batch_size=9, keep_optimizer_state=False), run, model, 1.0, 1.0).train(
            PrivateUnits.find(run.data)
        )


@pytest.mark.parametrize(
    ("half", "directives", "z", "also", "report"),
    [
        (LossProbe(batch_size=8), {}, 1.0, [[0.5, 1.0, 1]], {"probe_loss"}),
        (LossProbe(batch_size=8), {"reports_stay": True}, 1.0, [], set()),
        (
            SharpnessAwareTraining(batch_size=8),
            {"search_distance": 0.1, "variant": "L"}, 1 / math.sqrt(2), [[0.5, 1.0, 1]], {"perturbed_loss"},
        ),
        (
            SharpnessAwareTraining(batch_size=8),
            {"search_distance": 0.1, "variant": "S"}, 1 / math.sqrt(2), [[0.5, 1.0, 1]], {"sharpness"},
        ),
        (SharpnessAwareTraining(batch_size=8, salt=False), {}, 1.0, [], set()),
    ],
)  # fmt: skip
def test_a_report_is_counted_in_the_line_of_its_round(
    tmp_path: Path, half: LocalTraining, directives: Any, z: float, also: Any, report: set[str]
) -> None:
    """Check the costs that a line has, and that the metrics on the validation list are a line of their own cases."""
    here = site(tmp_path, half, NOISY, TASK, data_root=pictures(tmp_path / "images", 1))
    reply = here.perform(request("train", initial(TASK), directives=directives))
    assert (reply.status, reply.reason) == ("ok", "")
    assert reply.report.keys() == report
    assert metric_values(reply.metrics).keys() == {"accuracy"}
    metrics, train = booked(tmp_path)
    assert (metrics["kind"], metrics["z"], metrics["q"], metrics["steps"]) == ("validate", 0.5, 1.0, 1)
    assert metrics["sensitivity"] == pytest.approx(1 / metrics["units"])
    assert (train["kind"], train["z"], train["also"]) == ("train", pytest.approx(z), also)
    assert train["cases"] != metrics["cases"]
    assert reply.stats["epsilon"] == train["steps"] + len(also) == train["epsilon_after"]


def test_reports_and_metrics_are_means_over_patients(tmp_path: Path, silent: None) -> None:
    """Compare both with a loop over the images of each patient, and the same metrics at the end."""
    task = TASK
    here = site(tmp_path, LossProbe(batch_size=8), NOISY, task, data_root=pictures(tmp_path / "images", 3))
    state = initial(task)
    reply = here.perform(request("train", state))
    test = here.perform(request("validate", state))
    model = task.build_model().eval()
    model.load_state_dict(state)
    data, found = task.open_site("site-1", {"data_root": str(tmp_path / "images")}), {}
    for split in ("training", "validation", "test"):
        images, labels = next(iter(data.batches(split, batch_size=99)))
        with torch.no_grad():
            outputs = model(images)
        found[split] = (
            nn.functional.cross_entropy(outputs, labels, reduction="none").clamp(max=4).view(-1, 2).mean(1).mean(),
            (outputs.argmax(1) == labels).double().view(-1, 2).mean(1).mean(),  # two images of each patient
        )
    assert reply.report == {"probe_loss": pytest.approx(float(found["training"][0]), rel=1e-5)}
    assert metric_values(reply.metrics) == {"accuracy": pytest.approx(float(found["validation"][1]))}
    assert metric_values(test.metrics) == {"accuracy": pytest.approx(float(found["test"][1]))}
    assert "balanced_accuracy" in withheld_names(test.metrics)
    assert [line["units"] for line in booked(tmp_path)] == [3, 6, 3]


def test_numbers_without_noise_never_leave(tmp_path: Path) -> None:
    here = site(tmp_path, LossProbe(batch_size=8), NOISY, TASK, data_root=pictures(tmp_path / "images", 1))
    asked = request("train", initial(here.task))
    reply = here.perform(asked)
    again = SiteReply(
        "ok",
        metrics=[*reply.metrics, Cell("loss", split="validation", value=0.7)],
        report={**reply.report, "other": 0.5},
    )
    assert here.private is not None
    sent = here.private.release(asked, again, ["loss", "accuracy"], None)
    assert (metric_values(sent.metrics), sent.report) == (metric_values(reply.metrics), reply.report)
    assert withheld_names(sent.metrics) == ["loss"]


def test_metrics_stay_at_home_where_the_budget_of_their_cases_is_spent(tmp_path: Path) -> None:
    here = site(tmp_path, None, {"epsilon": 2.0, "reports": 0.5}, TASK, data_root=pictures(tmp_path / "images", 1))
    state = initial(TASK)
    replies = [here.perform(request("validate", state)) for _ in range(3)]
    assert [bool(metric_values(reply.metrics)) for reply in replies] == [True, True, False]
    assert {reply.status for reply in replies} == {"ok"}


# ------------------------------------------------------------------------------------------------ the run


def run(folder: Path, method: str, reports: float | None, rounds: int = 2, experiment: str = "") -> Any:
    plan = make_plan(
        method, task="classification", sites=["site-1", "site-2"], num_rounds=rounds, experiment=experiment,
        settings={"image_size": [32, 32], "network": "vit_mini", "num_classes": 5, "batch_size": 8, "local_epochs": 1},
    )  # fmt: skip
    own: dict[str, Any] = {"privacy": {"epsilon": 1000, "noise": 2.0}, "state_root": str(folder / "root")}
    if reports:
        own["privacy"]["reports"] = reports
    names = ("site-1", "site-2")
    for seed, name in enumerate(names):
        if not (folder / name).exists():
            pictures(folder / name, seed)
    by_site = {name: {"data_root": str(folder / name)} for name in names}
    by_site["site-1"] |= own
    return read_results(run_local(plan, folder / "run", {"sites": by_site}))


@pytest.mark.parametrize(
    ("method", "reports", "why"),
    [
        (
            "q_fed_avg",
            None,
            "QFedAvg falls back to FedAvg: of its reports under differential privacy site-1 sends none",
        ),
        ("q_fed_avg", 20.0, "(weights are lots below 100 patients times epsilon)"),
        ("fed_ism", 1.0, "(weights are lots below 1000 patients times epsilon)"),
        ("fed_lwr", 0.1, "FedLWR falls back to FedAvg: of its reports under differential privacy site-1 sends none"),
    ],
)
def test_a_run_whose_reports_would_be_lots_is_fed_avg_and_says_so(
    tmp_path: Path, method: str, reports: float | None, why: str
) -> None:
    found = run(tmp_path, method, reports)
    assert any(note.startswith("Rounds 0-1: ") and why in note for note in run_notes(found))
    of = {site: found.info.said[site]["images"]["training"] for site in ("site-1", "site-2")}
    for record in found.rounds:
        assert record.site_weights == pytest.approx({site: n / sum(of.values()) for site, n in of.items()})
        assert [phase.name for phase in record.phases] == ["train", "aggregate"]
        assert why in record.details["without"]
    assert all(line["also"] == [] for line in booked(tmp_path))


@pytest.mark.parametrize(
    ("method", "report"), [("q_fed_avg", "probe_loss"), ("fed_ism_plus_l", "perturbed_loss"), ("fed_ism", "sharpness")]
)
def test_a_run_with_enough_patients_weighs_by_noisy_reports(tmp_path: Path, method: str, report: str) -> None:
    found = run(tmp_path, method, 0.05)
    for record in found.rounds:
        assert "without" not in record.details
        told = record.reports["site-1"][report]
        assert -4 <= told <= 4
        assert record.site_weights["site-1"] != pytest.approx(0.5, abs=1e-6)
    of = found.info.privacy["site-1"]
    spent = found.rounds[1].train["site-1"]["epsilon"]
    assert of == {
        "ledger": last_line(tmp_path), "epsilon": spent, "target": 1000, "delta": 1e-5, "unit": "patient",
        "covers": "updates, reports and metrics",
        "mechanism": "DP-SGD, noise 2, clip 1; Gaussian, noise 0.05 (the test's figure: standard deviation 0.017)",
        "worth": pytest.approx(6 * one_release(0.05, 1e-5)), "lasts": 2,
    }  # fmt: skip
    (first,) = (one.text for one in run_findings(found) if one.text.startswith("Differential privacy at "))
    assert f"site-1 (epsilon {spent:g}" in first
    assert first.endswith(
        "covers updates, reports and metrics). Updates, metrics and reports of site-2 are in the clear."
    )
    cells = [cell for cell in found.cells if (cell.site, cell.split) == ("site-1", "test")]
    assert {cell.metric for cell in cells if cell.value is not None} == {"accuracy"}
    assert all(cell.low is cell.high is cell.cases is None for cell in cells if cell.metric != "accuracy")


def test_classes_in_equal_parts_are_refused_before_a_round_spends_the_budget(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"crt_rounds=\d+ .*site-1.*set crt_rounds=0"):
        run(tmp_path, "crt", None)
    assert not [*(tmp_path / "root").rglob(LEDGER)]


def test_a_resumed_run_knows_the_ledger_and_says_which_rounds_fell_back(tmp_path: Path) -> None:
    """Check a second job whose site has enough patients, and a third one after both folders were put back."""
    first = run(tmp_path, "q_fed_avg", None, 1, "e")
    assert first.info.privacy["site-1"]["ledger"] == last_line(tmp_path)
    shutil.copytree(tmp_path / "root", tmp_path / "backup")
    second = run(tmp_path, "q_fed_avg", 0.05, 2, "e")
    assert second.info.privacy["site-1"]["ledger"] == last_line(tmp_path)
    notes = [note for note in run_notes(second) if "falls back" in note]
    assert [note[:41] for note in notes] == ["Round 0: QFedAvg falls back to FedAvg: of"]
    assert [bool(record.details.get("without")) for record in second.rounds] == [True, False]
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "backup").rename(tmp_path / "root")
    with pytest.raises(RuntimeError, match=r"'site-1': .*its ledger lacks the line"):
        run(tmp_path, "q_fed_avg", 0.05, 3, "e")
