"""Test a training script with FLARE's Client API and ours; FLARE itself is in ``tests/e2e/test_own_script.py``."""

from __future__ import annotations

import copy
import difflib
import json
import re
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fairflare import client
from fairflare.base.checks import MAX_REASON
from fairflare.data.datalist import DataError
from fairflare.exchange.messages import Message, clean_meta, clean_state, encode_task
from fairflare.federation.plan.plan import Script
from fairflare.federation.site.script import describe_training
from fairflare.flare import client_api
from fairflare.flare.export.job import script_executor
from fairflare.flare.messages.wire import META_KEY, TRAINING_KEY, decode_model, encode_model
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_lwr import LayerSimilarityReport
from fairflare.methods.fed_prox import ProximalTraining
from fairflare.recipes import ScriptRecipe
from fairflare.tasks.scripts import ScriptTask
from tests.federation.test_script import Net, batches
from tests.methods.support import request
from tests.tiny import metric_values

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STATE = clean_state(Net().state_dict())


class Flare:
    """Stand in for FLARE's Client API, with tasks to come and the answers so far."""

    def __init__(self, tasks: list[tuple[str, FLModel]]) -> None:
        self.tasks, self.sent = tasks, []
        self.current: tuple[str, FLModel] | None = None
        self.started = False

    def init(self) -> None:
        self.started = True

    def get_site_name(self) -> str:
        if not self.started:
            raise RuntimeError("APIContext is None")
        return "site-1"

    def is_running(self) -> bool:
        if self.current is None and self.tasks:
            self.current = self.tasks.pop(0)
        return self.current is not None

    def receive(self) -> FLModel:
        assert self.current is not None
        return self.current[1]

    def get_task_name(self) -> str:
        assert self.current is not None
        return self.current[0]

    def send(self, model: FLModel) -> None:
        assert model.params is not None or model.metrics is not None  # what FLARE wants
        self.sent.append((self.get_task_name(), decode_model(model)))
        self.current = None


TASK = ScriptTask(model="own.Net", metrics={"recall_tumour": {"higher_is_better": True}})


def asked(name: str, training: LocalTraining | None, current_round: int = 0, **more: Any) -> tuple[str, FLModel]:
    message = encode_task(request(name, STATE, current_round, **more))
    if training is not None:
        message.meta[TRAINING_KEY] = clean_meta(describe_training(training, TASK))
    return name, encode_model(message, 3)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a temporary folder: a script that did not come with a job keeps its state in the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def federation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def made(*tasks: tuple[str, FLModel], **more: Any) -> tuple[Flare, client.Site, torch.nn.Module]:
        flare = Flare(list(tasks))
        for name in ("init", "get_site_name", "is_running", "receive", "get_task_name", "send"):
            monkeypatch.setattr(client_api.flare, name, getattr(flare, name))
        model = Net()
        site = client.Site(
            model, torch.nn.CrossEntropyLoss(), batches(), batches(8), batches(8),
            **{"metrics": lambda m, b: 0.5, "classes": 2, "folder": tmp_path, **more},
        )  # fmt: skip
        return flare, site, model

    return made


