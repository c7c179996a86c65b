"""Test a site's state on disk: by run, for one process at a time, after kills, cuts, flipped bits or a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.disk import files
from fairflare.base.disk.files import write_whole
from fairflare.base.disk.locks import Held, hold_lock
from fairflare.base.stopping import TaskStopped, stoppable
from fairflare.exchange.messages import encode_reply
from fairflare.federation.site import site_state
from fairflare.federation.site.site_state import SiteFolder
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.home import LOCAL_MODEL
from fairflare.methods.base.site_run import SiteStore
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_lwr import LayerSimilarityReport

from ..methods.support import at_site, initial, request, same
from .network import Run, good

FORK = multiprocessing.get_context("fork")  # a real process, without the seconds that an import of torch takes


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., SiteWorker]:
    def make(folder: str = "state", training: LocalTraining | None = None) -> SiteWorker:
        return at_site(tmp_path / folder, training or LayerSimilarityReport(batch_size=4))

    return make


def values(x: float) -> dict[str, Any]:
    return {"x": torch.full((100,), x), "nested": {"steps": [int(x)]}}


def equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(a["x"], b["x"])) and a["nested"] == b["nested"]


def kept(store: SiteStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


# ------------------------------------------------------------------------------------------------ values by round


def test_three_rounds_are_kept_and_later_ones_forgotten(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    for number in range(5):
        store.save("moments", number, values(number))
    assert kept(store) == ["moments.000002.pt", "moments.000003.pt", "moments.000004.pt"]
    assert equal(store.load_before("moments", 4), values(3))
    assert equal(store.load_before("moments", 3), values(2))  # the server goes back a round
    assert store.load_at("moments", 1) is None
    store.save("moments", 3, values(30))  # the server went back to its checkpoint
    assert store.load_at("moments", 4) is None
    assert equal(store.load_before("moments", 9), values(30))
    assert store.lost == []
    assert store.load_before("moments", 2) is None
    assert store.lost == ["no usable moments of an earlier round is here: starts with a new one"]


def test_one_round_of_a_local_model_is_kept(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    for number in (0, 1, 5, 3):
        store.save("model", number, values(number), kept=1)
        assert kept(store) == [f"model.00000{number}.pt"]


def test_nothing_kept_is_nothing_lost_in_the_first_round(tmp_path: Path) -> None:
    store = SiteStore(tmp_path / "none")
    assert store.load_before("moments", 0) is None
    assert store.load_at("moments", 7) is None
    assert store.lost == []


def test_no_flipped_bit_gives_another_value(tmp_path: Path) -> None:
    """Check flipped bits, most of which torch.load alone would accept."""
    store = SiteStore(tmp_path)
    store.save("moments", 1, values(1))
    file = tmp_path / "moments.000001.pt"
    whole = file.read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        found = store.load_at("moments", 1)
        assert found is None or equal(found, values(1)), place  # some bytes only fill, or are dates
        refused += found is None
    assert refused >= 80  # the numbers' own 400 bytes at least
    assert store.lost == ["its moments of round 1 is damaged"]


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_cut_file_is_found_out(tmp_path: Path, length: int) -> None:
    store = SiteStore(tmp_path)
    for number in (1, 2):
        store.save("moments", number, values(number))
    file = tmp_path / "moments.000002.pt"
    file.write_bytes(file.read_bytes()[:length])
    assert equal(store.load_before("moments", 3), values(1))
    assert store.lost == ["its moments of round 2 is damaged", "that of round 1 is taken"]


def test_too_little_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SiteStore(tmp_path)
    store.save("moments", 1, values(1))

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("torch.load", full)
    with pytest.raises(MemoryError):
        store.load_before("moments", 2)


# ------------------------------------------------------------------------------------------------ kill -9


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def dying_at(count: int) -> Iterator[None]:
    """Fork a process that kills itself before its ``count``-th file operation; half of a write is done by then."""
    left = [count]

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                _die()
            return function(*args, **kwargs)

        return wrapper

    save = torch.save

    def half(value: Any, file: Any, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            file.write(b"PK\x03\x04" + bytes(200))
            file.flush()
            _die()
        save(value, file, *args)

    torch.save = half
    files.flush_to_disk = counted(files.flush_to_disk)
    for name in ("open", "replace", "rename", "unlink"):
        setattr(Path, name, counted(getattr(Path, name)))
    yield


def save_and_die(folder: Path, count: int) -> None:
    with dying_at(count):
        SiteStore(folder).save("moments", 3, values(3))


@pytest.mark.parametrize("again", [False, True])
def test_killed_in_the_middle_of_saving_leaves_the_old_value_or_the_new_one(tmp_path: Path, again: bool) -> None:
    """Check the state of a new round, and of a round that the server asks for again."""
    outcomes, old = [], 0 if again else 2
    for count in range(1, 30):
        folder = SiteFolder("site-1", tmp_path / str(count))
        store = folder.store()
        store.folder.mkdir(parents=True)
        for number in (1, 2):
            store.save("moments", number, values(number))
        if again:
            store.save("moments", 3, values(old))
        child = FORK.Process(target=save_and_die, args=(store.folder, count))
        child.start()
        child.join(30)
        with folder.open_store(request("train", {}, 4)) as store:
            found = store.load_before("moments", 4)
            assert found is not None
            assert store.lost == []
            assert equal(found, values(3)) or equal(found, values(old)), count
            assert not list(store.folder.glob(".*")), "a part of a file is left"
            repeated = store.load_before("moments", 3)  # the server asks for the round again
            assert repeated is not None
            assert again or equal(repeated, values(2))
        outcomes.append(int(found["x"][0]))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert child.exitcode == 0, "it was never done"
    assert len(outcomes) >= 7  # open, write, fsync, replace, fsync, unlink ...
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {old, 3}


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    folder = SiteFolder("site-1", tmp_path / "site-1")
    store = folder.store("a")
    store.scratch.mkdir(parents=True)
    (store.scratch / "cka-1").write_text("features")
    own = store.folder / f".moments.000001.pt.{os.getpid()}.partial"  # in a container all have one number
    own.write_text("half")
    (folder.folder / ".b.gone").mkdir()
    (folder.folder / ".b.gone" / "moments.000001.pt").write_text("of a run that was being removed")
    with folder.open_store(request("train", {}, run="a")) as store:
        assert kept(store) == ["lock", "scratch"]
        assert not list(store.scratch.iterdir())
        (store.scratch / "cka-2").write_text("features")
    assert kept(store) == ["lock"]
    assert [path.name for path in folder.folder.iterdir()] == ["a"]


# ------------------------------------------------------------------------------------------------ damage and loss


def damage(store: SiteStore, name: str) -> None:
    path = store.folder / name
    whole = bytearray(path.read_bytes())
    for place in range(len(whole) // 2, len(whole) // 2 + 64):  # some bytes only fill
        whole[place] ^= 4
    path.write_bytes(whole)


@pytest.mark.long
def test_a_damaged_file_costs_moments_and_not_the_site(worker: Any) -> None:
    state = initial()
    here, healthy, gap, newcomer = (worker(name) for name in ("a", "b", "c", "d"))
    for number in (0, 1):
        here.perform(request("train", state, number))
        healthy.perform(request("train", state, number))
    damage(here.state.store(), "optimizer.000001.pt")
    reply = here.perform(request("train", state, 2))
    assert reply.status == "ok", reply.reason
    assert reply.stats["state_lost"] == "its optimizer of round 1 is damaged; that of round 0 is taken"
    gap.perform(request("train", state, 0))
    after_gap = gap.perform(request("train", state, 2))
    assert "state_lost" not in after_gap.stats
    assert same(reply.update, after_gap.update)
    assert not same(reply.update, healthy.perform(request("train", state, 2)).update)
    # All of them.
    for number in (0, 2):
        damage(here.state.store(), f"optimizer.00000{number}.pt")
    reply = here.perform(request("train", state, 3))
    assert reply.stats["state_lost"] == (
        "its optimizer of round 2 is damaged; its optimizer of round 1 is damaged; its optimizer of round 0 is "
        "damaged; no usable optimizer of an earlier round is here: starts with a new one"
    )
    fresh = newcomer.perform(request("train", state, 3))
    assert fresh.stats["state_lost"] == "no usable optimizer of an earlier round is here: starts with a new one"
    assert same(reply.update, fresh.update)
    # And it heals.
    reply = here.perform(request("train", state, 4))
    assert "state_lost" not in reply.stats
    assert same(reply.update, newcomer.perform(request("train", state, 4)).update)


def test_a_damaged_local_model_costs_one_report(worker: Any) -> None:
    state = initial()
    here = worker()
    here.perform(request("train", state, 0))
    damage(here.state.store(), f"{LOCAL_MODEL}.000000.pt")
    reply = here.perform(request("anchor", state, 0))
    assert reply.status == "skipped"
    assert reply.reason == (
        "site 'site-1' has no local model of round 0 to compare with the average of all local models (its local_model "
        "of round 0 is damaged)"
    )
    assert here.perform(request("train", state, 1)).status == "ok"
    assert here.perform(request("anchor", state, 1)).status == "ok"


def test_a_site_without_state_of_its_own_loses_none(worker: Any) -> None:
    reply = worker(training=LocalTraining(batch_size=4, keep_optimizer_state=False)).perform(
        request("train", initial(), 2)
    )
    assert reply.status == "ok"
    assert "state_lost" not in reply.stats


def test_log_and_results_of_the_server_say_it(tmp_path: Path) -> None:
    def behaviour(site: str, name: str, task: Any) -> Any:
        reply = good(site, name, task)
        if (site, name, task.current_round) == ("site-2", "train", 1):
            reply.meta["stats"]["state_lost"] = "moments \x1b[31m gone"
        return reply

    run = Run(tmp_path, behaviour, num_rounds=2)()
    first, second = (record["train"] for record in run.results["rounds"])
    assert not any("state_lost" in said for said in first.values())
    assert second["site-2"]["state_lost"] == "moments  [31m gone"
    assert "state_lost" not in second["site-1"]
    assert "round 1: site 'site-2' lost some of its state: moments  [31m gone" in run.net.warned


# ------------------------------------------------------------------------------------------------ runs


def exchange(worker: SiteWorker, run: str, state: Any, current_round: int) -> tuple[Any, Any]:
    told = {"run": run, "experiment": "x"}
    trained = worker.perform(request("train", state, current_round, **told))
    anchor = worker.perform(request("anchor", state, current_round, **told))
    assert (trained.status, anchor.status) == ("ok", "ok"), (trained.reason, anchor.reason)
    return trained, anchor


@pytest.mark.long
def test_two_runs_that_alternate_get_their_own_bits(worker: Any) -> None:
    """Check two jobs with one experiment id: neither moments nor local models may mix."""
    states = {"first": initial(seed=1), "second": initial(seed=2)}
    alone = {run: [exchange(worker(run), run, states[run], r) for r in range(3)] for run in states}
    here = {run: worker("shared") for run in states}
    for current_round in range(3):
        trained = {
            run: here[run].perform(request("train", states[run], current_round, run=run)) for run in ("first", "second")
        }
        for run in ("second", "first"):
            expected, about = alone[run][current_round]
            assert same(trained[run].update, expected.update), (run, current_round)
            reply = here[run].perform(request("anchor", states[run], current_round, run=run))
            assert reply.report == about.report
            assert max(reply.report["dissimilarity"]) > 0


def test_a_run_that_goes_on_finds_its_own_and_another_does_not(worker: Any) -> None:
    state = initial()
    worker().perform(request("train", state, 0, run="a"))
    told = worker().perform(request("train", state, 1, run="b"))
    assert "no usable optimizer" in told.stats["state_lost"]
    assert "state_lost" not in worker().perform(request("train", state, 1, run="a")).stats
    assert worker().perform(request("anchor", state, 0, run="b")).status == "skipped"


def test_three_runs_are_kept_and_the_oldest_that_nobody_holds_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = SiteFolder("site-1", tmp_path)
    other = tmp_path / "notes"  # not ours
    other.mkdir()

    def work(run: str) -> list[str]:
        time.sleep(0.01)  # the file system's clock is coarse
        with folder.open_store(request("train", {}, run=run)) as store:
            store.save("moments", 0, values(1))
        return sorted(path.name for path in tmp_path.iterdir())

    for run in ("a", "b", "c"):
        work(run)
    assert work("a") == ["a", "b", "c", "notes"]  # b is the oldest now
    assert work("d") == ["a", "c", "d", "notes"]
    assert "state of the old run b removed; those of 3 runs are kept" in caplog.text
    with hold_lock(tmp_path / "c" / "lock", "another job"):
        os.utime(tmp_path / "c" / "lock", (0, 0))
        assert work("e") == ["c", "d", "e", "notes"]
        assert (tmp_path / "c" / "moments.000000.pt").exists()


@pytest.mark.parametrize("run", ["../x", "a/b", ".hidden", "x" * 200])
def test_the_id_of_a_run_cannot_leave_the_folder(worker: Any, tmp_path: Path, run: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for name in ("train", "anchor", "validate"):
        reply = worker().perform(request(name, initial(), run=run))
        assert reply.status == "failed"
        assert reply.reason.startswith("site 'site-1': the server's id of the run is not usable: name '")
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------------------------------ one at a time


def hold(path: Path, ready: Any) -> None:
    with hold_lock(path, "process 4711 (train, round 3)"):
        ready.set()
        time.sleep(120)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """Start a process of an old job that still trains on the run's state."""
    ready = FORK.Event()
    child = FORK.Process(target=hold, args=(tmp_path / "state" / "a" / "lock", ready), daemon=True)
    child.start()
    assert ready.wait(30)
    yield child
    child.kill()
    child.join()


