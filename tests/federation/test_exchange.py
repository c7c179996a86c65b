"""Test ``exchange``: frozen tensors stay, trained ones travel, and the model is the same to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fairflare.base.settings import field_names, values_of
from fairflare.exchange.sent_tensors import SentTensors, fingerprint
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.prediction.predictor import load_predictor
from fairflare.tasks.classification import ClassificationTask
from tests.federation.network import Run
from tests.methods.own import Plane, Sites
from tests.shapes import of_what_travels, one_each
from tests.tiny import FUNDUS, model_in, run_document

CLASSES = {**FUNDUS, "phantom_own_test": 20, "corrupted_sites": 0, "phantom_min_share": 0.0}
OWN: dict[str, dict[str, Any]] = {
    "fed_mrl": {"weighting.grid": [2, 2]},
    "fed_lwr_last_layer": {"only_layer": "encoder.layer4"},
    "fair_lora": {"phantom": "dermoscopy", "phantom_test": 64, "phantom_own_test": 64, "adapters.rank": 2},
    "creff": {"gradient_repeats": 1, "classifier_epochs": 5, "feature_steps": 5},
}
ENCODER = ("encoder.conv1", "encoder.bn1", "encoder.layer1", "encoder.layer2", "encoder.layer3")


FROZEN = re.compile(rf"({'|'.join(ENCODER)}).*conv\d(\.base_layer)?\.weight")


def half_frozen(model: nn.Module, encoder: tuple[str, ...] = ENCODER) -> nn.Module:
    """Freeze the encoder's parameters; its last norms stay in evaluation mode, the other norms go on counting."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(encoder))
    norms = [m for n, m in model.named_modules() if n.startswith(encoder) and isinstance(m, nn.BatchNorm2d)]
    for norm in norms[-2:]:
        norm.train = partial(_stays_still, norm)  # type: ignore[method-assign]
        norm.eval()
    return model


