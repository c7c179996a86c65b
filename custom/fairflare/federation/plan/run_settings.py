"""Declare the settings of a run, and the folders in which a run saves its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.aspect import GROUPS, RETRAINING
from fairflare.base.cases.resampling import MOST
from fairflare.base.checks import number, refuse
from fairflare.base.disk.files import safe_name
from fairflare.base.settings import (
    BelowOne,
    Flag,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Whole,
    field_names,
    settings,
)
from fairflare.exchange.sent_tensors import ALL, check_exchange
from fairflare.federation.plan.bounds import Bounds

RESULTS_FOLDER = "fairflare"  # name of the results folder in the run directory
#: Names of groups of options in a command's help.
TRAINING, SITES_THAT_FAIL, RUN = "Task and training", "Sites that fail or come late", "The run"
SAME: Any = object()  # marks an option whose default is that of the class


@dataclass(frozen=True)
class ByOption:
    """Describe how commands and recipes take a setting of the run that ``--set`` does not take.

    Args:
        flags: flags of the command line's option; empty if only a recipe has the setting.
        help: help text of the option; empty if the option is for several settings.
        metavar: placeholder of the value in the help text.
        panel: group of options in the help text; ``None`` for the group of the options that are used most.
        low: least value that the option accepts.
        default: default of commands and recipes, where it is not the class's; ``None`` for the method's own.
        only: the one command that has the option; empty for all that take a run.
    """

    flags: tuple[str, ...] = ()
    help: str = ""
    metavar: str | None = None
    panel: str | None = None
    low: int | None = None
    default: Any = SAME
    only: str = ""


OF_RECIPES, TIMEOUT = ByOption(), ByOption(("--timeout",))


@settings
class RunSettings(Bounds):
    """Declare the settings of a run that do not depend on the method.

    Args:
        num_rounds: communication rounds.
        min_sites: number of usable results that a round needs; with secure sums a smaller number than 3 counts as 3.
        seed: seed of the initial model and of every site's training.
        experiment: id under which checkpoint and site state outlive the job; empty for no resume.
        check_timeout: seconds a site may take, before the first round, to open its data and say what it has.
        require_all_sites: a site whose data or settings fail the check before the first round ends the run; False: the
            run begins without the site, which joins as soon as it can train, unless its data differ in kind from those
            of most sites. A silent site never ends the run while ``min_sites`` answer.
        train_timeout, anchor_timeout, norms_timeout, validate_timeout: seconds a phase may take; a site may never
            answer.
        straggler_grace: seconds that late sites get once ``min_sites`` answered well; 0: the phase's whole timeout.
        max_missed: number of phases in a row after which a site that did not answer in time is not asked again until
            it shows up, and then after 2, 4, 8, ... rounds while it stays late; the final test asks every site.
        keep_local_models: leave each round's local models in the run directory (for audits; large).
        initial_ckpt: checkpoint that the federation starts from, at the server: a plain state dict or an
            ``FL_global_model.pt``, of exactly the task's network; empty: as the task says. An absolute path; a relative
            one is a file that the job carries.
        label: what tables call this run; default: the class of the rule.
        method: name of the method in the catalog; not set by hand.
        best_by: what makes a model the best by the primary metric on the sites' validation splits: ``mean`` over the
            sites, the ``worst`` site, ``mean_minus_std``: mean minus ``best_lambda`` times the standard deviation, or
            ``median``, which a few sites with false values cannot decide.
        best_lambda: factor on the standard deviation in ``best_by="mean_minus_std"``.
        test_last: number of last models whose test metrics are averaged in the results; each further model costs one
            more test at every site. The papers' settings have 5.
        test_every: the model of every so many rounds is tested too, for the test metrics over the rounds; they decide
            nothing. 0: none.
        bootstrap: number of random draws, with replacement, of a site's test images, on which the primary metric is
            measured in the final test, for the intervals of ``fairflare compare``; the values are sent. 0: none.
        crt_rounds: number of extra rounds after ``num_rounds`` in which only the classifier is trained anew, on classes
            in equal parts (cRT, ``docs/crt.md``); 0: none.
        crt_epochs: epochs in each round of ``crt_rounds``; an epoch is as many draws as the site has training images.
        crt_weights: the sites' weights in ``crt_rounds``: by ``samples``, or those of the ``method`` in its last round.
        crt_mask_absent: in ``crt_rounds`` a site does not change the classifier's rows of classes that it lacks.
        norm_statistics: ``"recalibrated"`` where the site half says so, else ``"average"``; not set by hand.
        min_cases: smallest number of cases that a site reports on: of a split, or of a class in it, with fewer only the
            update leaves, no metric, loss or number by class. A site's own setting holds where it is larger.
        channel_drop: probability with which a site sets each channel of a training sample to 0, at least one stays, so
            that the model also works where a channel is missing; default: 0.25 if a site lacks a channel, else 0.
        groups: attributes of people (``sex``, ``age``) that the datalists declare: the final test is measured for each
            of their groups too, from sums that leave the sites (``docs/groups.md``). By default nothing leaves.
        group_bins: number of bins of the histograms of probabilities from which a group's AUC is computed.
        calibration_bins: number of bins of the predicted class's probability, for a group's calibration error.
        exchange: which tensors of the model travel, in both directions: ``"all"``, ``"trainable"`` (those that training
            can change), or a regular expression that finds their names; parameters that it does not find are frozen.
            Each site builds all other tensors itself; they must equal the server's, see ``docs/exchange.md``.
        secure: ``"sums"``: no site's model leaves it; the server opens only weighted sums of all sites' updates, see
            ``docs/secure_sums.md``. No weight is then above 0.5. Empty: the server receives each site's update.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "best_lambda": only_with("best_by", "mean_minus_std"),
        **{name: only_with(one.on) for one in (GROUPS, RETRAINING) for name in one.settings[1:]},
        "bootstrap": only_with("a primary metric that can be measured on drawn cases", fact=True),
        "exchange": only_with("a tensor that it leaves out", fact=True),
        "channel_drop": only_with("a site whose cases have several channels", fact=True),
        "norm_statistics": only_with("a batch norm with running statistics", fact=True),
        "test_every": only_with("a round of such a number before the last one", fact=True),
        "test_last": only_with("a second round", fact=True),
    }

    num_rounds: Annotated[
        PositiveInt,
        ByOption(
            ("--rounds", "-r"), "Communication rounds; default: the method's quick job.", "N", low=1, default=None
        ),
    ] = 5
    min_sites: Annotated[
        PositiveInt,
        ByOption(("--min-sites",), "Usable results that a round needs.", "N", SITES_THAT_FAIL, low=1, default=2),
    ] = 1
    seed: Annotated[Whole, ByOption(("--seed",), "Of the initial model and of all training.", "N", low=0)] = 0
    experiment: Annotated[
        str, ByOption(("--experiment",), "Id under which a stopped run can be continued.", "ID", RUN)
    ] = ""
    check_timeout: Annotated[Positive, OF_RECIPES] = 600.0
    require_all_sites: Annotated[
        Flag,
        ByOption(
            (" /--no-require-all-sites",),
            "Go on without a site whose data or settings cannot be used; default: the run ends before training.",
            panel=SITES_THAT_FAIL,
        ),
    ] = True
    train_timeout: Annotated[Positive, TIMEOUT] = 3600.0
    anchor_timeout: Annotated[Positive, TIMEOUT] = 3600.0
    norms_timeout: Annotated[Positive, TIMEOUT] = 3600.0
    validate_timeout: Annotated[Positive, TIMEOUT] = 3600.0
    straggler_grace: Annotated[
        NonNegative,
        ByOption(
            ("--grace",), "Seconds for late sites once enough answered; 0: the whole timeout.", "S", SITES_THAT_FAIL
        ),
    ] = 0.0
    max_missed: Annotated[PositiveInt, OF_RECIPES] = 2
    keep_local_models: Annotated[
        Flag, ByOption(("--keep-local-models",), "Keep every round's local models.", panel=RUN, only="run")
    ] = False
    initial_ckpt: Annotated[
        str,
        ByOption(
            ("--initial-ckpt",), "Model file to start from: a state dict or an FL_global_model.pt.", "FILE", TRAINING
        ),
    ] = ""
    label: Annotated[
        str,
        ByOption(
            ("--label",),
            "What tables call the run, and its folder; default: the method's name.",
            "NAME",
            RUN,
            default=None,
        ),
    ] = ""
    method: Annotated[str, OF_RECIPES] = ""
    best_by: Literal["mean", "worst", "mean_minus_std", "median"] = "mean"
    best_lambda: NonNegative = 1.0
    test_last: PositiveInt = 1
    test_every: NonNegativeInt = 0
    bootstrap: Annotated[NonNegativeInt, Field(le=MOST)] = 0
    min_cases: PositiveInt = 1
    channel_drop: BelowOne | None = None
    groups: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)
    group_bins: Annotated[int, Field(strict=True, ge=2, le=1000)] = 100
    calibration_bins: Annotated[int, Field(strict=True, ge=2, le=100)] = 15
    norm_statistics: Annotated[Literal["average", "recalibrated"], OF_RECIPES] = "average"
    exchange: str = ALL
    secure: Literal["", "sums"] = ""
    crt_rounds: NonNegativeInt = 0
    crt_epochs: PositiveInt = 1
    crt_weights: Literal["samples", "method"] = "samples"
    crt_mask_absent: Flag = True

    @property
    def rounds_in_all(self) -> int:
        """Return the number of all rounds, with those that retrain the classifier alone."""
        return self.num_rounds + self.crt_rounds

    def bound_sums(self) -> RunSettings:
        """Return these settings, with secure sums bounded so that no weight shows a site's update."""
        from fairflare.privacy.sums.exposure import Limits

        weight = self.max_weight or (Limits().max_weight if self.secure else None)
        return self if weight == self.max_weight else replace(self, max_weight=weight)

    def tests(self, current_round: int) -> bool:
        """Return whether a round's model is tested after the round (not the last one, which the final test covers)."""
        every, left = self.test_every, self.rounds_in_all - current_round - 1
        return left > 0 and (left < self.test_last or (every > 0 and (current_round + 1) % every == 0))

    def __post_init__(self) -> None:
        if self.secure and self.num_rounds:
            from fairflare.privacy.sums.keys import FEWEST

            self.min_sites = max(self.min_sites, FEWEST)
        if self.experiment:
            safe_name(self.experiment)
        check_exchange(self.exchange)
        refuse({f"groups must name each attribute once, got {self.groups}": len({*self.groups}) != len(self.groups)})


