"""Test methods that act on groups of people: against slow references, and in runs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.core.aggregation.fair_rules import variance_slopes
from fairflare.core.statistics.group_metrics import exponentiate
from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fair_fed import FairFed
from fairflare.methods.flex_fair import FlexFair, VariancePenalty
from fairflare.methods.group_dro import GroupDRO, GroupWeighted
from tests.federation.test_groups import SITES


def inputs(reports: dict[str, dict[str, Any]], samples: dict[str, int]) -> RoundInputs:
    sites = sorted(reports)
    return RoundInputs(0, 2, sites, samples, reports, {}, {}, {})


def report(accuracy: float, table: Any = None) -> dict[str, Any]:
    if table is None:
        return {"accuracy": accuracy, "groups": None, "group_counts": None}
    rows = np.asarray(table, float)
    return {"accuracy": accuracy, "groups": float(len(rows)), "group_counts": rows.reshape(-1).tolist()}


def of_two_classes(tp: int, fp: int, fn: int, tn: int) -> list[list[int]]:
    """Return sums of both classes, as a site counts them."""
    return [[tn, fn, fp, tp], [tp, fp, fn, tn]]


SAMPLES = {"a": 100, "b": 300, "c": 600}
TABLES = {
    "a": [of_two_classes(8, 1, 2, 9), of_two_classes(4, 3, 6, 7)],
    "b": [of_two_classes(20, 5, 20, 35), of_two_classes(30, 25, 10, 15)],
}


@pytest.mark.parametrize("gap", ["equalised_odds", "equal_opportunity", "demographic_parity", ""])
def test_fair_fed_goes_by_the_gap_of_counts(gap: str) -> None:
    """Check that the gap is the paper's equal opportunity difference by default."""

    def slow(tables: list[Any]) -> float:
        tpr, fpr, told = [], [], []
        for group in range(2):
            tp, fp, fn, tn = (sum(table[group][1][k] for table in tables) for k in range(4))
            tpr.append(tp / (tp + fn))
            fpr.append(fp / (fp + tn))
            told.append((tp + fp) / (tp + fp + fn + tn))
        if gap == "demographic_parity":
            return abs(told[0] - told[1])
        odds = [abs(tpr[0] - tpr[1])] + ([abs(fpr[0] - fpr[1])] if gap == "equalised_odds" else [])
        return max(odds)

    accuracies = {"a": 0.6, "b": 0.8, "c": 0.9}
    reports = {site: report(accuracies[site], TABLES.get(site)) for site in accuracies}  # c keeps its counts
    rule = FairFed(fairfed_beta=0.5, fairfed_attribute="sex", **({"fairfed_gap": gap} if gap else {}))
    found = rule.weigh(inputs(reports, SAMPLES))
    whole = slow(list(TABLES.values()))
    mean = 0.84  # by samples
    delta = {site: abs(whole - slow([table])) for site, table in TABLES.items()} | {"c": abs(mean - 0.9)}
    middle = sum(delta.values()) / 3
    omega = {site: max(SAMPLES[site] / 1000 - 0.5 * (delta[site] - middle), 0) for site in delta}
    total = sum(omega.values())
    assert found.sites == pytest.approx({site: value / total for site, value in omega.items()}, abs=1e-12)
    assert found.details["group_gap_of_all"] == pytest.approx(whole, abs=1e-12)
    assert math.isnan(found.details["group_gap"]["c"])


def test_without_an_attribute_fair_fed_is_as_it_was() -> None:
    reports = {site: report(value) for site, value in {"a": 0.6, "b": 0.8, "c": 0.9}.items()}
    found = FairFed(fairfed_beta=0.1).weigh(inputs(reports, SAMPLES))
    assert found.sites == pytest.approx({"a": 0.087333333333, "b": 0.307333333333, "c": 0.605333333333}, abs=1e-9)
    assert set(found.details) == {"accuracy_gap", "omega"}


def test_gaps_between_groups_need_fair_feds_own_mode() -> None:
    with pytest.raises(ValueError, match="fairfed_attribute needs fairfed_mode"):
        FairFed(fairfed_mode="fedism", fairfed_attribute="sex")