def test_every_task_of_two_rounds_is_answered(federation: Any) -> None:
    lwr = LayerSimilarityReport()
    tasks = [asked(name, lwr, number) for number in (0, 1) for name in ("train", "anchor")]
    flare, site, model = federation(*tasks, asked("validate", lwr, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for epoch in site.epochs(2):
        seen.append(epoch)
        for inputs, targets in batches():
            optimizer.zero_grad()
            site.loss(inputs, targets).backward()
            site.step(optimizer)
    assert seen == [0, 1, 0, 1]
    assert [name for name, _ in flare.sent] == ["train", "anchor", "train", "anchor", "validate"]
    for name, answer in flare.sent:
        assert answer.meta["status"] == "ok", answer.meta
        assert answer.is_update is (name == "train")
    assert flare.sent[1][1].meta["report"]["layers"] == ["body", "head"]
    assert flare.sent[0][1].meta["num_steps"] == 6
    assert len(flare.sent[0][1].meta["stats"]["epoch_losses"]) == 2
    assert metric_values(flare.sent[4][1].metrics) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"classes": 1}, r"targets must lie in \[0, 0\] for classes=1"),
        ({"classes": [5]}, r"^classes.* got \[5\]$"),
        ({"prior": torch.nn.ReLU()}, "prior network must have an .* width"),
    ],
)
def test_the_server_learns_why_a_script_could_not_begin(
    wrong: dict[str, Any], told: str, federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the error ends the script, and that until the job ends the answers have its sentence."""
    tasks = [asked(name, LocalTraining()) for name in ("check", "train")]
    seen: list[Any] = []
    send = Flare.send
    monkeypatch.setattr(Flare, "send", lambda self, model: (send(self, model), seen.append(decode_model(model))))
    with pytest.raises(DataError, match=told):
        federation(*tasks, **wrong)
    assert len(seen) == 2
    for answer in seen:
        assert answer.meta["status"] != "ok"
        assert re.search(told, answer.meta["reason"])
    with pytest.raises(DataError, match=told):  # the job is over: nobody to tell
        federation(**wrong)
    assert len(seen) == 2


@pytest.mark.parametrize(("named", "wanted"), [(None, "bal"), ("accuracy", "accuracy")])
def test_the_primary_metric_is_the_job_s_unless_the_script_names_one(
    named: str | None, wanted: str, federation: Any
) -> None:
    task = ScriptTask(model="own.Net", metric="bal", metrics={"bal": {"higher_is_better": True}})
    message = encode_task(request("validate", STATE, 0))
    message.meta[TRAINING_KEY] = clean_meta(describe_training(LocalTraining(), task))
    flare, site, _ = federation(
        ("validate", encode_model(message, 3)), **({} if named is None else {"primary_metric": named})
    )
    assert not site.receive()
    ((_, answer),) = flare.sent
    assert metric_values(answer.metrics) == {wanted: 0.5}, answer.meta


def test_the_longer_form(federation: Any) -> None:
    flare, site, model = federation(asked("train", LocalTraining()), asked("validate", LocalTraining(), 1))
    while site.receive():
        with torch.no_grad():
            model.body.weight += 1
        with pytest.raises(RuntimeError, match="round 0 is not answered yet"):
            site.receive()
        site.send()
    assert flare.sent[0][1].params["body.weight"].allclose(torch.ones(3, 4))
    assert flare.sent[0][1].meta["num_samples"] == 24
    with pytest.raises(RuntimeError, match="no round to answer"):
        site.send()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (asked("train", None), "make the job with ScriptRecipe"),
        (asked("dance", LocalTraining()), "unknown task 'dance'"),
        (asked("train", LocalTraining(), experiment="../up"), "train failed with ValueError"),
    ],
)
def test_what_cannot_be_done_is_answered_and_costs_one_task(federation: Any, task: Any, words: str) -> None:
    flare, site, model = federation(task, asked("train", LocalTraining(), 1))
    assert site.receive()
    with torch.no_grad():
        model.body.weight += 1
    site.send()
    assert [answer.meta["status"] for _, answer in flare.sent] == ["failed", "ok"]
    assert words in flare.sent[0][1].meta["reason"]


def test_another_version_is_said(federation: Any) -> None:
    name, model = asked("train", LocalTraining())
    model.meta[META_KEY]["version"] = "9.9.9"
    flare, site, _ = federation((name, model))
    assert not site.receive()
    assert "the server 9.9.9; install the same version" in flare.sent[0][1].meta["reason"]


def test_behind_another_controller_the_script_ends_with_a_sentence(federation: Any) -> None:
    _, site, _ = federation(("train", FLModel(params=STATE, current_round=0)))
    with pytest.raises(RuntimeError, match="runs none of FairFlare's methods"):
        site.receive()


def test_metrics_by_class_stay_at_home(federation: Any) -> None:
    tasks = asked("train", LocalTraining()), asked("validate", LocalTraining(), 1)
    found = {"accuracy": 0.5, "recall_tumour": 0.1, "loss": 2.0}
    flare, site, model = federation(*tasks, metrics=lambda m, b: found, metrics_by_class=False)
    assert site.receive()
    with torch.no_grad():
        model.body.weight += 1
    site.send()
    assert not site.receive()
    for _, answer in flare.sent:
        assert metric_values(answer.metrics) == {"accuracy": 0.5, "loss": 2.0}


@pytest.mark.parametrize("training", [LocalTraining(), ProximalTraining(mu=0.1)], ids=["plain", "own loss"])
def test_a_loop_that_is_spent_is_no_training(
    training: LocalTraining, federation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Check a loop that goes through its batches once, as a Trainer with max_epochs or an iterator does."""
    flare, site, model = federation(*(asked("train", training, number) for number in range(3)))
    optimizer, once = torch.optim.SGD(model.parameters(), lr=0.1), iter(batches())
    while site.receive():
        for inputs, targets in once:
            optimizer.zero_grad()
            site.loss(inputs, targets).backward()
            optimizer.step()
        site.send()
    statuses = [answer.meta["status"] for _, answer in flare.sent]
    assert statuses == ["ok", "failed", "failed"]
    for number, (_, answer) in enumerate(flare.sent[1:], 1):
        reason = f"site 'site-1': it sent back the model that it received in round {number}, and does not count as"
        assert answer.meta["reason"].startswith(reason)
        assert "make a new one" in answer.meta["reason"]
        assert len(answer.meta["reason"]) <= MAX_REASON
        assert answer.params is None
        assert any(reason in record.message and record.levelname == "WARNING" for record in caplog.records)


def test_an_optimizer_of_another_model_is_noticed(federation: Any) -> None:
    flare, site, model = federation(asked("train", LocalTraining()))
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for _ in site.epochs(1):
        for inputs, targets in batches():
            site.loss(inputs, targets).backward()
            other.step()
    assert "the optimizer has this model's parameters" in flare.sent[0][1].meta["reason"]


def test_statistics_of_a_batch_norm_alone_are_no_training(federation: Any) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    name, task = asked("train", LocalTraining())
    task.params = clean_state(model.state_dict())
    flare, _, _ = federation((name, task))
    site = client.Site(
        model, torch.nn.CrossEntropyLoss(), batches(), batches(8), batches(8), metrics=lambda m, b: 0.5, classes=2
    )
    for _ in site.epochs(1):
        model(batches()[0][0])
    assert float(model[0].num_batches_tracked) > 0
    assert "sent back the model that it received" in flare.sent[0][1].meta["reason"]


def test_counted_steps_at_a_learning_rate_of_zero_are_a_training(federation: Any) -> None:
    """Check that the site reports it; the server's warning is in tests/federation/test_collector.py."""
    flare, site, model = federation(asked("train", LocalTraining()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in site.epochs(1):
        for inputs, targets in batches():
            site.loss(inputs, targets).backward()
            site.step(optimizer)
    assert (flare.sent[0][1].meta["status"], flare.sent[0][1].meta["num_steps"]) == ("ok", 3)


def test_with_report_goes_on_as_before() -> None:
    model = client.with_report(FLModel(params=STATE), {"sharpness": 1.0}, num_samples=3)
    message: Message = decode_model(model)
    assert message.meta["report"] == {"sharpness": 1.0}


# ------------------------------------------------------------------------------------------------ examples and jobs


def changed(plain: str, other: str) -> int:
    """Count lines that a user has to change: the longer side of a replaced block, without empty lines and docstring."""
    first, second = ([line for line in text.splitlines()[1:] if line.strip()] for text in (plain, other))
    codes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


@pytest.mark.parametrize(("name", "lines"), [("train_fair.py", 6), ("train_fair_mas.py", 7)])
def test_examples_differ_from_the_plain_script_in_at_most_eight_lines(name: str, lines: int) -> None:
    text = (EXAMPLES / name).read_text()
    assert changed((EXAMPLES / "train.py").read_text(), text) == lines <= 8
    assert f"{'six' if lines == 6 else 'seven'} lines of train.py differ" in text.splitlines()[0]


def test_counting_of_changed_lines() -> None:
    assert changed('"""x"""\na\nb\nc\n', '"""y"""\na\n\nB\nB2\nc\nd\n') == 3
    assert changed('"""x"""\na\nb\n', '"""x"""\nb\n') == 1


def config(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "app" / "config" / f"config_fed_{name}.json").read_text())


def test_the_job_has_flares_executor_and_the_script(tmp_path: Path) -> None:
    recipe = ScriptRecipe(
        "fed_lwr", train_script=EXAMPLES / "train_fair.py", model="Net", sites=2, settings={"preset": "authors"}
    )
    recipe.export(str(tmp_path))
    job = tmp_path / "fed_lwr"
    assert sorted(p.name for p in (job / "app" / "custom").iterdir()) == ["script_task.py", "train_fair.py"]
    (entry,) = config(job, "client")["executors"]
    assert entry["tasks"] == ["check", "train", "anchor", "norms", "validate", "keys", "mask", "release"]
    assert entry["executor"]["path"] == "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
    arguments = config(job, "server")["workflows"][0]["args"]
    assert arguments["task"]["args"] == {
        "model": "train_fair.Net",
        "model_args": {},
        "metric": "accuracy",
        "metrics": {},
    }
    # A value of both halves is given once.
    assert arguments["rule"]["args"]["preset"] == arguments["training"]["args"]["preset"] == "authors"


def test_an_external_process_gets_the_command(tmp_path: Path) -> None:
    ScriptRecipe(
        "fed_avg", train_script=EXAMPLES / "train_fair.py", model="Net", sites=2, launch_external_process=True,
        script_args="--data '/my images'", command="python3 -u",
    ).export(str(tmp_path))  # fmt: skip
    arguments = config(tmp_path / "fed_avg", "client")["executors"][0]["executor"]["args"]
    assert arguments["command"] == ["python3", "-u", "custom/train_fair.py", "--data", "/my images"]
    assert arguments["execution_mode"] == "external_process"


def test_a_command_of_a_job_exported_on_windows_suits_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflare.flare.export.job.Path", PureWindowsPath)
    executor = script_executor(Script(Path("train_fair.py"), command="python3"), "bundle")
    assert vars(executor)["_command"] == ["python3", "custom/train_fair.py"]


def test_a_preinstalled_job_carries_no_code(tmp_path: Path) -> None:
    ScriptRecipe(
        "fed_avg", train_script="/opt/train.py", model="hospital.Net", sites=2, packaging="preinstalled"
    ).export(str(tmp_path))
    assert not (tmp_path / "fed_avg" / "app" / "custom").exists()
    arguments = config(tmp_path / "fed_avg", "client")["executors"][0]["executor"]["args"]
    assert arguments["task_script_path"] == "/opt/train.py"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"train_script": "no.py"}, "must be a Python file, got 'no.py'"),
        ({"settings": {"learning_rate": 0.1}}, "learning_rate: the script's own loop"),
        ({"settings": {"presett": "paper"}}, "has no setting 'presett'"),
        ({"model": "a b"}, "'module.Class', got 'train_fair.a b'"),
        ({"packaging": "preinstalled"}, "packaging 'preinstalled' carries no code"),
        ({"min_sites": 3}, "min_sites=3, but the job has 2"),
    ],
)
def test_recipes_that_cannot_work_say_why(more: dict[str, Any], words: str) -> None:
    script = "train_fair.py" if more.get("packaging") else EXAMPLES / "train_fair.py"
    with pytest.raises(ValueError, match=re.escape(words)):
        ScriptRecipe("fed_lwr", **{"train_script": script, "model": "Net", "sites": 2, **more})


