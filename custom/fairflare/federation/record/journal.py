"""Report a run's progress: in the results, the event log and the server's log, and to listeners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fairflare.base.checks import printable
from fairflare.base.machine.child import run_in_child
from fairflare.base.plugins import tell_listeners
from fairflare.base.task import Metric
from fairflare.core.cells import BEST, LAST, VALIDATION, Cell
from fairflare.core.cells import SUPPRESSED as WITHHELD
from fairflare.exchange.messages import BySite
from fairflare.federation.collecting.collector import Training
from fairflare.federation.collecting.final_test import CLINICAL, SAID, Tested, mean_of
from fairflare.federation.collecting.phase import Phase
from fairflare.federation.collecting.transport import Listener, Transport
from fairflare.federation.plan.site_training import COMMON, PERSONAL
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.record.run_info import directions_of
from fairflare.federation.site.facts import OTHER_IMAGES
from fairflare.federation.site.replies import AT_HOME
from fairflare.methods.base.reports import SUPPRESSED
from fairflare.methods.base.rule import Weighing
from fairflare.methods.parts.consistency import SHARE, WITHOUT_LABELS
from fairflare.privacy.policy import EPSILON, LAST_LINE, PRIVACY
from fairflare.reporting.documents import Warned
from fairflare.reporting.no_effect import same_weights
from fairflare.reporting.results import RESULTS_FILE, LeftOut, ResultsStore, RoundRecord, read_results
from fairflare.reporting.sites.clinical import clinical_of
from fairflare.reporting.standing import NOWHERE, standing
from fairflare.reporting.table import fairness_table
from fairflare.reporting.values import cells_of, withheld_reason

#: Texts on the values that a site reports about its differential privacy.
PRIVATE = {
    "unit": "unit %s", "mechanism": "%s", "covers": "covers %s", "target": "epsilon at most %.4g",
    "delta": "delta %.3g", "worth": "patients times epsilon of a noisy report %.4g",
    "lasts": "rounds that the budget lasts for %g",
}  # fmt: skip


class Journal:
    """Write the results and the logs of one run.

    Args:
        folder: folder of ``results.json`` and the other results.
        transport: writes lines into the server's log.
        listeners: objects that are notified of the run's progress.
        metric: name of the task's primary metric.
        apart: whether another process draws pages and pictures, so that this process needs less memory.
    """

    def __init__(
        self, folder: Path, transport: Transport, listeners: Sequence[Listener], metric: str, *, apart: bool = False
    ) -> None:
        self.store, self.listeners = ResultsStore(folder), list(listeners)
        self.say, self.metric, self.apart = transport.say, metric, apart
        self.synthetic = False
        self._classes_at_home: set[str] = set()
        self._footing = NOWHERE  # describes which structures of which sites are compared

    @property
    def info(self) -> dict[str, Any]:
        """Return the ``info`` section of the run's results."""
        return self.store.info

    def tell(self, kind: str, **details: Any) -> None:
        """Write an event into the log file, and report it to the listeners."""
        self.store.event(kind, **details)
        for listener in self.listeners:
            listener.event(kind, details)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Write a line into the server's log, and show it where the run is watched."""
        self.tell("note", text=text)
        self.say(text, warning=warning)

    def record_check(self, phase: Phase, facts: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, Metric]) -> None:
        """Record the sites' reports on their data before the first round, and the metrics that they may measure."""
        reports = {site: {**facts[site]} for site in sorted(facts)}
        spent = self.info.get(PRIVACY, {})
        private = {site: entry for site, entry in spent.items() if site not in reports}  # they may come back later
        private |= {
            site: {**spent.get(site, {}), **report.pop(PRIVACY)}
            for site, report in reports.items()
            if PRIVACY in report
        }
        self.store.update_info(**directions_of(metrics), said=reports, privacy=private)
        if self.info.get("measured") is None:  # the server does not know the settings of the sites' training
            # The majority decides, not one site.
            by_most = 2 * sum(bool(report["personal"]) for report in facts.values()) > len(facts)
            self.store.update_info(measured=PERSONAL if by_most else COMMON)
        for site in sorted(facts):
            self.say(f"check: site {site!r} has {_data_in_words(facts[site])}")
        if other := [f"site {site!r} has other images or labels than in its first round" for site in sorted(facts)
                     if facts[site].get(OTHER_IMAGES)]:  # fmt: skip
            self.store.update_info(resumed_with=[*self.info.get("resumed_with", ()), *other])
            self.say(f"check: {', '.join(other)}: the rounds before were trained on those", warning=True)
        for site, reason in sorted(phase.left_out.items()):
            self.say(f"check: site {site!r} is not ready: {reason}", warning=True)
        if any(report["synthetic"] for report in facts.values()):
            self._note_synthetic()

    def _note_synthetic(self) -> None:
        if not self.synthetic:
            self.synthetic = True
            self.store.update_info(synthetic=True)
            self.say("the data are SYNTHETIC (a phantom): the figures say nothing about patients")

    def training(self, phase: Phase, record: RoundRecord) -> None:
        """Record in the results what the sites reported of a round's training."""
        self.record_left_out(phase, record)
        record.validation = {site: dict(phase.good[site]) for site in sorted(phase.good)}
        record.suppressed = {
            site: withheld for site, training in sorted(phase.trained.items())
            if (withheld := [*(f"metrics/{cell.metric}" for cell in training.cells if cell.reason == WITHHELD),
                             *(training.stats[SUPPRESSED] or ())])
        }  # fmt: skip
        record.train = {
            site: self._list_training_fields(site, training, record) for site, training in sorted(phase.trained.items())
        }
        self._note_classes_at_home(phase)
        record.notes = [note for _, training in sorted(phase.trained.items()) for note in training.notes]
        for note in record.notes:
            self.say(f"round {record.current_round}, {note}")
        if any(training.stats["synthetic"] for training in phase.trained.values()):
            self._note_synthetic()

    def ledgers(self) -> dict[str, Any]:
        """Return the directive that sends each site with differential privacy the last ledger hash that it reported."""
        lines = {site: entry[LAST_LINE] for site, entry in self.info.get(PRIVACY, {}).items() if LAST_LINE in entry}
        return {LAST_LINE: BySite(lines)} if lines else {}

    def record_spent(self, phase: Phase) -> None:
        """Record the sites' reports about their privacy ledgers, also those of sites whose answer is not used."""
        spent = {
            site: {name: statistics[name] for name in (EPSILON, LAST_LINE) if statistics[name]}
            for site, statistics in phase.all_stats.items()
        }
        if private := self.info.get(PRIVACY):
            self.store.update_info(privacy={site: {**entry, **spent.get(site, {})} for site, entry in private.items()})

    def _note_classes_at_home(self, phase: Phase) -> None:
        """Record and log which sites withhold metrics by class, so that tables can name this reason for gaps."""
        sites = {site for site, stats in phase.all_stats.items() if site in phase.good and stats[AT_HOME]}
        if not sites <= self._classes_at_home:
            self._classes_at_home |= sites
            names = sorted(self._classes_at_home)
            self.store.update_info(classes_at_home=names)
            self.say(f"metrics by class stay at home at: {', '.join(names)}")

    def _list_training_fields(self, site: str, training: Training, record: RoundRecord) -> dict[str, Any]:
        stats, lost = training.stats, printable(training.stats["state_lost"] or "")
        if lost:
            self.say(f"round {record.current_round}: site {site!r} lost some of its state: {lost}", warning=True)
        return {
            "loss": stats["train_loss"],
            "num_samples": training.num_samples,
            "num_steps": training.num_steps,
            "seconds": stats["seconds"],
            **{name: stats[name] for name in (SHARE, WITHOUT_LABELS, EPSILON) if stats[name] is not None},
            **({"state_lost": lost} if lost else {}),
        }

    def record_left_out(self, phase: Phase, record: RoundRecord) -> None:
        """Record one exchange of a round, and the sites that were left out of the exchange."""
        record.phases.append(phase.record())
        for site, reason in sorted(phase.left_out.items()):
            record.left_out.append(LeftOut(site=site, phase=phase.name, reason=reason))
            self.say(f"round {record.current_round}, {phase.name}: site {site!r} left out: {reason}", warning=True)

    def record_weights(
        self, weighing: Weighing, record: RoundRecord, warnings: Sequence[Warned] = (), *, last: bool = False
    ) -> None:
        """Record the weights that the rule gave in a round, and the warnings about single sites' influence.

        Args:
            weighing: the rule's weights, with the reports and values that they come from.
            record: the round's record, to be filled.
            warnings: warnings about single sites in this round.
            last: whether this is the rule's last weighing; if so, also warn if its weights were equal in all rounds.
        """
        record.site_weights = weighing.sites
        record.layers = weighing.record or None
        record.reports, record.values, record.details = weighing.reports, weighing.values, weighing.details
        never = same_weights([*read_results(self.store.folder).rounds, record]) if last else []
        self.record_warnings([*warnings, *never], record)

    def record_warnings(self, warnings: Collection[Warned], record: RoundRecord, phase: str = "") -> None:
        """Record and log warnings of a round, or of one of its exchanges (``phase``, such as ``", norms"``)."""
        record.warnings = [*record.warnings, *warnings]
        for one in warnings:
            who = f"site {one.site!r}: " if one.site else ""
            self.say(f"round {record.current_round}{phase}: {who}{one.text}", warning=True)

    def round_done(self, record: RoundRecord) -> None:
        """Record a completed round in the results, and report it to the listeners."""
        self.store.add_round(record)
        for listener in self.listeners:
            listener.round_done(record, self.metric)

    def new_best(self, state: Mapping[str, Any], best: BestModel) -> None:
        """Log that another model is now the best so far, and notify the listeners."""
        if best.made is None or best.made < 0:
            return
        about = "no site scored it" if best.value is None else f"{best.run.best_by} {self.metric} {best.value:.4f}"
        self.say(f"the best model so far is that of round {best.made} ({about})")
        for listener in self.listeners:
            listener.best_model(state, best.made)

    def record_test(self, last: Tested, best: BestModel, of_best: Tested | None) -> None:
        """Record the final test: every site's metrics, how fair they are, and pictures of the run.

        Args:
            last, of_best: tests of the last and of the best model. ``of_best`` is ``None`` where the best model is the
                last one, or cannot be tested because the sites' own tensors of its round are gone. In a run that
                validates on patches it has the best model's validation on whole volumes, also of the last one.
            best: describes the best model.
        """
        number, self._footing = last.phase.current_round, last.footing
        lost = {site: printable(last.phase.stats[site]["state_lost"] or "") for site in sorted(last.phase.good)}
        of_best_model = of_best.left_out if of_best is not None else ()
        for text in (
            *(f": site {left.site!r} left out: {left.reason}" for left in last.left_out),
            *(f", best model: site {left.site!r} left out: {left.reason}" for left in of_best_model),
            *(f": site {site!r}: its {self.metric!r} is not finite" for site in last.list_undefined(self.metric)),
            *(f": site {site!r} lost some of its state: {what}" for site, what in lost.items() if what),
            *(
                f": site {site!r}: {len(names)} metric(s) {self._why_withheld(site)}"
                for site, names in last.withheld().items()
            ),
        ):
            self.say(f"validate{text}", warning=True)
        self._note_classes_at_home(last.phase)
        is_last = best.made == number - 1
        sampling, most = last.collect(SAID), best.run.test_last
        inequality, ends = standing(last.test, sampling, self.info, last.footing)
        about = {
            site: dict(
                zip(("low", "high", "cases"), (*ends.get(site, (None, None)), values["test_cases"]), strict=True)
            )
            for site, values in sampling.items()
        }
        cells = self._cells(LAST, last.test, last, about)
        if of_best is not None:
            cells += self._cells(BEST, of_best.test, of_best)
        last_rounds: list[int] = []
        if most > 1:
            rounds = read_results(self.store.folder).rounds
            before = [one for one in rounds if number - most <= one.current_round < number - 1 and one.test]
            last_rounds = [*(one.current_round for one in before), number - 1]
            mean = mean_of([*(one.test for one in before), last.test])
            cells += self._cells(f"last {len(last_rounds)}", mean, last)
        cells += [
            Cell(metric, site, model, VALIDATION, value=value)
            for model, results in ((LAST, last), (BEST, of_best)) if results is not None
            for site, of_site in sorted(results.validation.items()) for metric, value in of_site.items()
        ]  # fmt: skip
        clinical, vectors = clinical_of(last.collect(CLINICAL))
        of_all, lists = last.of_all or ([], None)
        people, folds = last.groups or ([], [])
        self.store.finish(
            "completed",
            cells=[*cells, *of_all, *people, *clinical],
            vectors=[*last.collect_draws(self.metric), *folds, *vectors],
            inequality=inequality,
            personal=last.personal,
            footing=last.footing.as_dict() if last.footing.differs else None,
            global_test=lists,
            best=None if best.made is None else {  # a given model is not compared with other models
                **best.as_dict(), "is_last": is_last,
                "left_out": last.left_out if is_last else of_best.left_out if of_best else [],
            },
            last_rounds=last_rounds,
            phases=last.phases + (of_best.phases if of_best is not None else []),
            left_out=[*last.left_out, *last.of_sums],
        )  # fmt: skip
        written = self.store.folder / RESULTS_FILE
        for line in run_in_child(tell_listeners, written) if self.apart else tell_listeners(written):
            self.say(line)
        self.say("fairness on the sites' test splits\n" + fairness_table(read_results(self.store.folder)))
        for listener in self.listeners:
            listener.tested(last.test, self.metric, number)

    def _cells(
        self,
        model: str,
        test: Mapping[str, Mapping[str, float]],
        tested: Tested,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Cell]:
        """Return the test metrics of a model as cells; ``about``: interval and cases of the primary one, by site."""
        withheld = tested.withheld()
        classes = {name for one in tested.collect(SAID).values() for name in one.get("class_support") or ()}
        return cells_of(
            model, test, withheld, {site: self._why_withheld(site) for site in withheld}, self._footing.of,
            self._footing.empty, classes, {self.metric: about},
        )  # fmt: skip

    def _why_withheld(self, site: str) -> str:
        return withheld_reason(site, self.info.get(PRIVACY, {}), self.info.get("said", {}))

    def record_failure(self, reason: str, phase: Phase | None = None) -> None:
        """Record that the run has failed, and the sites that were left out in ``phase``, if a phase failed."""
        left_out = [] if phase is None else [LeftOut(s, phase.name, why) for s, why in sorted(phase.left_out.items())]
        try:
            self.store.finish("failed", reason=reason, left_out=left_out)
        except OSError as error:  # a full disk must not hide the reason
            self.say(f"the results cannot be written: {error}", warning=True)


