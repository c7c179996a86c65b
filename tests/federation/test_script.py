"""Test a script's own loop against our training: the same bits, and errors cost the round only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fairflare.base.settings import build
from fairflare.exchange.messages import STATUS_FAILED, STATUS_OK, SiteReply, clean_meta, clean_state
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.script import ScriptSite, build_training, describe_training, needs
from fairflare.federation.site.worker import SiteWorker, round_seed
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import make_optimizer, rate
from fairflare.methods.base.rule import TwoPhase
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.fed_mrl import FairProximalTraining
from fairflare.methods.parts.group_sums import ByPeople
from fairflare.tasks.scripts import LoopTask, ScriptData
from tests.methods.support import request, same

TINY: dict[str, Any] = {
    "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom_samples": 150, "phantom_test": 80, "phantom_sites": 2,
    "corrupted_sites": 0, "batch_size": 8, "local_epochs": 2, "keep_optimizer_state": False, "augment": False,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bsm_fl": {"phantom": "dermoscopy7", "max_grad_norm": 0.1},
    "fed_lwr": {"cka_batch_size": 8},
    # Kept features are of other batches: other last bits.
    "fed_mas": {"phantom": "dermoscopy7", "cache_features": False, "projector_dim": 96},
}
TOLD: dict[str, dict[str, Any]] = {
    "fed_ism_plus_s": {"search_distance": 0.05},
    "fed_mas": {"rescue_factor": True},
    "fed_mrl": {"mu": {"site-1": 0.3}, "mean_loss": 1.2},
}
METHODS = (
    "fed_avg",
    "fed_prox",
    "fed_lwr",
    "fed_ism_plus_s",
    "fed_mas",
    "fed_mrl",
    "q_fed_avg",
    "fed_ce",
)


def plan_of(method: str) -> Plan:
    return make_plan(method, task="classification", sites=2, settings={**TINY, **OWN.get(method, {})})


def as_script(plan: Plan, folder: Path) -> tuple[ScriptSite, Any]:
    """Return the parts that a script has for the same images, and the images."""
    data = plan.task.open_site("site-1", {})
    size = plan.training.batch_size
    splits = {split: list(data.batches(split, batch_size=size)) for split in ("training", "validation", "test")}
    torch.manual_seed(7)
    model = plan.task.build_model()
    task = LoopTask(
        model,
        torch.nn.CrossEntropyLoss(),
        ScriptData(splits, data.class_counts("training").tolist()),
        lambda net, batches: plan.task.evaluate(net, batches, "cpu"),
        plan.task.primary_metric,
    )
    told = clean_meta(describe_training(plan.training, plan.task))
    task.told = told["metrics"]
    return ScriptSite("site-1", task, model, build_training(told), {}, folder), data


def train(site: ScriptSite, data: Any, training: LocalTraining, seed: int, *, told: bool = True) -> None:
    """Train as a hospital's own loop would, on our batches; ``told``: with the epoch's number."""
    site.model.train()
    optimizer = make_optimizer(training, site.model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = rate(training, 0, 3)
    for epoch in range(training.local_epochs):
        for inputs, targets in data.batches("training", batch_size=training.batch_size, shuffle_seed=seed + epoch):
            optimizer.zero_grad()
            loss = site.loss(inputs, targets, epoch if told else None)
            loss.backward()
            site.step(optimizer)


@pytest.mark.many
@pytest.mark.parametrize(("method", "told"), [*((m, True) for m in METHODS), ("fed_mas", False), ("fed_mrl", False)])
def test_a_script_gives_the_bits_of_our_executor(method: str, told: bool, tmp_path: Path) -> None:
    plan = plan_of(method)
    torch.manual_seed(0)
    state = clean_state(plan.task.build_model().state_dict())
    ours = SiteWorker("site-1", plan.task, plan.training, {"device": "cpu"}, tmp_path / "ours")
    site, data = as_script(plan, tmp_path / "script")
    tasks = [request("train", state, directives=TOLD.get(method, {}))]
    if isinstance(plan.rule, TwoPhase):
        other = {name: t + 0.01 * torch.ones_like(t) if t.is_floating_point() else t for name, t in state.items()}
        tasks.append(request("anchor", other))
    tasks.append(request("validate", state))
    for task in tasks:
        expected = ours.perform(task)
        assert expected.status == STATUS_OK, expected.reason
        found = site.begin(task)
        if task.name == "train":
            assert found is None, found
            train(site, data, plan.training, round_seed(0, "site-1", 0), told=told)
            found = site.finish()
        assert found is not None
        assert found.status == STATUS_OK, found.reason
        assert found.report == expected.report
        assert (task.name != "anchor") or len(found.report["cka"]) > 3
        assert found.metrics == [cell for cell in expected.metrics if cell.split in ("test", "validation")]
        assert same(found.update or {}, expected.update or {})
        assert (found.num_samples, found.num_steps) == (expected.num_samples, expected.num_steps)
        expected.stats.pop("seconds")
        found.stats.pop("seconds")
        expected.stats.pop("synthetic", None)  # a script does not say so
        found.stats.pop("synthetic", None)
        assert found.stats == expected.stats


# ------------------------------------------------------------------------------------------------ a script of its own


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 3)
        self.head = torch.nn.Linear(3, 2)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def batches(count: int = 24, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 4, generator=g)
    return list(zip(inputs.split(size), (torch.arange(count) % 2).split(size), strict=True))


def small(
    folder: Path, training: LocalTraining, *, metrics: Callable[[Any, Any], Any] | None = None, **more: Any
) -> ScriptSite:
    torch.manual_seed(0)
    model = Net()
    classes = more.pop("classes", 2)
    splits = {"training": more.pop("images", None) or batches(), "validation": batches(8), "test": batches(8), **more}
    task = LoopTask(model, torch.nn.CrossEntropyLoss(), ScriptData(splits, classes), metrics or (lambda m, b: 0.5))
    return ScriptSite("site-1", task, model, training, {}, folder)


def start(site: ScriptSite, current_round: int = 0, **more: Any) -> SiteReply | None:
    torch.manual_seed(1)
    return site.begin(request("train", clean_state(Net().state_dict()), current_round, **more))


def loop(site: ScriptSite, *, loss: bool = True, step: bool = True, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(site.model.parameters(), lr=rate)
    for inputs, targets in batches():
        optimizer.zero_grad()
        own = torch.nn.functional.cross_entropy(site.model(inputs), targets)
        (site.loss(inputs, targets) if loss else own).backward()
        site.step(optimizer) if step else optimizer.step()


def test_a_plain_method_asks_nothing_of_the_loop(tmp_path: Path) -> None:
    site = small(tmp_path, LocalTraining())
    assert start(site) is None
    loop(site, loss=False, step=False)
    reply = site.finish()
    assert (reply.status, reply.num_samples, reply.num_steps) == (STATUS_OK, 24, None)
    assert "train_loss" not in reply.stats
    assert any(bool(t.any()) for t in (reply.update or {}).values())


def test_a_script_that_made_no_step_sends_nothing(tmp_path: Path) -> None:
    site = small(tmp_path, LocalTraining())
    assert start(site) is None
    reply = site.finish()
    assert (reply.status, reply.update) == (STATUS_FAILED, None)
    assert "it sent back the model that it received in round 0" in reply.reason
    assert "see that its loop runs in every round" in reply.reason
    assert start(site, 1) is None
    site.model.body.weight.data[1, 1] += 1e-3  # neither the first nor the last number: one is enough
    assert site.finish().status == STATUS_OK


@pytest.mark.parametrize(
    ("training", "loss", "step", "words"),
    [
        (FairProximalTraining(), False, False, "take site.loss(inputs, targets) in the script"),
        (LocalTraining(criterion="balanced_softmax"), False, False, "take site.loss(inputs, targets)"),
        (SharpnessAwareTraining(), True, False, "0 of 3 steps with SharpnessAwareTraining"),
        (LocalTraining(max_grad_norm=1.0), True, False, "for optimizer.step(), site.step(optimizer)"),
    ],
)
def test_a_loop_without_the_methods_part_is_refused(
    training: LocalTraining, loss: bool, step: bool, words: str, tmp_path: Path
) -> None:
    site = small(tmp_path, training)
    assert start(site, directives={"search_distance": 0.05}) is None
    loop(site, loss=loss, step=step)
    reply = site.finish()
    assert reply.status == STATUS_FAILED
    assert words in reply.reason
    assert reply.update is None
    assert start(site, 1, directives={"search_distance": 0.05}) is None  # and goes on
    loop(site)
    assert site.finish().status == STATUS_OK


def test_the_page_says_which_lines_a_method_needs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_script.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines() if line.startswith("|")]
    families = {
        "FedAvg, FedAvgM, FedAWA, FedHEAL, FedMGDA+, FedOpt, Fed-LWR and its ablations": (
            "fed_avg",
            "fed_avg_m",
            "fed_awa",
            "fed_heal",
            "fed_mgda",
            "fed_opt",
            "fed_lwr",
            "fed_lwr_cosine",
            "fed_lwr_last_layer",
        ),
        "FedDyn, FedProx, FlexFair, Group DRO": ("fed_dyn", "fed_prox", "flex_fair", "group_dro"),
        "q-FedAvg, FedCE, FedLF, FedPID, loss weights": ("q_fed_avg", "fed_ce", "fed_lf", "fed_pid", "loss_weights"),
        "AFL, FairFed, FedGA": ("afl", "fair_fed", "fed_ga"),
        "FedNova": ("fed_nova",),
        "SCAFFOLD": ("scaffold",),
        "Solo, FedBN": ("solo", "fed_bn"),
        "FedMRL": ("fed_mrl",),
        "FedISM, FedISM+, FedLESAM": ("fed_ism", "fed_ism_plus_s", "fed_ism_plus_l", "fed_lesam"),
        "BSM-FL, LA, FedLC": ("bsm_fl", "logit_adjustment", "fed_lc"),
        "MOON": ("moon",),
        "CReFF": ("creff",),
        "FedAvg + cRT": ("crt",),
        "LDAM-DRW": ("ldam",),
        "FedRDN": ("fed_rdn",),
        "Fed-MAS, BSM + KD": ("fed_mas", "bsm_kd"),
    }
    said = {name: (bool(loss), bool(step)) for title, loss, step in rows for name in families.get(title, ())}
    built = {m.name: build(m.training, m.site) for m in all_methods().values()}
    own = {name for name, half in built.items() if half.home.model or isinstance(half, ByPeople)}  # refused
    halves = {name: half for name, half in built.items() if name not in own}
    assert said == {name: needs(half) for name, half in halves.items()}


def test_a_loss_that_is_not_finite_costs_the_round(tmp_path: Path) -> None:
    site = small(tmp_path, LocalTraining())
    assert start(site) is None
    before = clean_state(site.model.state_dict())
    inputs = torch.full((8, 4), 1e30)
    site.model.head.weight.data.mul_(1e30)
    loss = site.loss(inputs, torch.zeros(8, dtype=torch.int64))
    loss.backward()
    assert all(not bool(p.grad.any()) for p in site.model.parameters())  # the script's optimizer stays clean
    reply = site.finish()
    assert reply.status == STATUS_FAILED
    assert "the training loss became" in reply.reason
    assert "round 0, epoch 0, step 0; lower the script's learning rate" in reply.reason
    assert start(site, 1) is None
    assert same(before, clean_state(site.model.state_dict()))


def test_a_model_that_is_not_finite_is_not_sent(tmp_path: Path) -> None:
    site = small(tmp_path, LocalTraining())
    assert start(site) is None
    site.model.body.weight.data[0, 0] = float("nan")
    reply = site.finish()
    assert reply.status == STATUS_FAILED
    assert "tensor 'body.weight' is not finite after training" in reply.reason


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"metrics": lambda m, b: 1.5}, "metric 'accuracy' must lie in [0, 1], got 1.5; declare whether"),
        ({"metrics": lambda m, b: {"dice": 0.5}}, "metrics must give 'accuracy'"),
        ({"metrics": lambda m, b: "good"}, "metric 'accuracy' must be a number, got 'good'"),
        ({"images": [(torch.zeros(2, 4),)], "classes": None}, "must be (inputs, targets)"),
        ({"validation": [{"x": 1}], "metrics": lambda m, b: list(b) and 0.5}, ""),
    ],
)
def test_values_of_a_script_that_cannot_be_used(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    site = small(tmp_path, SharpnessAwareTraining(), **more)
    reply = start(site, directives={"search_distance": 0.05})
    if not words:  # the script's own function may read what it likes
        assert reply is None
        return
    assert reply is not None
    assert reply.status == STATUS_FAILED
    assert words in reply.reason


def test_a_criterion_by_class_needs_the_classes(tmp_path: Path) -> None:
    reply = start(small(tmp_path, LocalTraining(criterion="logit_adjusted"), classes=None))
    assert reply is not None
    assert "client.Site(..., classes=N)" in reply.reason


def test_a_network_without_a_projection_head_is_told_what_fed_mas_needs(tmp_path: Path) -> None:
    reply = start(small(tmp_path, all_methods()["fed_mas"].training()), directives={"rescue_factor": True})
    assert reply is not None
    assert "a module projector with 96 outputs" in reply.reason


def test_an_unknown_task_is_answered(tmp_path: Path) -> None:
    reply = small(tmp_path, LocalTraining()).begin(request("dance", {}))
    assert reply is not None
    assert reply.status == STATUS_FAILED
    assert "unknown task 'dance'" in reply.reason


@pytest.mark.parametrize(
    ("splits", "classes", "words"),
    [
        ({"training": iter(batches())}, None, "training must be a DataLoader or a list"),
        ({"training": batches()}, 1, "targets must lie in [0, 0]"),
        ({"training": [(torch.zeros(2, 4), torch.zeros(2, 3, 3))]}, 2, "targets must be one class number"),
        ({"training": batches()}, [3], "classes must be a number or .*of each"),
    ],
)
def test_data_of_a_script_that_cannot_be_used(splits: Any, classes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        ScriptData(splits, classes)


def test_a_loader_is_read_whole_and_in_order_without_its_random_state() -> None:
    images = torch.arange(10.0)[:, None]
    loader = DataLoader(TensorDataset(images, torch.arange(10) % 3), batch_size=4, shuffle=True, drop_last=True)
    data = ScriptData({"training": loader}, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = torch.cat([inputs for inputs, _ in data.batches("training", batch_size=3)])
    assert torch.equal(found, images)
    assert data.num_samples("training") == 10
    assert data.class_counts("training").tolist() == [4, 3, 3]
    shuffled = torch.cat([inputs for inputs, _ in data.batches("training", batch_size=3, shuffle_seed=1)])
    assert torch.equal(shuffled[:, 0].long(), torch.tensor(data.order("training", 1)))
    assert not torch.equal(shuffled, images)
    assert torch.equal(before, torch.get_rng_state())


def test_a_source_begins_with_its_first_batch() -> None:
    """Hold that ``iter`` starts no loader, which draws a number: a resumed run sets torch's random state after it."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(2, 1), torch.tensor([0, 1]))])

    data = ScriptData({"training": DataLoader(Stream(), batch_size=None)})
    before = torch.get_rng_state()
    batches = iter(data.batches("training", batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)
    next(batches)
    assert not torch.equal(torch.get_rng_state(), before)


def test_batches_may_be_dicts() -> None:
    data = ScriptData({"training": [{"image": torch.ones(2, 1), "label": torch.tensor([0, 1])}]}, 2)
    ((inputs, targets),) = data.batches("training", batch_size=8)
    assert inputs.shape == (2, 1)
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (None, "make the job with ScriptRecipe"),
        ({"kind": "os.system", "settings": {}}, "which is not known here"),
        ({"kind": "LocalTraining", "settings": {"learning_rate": -1}}, "learning_rate must be a number > 0"),
    ],
)
def test_only_a_methods_site_half_can_be_told(told: Any, words: str) -> None:
    with pytest.raises(SiteError, match=words):
        build_training(told)


