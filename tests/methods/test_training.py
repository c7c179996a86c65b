"""Test local training, the base of every site half: determinism, rates, moments, refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from fairflare.base.settings import field_names
from fairflare.core.features.norms import lone_samples
from fairflare.exchange.messages import SiteReply
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import rate
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.fed_mas import RescueTraining
from fairflare.methods.fed_mrl import FairProximalTraining
from fairflare.methods.parts.classifier_retraining import ClassifierRetraining
from fairflare.methods.parts.probes import ReportsScore
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.networks import build_classifier

from .support import LONG_TAILED, at_site, initial, request, same


@pytest.fixture
def worker(tmp_path):
    def make(training=None, folder="state", **more):
        return at_site(tmp_path / folder, training, **more)

    return make


def test_training_is_deterministic_and_depends_on_the_round(worker):
    state = initial()
    first = worker(folder="a").perform(request("train", state))
    torch.rand(3)  # somebody else's random numbers
    again = worker(folder="b").perform(request("train", state))
    other = worker(folder="c").perform(request("train", state, current_round=1))
    assert first.status == "ok"
    assert same(first.update, again.update)
    assert first.metrics == again.metrics
    assert not same(first.update, other.update)
    assert first.num_steps == math.ceil(first.num_samples / 4)


def test_optimizer_moments_cross_processes_and_a_repeated_round_starts_the_same(worker):
    """Check a new worker per task, as in the simulator with few workers; then the server asks for round 1 again."""
    state = initial()
    worker().perform(request("train", state, 0))
    kept = worker().perform(request("train", state, 1))
    repeated = worker().perform(request("train", state, 1))
    fresh = worker(folder="fresh").perform(request("train", state, 1))
    assert same(kept.update, repeated.update)
    assert not same(kept.update, fresh.update)
    without = LocalTraining(batch_size=4, keep_optimizer_state=False)
    worker(without, folder="no").perform(request("train", state, 0))
    assert same(fresh.update, worker(without, folder="no").perform(request("train", state, 1)).update)


def test_nan_loss_names_the_site_and_the_remedy(worker):
    reply = worker(LocalTraining(batch_size=4, learning_rate=1e30)).perform(request("train", initial()))
    assert reply.status == "failed"
    assert reply.update is None
    assert "site 'site-1'" in reply.reason
    assert "lower learning_rate" in reply.reason


def test_every_epoch_has_an_order_and_an_augmentation_of_its_own(worker):
    """Check seeds of the round plus the epoch; ``run.batch`` says which images a batch holds."""
    seen = []

    class Watched(LocalTraining):
        def loss(self, run, model, inputs, targets):
            seen.append((run.epoch, list(run.batch), inputs.clone()))
            return super().loss(run, model, inputs, targets)

    here = worker(Watched(batch_size=5, local_epochs=3, augment=True))
    reply = here.perform(request("train", initial(), 2))
    assert reply.status == "ok", reply.reason
    assert len(reply.stats["epoch_losses"]) == 3
    assert reply.num_steps == len(seen) == 3 * math.ceil(reply.num_samples / 5)
    data = here.task.open_site("site-1", {})
    changed = []
    for epoch in range(3):
        mine = [(numbers, inputs) for e, numbers, inputs in seen if e == epoch]
        seed = round_seed(0, "site-1", 2) + epoch
        order = [number for numbers, _ in mine for number in numbers]
        assert order == data.order("training", seed)
        assert sorted(order) == list(range(reply.num_samples))
        wanted = list(data.batches("training", batch_size=5, shuffle_seed=seed, augment=True))
        assert all(torch.equal(inputs, x) for (_, inputs), (x, _) in zip(mine, wanted, strict=True))
        images = torch.cat([inputs for _, inputs in mine])
        changed.append(images[torch.tensor(order).argsort()])
    assert not torch.equal(changed[0], changed[1])
    assert not torch.equal(changed[1], changed[2])


class BadLastStep(LocalTraining):
    """Break the gradient of the last step in round 1, and leave its loss as it is."""

    def begin_round(self, run, model):
        self.seen = 0

    def loss(self, run, model, inputs, targets):
        loss = super().loss(run, model, inputs, targets)
        self.seen += len(inputs)
        if run.current_round == 1 and self.seen == run.data.num_samples("training"):
            loss = loss + self.nothing(next(model.parameters()).sum())
        return loss

    def nothing(self, value):
        return (0 * value).sqrt()  # slope 0 * inf


class HugeLastStep(BadLastStep):
    """Return a finite gradient whose square overflows: Adam's step is 0, and would remain 0."""

    def nothing(self, value):
        return 1e25 * (value - value.detach())