def test_a_site_with_other_numbers_of_classes_goes_by_its_accuracy() -> None:
    odd = [[[1, 2, 3, 4]] * 3] * 2
    tables = {**TABLES, "c": odd}
    reports = {site: report(0.8, tables[site]) for site in tables}
    found = FairFed(fairfed_attribute="sex").weigh(inputs(reports, SAMPLES))
    assert math.isnan(found.details["group_gap"]["c"])
    with pytest.raises(ReportError, match=r"'c': field 'group_counts' has 7 .*of 2"):
        FairFed(fairfed_attribute="sex").check_report({"groups": 2.0, "group_counts": [1.0] * 7}, "c", None)
    with pytest.raises(ReportError, match=r"'c': field 'group_counts' has 4 .*1\.5"):
        FairFed(fairfed_attribute="sex").check_report({"groups": 1.5, "group_counts": [1.0] * 4}, "c", None)
    unread = {"groups": 1.5, "group_counts": [1.0] * 7}
    assert FairFed().check_report(unread, "c", None) == unread  # without an attribute nobody reads them


# ------------------------------------------------------------------------------------------------ group DRO


def losses_of(losses: list[float], images: list[float]) -> dict[str, Any]:
    return {"group_losses": losses, "group_images": images}


def test_exponentiated_gradient_by_hand() -> None:
    found = exponentiate({"a": 0.25, "b": 0.75}, {"a": 2.0, "b": 1.0}, 0.5)
    top, low = 0.25 * math.exp(1.0), 0.75 * math.exp(0.5)
    assert found == pytest.approx({"a": top / (top + low), "b": low / (top + low)}, abs=1e-12)
    kept = exponentiate({"a": 0.25, "b": 0.75}, {"a": 9e5}, 1.0)
    assert kept == pytest.approx({"a": 0.25, "b": 0.75})
    assert exponentiate({}, {"a": 1.0, "b": 1.0}, 1.0) == {"a": 0.5, "b": 0.5}
    late = exponentiate({"a": 0.5, "b": 0.5}, {"late": 3.0}, 1.0)  # with their mean, not with what they have together
    assert late == pytest.approx({"a": 1 / 3, "b": 1 / 3, "late": 1 / 3}, abs=1e-15)
    three = exponentiate({"a": 0.2, "b": 0.4}, dict.fromkeys(("a", "b", "late"), 1.0), 0.5)  # .2, .4 and .3 of .9
    assert three == pytest.approx({"a": 2 / 9, "b": 4 / 9, "late": 3 / 9}, abs=1e-15)


def test_group_dro_pools_losses_and_tells_weights_over_shares() -> None:
    nan = math.nan
    reports = {"a": losses_of([1.0, 3.0], [10, 30]), "b": losses_of([2.0, nan], [40, nan])}
    rule = GroupDRO(dro_attribute="sex", dro_rate=0.5)
    assert rule.directives(0, 2, ["a", "b"]) == {}
    found = rule.weigh(inputs(reports, {"a": 40, "b": 60}))
    assert found.sites == {"a": 0.4, "b": 0.6}
    pooled = [(10 * 1.0 + 40 * 2.0) / 50, 3.0]
    weights = [math.exp(0.5 * loss) for loss in pooled]
    q = [w / sum(weights) for w in weights]
    assert found.details["q"] == pytest.approx({"0": q[0], "1": q[1]}, abs=1e-12)
    (told,) = rule.directives(1, 2, ["a", "b"]).values()
    assert told == pytest.approx([q[0] / (50 / 80), q[1] / (30 / 80)], abs=1e-12)
    again = GroupDRO(dro_attribute="sex", dro_rate=0.5)
    again.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert again.directives(1, 2, ["a"]) == rule.directives(1, 2, ["a"])


@pytest.mark.parametrize("attribute", ["sex", ""])
def test_a_small_group_is_taken_to_have_a_higher_loss(attribute: str) -> None:
    """Check section 3.3 of the paper: C / sqrt(n) is added to the loss that moves q, and to nothing else."""
    groups = 2 if attribute else 1
    reports = {
        "a": losses_of([1.0, 3.0][:groups], [9, 36][:groups]),
        "b": losses_of([2.0, 0.5][:groups], [16, 64][:groups]),
    }
    rule = GroupDRO(dro_attribute=attribute, dro_rate=0.5, dro_adjustment=6.0)
    q = rule.weigh(inputs(reports, {"a": 45, "b": 80})).details["q"]
    losses = {"a": 1.0 + 6 / 3, "b": 2.0 + 6 / 4}
    if attribute:
        losses = {"0": (9 * 1.0 + 16 * 2.0) / 25 + 6 / 5, "1": (36 * 3.0 + 64 * 0.5) / 100 + 6 / 10}
    weights = {key: math.exp(0.5 * loss) for key, loss in losses.items()}
    assert q == pytest.approx({key: w / sum(weights.values()) for key, w in weights.items()}, abs=1e-12)


