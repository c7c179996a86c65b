"""Run a job's first exchange, ``check``: before any training every site opens its data and reports what it has.

A wrong setting, unreadable data, a task that does not fit the method, synthetic data at some sites and real data at
others, or another number of classes than the job has end the run here, with a message that names the site and the
reason. With ``require_all_sites=false`` the run continues without that site; where sites differ from each other, it
continues without those that differ from most sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fairflare.base.cases.census import contradictions, list_unexplained, question, question_of_values
from fairflare.base.checks import MAX_SAMPLES, few, group_by_key, printable, refuse, refuse_if
from fairflare.base.site_data import MOST_WINDOWS
from fairflare.base.task import SPLIT_GLOBAL, Batches, Metric, SiteData, Task
from fairflare.core.statistics.footing import Footing
from fairflare.exchange.messages import TASK_CHECK, Message
from fairflare.federation.collecting.phase import Exchange, Phase, RoundFailed
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.journal import Journal
from fairflare.federation.server.retraining import Retraining
from fairflare.federation.site.facts import (
    ANNOTATED,
    CHANNELS,
    GLOBAL_LIST,
    MARKED,
    MARKED_CASES,
    MASK_LABELS,
    MEASURED,
    OTHER_IMAGES,
)
from fairflare.federation.site.groups import NAMES
from fairflare.federation.site.replies import read_head, reasons
from fairflare.federation.site.sampling import BY_CLASS, MOST_CLASSES
from fairflare.methods.base.reports import NO_IMAGES, VALIDATION, Field, ReportError, read_report
from fairflare.methods.base.rule import TwoPhase
from fairflare.methods.parts.group_sums import ACTED_ON
from fairflare.privacy.policy import BUDGET, PRIVACY, budget_notes
from fairflare.privacy.sums.keys import FEWEST

NUMBERED = re.compile(r"class_\d+")  # finds a class without a name of its own
COSTS = ("windows", "seconds")  # fields of tasks on whole volumes
MAX_LISTS = 100  # largest number of lists of images that a site may have
MAX_WORDS = 100_000  # largest number of characters of all names in a report together
#: Fields that a site reports in its answer to ``check``. A site with the user's own script may omit all of them.
FIELDS = (
    Field("splits", "names", required=False, doc="its lists: training, validation, test, `test_<name>`, unlabelled"),
    Field("suppressed", "names", required=False, doc="names of those of its lists with fewer cases than `min_cases`"),
    Field("min_cases", "whole", low=1, required=False, doc="the number that is in force there"),
    Field(
        "images", "vector", low=0, high=MAX_SAMPLES, same_length_as="splits", required=False,
        doc="number of images in each list",
        keep="of lists with fewer cases: `min_cases`",
    ),
    Field(
        GLOBAL_LIST, "text", required=False,
        doc="checksum of its list `test_global`, so that one that several sites have counts once",
        reveals="to whoever has the same images: that the site has this list",
        keep="leave `test_global` out of the datalist; of fewer cases `min_cases`",
    ),
    Field("synthetic", "flag", required=False, doc="whether the data are made up"),
    Field(
        "num_classes", "whole", low=1, high=MOST_CLASSES, required=False,
        doc="number of classes that the datalist names, else the highest label and one",
        reveals="where the datalist names no classes: that the site has the class of the highest label",
        keep=f"{BY_CLASS}, and of a class with fewer cases `min_cases`, where the datalist names no classes",
    ),
    Field(
        "class_names", "names", required=False,
        doc="names of the classes in the datalist, also of those that the site has no image of",
        keep="leave `class_names` out of the datalist",
    ),
    Field(
        MASK_LABELS, "names", required=False,
        doc="`<label>=<value>=<name>` of each label of the masks: the value in the files, and its name if it has one",
        reveals="which values the masks had when they were prepared",
        keep=f"leave `{MASK_LABELS}` out of the datalist",
    ),
    Field(
        "class_groups", "names", required=False,
        doc="which class is in which group (head, medium, tail) of the datalist",
        reveals="which classes have many and which few training images in the data that the groups were made from",
        keep="leave `class_groups` out of the datalist",
    ),
    Field(
        "prior", "text", required=False,
        doc="Fed-MAS: fingerprint of the frozen prior network", reveals="which published checkpoint the site holds",
    ),
    Field(
        NAMES, "names", required=False,
        doc="with `groups`: `<attribute>=<group>` of each declared group, also of those that nobody is of",
        keep="leave `attributes` out of the datalist",
    ),
    Field(OTHER_IMAGES, "flag", required=False, doc="its lists differ from those of its first round"),
    Field(
        ACTED_ON, "names", required=False,
        doc="of a method that goes by groups of people: `<attribute>=<group>` of each declared group",
        keep="leave `attributes` out of the datalist",
    ),
    Field(
        ANNOTATED, "names", required=False,
        doc="names of the structures or classes that its own file says are annotated",
        keep="leave `structures` and `classes` out of the site's file",
    ),
    Field(
        CHANNELS, "names", required=False,
        doc="names of those of the run's channels that its cases have, where the run names channels",
        reveals="which images its cases lack",
    ),
    Field(
        MEASURED, "names", required=False,
        doc="names of the findings that it measures: enough of its validation and test cases have and lack them",
        reveals="which findings occur at the site",
        keep=f"{BY_CLASS}; of one that fewer cases have, or lack, `min_cases`",
    ),
    Field(
        MARKED, "names", required=False,
        doc="names of the structures or classes that its labels have, in training, validation and its test lists",
        reveals="which structures or classes occur at the site",
        keep=f"{BY_CLASS}; of one that fewer cases have, or lack, `min_cases`",
    ),
    Field(
        MARKED_CASES, "vector", low=0, high=MAX_SAMPLES, same_length_as=MARKED, required=False,
        doc="number of cases with each of these", reveals="how often each occurs at the site", keep="as `marked`",
    ),
    Field(
        PRIVACY, "names", required=False,
        doc=f"where the site's file has `{PRIVACY}`: unit, mechanism, and what it covers", of=NO_IMAGES,
        reveals="about how many test patients it has",
    ),
    Field(
        BUDGET, "vector", low=0, required=False,
        doc="beside it: target epsilon, delta, the number of units times the epsilon of one noisy report (0: none), "
        "and how many of the job's rounds the budget lasts for",
        reveals="the number of patients, and what earlier jobs have spent", of=NO_IMAGES,
    ),
    Field(
        "windows", "vector", low=1, required=False, of=VALIDATION,
        doc="of whole volumes: sliding windows of the largest validation volume, and with voxels twice as large",
        reveals="about how large the site's largest validation volume is",
    ),
    Field(
        "seconds", "vector", low=0, required=False, of=NO_IMAGES,
        doc="of whole volumes: seconds a round for reading, training and validation there, from one patch",
    ),
    Field("personal", "flag", required=False, doc="whether it is measured with parts, or a model, that stay with it"),
    Field("device", "text", required=False, doc="`cpu` or `cuda`", reveals="whether the site has a GPU"),
    Field("computing", "text", required=False, doc="`precision`, `channels_last`, `compile`, `deterministic` there"),
)  # fmt: skip


def read_check(site: str, message: Message, current_round: int) -> dict[str, Any]:
    """Return a site's checked answer: images by list, and the other fields, ``None`` for each that it does not report.

    Raises:
        ReportError: the answer cannot be used (the message names site, field and value), or the site reports that it
            cannot take part.
    """
    report = read_report(read_head(site, message, current_round).get("report"), FIELDS, site)
    splits, counts = report.pop("splits") or [], report.pop("images") or []
    of_classes = [
        report[key] or ()
        for key in ("class_names", MASK_LABELS, "class_groups", NAMES, ACTED_ON, ANNOTATED, CHANNELS, MEASURED, MARKED)
    ]
    size, lists = sum(map(len, chain(splits, *of_classes))), len(splits) + len(report["suppressed"] or ())
    refuse_if(site, {
        f"more than {MAX_LISTS} lists or {MOST_CLASSES} classes or groups":
            lists > MAX_LISTS or max(map(len, of_classes)) > MOST_CLASSES,
        f"the names in its report have {size} characters, more than {MAX_WORDS}": size > MAX_WORDS,
        "'windows' has two entries and 'seconds' three":
            len(report["windows"] or range(2)) != 2 or len(report["seconds"] or range(3)) != 3,
        f"{PRIVACY!r} has three parts and {BUDGET!r} four":
            report[PRIVACY] is not None and (len(report[PRIVACY]), len(report[BUDGET] or ())) != (3, 4),
    })  # fmt: skip
    report |= {
        field.name: SHOWN[field.kind](value)
        for field in FIELDS
        if field.kind in SHOWN and (value := report.get(field.name)) is not None
    }
    # None if not asked for, or the site reports nothing about its labels or its privacy.
    rare = (NAMES, MASK_LABELS, ACTED_ON, ANNOTATED, CHANNELS, MEASURED, MARKED, MARKED_CASES, PRIVACY, BUDGET, *COSTS)
    report = {key: value for key, value in report.items() if value is not None or key not in rare}
    if MARKED in report:
        report[MARKED] = dict(zip(report[MARKED], map(int, report.pop(MARKED_CASES, ())), strict=False))
    if PRIVACY in report:
        report[PRIVACY] = dict(zip(
            ("unit", "mechanism", "covers", "target", "delta", "worth", "lasts"),
            [*report[PRIVACY], *report.pop(BUDGET)], strict=True,
        ))  # fmt: skip
    return {"images": {printable(split): int(n) for split, n in zip(splits, counts, strict=False)}, **report}


#: Functions that convert a value of a site's report, by the kind of the value's field.
SHOWN: dict[str, Callable[[Any], Any]] = {
    "whole": int, "text": printable, "names": lambda names: [printable(name) for name in names],
}  # fmt: skip


class _Said(SiteData):
    """Represent a site's data at the server by the site's report, from which the task takes the class names."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.synthetic = bool(report["synthetic"])
        self.num_classes = report["num_classes"]
        self.class_names = None if report["class_names"] is None else tuple(report["class_names"])
        if report["class_groups"] is not None:
            pairs = [entry.rpartition(" ")[::2] for entry in report["class_groups"]]
            self.class_groups = {n: tuple(int(c) for g, c in pairs if g == n and c.isdigit()) for n, _ in pairs}
        self._images = report["images"]

    def num_samples(self, split: str) -> int:
        return int(self._images.get(split, 0))

    def batches(self, split: str, **options: Any) -> Batches:
        raise ValueError("the server has no images of a site")