def test_a_state_in_use_is_refused_until_its_holder_is_dead(
    worker: Any, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_state, "LOCK_WAIT", 0.3)
    state, here = initial(), worker()
    for name in ("train", "anchor"):
        reply = here.perform(request(name, state, run="a"))
        assert reply.status == "failed"
        assert reply.reason == (
            "site 'site-1': its state of this run is in use by process 4711 (train, round 3); waited 0.3 s. End that "
            "process, or wait until it is done, and submit the job again"
        )
    assert here.perform(request("validate", state, run="a")).status == "ok"  # needs nothing of it
    assert here.perform(request("train", state, run="b")).status == "ok"  # another run
    holder.kill()
    holder.join()
    assert here.perform(request("train", state, run="a")).status == "ok"


def test_a_task_waits_for_the_one_before(worker: Any, holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_state, "LOCK_WAIT", 60.0)
    killer = threading.Timer(0.5, holder.kill)
    killer.start()
    assert worker().perform(request("train", initial(), run="a")).status == "ok"
    killer.join()


def test_the_stop_is_heard_while_waiting(worker: Any, holder: Any) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    reply = worker().perform(request("train", initial(), run="a"), stop)
    assert (reply.status, reply.reason) == ("skipped", "site 'site-1': the job was stopped")
    assert len(asked) == 3