def _stays_still(norm: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(norm, False)


class FrozenClassifier(ClassificationTask):
    def build_model(self) -> nn.Module:
        return half_frozen(super().build_model())


def plan_of(method: str, exchange: str, task: type | None = None, **more: Any) -> Plan:
    settings = {**CLASSES, **OWN.get(method, {})}
    options = {"num_rounds": 2, "exchange": exchange, **more}
    found = make_plan(method, task="classification", sites=2, settings=settings, **options)
    cls = task or FrozenClassifier
    return replace(found, task=cls(**{n: getattr(found.task, n) for n in field_names(type(found.task))}))


def bytes_of(results: Path, phase: str) -> tuple[int, int]:
    phases = run_document(results / "results.json")["rounds"][1]["phases"]
    found = next(row for row in phases if row["name"] == phase)
    return found["bytes_out"], found["bytes_in"]


def figures(results: Path) -> Any:
    rounds = run_document(results / "results.json")["rounds"]
    keys = ("validation", "train", "site_weights", "reports", "values", "details")
    return [{key: _timeless(entry[key]) for key in keys} for entry in rounds]


def _timeless(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _timeless(inner) for key, inner in value.items() if key != "seconds"}


class Killed(Listener):
    """End the process silently when a round's model is made and not saved yet."""

    def __init__(self, current_round: int) -> None:
        self.left = current_round

    def aggregated(self, state: Any) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


#: Each server optimizer has a state of its own.
SHAPES = one_each(lambda method: (of_what_travels(method), method.rule.move))


@pytest.mark.many
@pytest.mark.parametrize("method", [*SHAPES, "fed_lwr_last_layer", "fed_mrl"])
def test_the_same_bits_of_every_shape_of_methods(method: str, tmp_path: Path) -> None:
    """Compare a run that sends what is trained, and is killed and resumed, with one that sends all."""
    whole, plan = run_local(plan_of(method, "all"), tmp_path / "all"), plan_of(method, "trainable", experiment="study")
    child = os.fork()
    if child == 0:
        run_local(plan, tmp_path / "trainable", listeners=[Killed(1)])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    part = run_local(plan, tmp_path / "trainable")
    assert run_document(part / "results.json")["info"]["resumed_at_round"] == 1
    every, sent = model_in(whole), model_in(part)
    assert 0 < len(sent) < len(every)
    assert {name for name in every if name not in sent} >= {n for n in every if FROZEN.fullmatch(n)}
    assert all(torch.equal(sent[name], every[name]) for name in sent)
    if not method.startswith(("fed_lwr", "fed_lf")):  # they have weights of the layers that travel, and of no others
        assert json.dumps(figures(whole)) == json.dumps(figures(part))
    with pytest.raises(ValueError, match="exchange: was 'trainable'"):
        run_local(replace(plan, run=replace(plan.run, exchange="all", num_rounds=4)), tmp_path / "trainable")


# ---------------------------------------------------------------------------------------------- which tensors


class Net(nn.Module):
    """Define a network with every kind of tensor that the rule must decide about."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
        self.table = nn.Module()
        self.table.register_buffer("index", torch.arange(5))
        self.head = parametrizations.spectral_norm(nn.Linear(4, 2))
        self.encoder.requires_grad_(False)
        self.encoder[2].train = partial(_stays_still, self.encoder[2])  # type: ignore[method-assign]


STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]
HEAD = [f"head.{name}" for name in ("bias", "parametrizations.weight.original")]
VECTORS = [f"head.parametrizations.weight.0.{name}" for name in ("_u", "_v")]
COUNTING = [f"encoder.1.{name}" for name in STATISTICS]


def test_trainable_is_what_training_changes() -> None:
    sent = SentTensors(Net(), "trainable")
    assert sorted(sent.names) == sorted(HEAD + VECTORS + COUNTING)
    assert sent.parameters == frozenset(HEAD)
    assert len(SentTensors(Net(), "all").names) == len(Net().state_dict())


def test_training_changes_nothing_else() -> None:
    """Compare the rule with the tensors that a step in torch changes."""
    torch.manual_seed(0)
    model = Net().train()
    sent, before = SentTensors(model, "trainable"), {n: t.clone() for n, t in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # the vectors follow the weight a step later
        model.head(model.encoder(torch.rand(4, 3, 8, 8)).mean((2, 3))).square().mean().backward()
        optimizer.step()
    after = model.state_dict()
    assert {n for n in after if not torch.equal(after[n], before[n])} == set(sent.names)
    sent.check_unchanged(before, after)
    with pytest.raises(ValueError, match=r"training changed 1 tensor.*'table.index'"):
        sent.check_unchanged(before, {**after, "table.index": after["table.index"] + 1})


def test_a_pattern_freezes_what_it_does_not_match() -> None:
    model = Net()
    model.encoder.requires_grad_(True)
    sent = SentTensors(model, r"^encoder\.0|table")
    assert sorted(sent.names) == sorted(["encoder.0.weight", "encoder.0.bias", "table.index", *COUNTING, *VECTORS])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == sent.parameters == {"encoder.0.weight", "encoder.0.bias"}


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ("nowhere", "exchange='nowhere' matches no tensor"),
        ("encoder", "every parameter that it matches .* frozen"),
        ("(", r"^exchange.* got '\('"),
        (" ", "it is empty"),
    ],
)
def test_what_cannot_be_is_refused(exchange: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SentTensors(Net(), exchange)


def test_everything_frozen_is_refused() -> None:
    with pytest.raises(ValueError, match="every parameter of the task's network"):
        SentTensors(Net().requires_grad_(False), "trainable")


def test_the_fingerprint_is_of_names_types_shapes_and_bytes() -> None:
    """Compare the fingerprint with hashlib over NumPy's bytes."""
    tensors = {"b": torch.tensor([[1.5, 2.0]]), "a": torch.tensor(3), "h": torch.tensor([1.0], dtype=torch.bfloat16)}
    digest = hashlib.sha256()
    for name, head in (("a", "torch.int64\0()"), ("b", "torch.float32\0(1, 2)")):
        digest.update(f"{name}\0{head}\0".encode() + tensors[name].numpy().tobytes())
    digest.update(b"h\0torch.bfloat16\0(1,)\0" + bytes([0x80, 0x3F]))
    assert fingerprint(tensors) == digest.hexdigest()
    others = [{**tensors, "a": torch.tensor(4)}, {**tensors, "b": tensors["b"].T}, {**tensors, "c": torch.tensor(3)}]
    assert len({fingerprint(one) for one in (tensors, *others)}) == 4


# ---------------------------------------------------------------------------------------------- a whole run


@pytest.mark.long
def test_what_travels_is_counted_and_the_file_says_what_is_missing(tmp_path: Path) -> None:
    plan = plan_of("fed_lwr", "trainable", num_rounds=2)
    results = run_local(plan, tmp_path / "run")
    sent = model_in(results)
    size = sum(tensor.nbytes for tensor in sent.values())
    assert bytes_of(results, "train") == (2 * size, 2 * size)
    assert bytes_of(results, "anchor") == (2 * size, 0)
    info = run_document(results / "results.json")["info"]
    network = seeded_network(plan)
    rest = {name: tensor for name, tensor in network.state_dict().items() if name not in sent}
    assert info["exchange"] == {
        "setting": "trainable", "seed": 0, "sent": len(sent), "tensors": len(network.state_dict()), "bytes": size,
        "fingerprint": fingerprint(rest),
    }  # fmt: skip
    assert info["model_bytes"] == sum(tensor.nbytes for tensor in network.state_dict().values())
    assert "frozen" not in json.dumps(info["config"])
    assert info["config"]["exchange"] == "trainable"
    record = run_document(results / "results.json")["rounds"][0]
    assert set(record["layers"]) == {name.rpartition(".")[0] for name in sent}


def seeded_network(plan: Plan) -> nn.Module:
    torch.manual_seed(plan.run.seed)
    return plan.task.build_model()


def test_predict_builds_what_the_file_lacks(tmp_path: Path) -> None:
    """Check that the network of ``fairflare predict`` is that of a run in which all tensors travelled."""
    file = tmp_path / "task.py"
    file.write_text("from tests.federation.test_exchange import FrozenClassifier\nclass Task(FrozenClassifier): ...\n")
    whole = run_local(plan_of("fed_avg", "all"), tmp_path / "all")
    part = run_local(plan_of("fed_avg", "trainable"), tmp_path / "trainable")
    torch.manual_seed(5)  # of no concern
    found = load_predictor(part.parent, "last", task_file=file).network.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model_in(whole).items())
    other = tmp_path / "other.py"
    other.write_text(
        "from tests.federation.test_exchange import FrozenClassifier\nclass Task(FrozenClassifier):\n"
        "    def build_model(self):\n        model = super().build_model()\n"
        "        model.encoder.conv1.weight.data.add_(1)\n        return model\n"
    )
    with pytest.raises(ValueError, match=r"the run exchanged \(trainable\)"):
        load_predictor(part.parent, "last", task_file=other)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fed_lwr_last_layer", {"only_layer": "encoder.conv1"}, "only_layer='encoder.conv1' names no"),
        ("fed_avg", {"norm_statistics": "recalibrated"}, "in a part .* that does not travel"),
        ("creff", {"exchange": "head"}, ""),
    ],
)
def test_a_method_that_cannot_says_so(method: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    options = {"exchange": "trainable", **settings}
    options.pop("only_layer", None)
    plan = plan_of(method, **options)
    if "only_layer" in settings:
        plan = replace(plan, rule=replace_rule(plan, settings))
    if not words:
        assert run_local(plan, tmp_path)  # what the server makes travels in any case
        return
    with pytest.raises((RuntimeError, ValueError), match=words):
        run_local(plan, tmp_path)
    assert not list(tmp_path.rglob("FL_global_model.pt"))


def replace_rule(plan: Plan, settings: dict[str, Any]) -> Any:
    found = values_of(plan.rule)
    return type(plan.rule)(**{**found["args"], **settings})


# ---------------------------------------------------------------------------------------------- another encoder


class HalfPlane(Plane):
    """Define a network whose first layer is frozen."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model


class Another(HalfPlane):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].bias.data[0] += 1e-6  # type: ignore[index,union-attr]
        return model


class Absent(HalfPlane):
    def build_model(self) -> nn.Module:
        raise FileNotFoundError(2, "No such file", "/secret/encoder.safetensors")


class Mixed(Sites):
    """Give one of the sites another task than the other sites."""

    other: Any = None

    def worker(self, site: str) -> SiteWorker:
        task = self.other if site == "site-2" and self.other is not None else self.task
        return SiteWorker(site, task, self.training, {}, self.folder / site, num_threads=1)


def mixed(folder: Path, other: Any, job: str = "run", **settings: Any) -> Run:
    they = Mixed(folder / "state", LocalTraining(batch_size=4), HalfPlane())
    they.other = other
    sites = ["site-1", "site-2", "site-3"]
    half = values_of(they.training)
    made = Run(
        folder, they, sites=sites, task=HalfPlane(), site_half=half, exchange="trainable", job=job,
        **{"num_rounds": 2, **settings},
    )  # fmt: skip
    made.net.ready = lambda site, message: they.perform(site, "check", message)
    return made


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Another, "that is not sent .* differs .*; give this"),
        (Absent, "FileNotFoundError.; give this site"),
    ],
)
def test_a_site_with_another_encoder_is_out_by_name(other: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"1 of 3 site.*'site-2': .*{words}"):
        mixed(tmp_path / "all", other())()
    run = mixed(tmp_path / "most", other(), require_all_sites=False)()
    for number in range(2):
        assert run.results["rounds"][number]["accepted"] == ["site-1", "site-3"]
        phase, reason = run.left_out(number)["site-2"]
        assert phase == "train"
        assert re.search(words, reason)
        assert "/secret" not in reason
    assert any("site-2" in text and re.search(words, text) for text in run.net.warned)


def test_it_is_out_in_a_run_that_goes_on(tmp_path: Path) -> None:
    common: dict[str, Any] = {"experiment": "study", "require_all_sites": False}
    first = mixed(tmp_path, None, "first", **common)
    assert "left_out" in first().results["rounds"][0]
    assert first.results["rounds"][1]["accepted"] == ["site-1", "site-2", "site-3"]
    second = mixed(tmp_path, Another(), "second", num_rounds=3, **common)()
    assert second.results["info"]["resumed_at_round"] == 2
    assert second.results["rounds"][2]["accepted"] == ["site-1", "site-3"]
    assert "differs from the server's" in second.left_out(2)["site-2"][1]


# ---------------------------------------------------------------------------------------------- the encoder's file


def encoder_file(path: Path, seed: int) -> str:
    """Write the encoder of another training to a file for all participants."""
    torch.manual_seed(seed)
    state = plan_of("fed_avg", "all").task.build_model().state_dict()
    torch.save({name: tensor for name, tensor in state.items() if name.startswith("encoder.")}, path)
    return str(path)


def fitted(exchange: str, **more: Any) -> Plan:
    """Freeze the encoder by a setting; every participant loads it from a file."""
    settings = {**CLASSES, "freeze": "encoder", "initial_keys": {}, **more.pop("settings", {})}
    options = {"sites": 3, "num_rounds": 2, "min_sites": 2, **more}
    return make_plan("fed_avg", task="classification", settings=settings, exchange=exchange, **options)


@pytest.mark.long
def test_each_participant_loads_the_encoder_from_a_file_of_its_own(tmp_path: Path) -> None:
    files = {name: encoder_file(tmp_path / f"{name}.pt", 7) for name in ("server", "site-1")}
    local = {"initial_weights": files["server"], "sites": {"site-1": {"initial_weights": files["site-1"]}}}
    whole = run_local(fitted("all"), tmp_path / "all", local)
    part = run_local(fitted("trainable"), tmp_path / "part", local)
    every, sent = model_in(whole), model_in(part)
    assert 0 < len(sent) < len(every)
    assert all(torch.equal(sent[name], every[name]) for name in sent)
    read = torch.load(files["server"], weights_only=True)
    assert all(torch.equal(tensor, read[name]) for name, tensor in every.items() if name in read)
    named = run_local(fitted("trainable", settings={"initial_weights": files["server"]}), tmp_path / "named")
    found = load_predictor(named.parent, "last").network.state_dict()  # the file that the job names is in its record
    assert all(torch.equal(tensor, found[name]) for name, tensor in every.items())
    with pytest.raises(ValueError, match="here they are not those of the run"):
        load_predictor(part.parent, "last")
    with pytest.raises((RuntimeError, ValueError), match="initial_ckpt changes tensors"):
        run_local(fitted("trainable", initial_ckpt=files["server"]), tmp_path / "carried")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "words"), [("wrong", "differs .*initial_weights"), ("absent", "ValueError.*initial_weights")]
)
def test_a_site_with_the_wrong_or_no_file_is_out_by_name(kind: str, words: str, tmp_path: Path) -> None:
    theirs = encoder_file(tmp_path / "wrong.pt", 8) if kind == "wrong" else str(tmp_path / "secret" / "absent.pt")
    right = encoder_file(tmp_path / "right.pt", 7)
    local = {"initial_weights": right, "sites": {"site-2": {"initial_weights": theirs}}}
    with pytest.raises(RuntimeError, match=rf"1 of 3 site.*'site-2': .*{words}") as told:
        run_local(fitted("trainable"), tmp_path / "all", local)
    assert "secret" not in str(told.value)
    results = run_document(run_local(fitted("trainable", require_all_sites=False), tmp_path / "most", local))
    assert [record["accepted"] for record in results["rounds"]] == [["site-1", "site-3"]] * 2
    assert re.search(words, results["rounds"][0]["left_out"][0]["reason"])
