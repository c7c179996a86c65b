"""Test an experiment over several jobs: its lock, its fixed settings, going back a round, and a full disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare import __version__
from fairflare.base.settings import settings
from fairflare.exchange.messages import Message
from fairflare.federation.collecting.phase import ServerFault
from fairflare.federation.record.checkpoint import CheckpointError
from fairflare.federation.record.run_info import following_rounds
from fairflare.federation.server.rounds import RoundFailed, Stopped
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_ism import FedISM
from fairflare.methods.fed_lwr import FedLWR
from fairflare.methods.fed_mrl import FedMRL
from fairflare.methods.parts.mu_policy import FixedMu
from tests.tiny import rows, run_document

from .network import SILENT, SITES, Run, good
from .test_checkpoint import flip, rewrite


def same_model(first: Run, second: Run, name: str = "FL_global_model.pt") -> bool:
    models = first.model(name)["model"], second.model(name)["model"]
    return list(models[0]) == list(models[1]) and all(torch.equal(models[0][k], models[1][k]) for k in models[0])


def figures(run: Run) -> Any:
    """Return the results' rounds and test without values of a clock."""
    document = run_document(run.folder / "fairflare")
    for record in document["rounds"]:
        for phase in record["phases"]:
            phase.pop("seconds")
        for left in record["left_out"]:
            left["reason"] = ""
    return document["rounds"], document["test"]


def kept(folder: Path, experiment: str = "e") -> Path:
    return folder / "kept" / experiment


# ------------------------------------------------------------------------------------------------ one run at a time


def test_a_second_run_of_an_experiment_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    refused: list[Run] = []

    def meanwhile(site: str, name: str, task: Message) -> Any:
        if (site, name, task.current_round) == ("site-1", "train", 1):
            other = Run(tmp_path, num_rounds=2, experiment="e", job="second")
            with pytest.raises(CheckpointError) as caught:
                other()
            text = str(caught.value)
            assert "experiment 'e' is being run by job 'first' (process " in text
            assert f"(process {os.getpid()} on " in text
            assert "abort it, or give this one another experiment id" in text
            refused.append(other)
        return good(site, name, task)

    first = Run(tmp_path, meanwhile, num_rounds=2, experiment="e", job="first")()
    assert first.results["status"] == "completed"
    (other,) = refused
    assert other.net.asked == []
    assert other.results["status"] == "failed"
    assert "is being run by job 'first'" in other.results["reason"]
    assert figures(first) == figures(Run(tmp_path / "alone", num_rounds=2)())
    Run(tmp_path, num_rounds=3, experiment="e", job="third")()  # it is free again


def test_the_lock_is_free_after_every_end(tmp_path: Path) -> None:
    for name, behaviour in (("failed", lambda s, n, t: "site cannot"), ("broken", lambda s, n, t: Message(params=3))):
        with pytest.raises(RoundFailed):
            Run(tmp_path, behaviour, num_rounds=1, experiment="e", job=name)()
    Run(tmp_path, num_rounds=1, experiment="e", job="good")()


HOLDS = """
import sys, time
from pathlib import Path
from fairflare.base.disk.locks import FolderLock

lock = FolderLock(Path(sys.argv[1]), {"job_id": "far away"})
lock.take()
print("taken", flush=True)
time.sleep(60)
"""


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(kept(tmp_path))], stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(CheckpointError, match=f"run by job 'far away' \\(process {other.pid} on "):
            Run(tmp_path, num_rounds=1, experiment="e")()
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    Run(tmp_path, num_rounds=1, experiment="e", job="second")()


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    Run(tmp_path, num_rounds=1, experiment="e")()
    old = [kept(tmp_path) / name for name in (".model-000001.safetensors.99999999.partial",)]
    old += [tmp_path / "second" / ".FL_global_model.pt.99999999.partial"]
    old[-1].parent.mkdir()
    for path in old:
        path.write_bytes(b"x")
    Run(tmp_path, num_rounds=2, experiment="e", job="second")()
    assert not any(path.exists() for path in old)


# ------------------------------------------------------------------------------------------------ the run's id