def test_the_lock_of_a_removed_folder_is_not_one(tmp_path: Path) -> None:
    """Check a process that waits for a run's lock while another removes the run as too old."""
    path = tmp_path / "a" / "lock"
    got = threading.Event()

    def second() -> None:
        with hold_lock(path, "second", wait=30):
            assert path.read_text() == "second"
            with pytest.raises(Held, match="second"), hold_lock(path, "third"):
                pass
            got.set()

    thread = threading.Thread(target=second)
    with hold_lock(path, "first, with a long name"):
        thread.start()
        time.sleep(0.3)
        assert not got.is_set()
        (tmp_path / "a").rename(tmp_path / "gone")
    thread.join(30)
    assert got.is_set()


def test_a_folder_that_is_removed_between_opening_and_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock
    calls = []

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            return
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / "a").rename(tmp_path / "gone")
        lock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", flock)
    with hold_lock(tmp_path / "a" / "lock", "me"):
        assert (tmp_path / "a" / "lock").read_text() == "me"
    assert len(calls) == 2


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(KeyError), hold_lock(path, "first"):
        raise KeyError
    with hold_lock(path, "2"):
        assert path.read_text() == "2"
    with stoppable(lambda: True), hold_lock(path, "free: nobody asks"):
        pass
    with hold_lock(path, "x"), stoppable(lambda: True), pytest.raises(TaskStopped), hold_lock(path, "y", wait=30):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EPERM])