@pytest.mark.parametrize("broken", [BadLastStep, HugeLastStep])
def test_moments_of_a_broken_round_are_not_kept(worker, broken):
    """Check that moments are dropped, as one such step would exclude the site from every later round."""
    state = initial()
    here = worker(broken(batch_size=4))
    assert here.perform(request("train", state, 0)).status == "ok"
    reply = here.perform(request("train", state, 1))
    if broken is BadLastStep:
        assert reply.status == "failed"
        assert "is not finite after training in round 1" in reply.reason
        assert here.state.store().load_at("local_model", 1) is None
    else:
        assert reply.status == "ok", reply.reason
    assert here.state.store().load_at("optimizer", 1) is None
    after = here.perform(request("train", state, 2))
    assert after.status == "ok", after.reason
    healthy = worker(LocalTraining(batch_size=4), folder="healthy")
    healthy.perform(request("train", state, 0))
    assert same(after.update, healthy.perform(request("train", state, 2)).update)


# ------------------------------------------------------------------------------------------------ one sample


def small_task() -> ClassificationTask:
    """Define a user's own network whose last stage has features of 1x1."""
    task = ClassificationTask(
        phantom="fundus", image_size=(32, 32), phantom_sites=2, phantom_samples=60, phantom_test=40, partition="iid",
        corrupted_sites=0,
    )  # fmt: skip
    network = {"in_channels": 3, "classes": 5, "features": (4, 4, 8, 8), "norm_momentum": 0.1, "projector_dim": 96}
    task.build_model = lambda: build_classifier("resnet18", max_pool=True, **network)
    return task


DEEP, SHALLOW = "encoder.layer4.0.bn1", "encoder.bn1"
TOLD = {"search_distance": 0.05, "rescue_factor": True, "mean_loss": 0.5}


@pytest.mark.parametrize(
    "training",
    [LocalTraining, SharpnessAwareTraining, FairProximalTraining, RescueTraining],
    ids=lambda kind: kind.__name__,
)
def test_a_last_batch_of_one_sample_is_trained_on(worker, training):
    """Check that the running statistics are used where the sample has none of its own."""
    task = small_task()
    count = task.open_site("site-1", {}).num_samples("training")
    here = worker(training(batch_size=count - 1), task=task)
    reply = here.perform(request("train", initial(task), directives=TOLD))
    assert reply.status == "ok", reply.reason
    assert (reply.num_samples, reply.num_steps) == (count, 2)
    batches = {name: int(reply.update[f"{name}.num_batches_tracked"]) for name in (DEEP, SHALLOW)}
    assert batches == {DEEP: 1, SHALLOW: 2}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in reply.update.values())


def test_batches_of_one_sample_alone(worker, caplog):
    caplog.set_level("INFO")
    task = small_task()
    reply = worker(LocalTraining(batch_size=1), task=task).perform(request("train", initial(task)))
    assert reply.status == "ok", reply.reason
    assert bool((reply.update[f"{DEEP}.running_mean"] == 0).all())
    assert bool((reply.update[f"{SHALLOW}.running_mean"] != 0).all())
    assert float(reply.update["encoder.layer4.0.conv1.weight"].norm()) > 0
    said = [r.getMessage() for r in caplog.records if "one sample" in r.getMessage()]
    assert said == [f"a batch of one sample: batch norm {DEEP!r} takes its running statistics, unchanged"]


def test_a_norm_without_statistics_is_named(worker):
    task = small_task()
    build = task.build_model

    def build_model():
        model = build()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        return model

    task.build_model = build_model
    reply = worker(LocalTraining(batch_size=27), task=task).perform(request("train", initial(task)))
    assert reply.status == "failed"
    assert reply.reason.startswith(
        f"site 'site-1': batch norm {DEEP!r} has no running statistics and got one sample with 1x1 features; "
        "choose another batch_size"
    )


