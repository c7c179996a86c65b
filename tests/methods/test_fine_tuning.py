"""Models of the sites' own (``personalise``): fine-tuned behind the rounds, tested everywhere; tensors that stay."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.base.settings import build, values_of
from fairflare.base.stopping import TaskStopped
from fairflare.base.task import Metric
from fairflare.core.features.parts import names_in
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import Stopped
from fairflare.federation.site.script import _Lent
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import LocalLoop
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.parts.fine_tuning import DIRECTIVE, FineTuning
from fairflare.reporting.documents import encode_value
from fairflare.reporting.sites.own_models import (
    advice_sentences,
    cases_needed,
    personal,
    personal_notes,
    personal_tables,
    verdict,
)
from fairflare.reporting.table import fairness_table
from fairflare_lab.page.write import write_report
from tests.federation.network import Run
from tests.tiny import run_document
from tests.unit.report_runs import read

from .own import SITES, Plane, Points, Sites, run
from .support import LONG_TAILED, SEGMENTATION, at_site, initial, request, same

SMALL: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.5, "optimizer": "sgd"}


def half(form: str = "finetune:all", **more: Any) -> LocalTraining:
    return LocalTraining(**{**SMALL, "personalise": form, **more})


class Means(Plane):
    """Stand for a task whose metric is a mean over images, so that the images can be drawn again."""

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="accuracy", doc="made up", higher_is_better=True, mean_of_images=True),)


class Open(Sites):
    """Sites whose files let the own model leave."""

    def worker(self, site: str) -> Any:
        worker = super().worker(site)
        worker.settings["submit_model"] = True
        return worker


def opened(folder: Path, training: LocalTraining, kind: type[Sites] = Open, **more: Any) -> tuple[Run, Sites]:
    they = kind(folder / "state", training, more.pop("task", None) or Means(), more.pop("answer", None))
    told = {"sites": [*SITES, "site-3"], "task": they.task, "site_half": values_of(training), "num_rounds": 2, **more}
    return Run(folder, they, **told)(), they


# ------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize(
    ("steps", "low", "high", "p", "advice"),
    [
        (3, 0.01, 0.2, 0.01, "should use it"), (3, -0.2, -0.01, 0.01, "should not"), (3, -0.1, 0.1, 0.6, "cannot tell"),
        (3, 0.01, 0.2, 0.06, "cannot tell"), (0, math.nan, math.nan, 1.0, "no step helped"),
        (None, math.nan, math.nan, 1.0, "cannot tell"),
        (3, -0.2, 0.1, 0.01, "cannot tell"), (3, math.nan, math.nan, math.nan, "cannot tell"),
    ],
)  # fmt: skip
def test_the_direction_of_the_advice(steps: Any, low: float, high: float, p: float, advice: str) -> None:
    assert verdict(steps, low, high, p) == advice


def test_how_many_cases_would_tell() -> None:
    assert cases_needed(0.05, 0.05, 20) == 77  # 20 * 1.96 ** 2 = 76.8
    assert cases_needed(-0.05, 0.05, 20) == 77
    assert cases_needed(0.2, 0.05, 20) == 21  # it is seen already, but not beside the other sites
    assert cases_needed(0.0, 0.05, 20) is None is cases_needed(0.1, math.nan, 20)


def told(gain: list[float] | None = None, steps: float = 4.0) -> dict[str, Any]:
    return {"tuned_steps": steps, "tuned_passes": 9.0, "tuned_before": 0.5, "tuned_after": 0.7, "own_gain": gain}


def test_sentences_and_table_by_hand() -> None:
    """Advise by a metric whose lower values are better; by Holm, of three tests 0.02 * 3 is too much, 0.01 * 3 not."""
    metric = Metric(name="hd95", doc="", higher_is_better=False)
    common = {site: {"hd95": 5.0} for site in ("a", "b", "c", "d")}
    stats = {
        "a": told([5.0, 3.0, 2.0, 1.0, 3.0, 0.01, 0.5]), "b": told([5.0, 6.0, -1.0, -2.0, -0.1, 0.01, 0.5]),
        "c": told([5.0, 4.5, 0.5, 0.1, 1.0, 0.06, 0.5]), "d": told(steps=0.0),
    }  # fmt: skip
    found = personal(metric, stats, common, dict.fromkeys(common, 10), {"a": {"b": 7.0, "c": 4.0}})
    of = found["sites"]
    assert [of[site]["advice"] for site in "abcd"] == ["should use it", "should not", "cannot tell", "no step helped"]
    assert [of[site]["p_holm"] for site in "abc"] == pytest.approx([0.03, 0.03, 0.06])
    assert of["a"]["others"] == {"b": -2.0, "c": 1.0}  # 7 is 2 worse than 5
    results = read(personal=encode_value({**found, "part": "head", "left_out": {"e": "it was away"}}, ""))
    sentences = [text for text, _ in advice_sentences(results).values()]
    assert [*sentences, *personal_notes(results)] == [
        "Own models: better than the common one at the own site, and to be used there: a (+2.000, 95 % [1.0, 3.0]).",
        "Own models: worse than the common one at the own site, and not to be used: b (-1.000, 95 % [-2.00, -0.10]).",
        "Own models: the test cannot tell whether to use them: c (+0.500, 95 % [0.10, 1.00], which excludes 0, "
        "but not after the correction for 3 sites; about 39 test cases would).",
        "Own models: no step helped on the validation split, or it has fewer than 10 cases; the common one stays: d.",
        "No own model of e: it was away.",
        "Own models that the other sites did not test, as submit_model is not true at b, c.",
    ]
    (table,) = personal_tables(results)
    assert [row[0] for row in table.rows] == [*"abcd"]
    assert table.columns[-2:] == ["gain at b", "gain at c"]
    assert table.rows[0][-2:] == [-2.0, 1.0]


# ------------------------------------------------------------------------------------------------ the part


def network() -> nn.Module:
    torch.manual_seed(0)
    return Plane().build_model()


def test_which_parameters_a_part_has() -> None:
    model = network()
    assert names_in(model, "head") == ["3.weight", "3.bias"]
    assert names_in(model, "norms") == ["1.weight", "1.bias"]
    assert names_in(model, "all") == [name for name, _ in model.named_parameters()]
    model[3].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    assert names_in(model, "head") == ["1.weight", "1.bias"]  # the last layer that is trained
    named = nn.ModuleDict({"head": nn.Linear(2, 2), "projector": nn.Linear(2, 2)})
    assert names_in(named, "head") == ["head.weight", "head.bias"]


@pytest.mark.parametrize("part", ["head", "norms", "all"])
def test_only_the_part_is_changed_and_nothing_leaves(tmp_path: Path, part: str) -> None:
    task, state, rate = Means(), initial(Plane()), {"learning_rate": 5.0 if part == "norms" else 0.5}
    here = at_site(tmp_path, half(f"finetune:{part}", **rate), task=task)
    asked = request("train", state, 3, directives={DIRECTIVE: True})
    reply = here.perform(asked)
    assert reply.status == "ok", reply.reason
    assert reply.update == {}
    assert reply.stats["tuned_after"] > reply.stats["tuned_before"]
    own = here.local_model(asked, 3)
    assert reply.stats["tuned_steps"] > 0
    changed = {name for name in state if not torch.equal(own[name], state[name])}
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    expected = {*names_in(task.build_model(), part), *(statistics if part in ("norms", "all") else ())}
    assert changed == expected
    again = at_site(tmp_path / "open", half(f"finetune:{part}", **rate), {"submit_model": True}, task=task).perform(
        asked
    )
    assert set(again.update) == set(state)
    for name, tensor in again.update.items():
        torch.testing.assert_close(state[name] + tensor, own[name])


class Scripted(Means):
    """Its validation values are written down."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values, self.made = values, list[dict[str, torch.Tensor]]()

    def evaluate(self, model: nn.Module, batches: Any, device: Any) -> dict[str, float]:
        self.made.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        at = len(self.made) - 1  # behind them the two models are tested
        return {"accuracy": self.values[at] if at < len(self.values) else 0.5, "loss": 1.0}