def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with hold_lock(tmp_path / "lock", "me"):
        pass
    assert f"cannot be locked ({os.strerror(number)}): keep other processes away from its folder" in caplog.text


# ------------------------------------------------------------------------------------------------ a full disk


def run_in_child(function: Callable[[], Any]) -> Any:
    here, there = FORK.Pipe()

    def work() -> None:
        there.send(function())

    child = FORK.Process(target=work, daemon=True)
    child.start()
    there.close()
    assert here.poll(120)
    found = here.recv()
    child.join(30)
    return found


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Make writes fail half way, as on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_training_that_failed_leaves_nothing(worker: Any) -> None:
    class Fails(LocalTraining):
        """Raise an error after the moments were saved."""

        def report(self, run: Any, model: Any) -> dict[str, Any]:
            if run.current_round == 1:
                raise KeyError
            return {}

    state, here = initial(), worker("a", Fails(batch_size=4))
    replies = [here.perform(request("train", state, number)) for number in range(3)]
    assert [reply.status for reply in replies] == ["ok", "failed", "ok"]
    without = worker("b", LocalTraining(batch_size=4))
    without.perform(request("train", state, 0))
    assert same(replies[2].update, without.perform(request("train", state, 2)).update)
    assert kept(here.state.store()) == [
        "lists", "local_model.000002.pt", "lock", "optimizer.000000.pt", "optimizer.000002.pt"
    ]  # fmt: skip


