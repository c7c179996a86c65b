"""Test the executor: FLARE's requests to a site, and FLARE's view of errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare import __version__
from fairflare.exchange.messages import Message, SiteTask, encode_task
from fairflare.flare.executor import SiteExecutor
from fairflare.flare.messages.wire import decode_model, encode_model
from fairflare.methods.base.training import LocalTraining, SiteError

from ..federation.network import Line


class Closed(Line):
    """Define data that must not be opened, or that fail."""

    error: Exception = AssertionError("the data were opened")

    def open_site(self, site: str, settings: Any) -> Any:
        raise self.error


class Site:
    """Run an executor in a pretended FLARE."""

    def __init__(self, folder: Path, task: Any = None, local: Any = None, training: Any = None) -> None:
        (folder / "local").mkdir(parents=True)
        (folder / "local" / "fairflare.json").write_text(json.dumps(local or {}))
        workspace = SimpleNamespace(
            get_file_path_in_site_config=lambda name: str(folder / "local" / name),
            get_root_dir=lambda: str(folder), get_run_dir=lambda job: str(folder / job),
        )  # fmt: skip
        self.context = FLContext()
        self.context.set_prop(FLContextKey.CURRENT_RUN, "job", private=True, sticky=False)
        self.context.get_identity_name = lambda *_: "site-1"  # type: ignore[method-assign]
        self.context.get_engine = lambda *_: SimpleNamespace(get_workspace=lambda: workspace)  # type: ignore
        self.executor = SiteExecutor(task=task or Closed(), training=training or LocalTraining())
        self.log: list[str] = []
        self.executor.log_warning = lambda _, text: self.log.append(text)  # type: ignore[method-assign]
        self.abort = Signal()

    def __call__(self, name: str = "train", version: str = __version__, message: Message | None = None) -> Any:
        task = SiteTask(name, Line().build_model().state_dict(), 2, 5, 0)
        message = message or encode_task(task)
        message.meta = {**message.meta, "version": version}
        return self.executor.execute(name, FLModelUtils.to_shareable(encode_model(message)), self.context, self.abort)

    def reply(self, *args: Any, **kwargs: Any) -> Message:
        shareable = self(*args, **kwargs)
        assert shareable.get_return_code() == ReturnCode.OK
        return decode_model(FLModelUtils.from_shareable(shareable))


@pytest.mark.parametrize("version", ["9.0.0", "0.0.1", ""])
def test_a_server_of_another_version_is_refused_before_any_work(tmp_path: Path, version: str) -> None:
    site = Site(tmp_path)
    reply = site.reply(version=version)
    assert reply.params is None or reply.params == {}
    assert reply.meta["status"] == "failed"
    assert reply.meta["reason"] == (
        f"site 'site-1' has fairflare {__version__}, the server {version}; install the same version"
    )
    assert reply.current_round == 2
    assert not reply.metrics  # a refusal carries no made-up metric
    assert any("install the same version" in line for line in site.log)
    assert not (tmp_path / "job").exists()


def test_a_later_patch_of_the_version_is_served(tmp_path: Path) -> None:
    major, minor = __version__.split(".")[:2]
    reply = Site(tmp_path).reply(version=f"{major}.{minor}.99")
    assert reply.meta["reason"] == "site 'site-1': train failed with AssertionError (details in the site's log)"


def test_only_the_kind_of_an_error_leaves_the_site(tmp_path: Path) -> None:
    task = Closed()
    task.error = OSError(f"{tmp_path}/patients/42.nii is gone")
    reply = Site(tmp_path / "a", task).reply("validate")
    assert reply.meta["status"] == "failed"
    assert reply.meta["reason"] == "site 'site-1': validate failed with OSError (details in the site's log)"
    task.error = SiteError(f"{tmp_path}/patients is empty", public="site 'site-1': the data folder is empty")
    assert Site(tmp_path / "b", task).reply().meta["reason"] == "site 'site-1': the data folder is empty"


def test_a_message_that_is_none(tmp_path: Path) -> None:
    reply = Site(tmp_path).reply(message=Message(params={"w": torch.ones(1)}, meta={}, current_round=1))
    assert reply.meta["status"] == "failed"
    assert reply.meta["reason"] == (
        "site 'site-1': field 'current_round' of the server's task 'train' cannot be used: None; use the same version "
        "at server and sites"
    )


def test_a_bad_site_file_costs_the_task(tmp_path: Path) -> None:
    site = Site(tmp_path, local={"num_threads": 0})
    reply = site.reply()
    assert reply.meta["status"] == "failed"
    assert reply.meta["reason"].startswith("site 'site-1': setting 'num_threads' must be an integer >= 1, got 0")


def test_the_key_for_sums_goes_at_the_end_of_a_run(tmp_path: Path) -> None:
    site = Site(tmp_path, task=Line())
    asked = SiteTask("keys", {}, 0, 5, 0, experiment="e", sums={"run": bytes(32)})
    assert site.reply("keys", message=encode_task(asked)).meta["status"] == "ok"
    key = tmp_path / "fairflare_state" / "e" / "site-1" / "sums.key"
    assert key.exists()
    site.reply("validate", message=encode_task(SiteTask("validate", {}, 5, 5, 0, experiment="e")))
    assert key.exists()
    site.executor.handle_event(EventType.END_RUN, site.context)
    assert not key.exists()
    Site(tmp_path / "b").executor.handle_event(EventType.END_RUN, site.context)  # it was never asked


@pytest.mark.parametrize("isolate", ["false", 1, None])
def test_isolate_is_not_guessed(tmp_path: Path, isolate: Any) -> None:
    reply = Site(tmp_path, local={"isolate": isolate}).reply()
    assert reply.meta["reason"] == f"site 'site-1': setting 'isolate' must be true or false, got {isolate!r}"


@pytest.mark.long
def test_a_bad_site_file_says_the_same_with_isolate(tmp_path: Path) -> None:
    """Check the child process too: its message is more than that it ended."""
    site = Site(tmp_path, task=Line(), local={"num_threads": 0, "isolate": True})
    reply = site.reply()
    assert reply.meta["status"] == "failed"
    assert reply.meta["reason"] == "site 'site-1': setting 'num_threads' must be an integer >= 1, got 0"


def test_codes(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site("tell_me_all").get_return_code() == ReturnCode.TASK_UNKNOWN
    site.abort.trigger("stop")
    assert site().get_return_code() == ReturnCode.TASK_ABORTED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": 3}, "task must be Task, got 3"),
        ({"training": None}, "training must be LocalTraining, got None"),
        ({"isolate": 1}, "isolate must be true or false, got 1"),
        ({"tasks": []}, "SiteExecutor has no setting 'tasks'"),
    ],
)
def test_bad_settings_fail_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        SiteExecutor(**{"task": Closed(), "training": LocalTraining(), **given})


def test_filters_may_look_at_the_task_and_nothing_is_kept(tmp_path: Path) -> None:
    """Check that FLARE puts the task's data away before its ``ConvertWeights`` looks for them."""
    site = Site(tmp_path)
    site()
    site.context.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
    site.executor.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, site.context)
    shown = FLModelUtils.from_shareable(site.context.get_prop(FLContextKey.TASK_DATA))
    assert sorted(shown.params) == ["0.bias", "0.weight"]
    site.executor.handle_event(EventType.AFTER_TASK_RESULT_FILTER, site.context)
    assert site.context.get_prop(FLContextKey.TASK_DATA) is None
    site.executor.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, site.context)
    assert site.context.get_prop(FLContextKey.TASK_DATA) is None


@pytest.mark.parametrize("experiment", ["", "e"])
def test_decoded_volumes_lie_in_the_state_root_whatever_the_job(tmp_path: Path, experiment: str) -> None:
    site = Site(tmp_path / "kit")
    for own, root in (
        ({}, tmp_path / "kit" / "fairflare_state"),
        ({"state_root": str(tmp_path / "s")}, tmp_path / "s"),
    ):
        site.executor._settings = own
        arguments = site.executor._worker_arguments("site-1", experiment, site.context)
        assert arguments["decoded"] == root / "decoded" / "site-1"
        assert arguments["sent"] == root / ".sent" / "site-1.jsonl"