@pytest.mark.parametrize(
    ("values", "best", "passes"),
    [
        ([0.5, 0.5, 0.4, 0.5, 0.5, 0.5], 0, 5),  # on ties the common model stays
        ([0.5, 0.4, 0.6, 0.6, 0.1, 0.6, 0.5, 0.59], 2, 7),  # the earlier of two that are equally good; patience 5
        ([0.1 * k / 3 for k in range(21)], 20, 20),  # so many passes at most
    ],
)
def test_steps_are_chosen_on_validation_and_no_step_is_a_candidate(
    tmp_path: Path, values: list[float], best: int, passes: int
) -> None:
    task, state = Scripted(values), initial(Plane())
    asked = request("train", state, 3, directives={DIRECTIVE: True})
    here = at_site(tmp_path, half(), task=task)
    reply = here.perform(asked)
    assert reply.status == "ok", reply.reason
    assert (reply.stats["tuned_steps"], reply.stats["tuned_passes"]) == (3 * best, passes)  # 20 points, in 3 batches
    assert (reply.stats["tuned_before"], reply.stats["tuned_after"]) == (values[0], max(values))
    assert same(here.local_model(asked, 3), task.made[best])
    assert same(task.made[0], state)


def test_the_learning_rate_is_a_tenth_and_terms_of_the_method_are_left_out() -> None:
    prox = build(all_methods()["fed_prox"].training, {"learning_rate": 0.5, "personalise": "finetune"})
    found = FineTuning.choose(prox, {DIRECTIVE: True}, shares=False)
    assert (type(found), found.learning_rate, found.local_epochs) == (FineTuning, 0.05, 1)
    assert FineTuning.choose(prox, {}, shares=False) is prox