@settings
class WithoutTraining(RunSettings):
    """Declare the settings of a run without rounds, which tests a given model (``initial_ckpt``) at every site."""

    num_rounds: Literal[0] = 0


@settings
class PlanRun(WithoutTraining):
    """Declare the settings of a run without rounds that makes a plan of all sites' cases.

    Args:
        plan_memory: memory of a GPU in GB that the plan may count on; default: the smallest of the sites'.
    """

    plan_memory: Positive | None = None
    min_cases: PositiveInt = 5


BY_OPTION: Mapping[str, ByOption] = {
    name: mark
    for name, hint in get_type_hints(RunSettings, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, ByOption)
}
TIMEOUTS = tuple(name for name, option in BY_OPTION.items() if option is TIMEOUT)  # of phases behind the check
#: Settings of the run that users give in the same way as a method's settings.
LIKE_SETTINGS = tuple(name for name in field_names(RunSettings) if name not in BY_OPTION)


def usual_waits(min_sites: int | None = None, phase_timeout: float | None = None) -> dict[str, Any]:
    """Return ``min_sites`` and all timeouts of a run, from one timeout for all phases; default: two sites, an hour."""
    timeout = 3600.0 if phase_timeout is None else phase_timeout
    return {
        "min_sites": BY_OPTION["min_sites"].default if min_sites is None else min_sites,
        **dict.fromkeys(TIMEOUTS, timeout),
        "check_timeout": min(RunSettings().check_timeout, timeout),
    }


