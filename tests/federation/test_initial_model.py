"""Test ``initial_ckpt``: a federation that starts from a model file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.first_model import first_model
from fairflare.federation.transports.local import run_local
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import VOLUMES, run_document

from ..methods.support import SEGMENTATION, initial

TASK = SegmentationTask(**SEGMENTATION)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    model = TASK.build_model()
    TASK.initialise(model, str(path))
    return model.state_dict()


def forms(state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    torch.save(state, folder / "plain.pt")
    torch.save({"model": state, "train_conf": {"round": 3, "method": "FedAvg"}}, folder / "FL_global_model.pt")
    save_file(state, folder / "a.safetensors")
    return [folder / name for name in ("plain.pt", "FL_global_model.pt", "a.safetensors")]


def test_every_form_of_a_whole_network(tmp_path: Path) -> None:
    state = initial(seed=5)
    for path in forms(state, tmp_path):
        found = loaded(path)
        assert all(torch.equal(found[name], state[name]) for name in state), path


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


FIRST = "conv_0.conv_0.conv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, FIRST), f"does not fit the network: missing {FIRST}$"),
        (lambda s: {**s, "more": torch.zeros(1)}, "fit the network: unexpected more$"),
        (lambda s: {**s, FIRST: torch.zeros(1, 2)}, rf"{FIRST} has the shape \(1, 2\), needed is \("),
        (lambda s: {**s, FIRST: s[FIRST] * float("nan")}, f"NaN or infinite in tensor '{FIRST}'"),
        (lambda s: {**s, "run": pickle.Pickler}, "holds pickled objects, which are refused"),
        (lambda s: {}, "holds no state dict"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "a.pt"
    torch.save(change(dict(initial())), path)
    with pytest.raises(ValueError, match=message):
        loaded(path)


def test_classification_takes_its_own_model_with_every_part(tmp_path: Path) -> None:
    task = ClassificationTask(image_size=(33, 33), features=(4, 4, 8, 8), projector_dim=5)
    state = task.build_model().state_dict()
    for path in forms(state, tmp_path):
        model = task.build_model()
        said = task.initialise(model, str(path))
        assert said == f"initial weights of encoder and head (and projector) from {path.name}"
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def run(folder: Path, local: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    plan = make_plan("fed_avg", sites=2, num_rounds=1, settings=VOLUMES, **options)
    return run_document(run_local(plan, folder, local))


def test_a_run_goes_on_from_the_model_of_another(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    model = tmp_path / "first" / "server" / "simulate_job" / "FL_global_model.pt"
    for number, options in enumerate(({"initial_ckpt": str(model)}, {"local": {"initial_weights": str(model)}})):
        second = run(tmp_path / str(number), **options)
        assert second["rounds"][0]["validation"] != first["rounds"][0]["validation"]
        # The new run validates what the first one made.
        again = run(tmp_path / f"{number}b", **options, seed=3)
        assert again["rounds"][0]["validation"] == second["rounds"][0]["validation"]


def test_the_task_may_name_the_initial_weights(tmp_path: Path) -> None:
    """Check a segmentation network's weights; the run's own checkpoint overrides them."""
    state, other = initial(seed=5), initial(seed=6)
    own, of_run = forms(state, tmp_path)[0], tmp_path / "of_run.pt"
    torch.save(other, of_run)
    task = SegmentationTask(**SEGMENTATION, initial_weights=str(own))
    for checkpoint, wanted in ((None, state), (str(of_run), other)):
        model = task.build_model()
        task.initialise(model, checkpoint)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    settings = {**VOLUMES, "initial_weights": str(tmp_path / "gone.pt")}
    with pytest.raises((ValueError, RuntimeError), match=r"gone\.pt"):
        run_local(make_plan("fed_avg", sites=2, num_rounds=1, settings=settings), tmp_path / "run")


def test_two_checkpoints_are_one_too_many() -> None:
    place = Place(Path(), Path(), "job", settings={"initial_weights": "/a.pt"})
    assert place.initial_weights(RunSettings()) == "/a.pt"
    with pytest.raises(ValueError, match=r"initial_ckpt '/b.pt' .*'/a.pt'; take out"):
        place.initial_weights(RunSettings(initial_ckpt="/b.pt"))


def test_a_relative_path_lies_in_the_job() -> None:
    run_settings = RunSettings(initial_ckpt="start.pt")
    assert Place(Path(), Path(), "job", carried=Path("/x/custom")).initial_weights(run_settings) == "/x/custom/start.pt"
    assert Place(Path(), Path(), "job").initial_weights(run_settings) == "start.pt"
    absolute = RunSettings(initial_ckpt="/b.pt")
    assert Place(Path(), Path(), "job", carried=Path("/x/custom")).initial_weights(absolute) == "/b.pt"


def test_a_jobs_author_cannot_ask_which_files_the_server_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that one sentence covers a file outside the job that is missing, unreadable, or does not fit."""
    secret, other = tmp_path / "secret.txt", tmp_path / "other.pt"
    secret.write_text("no checkpoint")
    torch.save({"weight": torch.zeros(1)}, other)
    place = Place(tmp_path, tmp_path, "job", carried=tmp_path / "app" / "custom")
    told = set()
    for path in (tmp_path / "gone.pt", tmp_path, secret, other):
        for run, task in (
            (RunSettings(initial_ckpt=str(path)), SegmentationTask(**SEGMENTATION)),
            (RunSettings(), SegmentationTask(**SEGMENTATION, initial_weights=str(path))),
        ):
            with pytest.raises(ValueError, match="the server has no such file") as raised:
                first_model(task, run, place)
            assert raised.value.__suppress_context__
            told.add(str(raised.value).replace(str(path), "of the task"))
            assert str(path) in capfd.readouterr().err
    assert len(told) == 1
    # What the job carries itself, and what a local run names, is told in full.
    (tmp_path / "app" / "custom").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"gone\.pt does not exist"):
        first_model(SegmentationTask(**SEGMENTATION), RunSettings(initial_ckpt="gone.pt"), place)
    local = Place(tmp_path, tmp_path, "job")
    with pytest.raises(ValueError, match=r"gone\.pt does not exist"):
        first_model(SegmentationTask(**SEGMENTATION), RunSettings(initial_ckpt=str(tmp_path / "gone.pt")), local)