MUCH = 5  # times that validation may take as long as training before a remedy is named


def _costs(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return what a round on whole volumes costs at a site, in words, where the site reports it."""
    if not report.get("seconds") or not report.get("windows"):
        return {}
    (now, coarser), (reading, training, validation) = report["windows"], report["seconds"]
    return {
        f"up to {now:.0f} windows a volume; about {reading:.3g} s a round for reading, {training:.3g} s for training, "
        f"{validation:.3g} s for validation": True,
        f"validation takes {validation / max(training, 1e-9):.0f} times as long as training: with voxels twice as "
        f"large along each axis (--set spacing=...) it is {coarser:.0f} windows a volume":
            validation > MUCH * training and coarser < now,
    }  # fmt: skip


def _data_in_words(report: Mapping[str, Any]) -> str:
    """Return a site's report about its data as a sentence."""
    lists, home = ", ".join(f"{count} {split}" for split, count in report["images"].items()), report["suppressed"] or ()
    private = [PRIVATE[name] % value for name, value in report.get(PRIVACY, {}).items()]
    remarks = {
        f"{lists} images": lists,
        "said nothing about its data": not lists and not home,
        f"{', '.join(home)} {SUPPRESSED} (fewer than {report['min_cases']} cases)": home,
        "SYNTHETIC": report["synthetic"],
        f"{report['num_classes']} classes": report["num_classes"] is not None,
        f"prior {report['prior']}": report["prior"],
        f"differential privacy ({'; '.join(private)})": private,
        **{str(report[key]): report[key] for key in ("device", "computing")},
        **_costs(report),
    }
    return ", ".join(text for text, there in remarks.items() if there)