def test_one_sample_is_normed_as_in_evaluation_and_nothing_stays():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), norm)
    for _ in range(5):
        model(torch.randn(4, 2))
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    one = torch.randn(1, 2)
    with lone_samples(model):
        found = model(one)
        assert norm.training
        assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())
        model(torch.randn(2, 2))
        assert not torch.equal(norm.running_mean, before["running_mean"])
        norm.load_state_dict(before)
        norm.eval()
        assert torch.equal(model(one), found)
        assert not norm.training  # evaluation stays evaluation
        norm.train()
        with pytest.raises(RuntimeError):
            norm(torch.randn(1, 3).double())  # fails inside
        assert norm.training
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(one)
    assert not norm._forward_hooks
    assert not norm._forward_pre_hooks


# (1 + cos(pi (r + 1) / R)) / 2 for R = 4: cos 45, 90, 135, 180 degrees.
COSINE = [(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
LOW = 0.001  # of the rate


def share(current_round: int) -> float:
    """Return the share of the rate 0.1 in the tests below, which ends at a thousandth of it."""
    return LOW + (1 - LOW) * COSINE[current_round]


def test_rates_of_the_schedules():
    """Check lr_r = 1e-4 + (0.1 - 1e-4) (1 + cos(pi (r + 1) / R)) / 2, of Fed-MAS's code."""
    cosine = LocalTraining(learning_rate=0.1, schedule="cosine", lowest_rate=1e-4)
    wanted = [1e-4 + 0.0999 * c for c in COSINE]
    assert wanted == pytest.approx([0.0853699837, 0.05005, 0.0147300163, 1e-4], rel=1e-8)
    assert [rate(cosine, r, 4) for r in range(4)] == pytest.approx(wanted, rel=1e-12)
    # The paper's 200 rounds: 0.9, 90, 179.1 and 180 degrees.
    rates = [rate(cosine, r, 200) for r in (0, 99, 198, 199)]
    assert rates == pytest.approx([0.0999938378, 0.05005, 1.061622e-4, 1e-4], rel=1e-6)
    assert rate(cosine, 0, 1) == pytest.approx(1e-4)
    own = LocalTraining(learning_rate=0.02, schedule="cosine")
    assert rate(own, 3, 4) == pytest.approx(2e-5, rel=1e-12)
    assert rate(own, 1, 4) == pytest.approx(0.01001, rel=1e-12)
    higher = LocalTraining(learning_rate=0.1, schedule="cosine", lowest_rate=0.02)
    assert [rate(higher, r, 4) for r in (1, 3)] == pytest.approx([0.06, 0.02], rel=1e-12)
    constant = LocalTraining(learning_rate=0.1, lowest_rate=1e-4)
    assert [rate(constant, r, 4) for r in range(4)] == [0.1] * 4


def test_the_preset_of_fed_mas_ends_at_the_rate_of_its_code():
    for method in ("fed_mas", "bsm_kd", "bsm_fl"):
        training = make_plan(method, small=False).training
        assert [rate(training, r, 200) for r in (99, 199)] == pytest.approx([0.05005, 1e-4], rel=1e-9)


def test_bad_lowest_rates():
    with pytest.raises(ValueError, match=r"^lowest_rate.* got 0\.01$"):
        LocalTraining(schedule="cosine", lowest_rate=0.01)
    with pytest.raises(ValueError, match=r"^lowest_rate.* got 0$"):
        LocalTraining(lowest_rate=0)
    for training in (RescueTraining, FairProximalTraining):  # with checks of their own
        with pytest.raises(ValueError, match="lowest_rate must be at most"):
            training(schedule="cosine", lowest_rate=0.01)


def moved(reply: SiteReply) -> torch.Tensor:
    """Return the change of all weights; batch norm's statistics do not depend on the rate."""
    assert reply.status == "ok", reply.reason
    return torch.cat([t.flatten().double() for n, t in reply.update.items() if n.endswith(("weight", "bias"))])


@pytest.mark.parametrize("current_round", range(4))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_schedule_sets_the_step(worker, optimizer, current_round):
    """Check one step over all images: the cosine's step is the constant rate's, shrunk."""
    settings = {"optimizer": optimizer, "learning_rate": 0.1, "momentum": 0.0, "batch_size": 100}
    steps = {}
    for schedule in ("constant", "cosine"):
        training = LocalTraining(**settings, schedule=schedule)
        steps[schedule] = worker(training, schedule).perform(request("train", initial(), current_round, num_rounds=4))
        assert steps[schedule].num_steps == 1
    found, full = moved(steps["cosine"]), moved(steps["constant"])
    assert float(full.norm()) > 1e-3
    torch.testing.assert_close(found, share(current_round) * full, rtol=1e-4, atol=2e-7)


def test_the_rounds_rate_goes_before_the_kept_optimizers(worker):
    """Check that an optimizer's saved rate of the round before is not used."""
    steps = {}
    for schedule in ("constant", "cosine"):
        training = LocalTraining(learning_rate=0.1, schedule=schedule, batch_size=100)
        here = worker(training, schedule)
        for current_round in (0, 2):
            steps[schedule] = here.perform(request("train", initial(), current_round, num_rounds=4))
    torch.testing.assert_close(moved(steps["cosine"]), share(2) * moved(steps["constant"]), rtol=1e-4, atol=2e-7)


# ------------------------------------------------------------------------------------------------ criteria


def naive_criterion(criterion: str, tau: float, logits: torch.Tensor, label: int, counts: list[int]) -> float:
    """Compute one sample's loss, in plain numbers."""
    total = sum(counts)
    shift = {
        "logit_adjusted": lambda n: tau * math.log(n / total),
        "balanced_softmax": math.log,
        "fedlc": lambda n: -tau * n**-0.25,
    }[criterion]
    changed = {c: float(z) + shift(counts[c]) for c, z in enumerate(logits) if counts[c]}
    return math.log(sum(math.exp(z) for z in changed.values())) - changed[label]


@pytest.mark.parametrize(
    ("criterion", "strength", "tau"),
    [
        ("logit_adjusted", None, 1.0),
        ("logit_adjusted", 0.3, 0.3),
        ("balanced_softmax", None, math.nan),
        ("fedlc", None, 0.5),
        ("fedlc", 2.0, 2.0),
    ],
)
def test_criterion_of_the_first_step(worker, criterion, strength, tau):
    """Check that one step's recorded loss over all images is the criterion's mean with this site's class counts."""
    task = ClassificationTask(
        image_size=(33, 33), features=(4, 4, 8, 8), phantom="fundus", phantom_sites=3, phantom_samples=60,
        phantom_test=40, partition="iid", corrupted_sites=0,
    )  # fmt: skip
    state = initial(task)
    training = LocalTraining(batch_size=1000, criterion=criterion, prior_strength=strength)
    reply = worker(training, task=task).perform(request("train", state))
    assert reply.status == "ok", reply.reason
    data = task.open_site("site-1", {})
    ((images, labels),) = data.batches("training", batch_size=1000)
    counts = data.class_counts("training").tolist()
    assert len(set(counts)) > 1
    model = task.build_model()
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model.train()(images)
    losses = [naive_criterion(criterion, tau, z, int(y), counts) for z, y in zip(logits, labels, strict=True)]
    assert reply.stats["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


# ------------------------------------------------------------------------------------------------ steps, not epochs

HALVES = [LocalTraining, SharpnessAwareTraining, RescueTraining, FairProximalTraining]
CLASSES = {**LONG_TAILED, "partition": "iid", "projector_dim": 96}


@pytest.mark.parametrize("half", HALVES, ids=lambda h: h.__name__)
@pytest.mark.parametrize("steps", [2, 4, 9])  # less than a pass, one, two and a bit
def test_the_same_number_of_steps_whatever_the_data(worker, half, steps):
    """Check batches of cut-off epochs; every method counts a step once, and knows which images it sees."""
    seen = []

    class Watched(half):
        def step(self, run, model, optimizer, closure):
            seen.append((run.epoch, list(run.batch)))
            return super().step(run, model, optimizer, closure)

    task = ClassificationTask(**CLASSES)
    here = worker(Watched(batch_size=10, local_steps=steps), task=task)
    told = {"search_distance": 0.05, "rescue_factor": True, "mean_loss": 1.0}
    reply = here.perform(request("train", initial(task), 1, directives=told))
    assert reply.status == "ok", reply.reason
    count = reply.num_samples
    assert math.ceil(count / 10) == 4
    assert reply.num_steps == len(seen) == steps
    assert len(reply.stats["epoch_losses"]) == math.ceil(steps / 4)
    data, expected = here.task.open_site("site-1", {}), []
    for number in range(3):
        order = data.order("training", round_seed(0, "site-1", 1) + number)
        expected += [(number, order[start : start + 10]) for start in range(0, count, 10)]
    assert seen == expected[:steps]
    counters = {int(t) for n, t in here.network.model.state_dict().items() if n.endswith("num_batches_tracked")}
    assert steps in counters


def test_steps_that_make_whole_passes_are_epochs(worker):
    """Check equality bit by bit, with moments and losses; the last pass's loss is of its own batches."""
    state = initial()
    epochs = worker(LocalTraining(batch_size=4, local_epochs=2), "a").perform(request("train", state))
    assert epochs.num_steps % 2 == 0
    steps = worker(LocalTraining(batch_size=4, local_steps=epochs.num_steps), "b").perform(request("train", state))
    assert same(steps.update, epochs.update)
    assert steps.stats["epoch_losses"] == epochs.stats["epoch_losses"]
    first = worker(LocalTraining(batch_size=4, local_steps=1), "c").perform(request("train", state))
    assert first.stats["epoch_losses"] == [first.stats["train_loss"]]
    assert first.stats["train_loss"] != epochs.stats["epoch_losses"][0]
    assert rate(worker(LocalTraining(batch_size=4, local_steps=1), "d").training, 1, 4) == 1e-3


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(ValueError, match="local_steps=3 and local_epochs=2 exclude"):
        LocalTraining(local_steps=3, local_epochs=2)
    for method in ("fed_avg", "bsm_fl", "fed_ism"):  # whose jobs have epochs of their own
        for small in (True, False):
            training = make_plan(method, settings={"local_steps": 3}, small=small).training
            assert (training.local_steps, training.local_epochs) == (3, 1)
    with pytest.raises(ValueError, match="local_steps=3 and local_epochs=1 exclude"):
        make_plan("fed_avg", settings={"local_steps": 3, "local_epochs": 1})


def test_the_loss_of_fedmrl_is_of_all_steps(worker):
    """Check a last pass that may be one batch long."""
    here = worker(FairProximalTraining(batch_size=10, local_steps=5, mu=0.0), task=ClassificationTask(**CLASSES))
    reply = here.perform(request("train", initial(here.task)))
    whole, cut = reply.stats["epoch_losses"]
    assert reply.report["train_loss"] == pytest.approx(
        (reply.num_samples * whole + 10 * cut) / (reply.num_samples + 10)
    )


# ------------------------------------------------------------------------------------------------ the hooks


def hooks() -> list[str]:
    """Return the hooks that a half may override: public members of the base that are no settings."""
    return sorted(n for n in vars(LocalTraining) if not n.startswith("_") and n not in field_names(LocalTraining))


def test_twelve_hooks_and_each_has_two_users() -> None:
    """Check also that each hook has two methods; a feature of one method is a part, a mix-in or a function."""
    assert len(hooks()) <= 12
    halves: list[type] = [ReportsScore, ClassifierRetraining, *(method.training for method in all_methods().values())]
    classes = {base for half in halves for base in half.__mro__ if base is not LocalTraining}
    users = {hook: {cls.__name__ for cls in classes if hook in vars(cls)} for hook in hooks()}
    assert {hook: names for hook, names in users.items() if len(names) < 2} == {}


def test_the_documentation_lists_the_hooks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    section = page.partition("### The hooks of a training")[2].partition("\n#")[0]
    assert sorted(re.findall(r"^\| `(\w+)", section, re.MULTILINE)) == hooks()


def test_an_anchor_is_refused_by_a_training_without_a_report_about_it(worker) -> None:
    task = small_task()
    here, state = worker(LocalTraining(batch_size=4), "a", task=task), initial(task)
    assert here.perform(request("train", state)).status == "ok"
    reply = here.perform(request("anchor", state))
    assert (reply.status, reply.update) == ("failed", None)
    assert "LocalTraining cannot compare the local model" in reply.reason
    assert "choose the training that belongs to the rule" in reply.reason