def test_the_run_id_stays_over_resumes_and_is_new_for_a_new_start(tmp_path: Path) -> None:
    def ids(run: Run) -> set[str]:
        told = {task.meta["run"] for task in run.net.tasks}
        assert told == {run.results["info"]["run"]}
        return told

    first = ids(Run(tmp_path, num_rounds=1, experiment="e")())
    assert all(len(x) == 12 for x in first)
    assert ids(Run(tmp_path, num_rounds=2, experiment="e")()) == first
    others = [ids(Run(tmp_path / "x", num_rounds=1)()) for _ in range(2)] + [
        ids(Run(tmp_path / "y", num_rounds=1, experiment="e")())
    ]
    assert len(set.union(first, *others)) == 4


def test_a_run_that_did_no_round_does_not_hold_its_settings(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed):
        Run(tmp_path, lambda s, n, t: "cannot", num_rounds=2, experiment="e", seed=1)()
    run = Run(tmp_path, num_rounds=2, experiment="e", seed=2)()
    assert "starting anew" in " ".join(run.net.said)
    assert same_model(run, Run(tmp_path / "a", num_rounds=2, seed=2)())


# ------------------------------------------------------------------------------------------------ what must be the same


def with_versions(folder: Path, **changes: str) -> None:
    path = kept(folder) / "state-000001.json"
    extra = json.loads(path.read_text())["content"]["extra"]
    rewrite(kept(folder), 1, extra={**extra, "versions": {**extra["versions"], **changes}})


@pytest.mark.parametrize("was", ["0.1.7", "0.3.0"])
def test_another_fairflare_is_refused_by_name(was: str, tmp_path: Path) -> None:
    Run(tmp_path, num_rounds=1, experiment="e")()
    with_versions(tmp_path, fairflare=was)
    why = f"^experiment 'e' .*{re.escape(was)}, this is {re.escape(__version__)}; install that "
    with pytest.raises(CheckpointError, match=why + r"version .* give .*another experiment id$"):
        Run(tmp_path, num_rounds=2, experiment="e")()


def test_another_torch_is_said(tmp_path: Path) -> None:
    Run(tmp_path, num_rounds=1, experiment="e")()
    with_versions(tmp_path, torch="1.0", numpy="0.9")
    run = Run(tmp_path, num_rounds=2, experiment="e")()
    first, second = run.results["info"]["resumed_with"][:2]
    assert first.startswith("numpy was 0.9, is ")
    assert second.startswith("torch was 1.0, is ")
    assert sum("torch was 1.0" in line for line in run.net.warned) == 1