def test_a_site_on_a_full_disk_is_left_out_and_comes_back(worker: Any) -> None:
    """Check that the whole task is refused, as an update without saved moments could not be repeated after a stop."""
    state = initial()

    def work() -> list[Any]:
        here = worker()
        replies = [here.perform(request("train", state, 0))]
        with small_files(2000):
            replies.append(here.perform(request("train", state, 1)))
            replies.append(here.perform(request("validate", state, 1)))
        replies.append(here.perform(request("train", state, 2)))
        return [(r.status, r.reason, r.update is None, r.stats.get("state_lost")) for r in replies]

    first, full, test, after = run_in_child(work)
    assert full == (
        "failed",
        "site 'site-1': train failed with OSError: File too large (details in the site's log)",
        True,
        None,
    )
    assert (first[0], test[0], after[0]) == ("ok", "ok", "ok")
    assert after[3] is None
    assert kept(worker().state.store()) == [
        "lists", "local_model.000002.pt", "lock", "optimizer.000000.pt", "optimizer.000002.pt"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "OSError: No space left on device; make room for the site's state (state_root) and its temporary files; "
            "the site is back in the round after that",
        ),
        (
            errno.EROFS,
            "OSError: Read-only file system; let the site write to its state_root; it is back in the round after that",
        ),
        (errno.EIO, "OSError: Input/output error"),
    ],
)
def test_the_reason_has_the_systems_words_and_no_path(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    here, state = worker(), initial()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "secret"))

    monkeypatch.setattr("fairflare.base.disk.locks.os.open", fails)
    reply = here.perform(request("train", state))
    assert reply.status == "failed"
    assert reply.reason == f"site 'site-1': train failed with {said} (details in the site's log)"
    assert here.perform(request("validate", state)).status == "ok"
    monkeypatch.undo()
    assert here.perform(request("train", state)).status == "ok"


def test_a_state_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    reply = at_site(tmp_path / "root" / "x" / "site-1").perform(request("train", initial()))
    assert reply.reason == (
        "site 'site-1': train failed with NotADirectoryError: Not a directory (details in the site's log)"
    )


def test_an_old_run_that_cannot_be_removed_costs_no_task(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Path, target: Path) -> Path:
        if re.fullmatch(r"\..\.gone", Path(target).name):
            raise PermissionError(errno.EACCES, "Permission denied")
        return replace(self, target)

    replace = Path.replace
    here = worker(training=LocalTraining(batch_size=4, local_epochs=1))
    for run in ("a", "b", "c"):
        with here.state.open_store(request("train", {}, run=run)):
            pass
    monkeypatch.setattr(Path, "replace", fails)
    assert here.perform(request("train", initial(), run="d")).status == "ok"
    assert "old files of its state cannot be removed" in caplog.text


def test_partials_of_the_living_stay_unless_the_folder_is_held(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", lambda path: path.write_text("whole"))
    mine, dead = tmp_path / f".x.{os.getpid()}.partial", tmp_path / ".x.4194305.partial"
    for path in (mine, dead):
        path.write_text("half")
    assert files.remove_partials(tmp_path) == 1
    assert mine.exists()
    assert files.remove_partials(tmp_path, mine=True) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert files.remove_partials(tmp_path / "none", mine=True) == 0


# ------------------------------------------------------------------------------------------------ what was sent


def test_a_site_can_read_every_value_that_it_has_sent(tmp_path: Path) -> None:
    """Compare the log with the messages of three tasks and a refusal, and a model's checksum with a plain loop."""
    log, own = tmp_path / "root" / ".sent" / "site-1.jsonl", at_site(tmp_path / "state")
    own.sent, state = log, initial()
    names = ("check", "train", "validate", "unheard-of")
    replies = [own.perform(request(name, {} if name == "check" else state, 1, run="r")) for name in names]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + tensor.numpy().tobytes())
    assert [line.pop("model") for line in lines] == [None, *[digest.hexdigest()] * 3]
    assert [(line["task"], line["run"], line["round"]) for line in lines] == [(name, "r", 1) for name in names]
    assert [line["lists"] for line in lines] == [[], [], ["test"], []]
    for line, reply in zip(lines, replies, strict=True):
        message, told = encode_reply(reply, 1), line["answer"]
        assert (told.pop("update") is None) == (message.params is None)
        assert told == json.loads(json.dumps({**message.meta, "metrics": message.metrics}))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (log, log.parent)] == [0o600, 0o700]


def test_what_cannot_be_written_down_is_not_sent(tmp_path: Path) -> None:
    own = at_site(tmp_path / "state")
    own.sent = tmp_path / "log"
    own.sent.mkdir()
    reply = own.perform(request("train", initial()))
    assert (reply.status, reply.update, reply.metrics) == ("failed", None, [])
    assert "train failed with IsADirectoryError" in reply.reason