@dataclass
class Place:
    """Store the folders of a run, and the settings of the server's private file.

    Args:
        run_dir: folder of this job, for results, models and staging.
        experiments: folder of the checkpoints of all experiments.
        job_id: FLARE's id of the job, or a name.
        settings: content of the server's ``local/fairflare.json``.
        site_half: class path and settings of the sites' training; ``None`` if it is not known at the server.
        carried: folder of the files that the job carries; ``None`` if it carries none, and relative paths start at the
            working directory.
        apart: whether the sites are other processes, so that the server need not hold tensors that do not travel.
    """

    run_dir: Path
    experiments: Path
    job_id: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    site_half: Any = None
    carried: Path | None = None
    apart: bool = False

    def spares_memory(self, run: RunSettings) -> bool:
        """Return whether this process is a server that need not hold the whole model, and so leaves pages to others."""
        return self.apart and run.exchange != ALL

    @property
    def models_in_memory(self) -> float | None:
        """Return how many bytes of local models may wait in the server's memory; ``None`` for a quarter of it.

        Raises:
            ValueError: the value in the server's file is no number of bytes.
        """
        limit = self.settings.get("models_in_memory")
        return None if limit is None else number("models_in_memory in the server's local/fairflare.json", limit, low=0)

    def initial_weights(self, run: RunSettings) -> str | None:
        """Return the checkpoint that the federation starts from: the job's, or that of the server's private file.

        Raises:
            ValueError: both name a checkpoint, or the job's relative path leads out of the files that the job carries.
        """
        from_server = (
            self.settings.get("initial_weights") if run.num_rounds else None
        )  # no rounds: the given model alone
        if not run.initial_ckpt:
            return from_server
        path = (self.carried or Path()) / run.initial_ckpt
        outside = self.carried is not None and not path.resolve().is_relative_to(self.carried.resolve())
        refuse({
            f"the run starts from initial_ckpt {run.initial_ckpt!r} and the server's local/fairflare.json names "
            f"initial_weights {from_server!r}; take out one of them": from_server is not None,
            f"initial_ckpt {run.initial_ckpt!r:.200} leads out of the files that the job carries; name one of them, or "
            "give the absolute path of a file at the server": outside and not Path(run.initial_ckpt).is_absolute(),
        })  # fmt: skip
        return str(path)
