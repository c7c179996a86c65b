"""Test a MONAI bundle as the task: the parts that are read, refusals, and the files that a job carries."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.disk.bundle_files import bundle_checksum, bundle_files, copy_bundle, group_digits
from fairflare.federation.plan.plan import make_plan
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.local_loop import make_optimizer
from fairflare.methods.base.training import LocalTraining
from fairflare.prediction.recall import recall
from fairflare.tasks.bundle import MonaiBundleTask
from tests.bundles import train_config, write_bundle

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[dict[str, Any]], Any]


def plan(folder: Path, method: str = "fed_avg", **options: Any) -> Any:
    return make_plan(method, monai_bundle=folder, **{"sites": 2, **options})


def changed(folder: Path, change: Change) -> Path:
    config = train_config()
    change(config)
    return write_bundle(folder, config)


def without(*keys: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        for key in keys:
            *steps, last = key.split("#")
            inside = config
            for step in steps:
                inside = inside[step]
            del inside[last]

    return change


def with_value(key: str, value: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        *steps, last = key.split("#")
        for step in steps:
            config = config[step]
        config[last] = value

    return change


# ------------------------------------------------------------------------------------------------ what is taken


def test_network_and_training_are_the_bundles(tmp_path: Path) -> None:
    found = plan(write_bundle(tmp_path / "b"), rounds := "fed_avg", settings={"learning_rate": 0.5})
    assert rounds == found.method.name
    training = found.training
    assert (training.optimizer, training.batch_size, training.augment) == ("task", 2, True)
    assert training.learning_rate == 0.5  # the user's goes before
    assert "learning_rate" not in " ".join(found.prescribed)
    first, second = found.task.build_model(), found.task.build_model()
    assert first(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 2, 16, 16, 16)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(3)
    one = found.task.build_model()
    torch.manual_seed(3)
    assert all(map(torch.equal, one.state_dict().values(), found.task.build_model().state_dict().values()))
    assert [metric.name for metric in found.task.declared_metrics()] == [
        "dice", "loss", "dice_organ", "dice_lesion", "dice_<class>",
    ]  # fmt: skip


def test_what_the_method_has_otherwise_is_said(tmp_path: Path) -> None:
    said = " ".join(plan(write_bundle(tmp_path / "b"), "fed_mrl").prescribed)
    assert "optimizer='task' (the method's own: 'sgd')" in said


def test_train_like_another_method_is_the_bundles_training(tmp_path: Path) -> None:
    found = plan(write_bundle(tmp_path / "b"), "q_fed_avg", train_like="fed_ism")
    assert (found.training.learning_rate, found.training.batch_size) == (0.01, 2)


ADAM = {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": "@rate"}


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ({"weight_decay": 0.1, "betas": (0.8, 0.9), "amsgrad": True, "eps": 1e-4}, torch.optim.Adam),
        ({"_target_": "torch.optim.AdamW"}, torch.optim.AdamW),
        ({"_target_": "torch.optim.SGD", "momentum": 0.8}, torch.optim.SGD),
    ],
)
def test_its_optimizer(tmp_path: Path, optimizer: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    def change(config: dict[str, Any]) -> None:
        config |= {"rate": 0.02, "optimizer": {**ADAM, **optimizer}}

    found = plan(changed(tmp_path / "b", change))
    assert (found.training.optimizer, found.training.learning_rate) == ("task", 0.02)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    made = make_optimizer(found.training, parameters, found.task)
    said = {name: value for name, value in optimizer.items() if name != "_target_"}
    assert type(made) is kind
    assert made.defaults == kind(parameters, lr=0.02, **said).defaults  # type: ignore[call-arg]


def test_an_optimizer_of_its_own_is_made_of_its_arguments(tmp_path: Path) -> None:
    from monai.optimizers import Novograd

    novograd = {**ADAM, "_target_": "Novograd", "lr": 0.02, "weight_decay": 0.03, "amsgrad": True}
    folder = changed(tmp_path / "b", with_value("optimizer", novograd))
    found = plan(folder)
    model = found.task.build_model()
    made = make_optimizer(found.training, model.parameters(), found.task)
    assert isinstance(made, Novograd)
    assert made.defaults["weight_decay"] == 0.03
    assert made.defaults["amsgrad"] is True
    mine = {id(p) for group in made.param_groups for p in group["params"]}
    assert mine == {id(p) for p in model.parameters()}
    assert plan(folder, settings={"optimizer": "sgd"}).training.optimizer == "sgd"
    with pytest.raises(ValueError, match="weight_decay would have no effect"):
        plan(folder, settings={"weight_decay": 0.1})


def test_no_other_task_has_an_optimizer() -> None:
    with pytest.raises(ValueError, match="optimizer='task' needs a MONAI bundle's"):
        make_plan("fed_avg", settings={"optimizer": "task"})
    with pytest.raises(ValueError, match="needs the task"):
        make_optimizer(LocalTraining(optimizer="task"), [torch.nn.Parameter(torch.zeros(1))])


def test_yaml_references_and_other_names(tmp_path: Path) -> None:
    import yaml

    config = train_config()
    config["train"]["trainer"]["loss_function"] = config.pop("loss")  # a usual second place
    config["my_metric"] = config["validate"].pop("key_metric")
    config["validate"]["key_metric"] = "@my_metric"
    config["unusual"] = config["train"].pop("preprocessing")
    del config["train"]["dataset"]
    folder = write_bundle(tmp_path / "b", config)
    (folder / "configs" / "train.json").unlink()
    (folder / "configs" / "train.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"train.yaml: no key for train_preproc"):
        plan(folder)
    found = plan(folder, settings={"bundle_overrides": {"train#preprocessing": "@unusual"}})
    outputs, targets = torch.zeros(1, 2, 4, 4, 4), torch.zeros(1, 1, 4, 4, 4)
    assert torch.isfinite(found.task.loss(outputs, targets))


def test_a_later_file_and_an_override_go_before(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    (folder / "configs" / "mine.json").write_text(json.dumps({"network_def#channels": [2, 4, 8], "num_classes": 3}))
    settings: dict[str, Any] = {"bundle_configs": ["train", "mine"]}
    model = plan(folder, settings=settings).task.build_model()
    assert model(torch.zeros(1, 1, 8, 8, 8)).shape[1] == 3
    settings["bundle_overrides"] = {"num_classes": 4, "optimizer#lr": 0.7}
    found = plan(folder, settings=settings)
    assert found.task.build_model()(torch.zeros(1, 1, 8, 8, 8)).shape[1] == 4
    assert found.training.learning_rate == 0.7


def own_network(folder: Path, width: int) -> Path:
    """Make a bundle with code of its own, in a module name that other bundles have too."""
    config = train_config()
    config["network_def"] = {"_target_": "scripts.net.Net"}
    write_bundle(folder, config)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "__init__.py").touch()
    text = (
        f"import torch\nclass Net(torch.nn.Conv3d):\n    def __init__(self):\n        super().__init__(1, {width}, 1)\n"
    )
    (folder / "scripts" / "net.py").write_text(text)
    return folder


def test_each_bundle_has_its_own_code(tmp_path: Path) -> None:
    tasks = [plan(own_network(tmp_path / str(width), width)).task for width in (2, 3)]
    for _ in range(2):
        assert [task.build_model().out_channels for task in tasks] == [2, 3]


def test_code_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    (folder / "json").mkdir()
    (folder / "json" / "__init__.py").touch()
    with pytest.raises(ValueError, match="'json' has the name of one"):
        plan(folder)


def test_the_task_can_be_sent_to_a_child_process(tmp_path: Path) -> None:
    from fairflare.tasks import bundle

    class Here(MonaiBundleTask):
        folder = write_bundle(tmp_path / "b")

    Here.__qualname__, Here.__module__ = "Here", bundle.__name__
    vars_of: Any = bundle
    vars_of.Here = Here
    try:
        task = Here()
        assert task.parts.kept("key_metric").structures == ["organ", "lesion"]  # made of an expression
        again = pickle.loads(pickle.dumps(task))
        assert again.primary_metric == "dice"
        assert again.parts.kept("key_metric").structures == ["organ", "lesion"]
    finally:
        del vars_of.Here


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("network_def", "network"), "no key for network: .*'net_def'"),
        (without("loss", "train#trainer"), "no key for loss: .*'lossfn'"),
        (without("train#preprocessing", "train#dataset"), "no key for train_preprocessing"),
        (without("validate#preprocessing"), "validate_preprocessing: .*'validate#prep"),
        (without("validate#key_metric"), "for key_metric.*key_metric': '@KEY'"),
        (with_value("network_def#chanels", [1]), "key 'network_def' .*TypeError: .*chanels"),
        (with_value("network_def#_target_", "nosuch.Net"), "key 'network_def' cannot be made.*nosuch"),
        (with_value("network_def", {"_target_": "Compose"}), "'network_def'.* got a Compose$"),
        (with_value("loss#lambda_dice", "$1 / 0"), "key 'loss' .*ZeroDivisionError"),
        (with_value("loss", {"_target_": "DiceLoss", "sigmoid": "@nowhere"}), "'loss' cannot be made: .*nowhere"),
        (with_value("train#preprocessing", {"_target_": "Compose", "transforms": [3]}), "transforms|callable"),
        (with_value("train#inferer", {"_target_": "SlidingWindowInferer", "roi_size": 8}), "must give a SimpleInferer"),
        (with_value("validate#key_metric", {"a": {"_target_": "ROCAUC"}}), "'validate#key_metric#a' is 'ROCAUC', whi"),
        (with_value("validate#key_metric", {"a": {"_target_": "MeanDice", "reduction": "sum"}}), "must be 'mean'"),
        (with_value("validate#key_metric", {"a": {"_target_": "MeanDice", "sofmax": 1}}), "'sofmax', which is not"),
        (with_value("optimizer", "$torch.optim.Adam(@network.parameters())"), "'optimizer' must be of all the network"),
        (with_value("optimizer", {**ADAM, "lr": 1, "params": ["$@network.model"]}), "must be of all the network's"),
        (with_value("train#dataloader#batch_size", "two"), "batch_size'.* got a str$"),
        (with_value("network_def#weights", "$torch.load(@bundle_root + '/models/model.pt')"), "without-models-.*/b/mo"),
    ],
)  # fmt: skip
def test_a_bundle_that_cannot_be_used_is_one_line(tmp_path: Path, change: Change, message: str) -> None:
    folder = changed(tmp_path / "b", change)
    with pytest.raises(ValueError, match=message) as refused:
        plan(folder)
    assert "\n" not in str(refused.value)
    assert "MONAI bundle 'b', configs/train.json: " in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "train.json cannot be read: JSONDecodeErr"),
        ("[1]", "train.json must hold an object"),
        ('"x"', "train.json must hold an object"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    folder = write_bundle(tmp_path / "b")
    (folder / "configs" / "train.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bundle_ids": {"loss": "lost"}}, "no setting 'bundle_ids'"),
        ({"bundle_overrides": {"loss": "@lost"}}, "key 'loss' cannot be made: .*lost"),
        ({"bundle_overrides": {"num_clases": 3}}, "bundle_overrides names 'num_clases'"),
        ({"bundle_configs": ["train", "evaluate"]}, "no configs/evaluate.json .*; there is met"),
        ({"bundle_configs": []}, "bundle_configs"),
        ({"bundle_sha256": "0"}, "is not the one of this job"),
        ({"image_size": [32, 32]}, "no setting 'image_size'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(write_bundle(tmp_path / "b"), settings=settings)


def test_folders_that_are_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        plan(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no configs/train.json .* no folder"):
        plan(tmp_path)
    folder = write_bundle(tmp_path / "b")
    (folder / "more").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="more is a link to a folder"):
        plan(folder)


def test_one_task_at_a_time_and_never_without_permission(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    with pytest.raises(ValueError, match="task_file and monai_bundle exclude"):
        plan(folder, task_file="mine.py")
    with pytest.raises(ValueError, match="task and monai_bundle exclude each other"):
        plan(folder, task="segmentation")
    with pytest.raises(ValueError, match=r"is custom code, .*class of the package"):
        MonaiBundleTask()  # what a job without custom code can name
    with pytest.raises(ValueError, match="folder"):
        MonaiBundleTask(folder=str(folder))


def test_predict_says_where_to_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a MONAI bundle.*docs/bundles.md"):
        recall({"class": "fairflare.tasks.bundle.MonaiBundleTask", "own_code": ["folder"]}, tmp_path)


# ------------------------------------------------------------------------------------------------ what goes with a job


def test_the_checksum_is_of_all_that_is_carried(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    (folder / "docs").mkdir()
    (folder / "docs" / "README.md").write_text("text")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").touch()
    assert bundle_files(folder) == ["configs/metadata.json", "configs/train.json", "docs/README.md"]
    first = bundle_checksum(folder)
    copy_bundle(folder, tmp_path / "copy")
    assert bundle_checksum(tmp_path / "copy") == first
    assert not (tmp_path / "copy" / "models").exists()
    (folder / "models" / "model.pt").write_bytes(b"other weights")
    assert bundle_checksum(folder) == first
    (folder / "docs" / "README.md").write_text("texT")
    second = bundle_checksum(folder)
    (folder / "docs" / "README.md").rename(folder / "docs" / "readme.md")
    assert len({first, second, bundle_checksum(folder)}) == 3


def test_a_job_carries_it_as_custom_code(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    FairRecipe("fed_avg", monai_bundle=folder, sites=2).export(str(tmp_path / "jobs"))
    app = tmp_path / "jobs" / "fed_avg" / "app"
    carried = sorted(path.relative_to(app).as_posix() for path in app.rglob("*.*") if path.parent != app / "config")
    # Beside ``custom``: there `nvflare job submit` parses every YAML and JSON file, and stops at those that it cannot.
    assert carried == ["custom/task.py", "monai_bundle/configs/metadata.json", "monai_bundle/configs/train.json"]
    text = (app / "config" / "config_fed_client.json").read_text()
    assert str(tmp_path) not in text
    task = json.loads(text)["executors"][0]["executor"]["args"]["task"]
    assert task["path"] == "task.Task"
    assert task["args"]["bundle_sha256"] == group_digits(bundle_checksum(folder))
    from fairflare.federation.plan.task_files import load_task_class

    cls = load_task_class(app / "custom" / "task.py")
    assert cls(**task["args"]).primary_metric == "dice"
    (app / "monai_bundle" / "configs" / "train.json").write_text("{}")
    with pytest.raises(ValueError, match="'monai_bundle' is not the one"):
        cls(**task["args"])