def test_other_sites_and_more_rounds_are_said(tmp_path: Path) -> None:
    half = {"path": "fairflare.methods.base.training.LocalTraining", "args": {}}
    Run(tmp_path, num_rounds=1, experiment="e", min_sites=3, site_half=half)()
    sites = ["site-1", "site-2", "site-4"]
    run = Run(tmp_path, num_rounds=2, experiment="e", min_sites=2, sites=sites, site_half=half)()
    assert run.results["info"]["resumed_with"] == [
        "no longer in the job: site-3", "new in the job: site-4", "num_rounds was 1, is 2",
    ]  # fmt: skip
    assert run.results["rounds"][1]["accepted"] == sites


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"rule": FedISM(rho=0.1, tau=0.5)}, r"rule\.tau"),
        ({"rule": FedMRL()}, r"rule\.mu_policy"),
        ({"site_half": {"path": "fairflare.methods.base.training.LocalTraining", "args": {"schedule": "cosine"}}},
         r"training\.schedule"),
        ({"site_half": {"path": "fairflare.methods.fed_ism.SharpnessAwareTraining", "args": {"tau": 0.5}}},
         r"training\.tau"),
    ],
)  # fmt: skip
def test_another_number_of_rounds_is_refused_where_something_depends_on_it(
    tmp_path: Path, options: dict[str, Any], names: str
) -> None:
    report = {"sharpness": 0.1, "perturbed_loss": 0.2, "train_loss": 0.3, "accuracy": 0.5, "global_accuracy": 0.5,
              "num_validation": 5}  # fmt: skip

    def behaviour(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        reply.meta["report"] = report
        return reply

    Run(tmp_path, behaviour, num_rounds=1, experiment="e", **options)()
    other = Run(tmp_path, behaviour, num_rounds=2, experiment="e", **options)
    with pytest.raises(CheckpointError, match=rf"num_rounds=1, is 2, and {names} .*Set"):
        other()
    assert other.net.asked == []
    Run(tmp_path, behaviour, num_rounds=1, experiment="e", **options)()


@pytest.mark.parametrize("rule", [FedISM(), FedMRL(mu_policy=FixedMu()), FedLWR()])
def test_rules_that_do_not_look_at_the_number_of_rounds(rule: Any) -> None:
    assert following_rounds(rule, None) == []


def test_a_number_of_rounds_that_is_done_already(tmp_path: Path) -> None:
    Run(tmp_path, num_rounds=3, experiment="e")()
    with pytest.raises(CheckpointError, match="3 rounds already, num_rounds is 2; set"):
        Run(tmp_path, num_rounds=2, experiment="e")()


def test_the_servers_own_process_does_not_load_any_class_that_a_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_jobs_own.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').close()\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    half = {"path": "a_jobs_own.X", "args": {}}
    Run(tmp_path, num_rounds=1, experiment="e", site_half=half)()
    run = Run(tmp_path, num_rounds=2, experiment="e", site_half=half)()
    assert not (tmp_path / "owned").exists()
    assert "whether the sites' training depends on it is not known" in run.results["info"]["resumed_with"][-1]


# ------------------------------------------------------------------------------------------------ a damaged checkpoint


def test_a_flipped_bit_costs_a_round_and_is_said(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a", num_rounds=3, rule=FedLWR())()
    Run(tmp_path, num_rounds=2, rule=FedLWR(), experiment="e")()
    flip(kept(tmp_path) / "model-000002.safetensors")
    rest = Run(tmp_path, num_rounds=3, rule=FedLWR(), experiment="e")()
    assert [task.current_round for task in rest.net.tasks] == [1, 1, 2, 2, 3]
    (said,) = [text for text in rest.results["info"]["resumed_with"] if "model-" in text]
    assert said == "model-000002.safetensors is not what was written: its checksum differs"
    assert any(said in line for line in rest.net.warned)
    assert figures(rest) == figures(whole)
    assert same_model(rest, whole)


def test_a_damaged_log_of_rounds_costs_these_and_is_said(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a", num_rounds=4, rule=FedLWR())()
    Run(tmp_path, num_rounds=3, rule=FedLWR(), experiment="e")()
    path = kept(tmp_path) / "rounds.jsonl.bz2"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rest = Run(tmp_path, num_rounds=4, rule=FedLWR(), experiment="e")()
    results = rest.results
    assert results["status"] == "completed"
    assert [record["current_round"] for record in results["rounds"]] == [0, 3]
    said = "the results of 1 of 3 rounds can be read, the others are lost; the model is whole"
    assert said in results["info"]["resumed_with"]
    assert any(said in line for line in rest.net.warned)
    assert same_model(rest, whole)
    assert results["test"] == whole.results["test"]


def test_the_best_model_is_there_in_a_job_that_goes_on(tmp_path: Path) -> None:
    def falling(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        reply.metrics = rows({"dice": 0.9 - 0.2 * task.current_round}, "validation" if name == "train" else "test")
        return reply

    whole = Run(tmp_path / "a", falling, num_rounds=3)()
    Run(tmp_path, falling, num_rounds=2, experiment="e")()
    rest = Run(tmp_path, falling, num_rounds=3, experiment="e", job="second")()
    assert same_model(rest, whole, "best_FL_global_model.pt")
    assert rest.model("best_FL_global_model.pt")["train_conf"] == whole.model("best_FL_global_model.pt")["train_conf"]
    Run(tmp_path / "b", falling, num_rounds=2, experiment="e")()
    flip(kept(tmp_path / "b") / "model-000001.safetensors")
    again = Run(tmp_path / "b", falling, num_rounds=3, experiment="e", job="second")()
    assert any("the best model so far cannot be read" in line for line in again.net.warned)
    assert again.model("best_FL_global_model.pt")["train_conf"]["round"] == 1  # the best of the rounds to come
    assert same_model(again, whole)


# ------------------------------------------------------------------------------------------------ going back one round


class Poisoned:
    """Make all sites fail at a round's model, the first ``times`` times."""

    def __init__(self, current_round: int, times: int = 1, name: str = "train", how: Any = "poison") -> None:
        self.at, self.left, self.name, self.how = current_round, dict.fromkeys(SITES, times), name, how
        self.lock = threading.Lock()

    def __call__(self, site: str, name: str, task: Message) -> Any:
        with self.lock:
            if (name, task.current_round) == (self.name, self.at) and self.left[site]:
                self.left[site] -= 1
                return self.how if self.how is SILENT else f"site {site!r}: train failed with ValueError"
        return good(site, name, task)


@settings
class Counting(FedAvg):
    """Define a FedAvg with state: its weights depend on how often it weighed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = 0

    def weigh(self, inputs: Any) -> Any:
        self.count += 1
        found = super().weigh(inputs)
        weights = {site: (self.count if site == "site-1" else 1.0) for site in inputs.sites}
        found.sites = {site: value / sum(weights.values()) for site, value in weights.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(("at", "name"), [(1, "train"), (2, "train"), (3, "validate")])
def test_going_back_one_round(tmp_path: Path, at: int, name: str) -> None:
    whole = Run(tmp_path / "a", num_rounds=3, rule=Counting())()
    run = Run(tmp_path, Poisoned(at, name=name), num_rounds=3, rule=Counting(), experiment="e")()
    asked = [task.current_round for task in run.net.tasks]
    assert asked == [*range(at + 1), at - 1, *range(at, 4)]
    assert figures(run) == figures(whole)
    assert same_model(run, whole)
    assert same_model(run, whole, "best_FL_global_model.pt")
    (entry,) = run.results["went_back"]
    assert (entry["from_round"], entry["to_round"]) == (at, at - 1)
    assert f"round {at}, {name}: 0 usable result(s) of 3" in entry["reason"]
    assert sum(f"Going back: round {at - 1} is done again" in line for line in run.net.warned) == 1
    again = Run(tmp_path, num_rounds=3, rule=Counting(), experiment="e", job="again")()  # its checkpoints are sound
    assert same_model(again, whole)
    assert again.results["went_back"] == [entry]


def test_going_back_on_resume(tmp_path: Path) -> None:
    """Check a run that stopped and left a model at which all sites fail."""
    whole = Run(tmp_path / "a", num_rounds=3, rule=Counting())()
    Run(tmp_path, num_rounds=2, rule=Counting(), experiment="e")()
    rest = Run(tmp_path, Poisoned(2), num_rounds=3, rule=Counting(), experiment="e", job="second")()
    assert [task.current_round for task in rest.net.tasks] == [2, 1, 2, 3]
    assert same_model(rest, whole)
    assert figures(rest) == figures(whole)


def test_going_back_helps_once_or_not(tmp_path: Path) -> None:
    run = Run(tmp_path, Poisoned(2, times=2), num_rounds=3, experiment="e")
    with pytest.raises(RoundFailed, match=r"round 2, train: 0 .*going back .* not help"):
        run()
    assert [task.current_round for task in run.net.tasks] == [0, 1, 2, 1, 2]
    assert len(run.results["went_back"]) == 1
    rest = Run(tmp_path, Poisoned(2), num_rounds=3, experiment="e", job="second")()  # it may be tried again
    assert [task.current_round for task in rest.net.tasks] == [2, 1, 2, 3]


@pytest.mark.parametrize(
    ("behaviour", "options"),
    [
        (Poisoned(1, how=SILENT), {"experiment": "e", "train_timeout": 0.3}),  # the network, not the model
        (Poisoned(1), {}),  # nothing is kept to go back to
        (Poisoned(0), {"experiment": "e"}),  # there is nothing before
    ],
)
def test_not_going_back(tmp_path: Path, behaviour: Any, options: dict[str, Any]) -> None:
    run = Run(tmp_path, behaviour, num_rounds=3, **options)
    with pytest.raises(RoundFailed):
        run()
    assert len(run.net.tasks) == behaviour.at + 1
    assert run.results["went_back"] == []


# ------------------------------------------------------------------------------------------------ abort


@pytest.mark.parametrize("name", ["train", "anchor", "validate"])
@pytest.mark.parametrize("current_round", [0, 1])
def test_abort_in_each_phase_leaves_what_a_new_job_goes_on_with(tmp_path: Path, name: str, current_round: int) -> None:
    whole = Run(tmp_path / "a", num_rounds=2, rule=FedLWR())()
    run = Run(tmp_path, num_rounds=2, rule=FedLWR(), experiment="e")
    at = 2 if name == "validate" else current_round

    def behaviour(site: str, n: str, task: Message) -> Any:
        if (n, task.current_round) == (name, at):
            run.net.abort = True
            return SILENT
        return good(site, n, task)

    run.net.behaviour = behaviour
    with pytest.raises(Stopped):
        run()
    assert run.results["status"] == "failed"
    assert run.staged == []
    rest = Run(tmp_path, num_rounds=2, rule=FedLWR(), experiment="e", job="second")()
    assert rest.net.tasks[0].current_round == at
    assert figures(rest) == figures(whole)
    assert same_model(rest, whole)
    assert same_model(rest, whole, "best_FL_global_model.pt")


# ------------------------------------------------------------------------------------------------ disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of its own with 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # tensors may still be mapped from it


def fill(folder: Path, leave: int) -> None:
    """Fill a disk up to ``leave`` bytes; threads of other sites may write meanwhile."""
    with (folder / "filler").open("wb") as file:
        while True:
            status = os.statvfs(folder)
            with suppress(OSError):  # less is free than a moment ago
                return os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - leave))
            if not status.f_bavail:
                return None


def filling(folder: Path, at: int, leave: int = 0) -> Callable[[str, str, Message], Message]:
    def behaviour(site: str, name: str, task: Message) -> Message:
        if (site, name, task.current_round) == ("site-1", "train", at) and not (folder / "filler").exists():
            fill(folder, leave)
        return good(site, name, task)

    return behaviour


@settings
class Large(Counting):
    """Define a rule that saves much more than a model."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ballast": torch.zeros(60_000)}


@pytest.mark.parametrize("leave", [0, 100_000])
def test_a_full_disk_of_the_checkpoints_ends_the_run_and_leaves_the_last_one(small_disk: Path, leave: int) -> None:
    folder = small_disk.parent
    (folder / "kept").symlink_to(small_disk)
    whole = Run(folder / "a", num_rounds=3, rule=Large())()
    run = Run(folder, filling(small_disk, 1, leave), num_rounds=3, rule=Large(), experiment="e")
    with pytest.raises(ServerFault, match=r"round 2 cannot be written .*[Nn]o space"):
        run()
    assert run.results["status"] == "failed"
    assert "Free space there, or choose another disk (checkpoint_root" in run.results["reason"]
    assert not [path for path in kept(folder).iterdir() if path.name.endswith(".partial")]
    (small_disk / "filler").unlink()
    rest = Run(folder, num_rounds=3, rule=Large(), experiment="e", job="second")()
    assert rest.net.tasks[0].current_round == 1
    assert same_model(rest, whole)
    assert figures(rest) == figures(whole)


def test_a_full_disk_of_the_run_still_says_failed_in_the_results(small_disk: Path) -> None:
    run = Run(small_disk, filling(small_disk, 1), num_rounds=3)
    with pytest.raises(ServerFault, match=r"[Nn]o space left"):
        run()
    assert run.results["status"] == "failed"
    assert "o space left" in run.results["reason"]
    assert [record["current_round"] for record in run_document(run.folder / "fairflare")["rounds"]] == [0]


def test_a_file_in_place_of_the_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    run = Run(tmp_path, num_rounds=1, experiment="e")
    with pytest.raises(ServerFault, match=r"the checkpoint folder cannot .*_root"):
        run()
    assert run.net.asked == []
    assert run.results["status"] == "failed"


def test_a_checkpoint_disk_that_became_read_only(small_disk: Path) -> None:
    folder = small_disk.parent
    (folder / "kept").symlink_to(small_disk)

    def behaviour(site: str, name: str, task: Message) -> Message:
        if (site, name, task.current_round) == ("site-1", "train", 1):  # laid over it, since it is in use
            subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
        return good(site, name, task)

    run = Run(folder, behaviour, num_rounds=2, experiment="e", train_timeout=30)
    with pytest.raises(ServerFault, match=r"round 2 cannot be written .*Read-only"):
        run()
    subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
    assert run.results["status"] == "failed"
    assert Run(folder, num_rounds=2, experiment="e", job="second")().net.tasks[0].current_round == 1


def test_a_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    """Check a write that the system refuses as on a full disk, where no disk can be mounted."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def behaviour(site: str, name: str, task: Message) -> Message:
        if (name, task.current_round) == ("train", 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        return good(site, name, task)

    run = Run(tmp_path, behaviour, num_rounds=2, rule=Large(), experiment="e")
    try:
        with pytest.raises(ServerFault, match=r"round 2 cannot .*: File too large"):
            run()
        assert run.results["status"] == "failed"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Run(tmp_path, num_rounds=2, rule=Large(), experiment="e")().net.tasks[0].current_round == 1