def test_a_script_with_masks_of_some_structures(federation: Any) -> None:
    """Give a script's loss the annotated channels of outputs and masks, and nothing of other channels."""
    seen = []

    def loss(outputs: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        seen.append((outputs.shape[1], masks.shape[1]))
        return (outputs - masks).square().mean()

    masks = [(torch.ones(3, 4), torch.ones(3, 2, 5)), (torch.ones(3, 4), torch.ones(3, 2, 5))]
    flare, _, _ = federation(asked("train", LocalTraining()))
    net = torch.nn.Sequential(Net(), torch.nn.Unflatten(1, (2, 1)))
    name, task = asked("train", LocalTraining())
    task.params = clean_state(net.state_dict())
    flare.tasks = [(name, task)]
    site = client.Site(net, loss, masks, masks, masks, metrics=lambda m, b: 0.5, annotated=[1])
    assert site.known(torch.arange(6).reshape(1, 3, 2)).tolist() == [[[2, 3]]]
    for _ in site.epochs(1):
        for inputs, targets in masks:
            site.loss(inputs, targets).backward()
            with torch.no_grad():
                net[0].head.bias -= 1
            assert bool((net[0].head.weight.grad[0] == 0).all())
    assert set(seen) == {(1, 1)}
    assert flare.sent[0][1].meta["status"] == "ok", flare.sent[0][1].meta