class Check:
    """Run the ``check`` exchange with every site before a job's first round, also when an experiment is resumed.

    Args:
        task: the task that is learned.
        run: settings of the run.
        ask, journal: the run's exchange with the sites, and its journal.
        retraining: the rules of all rounds.
        metrics: metrics that sites may measure; metrics of the classes that the sites name are added.
    """

    def __init__(
        self,
        task: Task,
        run: RunSettings,
        ask: Exchange,
        journal: Journal,
        retraining: Retraining,
        metrics: dict[str, Metric] | None = None,
    ) -> None:
        self.task, self.settings, self.metrics = task, run, {} if metrics is None else metrics
        self.roster, self.journal, self.retraining = ask.roster, journal, retraining
        # grace=0: sites get the whole timeout, because opening the data may take long.
        self.ask = replace(ask, grace=0.0)
        self.facts: dict[str, dict[str, Any]] = {}
        self.synthetic: bool | None = None

    def run(self, current_round: int) -> None:
        """Ask each site what data it has, and end the run or leave sites out where the answers do not fit together.

        Args:
            current_round: number of the first round that the run is about to do.

        Raises:
            RoundFailed: the run cannot begin; the message names the sites that prevent it and says what to do.
            ServerFault, Stopped: as in any exchange.
        """
        run, sites = self.settings, self.roster.list_known()
        # The extra rounds' directives come beforehand, so that the sites can say whether they can do such rounds.
        extra = self.retraining.classifier.directives(run.num_rounds, run.num_rounds, sites) if run.crt_rounds else {}
        phase = self.ask(
            TASK_CHECK, current_round, {}, sites, run.check_timeout, self._take,
            groups=tuple(run.groups), directives={**self.journal.ledgers(), **extra},
        )  # fmt: skip
        problems = list(dict.fromkeys(self._problems(phase, self.journal.synthetic if current_round > 0 else None)))
        for report in self.facts.values():
            for name, metric in self.task.suited_to(_Said(report)).by_name().items():
                self.metrics.setdefault(name, metric)  # no site can change a metric that the job declares
        self.journal.record_check(phase, self.facts, self.metrics)
        if self.patchwise or self.journal.info.get("validation"):
            self.journal.store.update_info(validation="patches")
            self.journal.say("validation: patches, 50 fixed ones a volume, since volumes have many windows")
        left = run.num_rounds - current_round
        private = {site: answer[PRIVACY] for site, answer in sorted(self.facts.items()) if PRIVACY in answer}
        if problems := [*problems, *self._unready(phase, private, left)]:
            raise RoundFailed(
                " ".join(
                    ["check, before any", "training:" if run.num_rounds else "test:", *map(_end_sentence, problems)]
                ),
                phase,
            )
        for site, budget in private.items():
            for text, warning in budget_notes(budget["target"], budget["lasts"], left):
                self.journal.note(f"privacy budget of site {site!r}: {text}", warning=warning)
        self.synthetic = next(iter(_group_by(self.facts, "synthetic")), None)

    @property
    def global_lists(self) -> list[list[str]]:
        """Return groups of sites with the same list ``test_global``; a site whose list lacks a checksum is a group."""
        return [*group_by_key(
            (facts[GLOBAL_LIST] or f"of {site}", site)
            for site, facts in sorted(self.facts.items())
            if SPLIT_GLOBAL in facts["images"]
        ).values()]  # fmt: skip

    @property
    def patchwise(self) -> bool:
        """Return whether validation is on fixed patches at all sites: a volume somewhere has more than 64 windows.

        Under differential privacy it is not, since the noise is reckoned for figures of patients.
        """
        return not any(PRIVACY in report for report in self.facts.values()) and any(
            report.get("windows", (0,))[0] > MOST_WINDOWS for report in self.facts.values()
        )

    @property
    def said(self) -> dict[str, dict[str, float]]:
        """Return the numbers that each site reported: its images by list, and the groups of people used by the method.

        The group of images whose attribute is not known is not counted. A list that a site withholds counts as 0
        images.
        """
        return {
            site: {**dict.fromkeys(report["suppressed"] or (), 0), **report["images"]}
            | ({"groups": len(report[ACTED_ON]) - 1} if report.get(ACTED_ON) else {})
            for site, report in self.facts.items()
        }

    @property
    def footing(self) -> Footing:
        """Return which structures or classes of each site are compared: those that the site annotates.

        Where the site's ``min_cases`` is 1, a structure that none of the site's labels marks is left out.
        """
        structures, support = {}, {}
        for site, report in sorted(self.facts.items()):
            every = frozenset(map(printable, self.task.suited_to(_Said(report)).outcome_names()))
            annotated = (frozenset(report[key]) for key in (MEASURED, ANNOTATED) if report.get(key) is not None)
            structures[site] = next(annotated, every)
            if report.get("marked") and report["min_cases"] is None and self.task.has_classes is False:
                support[site] = dict.fromkeys(structures[site].difference(report["marked"]), 0)
        return Footing(structures, self.task.primary_metric).drop_empty(support)

    @property
    def annotators(self) -> dict[str, list[str]]:
        """Return the sites that annotate each structure, class or finding; empty if all sites annotate all."""
        return self._owners(ANNOTATED, lambda report: self.task.suited_to(_Said(report)).outcome_names())

    @property
    def channel_owners(self) -> dict[str, list[str]]:
        """Return the sites whose cases have each channel; empty if all sites have all."""
        return self._owners(CHANNELS, lambda report: map(str, self.task.channels or ()))

    def _owners(self, key: str, names_of: Callable[[Mapping[str, Any]], Iterable[str]]) -> dict[str, list[str]]:
        """Return the sites that have each of the task's parts, in the network's order; empty if all sites have all.

        Args:
            key: field of a report that names the parts that the site has; a site without the field has all.
            names_of: function that returns the names of all parts for the report of a site.
        """
        owners: list[tuple[str, list[str]]] = []
        for site, report in sorted(self.facts.items()):
            names = [printable(name) for name in names_of(report)]
            owners += [(name, []) for name in names[len(owners) :]]
            for name, (_, sites) in zip(names, owners, strict=False):
                if name in report.get(key, names):
                    sites.append(site)
        return dict(owners) if any(len(sites) < len(self.facts) for _, sites in owners) else {}

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """Return the groups of classes (head, medium, tail) in the sites' datalists; empty where the task has none."""
        return next((self.task.suited_to(_Said(report)).groups() for report in self.facts.values()), {})

    def same_kind(self, site: str, synthetic: bool | None) -> None:
        """Refuse a site's training where its data are synthetic and other sites' data are real, or the reverse.

        Raises:
            ReportError: the site's data are of the other kind.
        """
        if None not in (synthetic, self.synthetic) and synthetic != self.synthetic:
            kinds = ("made up, and the others' are not", "not made up, as the others' are")
            raise ReportError(f"site {site!r}: its data are {kinds[not synthetic]}; the two are never mixed")

    def _take(self, phase: Phase, site: str, message: Message) -> None:
        self.facts[site] = read_check(site, message, phase.current_round)

    def _unready(self, phase: Phase, private: Mapping[str, Mapping[str, Any]], left: int) -> Iterator[str]:
        """Yield a sentence about the sites that cannot take part, or not to the end, if the run must not begin so.

        Args:
            phase: the check's exchange.
            private: facts about the sites' differential privacy; where there are any, FedAvg takes the place of a rule
                that asks about the anchor, for which secure sums need one site more.
            left: number of the method's rounds that are to be done.
        """
        run, rule = self.settings, self.retraining.rule
        least = max(run.min_sites, FEWEST + 1 if run.secure and isinstance(rule, TwoPhase) and not private else 0)
        needed = f"min_sites={run.min_sites}" + (
            f", secure sums of this method need {least} sites; fed_avg needs one less" * (least > run.min_sites)
        )
        lasts = {site: min(left, private[site]["lasts"]) if site in private else left for site in sorted(phase.good)}
        if len(lasts) >= least and (most := sorted(lasts.values())[-least]) < left:
            yield (
                f"privacy budgets end ({', '.join(f'{site} after {n:g}' for site, n in lasts.items() if n < left)} of "
                f"{left} round(s)), and the last round would have fewer than {least} sites ({needed}). Set num_rounds="
                f"{run.num_rounds - left + most:g} at most, or let the files of these sites have a larger epsilon or "
                "more noise"
            )
        needs = FEWEST + (isinstance(rule, TwoPhase) and not private)
        for name, sites in {**self.annotators, **self.channel_owners}.items() if run.secure and run.num_rounds else ():
            if 0 < len(sites) < needs:
                yield (
                    f"{name!r} is at {len(sites)} site(s) only ({', '.join(sites)}), and a secure sum of its weights "
                    f"would show theirs: it needs {needs}. Leave it out of the task, or set secure=''"
                )
        refused = {site: why for site, why in phase.left_out.items() if site not in phase.unheard}
        if len(phase.good) < least:
            yield (
                f"{len(phase.good)} of {len(phase.asked)} site(s) ready, {needed}. "
                f"Not ready: {reasons(phase.left_out.items()) or 'none'}"
            )
        elif refused and self.settings.require_all_sites:
            yield (
                f"{len(refused)} of {len(phase.asked)} site(s) cannot take part: "
                f"{_end_sentence(reasons(refused.items()))} Correct it there and start again, or let the others go "
                "on without it: require_all_sites=false (--no-require-all-sites)"
            )

    def _problems(self, phase: Phase, before: bool | None) -> Iterator[str]:
        """Yield each difference between the sites' data that ends the run.

        If the run may continue without a site, a site that differs from most, or from earlier rounds, is left out.

        Args:
            phase: the check's exchange.
            before: whether the earlier rounds were trained on synthetic data; ``None`` if no round was done.
        """
        by_kind = _group_by(self.facts, "synthetic")
        made_up, real = by_kind.get(True, []), by_kind.get(False, [])
        if before is not None and (made_up or real) and not (made_up if before else real):
            was, now = ("made-up", "real") if before else ("real", "made-up")
            yield f"the rounds before were trained on {was} data, and {', '.join(made_up or real)} has {now} ones now"
        else:
            yield from self._same(
                phase,
                by_kind,
                f"made-up data beside real ones: synthetic at {', '.join(made_up)}, real at {', '.join(real)}. "
                f"Set 'data_root' in the fairflare.json of {', '.join(made_up)}",
                "its data are of another kind (made up or real) than those of most sites, or of the rounds before; the "
                "two are never mixed: correct 'data_root' in its fairflare.json",
                wanted=before,
            )
        yield from self._classes(phase, _group_by(self.facts, "synthetic").get(False, []))
        clashes = contradictions({site: report.get(MASK_LABELS, ()) for site, report in self.facts.items()})
        for by_meaning in clashes.values():
            yield from self._same(phase, by_meaning, question_of_values(clashes), question_of_values(clashes))
        yield from self._silent(phase)
        for key, whose in ((NAMES, "'groups'"), (ACTED_ON, "the method")):
            yield from self._same(
                phase, _group_by(self.facts, key),
                "the datalists declare the attributes differently: {}. Declare them alike",
                f"its datalist declares the attributes of {whose} otherwise than those of most sites; correct it there",
            )  # fmt: skip
        by_prior = _group_by(self.facts, "prior")
        if len(by_prior) > 1 and self.settings.require_all_sites:  # else the rule leaves the minority out
            held = "; ".join(f"{prior!r} at {', '.join(sites)}" for prior, sites in by_prior.items())
            yield f"the sites hold different prior networks: {held}. Give every site the same checkpoint ('prior')"

    def _silent(self, phase: Phase) -> Iterator[str]:
        """Yield a question for each site whose labels lack others' structures or classes without a declared reason."""
        lacking = list_unexplained(
            {site: report[MARKED] for site, report in self.facts.items() if MARKED in report},
            [site for site, report in self.facts.items() if ANNOTATED in report],
        )
        together = [lacking] if lacking and self.settings.require_all_sites else None
        for asked in together or [{site: names} for site, names in lacking.items()]:
            site = next(iter(asked))
            task = self.task.suited_to(_Said(self.facts[site]))
            text = question(
                asked, bool(task.has_classes or task.findings),
                dict(zip(task.outcome_names(), getattr(task, "structures", ()), strict=False)),
            )  # fmt: skip
            if together:
                yield text
            else:
                self._leave_out(phase, site, text)

    def _classes(self, phase: Phase, real: Sequence[str]) -> Iterator[str]:
        """Yield each problem with the classes of sites with real data: sites differ, or differ from the network."""
        for key, verb, remedy in (
            ("class_names", "name", ""),
            ("class_groups", "group", ". Write the same 'class_groups' into all"),
        ):
            yield from self._same(
                phase, _group_by(self.facts, key, real), f"the datalists {verb} the classes differently: {{}}{remedy}",
                f"its datalist {verb}s the classes otherwise than those of most sites; correct {key!r} there",
            )  # fmt: skip
        if not self.settings.num_rounds:
            yield from self._compare_with_model(phase, [site for site in real if site in self.facts])
        wanted = self.task.classes
        counts = {site: self.facts[site]["num_classes"] for site in real if site in self.facts}
        known = {site: count for site, count in counts.items() if count is not None}
        if wanted is None or not known:
            return
        over = [site for site, count in known.items() if count > wanted]
        if over and not self.settings.require_all_sites and 2 * len(over) < len(known):
            for site in over:
                self._leave_out(phase, site, f"it has {known.pop(site)} classes, the job has num_classes={wanted}")
        # A site that did not report or was left out may alone have the highest classes: check only if all reported.
        if len(known) == len(counts) and not phase.left_out and max(known.values()) != wanted:
            yield (
                f"the job has num_classes={wanted}, the sites have {max(known.values())} classes at most "
                f"({', '.join(f'{site}: {count}' for site, count in sorted(known.items()))}). Set "
                f"num_classes={max(known.values())}, or name all classes with 'class_names' in the datalists"
            )

    def _compare_with_model(self, phase: Phase, sites: Sequence[str]) -> Iterator[str]:
        """Yield a problem for each site that names other classes than the given model has; or leave the site out."""
        wanted = [*(getattr(self.task, "class_names", None) or ())]
        named = {site: [*(self.facts[site]["class_names"] or wanted)] for site in sites}
        for site in (
            site for site, classes in named.items() if classes != wanted and not all(map(NUMBERED.fullmatch, wanted))
        ):
            difference = f"its datalist names the classes {few(named[site], 4)}, and the given model {few(wanted, 4)}"
            if self.settings.require_all_sites:
                yield f"site {site!r}: {difference}"
            else:
                self._leave_out(phase, site, difference)

    def _same(
        self,
        phase: Phase,
        by_value: Mapping[Any, Sequence[str]],
        problem: str,
        reason: str,
        *,
        wanted: Any = None,
    ) -> Iterator[str]:
        """Yield the problem where sites differ and none may be left out; else leave out the sites that differ.

        Args:
            phase: the check's exchange.
            by_value: the sites by the compared value.
            problem: text of the problem; ``{}`` in it stands for the different values and their sites.
            reason: text about a site that is left out.
            wanted: the right value; ``None`` for the value that more than half of the reporting sites have.
        """
        if len(by_value) < 2:
            return
        if "{}" in problem:
            values = "; ".join(f"{', '.join(value)} at {', '.join(sites)}" for value, sites in by_value.items())
            problem = problem.replace("{}", values[:600])
        most = max(by_value, key=lambda value: len(by_value[value]))
        if wanted is None and 2 * len(by_value[most]) > sum(map(len, by_value.values())):
            wanted = most
        if self.settings.require_all_sites:
            yield problem
        elif wanted is None:
            yield f"{_end_sentence(problem)} No side is that of most sites, so none is left out"
        else:
            for site in (site for value, sites in by_value.items() if value != wanted for site in sites):
                self._leave_out(phase, site, reason)

    def _leave_out(self, phase: Phase, site: str, reason: str) -> None:
        """Leave a site out of the whole run: the site is not asked again."""
        self.roster.excluded[site] = f"site {site!r}: {reason}"
        phase.refuse(site, self.roster.excluded[site])
        self.facts.pop(site, None)  # it may be left out for several reasons