def test_with_fewer_than_ten_validation_cases_no_step_is_made(tmp_path: Path) -> None:
    class Few(Means):
        def open_site(self, site: str, settings: Any) -> Any:
            return Points(site, 9)

    made, _ = opened(tmp_path, half(), Sites, task=Few())
    assert {(of["steps"], of["passes"]) for of in made.results["personal"]["sites"].values()} == {(0, 0)}
    assert "fewer than 10 cases; the common one stays: site-1, site-2, site-3." in fairness_table(read(**made.results))


# ------------------------------------------------------------------------------------------------ a run


def test_own_models_are_tested_at_their_own_site_and_at_all_others(tmp_path: Path) -> None:
    made, sites = opened(tmp_path, half())
    task, found = Means(), made.results["personal"]["sites"]
    assert sorted(found) == [*SITES, "site-3"]
    for owner, of in found.items():
        assert of["steps"] > 0
        assert sorted(of["others"]) == sorted({*found} - {owner})
        model = task.build_model()
        model.load_state_dict(sites.kept(owner, "local_model", 2))
        for place in found:
            batches = task.open_site(place, {}).batches("test", batch_size=8)
            gain = task.evaluate(model, batches, "cpu")["accuracy"] - made.results["test"][place]["accuracy"]
            assert (of["gain"] if place == owner else of["others"][place]) == pytest.approx(gain, abs=1e-6)
        assert of["low"] <= of["gain"] <= of["high"]
    plain, _ = opened(tmp_path / "plain", LocalTraining(**SMALL))
    assert made.results["test"] == plain.results["test"]
    assert same(made.model()["model"], plain.model()["model"])
    assert "personal" not in plain.results or not plain.results["personal"]
    text = fairness_table(read(**made.results))
    assert "gain at site-2" in text
    page = write_report(made.folder / "fairflare", tmp_path / "page")
    assert "own models" in page.read_text().lower()


