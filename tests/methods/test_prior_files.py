"""Test which checkpoint of the prior network a job may name: the packaged weights in other places."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fairflare.exchange.messages import SiteReply
from fairflare.methods.fed_mas import RescueTraining
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.priors import EMBEDDED_FILE
from tests.tiny import CLASSES

from .support import at_site, initial, request

TASK = {**CLASSES, "projector_dim": 96}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Make ``data`` of the site and ``secret`` beside it, each with a checkpoint, and a link between them."""
    for name in ("data", "secret"):
        (tmp_path / name).mkdir()
        shutil.copy(EMBEDDED_FILE, tmp_path / name / "p.safetensors")
    (tmp_path / "data" / "link.safetensors").symlink_to(tmp_path / "secret" / "p.safetensors")
    return tmp_path


def answer(folders: Path, prior: str, settings: dict[str, Any]) -> SiteReply:
    """Return the answer to a training whose job names ``prior``; ``{}`` in both stands for the folders."""
    own = {key: value.format(folders) if isinstance(value, str) else value for key, value in settings.items()}
    if "linked_roots" in own:
        own["linked_roots"] = [entry.format(folders) for entry in own["linked_roots"]]
    task = ClassificationTask(**TASK)
    site = at_site(folders / "state", RescueTraining(batch_size=16, prior=prior.format(folders)), own, task=task)
    site._data = task.open_site("site-1", {})  # the images do not matter here
    return site.perform(request("train", initial(task), directives={"rescue_factor": True}))


@pytest.mark.parametrize(
    ("prior", "settings"),
    [
        ("{}/secret/p.safetensors", {"data_root": "{}/data"}),
        ("{}/secret/p.safetensors", {}),
        ("{}/data/link.safetensors", {"data_root": "{}/data"}),
        ("{}/data/../secret/p.safetensors", {"data_root": "{}/data"}),
        ("{}/data/p.safetensors", {"data_root": "{}/dat"}),
    ],
)
def test_outside_of_the_sites_folders_it_is_refused(
    folders: Path, prior: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reply = answer(folders, prior, settings)
    assert reply.status == "failed"
    assert "site 'site-1': it does not let a job name the checkpoint" in reply.reason
    for secret in (str(folders), "secret", "safetensors"):
        assert secret not in reply.reason
    assert f"'{prior.format(folders)}', lies outside data_root and linked_roots" in caplog.text


@pytest.mark.parametrize(
    ("prior", "settings"),
    [
        ("{}/data/p.safetensors", {"data_root": "{}/data"}),
        ("{}/data/link.safetensors", {"data_root": "{}/data", "linked_roots": ["{}/secret"]}),
        ("{}/secret/p.safetensors", {"linked_roots": ["{}"]}),
        ("/nowhere", {"prior": "{}/secret/p.safetensors"}),  # the site's own word goes first
    ],
)
def test_where_the_site_allows_it_it_is_read(folders: Path, prior: str, settings: dict[str, Any]) -> None:
    reply = answer(folders, prior, settings)
    assert reply.status == "ok", reply.reason