def _group_by(
    facts: Mapping[str, Mapping[str, Any]], key: str, among: Iterable[str] | None = None
) -> dict[Any, list[str]]:  # fmt: skip
    """Return the sites (those ``among`` these) by the value of a field of their reports, without those that lack it."""
    return group_by_key(
        (tuple(value) if isinstance(value, list) else value, site)
        for site in sorted(facts if among is None else facts.keys() & among)
        if (value := facts[site].get(key)) not in (None, [])
    )


def _end_sentence(text: str) -> str:
    """Return a reason as a complete sentence; the reason may already end with a question mark."""
    return text if text.endswith((".", "?")) else f"{text}."


def check_present(named: Iterable[str], connected: Sequence[str], min_sites: int, say: Callable[..., None]) -> None:
    """Check that a run can begin with the connected sites, and log which sites of the job are not connected.

    Args:
        named: sites that the job names.
        connected: sites that are connected.
        min_sites: number of connected sites that the run needs.
        say: writes a line into the server's log.

    Raises:
        RoundFailed: no site is connected, or fewer than ``min_sites``.
    """
    if missing := sorted(set(named) - set(connected)):
        say(f"not connected, though the job names them: {', '.join(missing)}; it goes on without them", warning=True)
    refuse({
        "no site is connected": not connected,
        f"{len(connected)} site(s) in the job ({', '.join(connected)}), min_sites={min_sites}; start more sites or "
        "lower min_sites": len(connected) < min_sites,
    }, RoundFailed)  # fmt: skip