def test_losses_of_samples_are_those_of_the_criterion(tmp_path: Path) -> None:
    outputs, targets = torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1])
    for criterion in (
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(reduction="none"),
        lambda out, wanted: torch.nn.functional.cross_entropy(out, wanted),
    ):
        task = LoopTask(Net(), criterion, ScriptData({}), lambda m, b: 0.5)
        assert float(task.sample_losses(outputs, targets).mean()) == pytest.approx(float(task.loss(outputs, targets)))
        assert task.sample_losses(outputs, targets).shape == (5,)


def test_precision_is_the_scripts_own(tmp_path: Path) -> None:
    """Check that a setting of our training loop is refused where a script has its own loop."""
    plan = make_plan("fed_avg", task="classification", sites=2, settings={**TINY, "precision": "bf16"})
    site, _ = as_script(plan, tmp_path)
    for name in ("check", "train"):
        found = site.begin(request(name, clean_state(plan.task.build_model().state_dict())))
        assert found is not None
        assert found.status == STATUS_FAILED
        assert found.reason == (
            "site 'site-1': bf16: precision, channels_last, compile and deterministic are of FairFlare's own training "
            "loop; take them out of the job or the site's file, and do it in the script"
        )


class Watched(SharpnessAwareTraining):
    """Look at every batch twice, and record which look a loss was told to be."""

    def loss(self, run: Any, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.append(run.first_pass)
        return super().loss(run, model, inputs, targets)


def test_the_second_look_at_a_batch_is_told_apart(tmp_path: Path) -> None:
    """Check that Fed-MAS's distances are of the first look alone; a user's own method may have both looks."""
    training = Watched(optimizer="sgd")
    training.seen = []
    site = small(tmp_path, training)
    assert start(site) is None
    loop(site)
    assert site.finish().status == STATUS_OK
    assert training.seen == [True, False] * len(batches())