def test_a_model_leaves_only_where_the_site_says_so(tmp_path: Path) -> None:
    made, sites = opened(tmp_path, half(), Sites)
    assert [sites.sent[site, "train", 2].params for site in SITES] == [{}, {}]
    assert all(of["others"] == {} for of in made.results["personal"]["sites"].values())
    assert "as submit_model is not true at site-1" in fairness_table(read(**made.results))


@pytest.mark.parametrize("name", ["fed_lwr", "fed_nova", "fed_mas", "creff", "fair_fed"])
def test_any_method_with_a_common_model(tmp_path: Path, name: str) -> None:
    of_classes = {**LONG_TAILED, "max_pool": False}
    settings = of_classes if all_methods()[name].task == "classification" else SEGMENTATION
    plan = make_plan(name, sites=2, num_rounds=1, settings={**settings, "personalise": "finetune"})
    found = run_document(run_local(plan, tmp_path))["personal"]
    assert (found["part"], sorted(found["sites"]), found["left_out"]) == ("head", SITES, {})


def test_a_site_that_is_stopped_goes_on_and_makes_no_step_twice(tmp_path: Path, monkeypatch: Any) -> None:
    state, task = initial(Plane()), Means()
    asked = request("train", state, 3, directives={DIRECTIVE: True})
    whole = at_site(tmp_path / "whole", half(), task=task)
    expected = whole.perform(asked)
    assert expected.stats["tuned_passes"] > 3
    made: list[int] = []
    real = LocalLoop._step

    def step(loop: LocalLoop, *batch: torch.Tensor) -> torch.Tensor:
        made.append(1)
        if len(made) == 8:  # in the third pass
            raise TaskStopped("the job was stopped")
        return real(loop, *batch)

    monkeypatch.setattr(LocalLoop, "_step", step)
    assert at_site(tmp_path / "cut", half(), task=task).perform(asked).status == "skipped"
    again = at_site(tmp_path / "cut", half(), task=task)
    reply = again.perform(asked)
    assert len(made) == 3 * expected.stats["tuned_passes"] + 2  # the pass that was cut is made again as a whole
    assert {k: v for k, v in reply.stats.items() if k != "seconds"} == {
        k: v for k, v in expected.stats.items() if k != "seconds"
    }
    assert same(again.local_model(asked, 3), whole.local_model(asked, 3))
    other = {**state, "3.bias": state["3.bias"] + 1}  # of another common model nothing is taken up
    asked = request("train", other, 3, directives={DIRECTIVE: True})
    fresh = at_site(tmp_path / "fresh", half(), task=task)
    assert again.perform(asked).stats["tuned_passes"] == fresh.perform(asked).stats["tuned_passes"]
    assert same(again.local_model(asked, 3), fresh.local_model(asked, 3))


def test_a_run_that_is_stopped_in_the_fine_tuning_goes_on(tmp_path: Path) -> None:
    whole, _ = opened(tmp_path / "whole", half(), experiment="e")
    folder, stopped = tmp_path / "cut", []

    def stop(site: str, name: str, message: Any) -> None:
        if name == "train" and message.current_round == 2 and not stopped:
            stopped.append(run_.net)
            run_.net.abort = True

    sites = Open(folder / "state", half(), Means(), stop)
    told = {"sites": [*SITES, "site-3"], "task": Means(), "site_half": values_of(half()), "num_rounds": 2}
    run_ = Run(folder, sites, experiment="e", **told)
    with pytest.raises(Stopped):
        run_()
    rest = Run(folder, sites, job="rest", experiment="e", **told)()
    assert rest.results["info"]["resumed_at_round"] == 2
    assert rest.results["personal"] == whole.results["personal"]
    assert rest.results["test"] == whole.results["test"]