def test_group_dro_without_an_attribute_weighs_the_sites() -> None:
    reports = {"a": losses_of([1.0], [10]), "b": losses_of([3.0], [90])}
    found = GroupDRO(dro_rate=1.0).weigh(inputs(reports, {"a": 10, "b": 90}))
    assert found.sites == pytest.approx({"a": 1 / (1 + math.exp(2)), "b": math.exp(2) / (1 + math.exp(2))}, abs=1e-12)


def test_a_group_keeps_a_tenth_of_its_share_of_the_images() -> None:
    """Check q of a group whose loss is far lower, and which has 10 of 100 images: .1 * .1, before both sum to 1."""
    rule = GroupDRO(dro_attribute="sex", dro_rate=1.0)
    q = rule.weigh(inputs({"a": losses_of([0.0, 50.0], [10, 90])}, {"a": 100})).details["q"]
    assert q == pytest.approx({"0": 0.01 / 1.01, "1": 1 / 1.01}, abs=1e-12)
    (told,) = rule.directives(1, 2, ["a"]).values()
    assert told == pytest.approx([0.1, 1 / 1.01 / 0.9])


def test_the_site_half_weighs_each_image_by_its_group() -> None:
    half = GroupWeighted(dro_attribute="sex")
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    task = SimpleNamespace(sample_losses=lambda o, t: torch.nn.functional.cross_entropy(o, t, reduction="none"))
    numbers, groups = [0, 1, 2, 1, 0], {"sex": ("female", "male", "unknown")}
    data = SimpleNamespace(group_numbers=lambda split, name: numbers, attributes=groups)
    run: Any = SimpleNamespace(
        directives={"group_weights": [0.5, 3.0]}, site="a", batch=[4, 1, 2, 3], task=task, data=data,
        task_on=lambda split: task,
        device=torch.device("cpu"),
    )  # fmt: skip
    found = half.loss(run, lambda inputs: outputs, torch.zeros(4), targets)
    slow = []
    for weight, row, target in zip([0.5, 3.0, 1.0, 3.0], outputs.double().tolist(), targets.tolist(), strict=True):
        slow.append(-weight * math.log(math.exp(row[target]) / sum(map(math.exp, row))))
    assert float(found) == pytest.approx(sum(slow) / 4, rel=1e-6)


# ------------------------------------------------------------------------------------------------ FlexFair


def test_slopes_by_hand() -> None:
    # L = .2, .8 over 30 and 10 of 40 images: M = .35; L - M = -.15, .45, together .3
    found = variance_slopes({"a": 0.2, "b": 0.8}, {"a": 30, "b": 10}, 40)
    assert found == pytest.approx({"a": 40 * (-0.15 / 30 - 0.3 / 40), "b": 40 * (0.45 / 10 - 0.3 / 40)}, abs=1e-12)
    assert variance_slopes({"a": 0.2}, {"a": 30}, 40) == {"a": 0.0}
    assert variance_slopes({}, {}, 40) == {}


SIZES = {"a": 12, "b": 30, "c": 18}
CLASSES = 3


def site_run(site: str, images: torch.Tensor, labels: torch.Tensor, groups: list[int], classes: int) -> Any:
    def sample_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.ndim == 1:
            return outputs
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def batches(split: str, *, batch_size: int) -> list[Any]:
        return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))

    data = SimpleNamespace(
        group_numbers=lambda split, name: groups, batches=batches, attributes={"sex": ("F", "M", "unknown")},
        cases=lambda split: None, num_samples=lambda split: len(labels),
    )  # fmt: skip
    task = SimpleNamespace(
        sample_losses=sample_losses, loss=lambda outputs, targets: outputs.mean(), outcome_names=lambda: ["x"] * classes
    )
    return SimpleNamespace(
        site=site, device=torch.device("cpu"), directives={}, min_cases=1, settings={}, own={},
        batch=list(range(len(labels))), data=data, task=task,
        task_on=lambda split: task,
    )  # fmt: skip


