"""Test FedDyn: worked numbers, absent and new sites, what stays at a site, and a run that is killed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fairflare.exchange.messages import Message
from fairflare.methods.fed_dyn import DynamicTraining, FedDyn

from .own import SITES, Plane, killed, losing, run
from .test_scaffold import TARGETS, Plain

#: One step of 0.5 is exact: the loss (y - t)^2 / 2 with a pull of strength 1 has the second derivative 2.
HALF: dict[str, Any] = {
    "optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 2,
    "keep_optimizer_state": False, "feddyn_alpha": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "drifts", "common"), [(1, (-0.5, 1.5), 0.5), (2, (-1.25, 1.75), 0.25)], ids=["one", "two"]
)
def test_worked_numbers(rounds: int, drifts: Any, common: float, tmp_path: Path) -> None:
    """Check y (.5, 2.5) and (1.25, 2.25), g = -l (.5, -1.5) and (1.25, -1.75), h -.5 and -.25, and x 2 twice."""
    rule = FedDyn()
    made, sites = run(tmp_path, DynamicTraining(**HALF), task=Plain(), rule=rule, num_rounds=rounds)
    assert float(made.model()["model"]["x"]) == pytest.approx(2, abs=1e-12)
    for site, drift in zip(SITES, drifts, strict=True):
        kept = sites.kept(site, "drift", rounds - 1)
        assert list(kept) == ["x", "before/x"]  # none of what is frozen
        assert float(kept["x"]) == pytest.approx(drift, abs=1e-12)
    (kept,) = rule.state_dict()["drift"].values()
    assert float(kept) == pytest.approx(common, abs=1e-12)
    assert kept.dtype == torch.float64
    told = [record["values"]["drift"] for record in made.results["rounds"]]
    assert told == pytest.approx([0, 0.5][:rounds])


def test_an_absent_site_keeps_its_own_and_counts_in_the_common_one(tmp_path: Path) -> None:
    """Check x 3.25 after a round of one of two sites, and the next round of both, by hand."""

    def answer(site: str, name: str, message: Message) -> Any:
        return "gone" if (site, name, message.current_round) == ("site-1", "train", 0) else None  # no answer to use

    for rounds, x, common in ((1, 3.25, 0.75), (2, (1.625 + 2.875) / 2 + 0.75 - 1.0, -0.25)):
        rule = FedDyn()
        made, _ = run(
            tmp_path / str(rounds), DynamicTraining(**HALF), task=Plain(), rule=rule, num_rounds=rounds, min_sites=1,
            answer=answer,
        )  # fmt: skip
        assert float(made.model()["model"]["x"]) == pytest.approx(x, abs=1e-12)
        assert float(rule.state_dict()["drift"]["x"]) == pytest.approx(common, abs=1e-12)


def test_an_answer_that_is_lost_after_its_training_leaves_the_common_one_the_mean(tmp_path: Path) -> None:
    """Check that -h/alpha is the mean of all l_k, where more answers are lost than a site stores values."""
    lost = {("site-2", number) for number in (0, 2, 3, 4, 5)} | {("site-1", 8)}
    half, task, rule = DynamicTraining(**HALF), Plain(), FedDyn()
    answer = losing(tmp_path, half, task, lost)
    _, sites = run(tmp_path, half, task=task, rule=rule, num_rounds=12, min_sites=1, answer=answer)
    own = [sites.kept(site, "drift", 11)["x"] for site in SITES]
    assert float(rule.state_dict()["drift"]["x"]) == pytest.approx(float(sum(own)) / 2, abs=1e-9)


def test_what_is_clipped_counts_at_the_site_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that -h/alpha is the mean of all l_k where the update of a site far off is clipped."""
    sites = ["site-1", "site-2", "site-3"]
    for site, target in zip(sites, (0.9, 1.1, 13.0), strict=True):
        monkeypatch.setitem(TARGETS, site, target)
    rule = FedDyn()
    made, they = run(
        tmp_path, DynamicTraining(**HALF), task=Plain(), rule=rule, sites=sites, num_rounds=40, max_update_norm=1.5
    )
    assert any("max_update_norm" in str(record) for record in made.results["rounds"])
    total = 0.0
    for site in sites:
        kept, (number, share) = they.kept(site, "drift", 39), rule.state_dict()["counted"][site]
        assert number == 39
        total += float(kept["before/x"].lerp(kept["x"], share))
    assert rule.state_dict()["counted"]["site-3"][1] < 1
    assert float(rule.state_dict()["drift"]["x"]) == pytest.approx(total / 3, abs=1e-9)


def test_a_new_site_counts_in_the_common_one_with_nothing() -> None:
    rule, found = FedDyn(), []
    for sites in (["a", "b"], ["a", "b"], ["a", "b", "c"]):
        rule.weigh(cast("Any", SimpleNamespace(asked=sites, sites=sites, current_round=0, shares={})))
        found.append(float(rule.move({"w": torch.tensor(3.0, dtype=torch.float64)})["w"]))
    assert found == pytest.approx([3 + 3, 3 + 6, 3 + 6 * 2 / 3 + 3])


def test_what_stays_at_a_site_is_not_pulled(tmp_path: Path) -> None:
    half = DynamicTraining(**HALF, personalise="keep:^3")
    _, sites = run(tmp_path, half, task=Plane(), rule=FedDyn(), num_rounds=2)
    assert {name.split(".")[0] for name in sites.kept("site-1", "drift", 1) if "before" not in name} == {"0", "1"}


def test_only_what_is_trained_has_a_drift_and_no_byte_is_added(tmp_path: Path) -> None:
    rule = FedDyn()
    made, _ = run(tmp_path, DynamicTraining(**HALF), task=Plane(), rule=rule, num_rounds=2)
    assert set(rule.state_dict()["drift"]) == {name for name, _ in Plane().build_model().named_parameters()}
    out = [phase["bytes_out"] for record in made.results["rounds"] for phase in record["phases"] if phase["asked"]]
    assert out[0] == out[1]


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    half, task = DynamicTraining(**{**HALF, "batch_size": 8, "feddyn_alpha": 0.1}), Plane()
    whole, _ = run(tmp_path / "whole", half, task=task, rule=FedDyn(), num_rounds=4)

    rest = killed(tmp_path / "cut", half, task, FedDyn(), 4)
    assert [name for name, _ in rest.net.asked] == ["train", "train", "validate"]
    found = whole.model()["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())
