"""Test LDAM-DRW, logit adjustment and FedLC at a site: the spec's worked examples in each method's training."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.ldam import MarginTraining
from fairflare.methods.logit_adjustment import CalibratedTraining
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.networks import CosineHead

from . import support
from .support import LONG_TAILED as TASK
from .support import QUICK, at_site, request, same


def run_of(counts: Any, current_round: int = 0, num_rounds: int = 100) -> Any:
    data = SimpleNamespace(class_counts=lambda split: None if counts is None else torch.tensor(counts))
    task = SimpleNamespace(chosen=lambda outputs: outputs)
    return SimpleNamespace(site="a", data=data, task=task, current_round=current_round, num_rounds=num_rounds, own=None)


class Fixed(torch.nn.Module):
    """Return the same scaled cosines for each input."""

    def __init__(self, cosines: Any, scale: float) -> None:
        super().__init__()
        self.head = SimpleNamespace(scale=scale)
        self.cosines = torch.tensor(cosines, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head.scale * self.cosines.expand(len(inputs), -1)


@pytest.mark.parametrize(("scale", "expected"), [(30.0, 27.002476), (1.0, 1.699892)])
def test_ldam_of_the_spec(scale, expected):
    training, run = MarginTraining(), run_of([100, 10, 1])
    model = Fixed([0.5, 0.3, 0.1], scale)
    training.begin_round(run, model)
    assert float(training.loss(run, model, torch.zeros(1), torch.tensor([2]))) == pytest.approx(expected, abs=1e-6)


def test_ldam_defers_the_class_weights():
    training = MarginTraining()
    for current_round, expected in ((79, [1, 1, 1]), (80, [0.027159, 0.270369, 2.702472])):
        run = run_of([100, 10, 1], current_round)
        training.begin_round(run, torch.nn.Identity())
        assert run.own.tolist() == pytest.approx(expected, abs=1e-6)
    run = run_of([100, 0, 1], 99)
    training.begin_round(run, torch.nn.Identity())
    assert run.own[1] == 0
    assert float(run.own.sum()) == pytest.approx(2)
    run = run_of([100, 10, 1], 0, 1)  # int(0.8 * 1) is 0
    training.begin_round(run, torch.nn.Identity())
    assert run.own.tolist() == [1, 1, 1]
    assert training.follows_num_rounds() == ["drw_start"]
    assert MarginTraining(drw_start=1.0).follows_num_rounds() == []


def test_cosine_head():
    head = CosineHead(4, 3, 30.0).double()
    features = torch.randn(5, 4, dtype=torch.float64)
    found = head(features).detach()
    for row in range(5):
        for c in range(3):
            cosine = torch.dot(features[row], head.weight[c].detach()) / (features[row].norm() * head.weight[c].norm())
            assert float(found[row, c]) == pytest.approx(30 * float(cosine), abs=1e-9)
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    assert head.weight.detach().norm(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-6)
    model = ClassificationTask(**TASK, classifier="cosine", cosine_scale=7.0).build_model()
    assert model(torch.rand(4, 3, 32, 32)).abs().max() <= 7
    plain = support.initial(ClassificationTask(**TASK))
    assert same(plain, support.initial(ClassificationTask(**TASK, cosine_scale=7.0)))  # linear: as before


def test_ldam_without_margin_and_weights_is_cross_entropy(tmp_path):
    task = ClassificationTask(**TASK, classifier="cosine")
    asked = request("train", support.initial(task))
    margin = at_site(tmp_path / "a", MarginTraining(**QUICK, max_margin=0.0, drw_start=1.0), task=task).perform(asked)
    plain = at_site(tmp_path / "b", LocalTraining(**QUICK), task=task).perform(asked)
    for name, tensor in plain.update.items():
        torch.testing.assert_close(margin.update[name], tensor, atol=2e-4, rtol=0)


def test_ldam_refuses():
    with pytest.raises(ValueError, match=r"^criterion.* got 'fedlc'$"):
        MarginTraining(criterion="fedlc")
    with pytest.raises(ValueError, match="set classifier='cosine'"):
        make_plan("ldam", settings={"classifier": "linear"})
    with pytest.raises(ValueError, match="cannot learn segmentation"):
        make_plan("ldam", task="segmentation")
    with pytest.raises(SiteError, match="site 'a': LDAM needs a cosine classifier"):
        MarginTraining().check(run_of([1, 2]), torch.nn.Linear(2, 2))
    with pytest.raises(SiteError, match="site 'a': LDAM's margins need classes"):
        MarginTraining().check(run_of(None), torch.nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------ LA, FedLC


def losses(training: LocalTraining, counts: Any) -> list[float]:
    logits = torch.zeros(3, 3, dtype=torch.float64)
    rows = zip(logits.split(1), torch.arange(3).split(1), strict=True)
    return [float(training.loss(run_of(counts), torch.nn.Identity(), *row)) for row in rows]


def test_logit_adjustment_of_the_spec():
    training = make_plan("logit_adjustment").training
    assert losses(training, [81, 16, 1]) == pytest.approx([0.190518, 1.812379, 4.584967], abs=1e-6)
    plain = make_plan("logit_adjustment", settings={"prior_strength": 0.0}).training
    assert losses(plain, [81, 16, 1]) == pytest.approx([math.log(3)] * 3)


def test_fed_lc_of_the_spec():
    training = make_plan("fed_lc").training
    assert losses(training, [81, 16, 1]) == pytest.approx([0.969481, 1.052814, 1.302814], abs=1e-6)
    excluding = make_plan("fed_lc", settings={"fedlc_exclude_target": True}).training
    assert losses(excluding, [81, 16, 1]) == pytest.approx([0.492606, 0.623639, 0.985682], abs=1e-6)
    run: Any = run_of([81, 16, 1])
    found = excluding.loss(run, torch.nn.Identity(), torch.zeros(3, 3, dtype=torch.float64), torch.arange(3))
    assert float(found) == pytest.approx((0.492606 + 0.623639 + 0.985682) / 3, abs=1e-6)
    halved = make_plan("fed_lc", settings={"fedlc_exclude_target": True, "prior_strength": 0.0}).training
    assert losses(halved, [81, 16, 1]) == pytest.approx([math.log(2)] * 3)


def test_fed_lc_is_its_criterion():
    with pytest.raises(ValueError, match="criterion must be 'fedlc', got 'task'"):
        CalibratedTraining(criterion="task")
    assert make_plan("fed_lc", train_like="fed_ism").training.criterion == "fedlc"
    assert make_plan("logit_adjustment", train_like="bsm_fl").training.criterion == "logit_adjusted"