def gradients(over: Any, measure: Any, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a linear classifier: averaged over the sites by samples as the method trains it, and of the objective of all
    images pooled, with its penalty written out.
    """
    made = torch.Generator().manual_seed(3)
    model, data = torch.nn.Linear(4, CLASSES).double(), {}
    torch.nn.init.normal_(model.weight, generator=made)
    for site, n in SIZES.items():
        images = torch.randn(n, 4, generator=made, dtype=torch.float64) + len(data)
        labels, groups = (torch.randint(3, (n,), generator=made) for _ in range(2))  # group 2: not known
        labels[:CLASSES] = torch.arange(CLASSES)
        data[site] = (images, labels, groups)
    attribute = "" if over == "sites" else "sex"
    half = VariancePenalty(flexfair_over=over, flexfair_measure=measure, flexfair_attribute=attribute, batch_size=7)
    rule = FlexFair(flexfair_over=over, flexfair_measure=measure, flexfair_weight=weight)
    runs = {site: site_run(site, of[0], of[1], of[2].tolist(), CLASSES) for site, of in data.items()}
    for run in runs.values():
        half.begin_round(run, model)
    rule.weigh(inputs({site: half.report(run, model) for site, run in runs.items()}, SIZES))
    told = rule.directives(1, 2, list(runs))["loss_slopes"]
    total, found = sum(SIZES.values()), torch.zeros(CLASSES, 4, dtype=torch.float64)
    for site, run in runs.items():
        run.directives = {"loss_slopes": told[site]}
        model.zero_grad()
        half.loss(run, model, *data[site][:2]).backward()
        assert model.weight.grad is not None
        found += SIZES[site] / total * model.weight.grad
    images, labels, groups = (torch.cat([of[k] for of in data.values()]) for k in range(3))
    places = torch.cat([torch.full((n,), k) for k, n in enumerate(SIZES.values())])
    losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
    objective = losses.mean()
    for parties, known, of in ((places, 3, "sites"), (groups, 2, "groups")):
        for c in range(CLASSES) if over in (of, "both") else ():
            of_class = torch.ones(total, dtype=torch.bool) if measure == "equal_accuracy" else labels == c
            chosen = [losses[of_class & (parties == party)] for party in range(known)]
            mean = torch.cat(chosen).mean()
            share = 1 / CLASSES if measure == "equal_accuracy" else 1
            objective = (
                objective + weight / len(SIZES) * share * sum((one.mean() - mean) ** 2 for one in chosen) / known
            )
    model.zero_grad()
    objective.backward()
    assert model.weight.grad is not None
    return found, model.weight.grad


@pytest.mark.parametrize("measure", ["equal_accuracy", "demographic_parity", "equal_opportunity"])
@pytest.mark.parametrize("over", ["sites", "groups", "both"])
def test_the_federations_gradient_is_that_of_the_pooled_penalty(over: str, measure: str) -> None:
    found, pooled = gradients(over, measure, 0.006)  # so small that no image counts less than 0 times
    plain, _ = gradients(over, measure, 0.0)
    assert float((pooled - plain).abs().max()) > 1e-4
    torch.testing.assert_close(found, pooled, rtol=0, atol=1e-7)  # factors are float32


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_lambda_is_that_of_the_authors_for_any_number_of_sites(sites: int) -> None:
    """One step of plain SGD as the authors' code makes it: a model a site, the sum of the losses plus lambda times
    their variance, models averaged.
    """
    weight, each = 0.02, 6
    made = torch.Generator().manual_seed(sites)
    data = [torch.randn(each, 4, generator=made, dtype=torch.float64) + k for k in range(sites)]
    labels = [torch.randint(2, (each,), generator=made) for _ in range(sites)]
    start = torch.randn(2, 4, generator=made, dtype=torch.float64)
    own = [start.clone().requires_grad_() for _ in range(sites)]
    losses = [torch.nn.functional.cross_entropy(x @ w.T, y) for x, w, y in zip(data, own, labels, strict=True)]
    (sum(losses) + weight * torch.stack(losses).var(correction=0)).backward()
    authors = torch.stack([w.grad for w in own]).mean(0)
    names = [f"s{k}" for k in range(sites)]
    rule = FlexFair(flexfair_weight=weight)
    told = {
        name: {"rows": 1.0, "group_losses": [float(x.detach())], "group_images": [6.0]}
        for name, x in zip(names, losses, strict=True)
    }
    rule.weigh(inputs(told, dict.fromkeys(names, each)))
    slopes = rule.directives(1, 2, names)["loss_slopes"]
    found = torch.zeros(2, 4, dtype=torch.float64)
    for k, name in enumerate(names):
        model = start.clone().requires_grad_()
        (torch.nn.functional.cross_entropy(data[k] @ model.T, labels[k]) * (1 + slopes[name][0])).backward()
        found += model.grad / sites
    torch.testing.assert_close(found, authors, rtol=0, atol=1e-12)


def test_an_image_counts_between_0_and_10_times() -> None:
    half = VariancePenalty(flexfair_over="groups", flexfair_attribute="sex")
    run = site_run("a", torch.zeros(4), torch.zeros(4), [0, 1, 2, 1], 1)
    run.directives = {"loss_slopes": [0.0, -7.0, 30.0]}
    found = half.loss(run, lambda images: torch.tensor([0.5, 1.5, 2.0, 4.0]), torch.zeros(4), torch.zeros(4))
    assert float(found) == pytest.approx((0 * 0.5 + 10 * 1.5 + 2.0 + 10 * 4.0) / 4)
    run.directives = {}
    assert float(half.loss(run, lambda images: torch.ones(4), torch.zeros(4), torch.zeros(4))) == pytest.approx(1.0)


def test_equal_opportunity_is_of_the_classes_that_are_looked_for() -> None:
    rule = FlexFair(flexfair_measure="equal_opportunity", flexfair_weight=1.0)
    reports = {
        "a": {"rows": 1.0, "group_losses": [1.0, 2.0], "group_images": [10.0, 6.0]},
        "b": {"rows": 1.0, "group_losses": [4.0, 3.0], "group_images": [30.0, 8.0]},
    }
    rule.weigh(inputs(reports, {"a": 16, "b": 38}))
    slopes = variance_slopes({"a": 2.0, "b": 3.0}, {"a": 6, "b": 8}, 54)
    told = rule.directives(1, 2, ["a", "b"])["loss_slopes"]
    assert told == {site: [0.0, pytest.approx(slope / 2)] for site, slope in slopes.items()}


def test_flex_fair_goes_by_what_is_told() -> None:
    rule = FlexFair(flexfair_over="both")
    assert rule.directives(0, 2, ["a"]) == {}
    nan = math.nan
    reports = {
        "a": {"rows": 3.0, "group_losses": [1.0, 0.5, 2.0], "group_images": [10.0, 6.0, 4.0]},
        "b": {"rows": 3.0, "group_losses": [4.0, nan, nan], "group_images": [30.0, nan, nan]},  # its groups stay
        "c": {"rows": 1.0, "group_losses": [9.0], "group_images": [60.0]},  # of another form
        "d": {"rows": 3.0, "group_losses": None, "group_images": None},
    }
    rule.weigh(inputs(reports, {"a": 10, "b": 30, "c": 60, "d": 5}))
    told = rule.directives(1, 2, ["a", "new"])["loss_slopes"]
    sites = variance_slopes({"a": 1.0, "b": 4.0}, {"a": 10, "b": 30}, 105)
    groups = variance_slopes({0: 0.5, 1: 2.0}, {0: 6, 1: 4}, 105)
    assert told["a"] == pytest.approx([2 / 4 * s for s in (sites["a"], groups[0], groups[1])])  # of four sites
    assert told["new"] == pytest.approx([0.0, 2 / 4 * groups[0], 2 / 4 * groups[1]])
    other = FlexFair(flexfair_over="both")
    other.load_state_dict(rule.state_dict())
    assert other.directives(1, 2, ["a", "new"]) == rule.directives(1, 2, ["a", "new"])
    rule.weigh(inputs({"d": reports["d"]}, {"d": 5}))
    assert rule.directives(2, 3, ["a"]) == {}
    rows = {"rows": 3.0, "group_losses": [1.0] * 4, "group_images": [9.0] * 4}  # that do not fit: moves nothing
    rule.weigh(inputs({"x": rows, "y": {**rows, "rows": 1.5}}, {"x": 9, "y": 9}))
    assert rule.directives(2, 3, ["x"]) == {}
    with pytest.raises(ValueError, match="'groups' needs flexfair_attribute"):
        VariancePenalty(flexfair_over="groups")
    settings = {"flexfair_measure": "equal_opportunity", "criterion": "task"}
    with pytest.raises(ValueError, match=r"'equal_opportunity' needs .*classes"):
        make_plan("flex_fair", task="segmentation", sites=SITES, settings=settings)


def test_groups_and_classes_of_few_cases_stay() -> None:
    half = VariancePenalty(flexfair_over="groups", flexfair_attribute="sex", flexfair_measure="demographic_parity")
    labels, groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]), [0, 0, 1, 1, 0, 0, 1, 1, 2]
    run = site_run("a", torch.arange(9.0), labels, groups, 2)
    half.begin_round(run, torch.nn.Identity())
    assert run.own["rows"] == 3
    assert run.own["group_images"] == [4, 5, 2, 2, 2, 2]
    assert run.own["group_losses"] == [1.5, 6.0, 0.5, 4.5, 2.5, 6.5]
    run.min_cases = 2  # who is not known is one: the next smallest group stays with it
    half.begin_round(run, torch.nn.Identity())
    assert np.isnan(run.own["group_images"]).reshape(3, 2)[1:].all(1).any()
    run.settings = {"metrics_by_class": False}
    half.begin_round(run, torch.nn.Identity())
    assert np.isnan(run.own["group_images"]).all()
    assert np.isnan(run.own["group_losses"]).all()