@pytest.mark.parametrize(
    ("params", "stats", "why"),
    [({"0.weight": torch.zeros(7)}, {}, "0.weight"), ({}, {"own_gain": [0.1]}, "'own_gain' must have 7 entries")],
)
def test_a_site_that_fails_has_no_own_model_and_the_run_goes_on(
    tmp_path: Path, params: dict[str, Any], stats: dict[str, Any], why: str
) -> None:
    def answer(site: str, name: str, message: Any) -> Any:
        if (site, name, message.current_round) != ("site-2", "train", 2):
            return None
        reply = sites[0].perform(site, name, message)
        reply.params, reply.meta["stats"] = {**reply.params, **params}, {**reply.meta["stats"], **stats}
        return reply

    sites = [Open(tmp_path / "state", half(), Means())]
    made, _ = opened(tmp_path, half(), answer=answer)
    assert made.results["status"] == "completed"
    assert why in made.results["personal"]["left_out"]["site-2"]
    assert sorted(made.results["personal"]["sites"]) == ["site-1", "site-3"]
    assert "No own model of site-2: " in fairness_table(read(**made.results))


def test_the_floor_holds_for_the_own_model_too(tmp_path: Path) -> None:
    reply = at_site(tmp_path, half(), {"min_cases": 21}, task=Means()).perform(
        request("train", initial(Plane()), 3, directives={DIRECTIVE: True})
    )
    assert reply.status == "ok", reply.reason
    names = {"tuned_steps", "tuned_passes", "tuned_before", "tuned_after", "own_gain"}
    assert not names & set(reply.stats)
    assert {f"stats/{name}" for name in names} <= set(reply.stats["suppressed"])


# ------------------------------------------------------------------------------------------------ tensors that stay


def test_tensors_that_an_expression_finds_stay_at_the_sites(tmp_path: Path) -> None:
    made, sites = run(tmp_path, half(r"keep:^3\.", learning_rate=0.05))
    stays = ["3.bias", "3.weight"]
    start = made.net.tasks[0].params
    for site in SITES:
        for current_round in range(3):
            sent = sites.sent[site, "train", current_round].params
            assert sorted(sent) == sorted(set(start) - set(stays))
            assert sorted(sites.kept(site, "parts", current_round)) == stays
    model = made.model()["model"]
    assert all(torch.equal(model[name], start[name]) for name in stays)  # what a new site starts from
    assert not torch.equal(*(sites.kept(site, "parts", 2)["3.weight"] for site in SITES))
    assert made.results["info"]["measured"] == "personal"
    assert not made.results.get("personal")


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("form", ["fine", "finetune:", "finetune:body", "keep:", "keep:(", "Keep:a"])
def test_other_forms_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="personalise"):
        LocalTraining(personalise=form)


@pytest.mark.parametrize("name", ["solo", "fed_bn", "ditto", "cffl", "cgsv"])
def test_methods_without_a_common_model_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="starts from a model that all sites share"):
        make_plan(name, settings={"personalise": "finetune"}, shown=True)
    with pytest.raises(ValueError, match="norm_statistics='site'"):
        LocalTraining(personalise="finetune", norm_statistics="site")


def test_a_network_without_the_part_is_refused_before_the_first_round(tmp_path: Path) -> None:
    here = at_site(tmp_path, half("finetune:norms"), task=Plane("none"))
    reply = here.perform(request("check", {}))
    assert "the network has nothing to train in its norms" in reply.reason
    with pytest.raises(ValueError, match="personalise='keep:nothing' matches no"):
        run(tmp_path / "run", half("keep:nothing"))


def test_a_script_of_the_sites_cannot_fine_tune(tmp_path: Path) -> None:
    lent = _Lent(half(), None)  # type: ignore[arg-type]
    with pytest.raises(SiteError, match="personalise=finetune:all is done by"):
        lent.check(SimpleNamespace(site="site-1", computing=""), nn.Identity())  # type: ignore[arg-type]
