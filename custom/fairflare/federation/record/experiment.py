"""Resume a run from an earlier job's checkpoint, save it after each round, and take it back by one round."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare import __version__
from fairflare.base.checks import refuse, true_texts
from fairflare.base.disk.files import remove_partials
from fairflare.base.disk.locks import FolderInUse, FolderLock, describe_holder
from fairflare.base.settings import flatten
from fairflare.core.states import check_state
from fairflare.exchange.messages import same_version
from fairflare.federation.collecting.phase import ServerFault
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place, RunSettings
from fairflare.federation.plan.site_training import training_of
from fairflare.federation.record.checkpoint import (
    BY_SITES,
    MEMORY_FOLDER,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    check_same_config,
    check_same_rounds,
    differing,
)
from fairflare.federation.record.journal import Journal
from fairflare.federation.record.models import ModelFiles
from fairflare.federation.record.run_info import following_rounds
from fairflare.methods.base.rule import State
from fairflare.privacy.policy import PRIVACY

if TYPE_CHECKING:
    from fairflare.federation.server.retraining import Retraining


class Experiment:
    """Manage the checkpoints of a run, and the lock on them; without an experiment id nothing is saved.

    Args:
        run, place: settings and folders of the run.
        rule: the server half, whose state is saved.
        journal, files: results and model files, which are also restored when a run is resumed or taken back.
        say: function that writes a line into the server's log.
        sums: what secure sums keep from round to round; empty without them.

    Attributes:
        run_id: id that all jobs share that resume one run of an experiment; each new start has another id.
        memory: folder of the files that the rule keeps on disk.
    """

    def __init__(
        self,
        run: RunSettings,
        place: Place,
        rule: Retraining,
        journal: Journal,
        files: ModelFiles,
        say: Callable[..., None],
        sums: dict[str, Any],
    ) -> None:
        self.run, self.place, self.rule = run, place, rule
        self.journal, self.files, self.say = journal, files, say
        self.run_id = uuid.uuid4().hex[:12]
        self.folder = CheckpointFolder(place.experiments / run.experiment) if run.experiment else None
        self.lock = FolderLock(self.folder.folder, {"job_id": place.job_id}) if self.folder else None
        self.memory = (self.folder.folder if self.folder else place.run_dir / RESULTS_FOLDER) / MEMORY_FOLDER
        self.sums = sums
        self._config: dict[str, Any] = {}
        self._sites: list[str] = []

    def open(self) -> None:
        """Lock the experiment for this run alone, and remove files that dead processes left.

        Raises:
            CheckpointError: another run holds the experiment; the message names its job, process, host and start.
            ServerFault: the experiment's folder cannot be written.
        """
        if self.lock is not None:
            try:
                with writing("the checkpoint folder", self.lock.folder):
                    self.lock.take()
            except FolderInUse as error:
                raise CheckpointError(
                    f"experiment {self.run.experiment!r} is being run by {describe_holder(error.holder)}; wait until "
                    "that run is over or abort it, or give this one another experiment id"
                ) from None
            remove_partials(self.lock.folder, mine=True)
        remove_partials(self.place.run_dir)

    def close(self) -> None:
        """Release the experiment's lock; if the run has no experiment id, remove the rule's saved state."""
        if self.lock is not None:
            self.lock.release()
        else:
            shutil.rmtree(self.memory, ignore_errors=True)

    # -- where a run begins

    def begin(self, start: State, config: Mapping[str, Any], info: dict[str, Any]) -> tuple[int, State]:
        """Return the first round to do and its model: ``start``, or the model of the experiment's newest checkpoint.

        Also start the run's results, with ``info``; a resumed run continues the earlier results.

        Raises:
            CheckpointError: the checkpoints do not fit these settings or versions, or are damaged.
            ServerFault: the checkpoint folder or the results cannot be written.
        """
        self._config, self._sites = dict(config), list(info["connected"])
        checkpoint = self._load()
        if checkpoint is not None:
            self._resume(checkpoint, info)
        info.update(run=self.run_id, synthetic=self.journal.synthetic)
        with writing("the results", self.journal.store.folder):
            self.journal.store.start(info)
            if checkpoint is not None and self.folder is not None:
                self.journal.store.load_state_dict(checkpoint.results, self.folder.log)
        if checkpoint is not None:
            return checkpoint.next_round, self._take_back(checkpoint, start)
        self.save(0, start)
        return 0, start

    def _load(self) -> Checkpoint | None:
        checkpoint = (
            None if self.folder is None
            else self.folder.load(partial(_check_version, experiment=self.run.experiment))
        )  # fmt: skip
        if checkpoint is not None and checkpoint.next_round == 0 and differing(checkpoint.config, self._config):
            self.say(f"experiment {self.run.experiment!r}: no round was done under other settings; starting anew")
            return None
        return checkpoint

    def _resume(self, checkpoint: Checkpoint, info: dict[str, Any]) -> None:
        run = self.run
        check_same_config(checkpoint.config, self._config, run.experiment)
        following = following_rounds(self.rule, self.place.site_half) + ["crt_rounds"] * bool(run.crt_rounds)
        was = checkpoint.config["num_rounds"]
        # The retraining rounds after the method's own rounds are not counted in the earlier number of rounds either.
        done = checkpoint.next_round if not run.crt_rounds else min(checkpoint.next_round, was)
        check_same_rounds(was, run.num_rounds, done, following, run.experiment)
        self.run_id = str(checkpoint.extra["run"])
        self.journal.synthetic = bool(checkpoint.extra["synthetic"])
        info |= {
            "resumed_at_round": checkpoint.next_round,
            "said": checkpoint.extra.get("said", {}),  # used in model files until the sites report again
            PRIVACY: checkpoint.extra.get(PRIVACY, {}),
        }
        self.sums |= checkpoint.extra.get("sums", {})
        differences = [*checkpoint.passed_over, *self._differences(checkpoint, info)]
        info |= {"resumed_with": differences} if differences else {}
        self.say(f"experiment {run.experiment!r}: going on at round {checkpoint.next_round} of {run.rounds_in_all}")
        for text in differences:
            self.say(f"experiment {run.experiment!r}: {text}", warning=True)

    def _differences(self, checkpoint: Checkpoint, info: Mapping[str, Any]) -> list[str]:
        """Return each difference from the experiment's earlier job that may change the results."""
        was, now = checkpoint.extra["versions"], info["versions"]
        then, here = set(checkpoint.extra["sites"]), set(self._sites)
        dealt, deals = (flatten(config).get(BY_SITES) for config in (checkpoint.config, self._config))
        before = checkpoint.config["num_rounds"]
        unknown = "; whether the sites' training depends on it is not known" * (not training_of(self.place.site_half))
        return true_texts({
            **{
                f"{name} was {was.get(name)}, is {now.get(name)}: the last digits may differ":
                    was.get(name) != now.get(name)
                for name in sorted({*was, *now})
            },
            f"no longer in the job: {', '.join(sorted(then - here))}": then - here,
            f"new in the job: {', '.join(sorted(here - then))}": here - then,
            f"the synthetic images were dealt to {dealt} sites, are to {deals}: every site has other images":
                self.journal.synthetic and dealt != deals,
            f"num_rounds was {before}, is {self.run.num_rounds}{unknown}": before != self.run.num_rounds,
        })  # fmt: skip

    def _take_back(self, checkpoint: Checkpoint, like: State) -> State:
        """Restore the rule, the best model and the model files from a checkpoint.

        Returns:
            The global model in the network's own order.
        """
        check_state(checkpoint.model, like, "checkpoint")
        self.rule.load_state_dict(checkpoint.rule)
        best = self.folder.best_model(checkpoint) if self.folder is not None else None
        if best is None and checkpoint.extra["best_round"] is not None:
            self.say("the best model so far cannot be read; the best of the rounds to come is kept", warning=True)
        state = {name: checkpoint.model[name] for name in like}  # the file's names are sorted
        with writing("the model", self.files.folder):
            self.files.take_back(
                state,
                checkpoint.next_round - 1,
                None if best is None else {name: best[name] for name in like},
                checkpoint.extra["best"],
            )
        return state

    # -- after a round

    def save(self, next_round: int, state: State) -> None:
        """Save a checkpoint: the model that ``next_round`` begins with, and all state that belongs to this model.

        Raises:
            ServerFault: the disk is full or cannot be written; the earlier checkpoints are kept.
        """
        if self.folder is None:
            return
        best = self.files.best
        checkpoint = Checkpoint(
            next_round=next_round,
            model=dict(state),
            rule=self.rule.state_dict(),
            results=self.journal.store.state_dict(),
            config=self._config,
            extra={
                "run": self.run_id,
                "sites": self._sites,
                "versions": self.journal.info["versions"],
                "synthetic": self.journal.synthetic,
                "said": self.journal.info.get("said", {}),
                PRIVACY: self.journal.info.get(PRIVACY, {}),
                "sums": self.sums,
                "best": best.state_dict(),
                "best_round": None if best.made is None else best.made + 1,  # the round that began with the best model
            },
        )
        with writing(f"the checkpoint of round {next_round}", self.folder.folder):
            self.folder.save(checkpoint, self.journal.store.log)

    def go_back(self, current_round: int, like: State, reason: str) -> State | None:
        """Restore the state before the last round, and return its model, or ``None`` if that checkpoint cannot be read.

        Raises:
            ServerFault: a folder cannot be written.
        """
        with writing("the checkpoint folder", self.folder.folder if self.folder else self.place.run_dir):
            checkpoint = self.folder.back_from(current_round) if self.folder is not None else None
        if checkpoint is None or self.folder is None:
            return None
        self.say(
            f"{reason}. Going back: round {checkpoint.next_round} is done again, from the model before it", warning=True
        )
        with writing("the results", self.journal.store.folder):
            self.journal.store.go_back(checkpoint.results, self.folder.log, reason)
        return self._take_back(checkpoint, like)


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Convert a disk error in the context to a ``ServerFault`` whose text tells the server's operator what to do."""
    try:
        yield
    except OSError as error:
        raise ServerFault(
            f"{what} cannot be written to {folder}: {error.strerror or error}. Free space there, or choose another "
            "disk (checkpoint_root in the server's local/fairflare.json), and start the run again; with an experiment "
            "id it goes on after the last whole round"
        ) from error


def _check_version(extra: Mapping[str, Any], experiment: str) -> None:
    was = str(extra["versions"].get("fairflare"))
    refuse({
        f"experiment {experiment!r} was begun with fairflare {was}, this is {__version__}; install that version to go "
        "on with it, or give the run another experiment id": not same_version(was),
    }, CheckpointError)  # fmt: skip
