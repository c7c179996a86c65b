"""Make one plan for all sites from counts of their cases, without a round.

Each question is one exchange; the site's half is :mod:`fairflare.federation.site.case_counts`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fairflare.base.checks import refuse, refuse_if
from fairflare.base.disk.files import write_whole
from fairflare.core.plans.counts import HIGHEST_HU, LOWEST_HU, MOST, total
from fairflare.core.plans.document import Answers, plan_of
from fairflare.exchange.messages import TASK_PLAN, Message
from fairflare.federation.collecting.phase import Phase, RoundFailed
from fairflare.federation.plan.run_settings import PlanRun
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.server.sums import SitesLost
from fairflare.federation.site.case_counts import ASKED, CASES, CROPPED, FIELDS, FOREGROUND, KINDS, MEMORY
from fairflare.federation.site.replies import read_head
from fairflare.methods.base.reports import read_report
from fairflare.methods.base.rule import State
from fairflare.reporting.results import RoundRecord

PLAN = "plan.json"
USUAL_MEMORY = 8.0  # memory in GB of the GPU that nnU-Net plans for
HUS = HIGHEST_HU - LOWEST_HU + 1
SLACK = 1e-3  # share by which rounding may move a sum of histograms


class Planning(Rounds):
    """Ask the sites for counts in place of training, and write the plan beside the results."""

    def finish(self, state: State) -> None:
        """Ask the questions, and write the plan.

        Raises:
            RoundFailed: too few sites answered, or a sum cannot be opened.
        """
        run, record = self.settings, RoundRecord(current_round=0, sites=self.roster.live(0))
        assert isinstance(run, PlanRun)
        of_ct = self.task.of_ct
        answer = self._sum_answers(0, (0.0, 0.0, 0.0), record)
        first = Answers(_axes(answer, "spacing"), _axes(answer, "size"))
        for number in range(1, 2 + bool(of_ct)):
            answer |= self._sum_answers(number, first.target, record)
        answers = replace(
            first, resampled=_axes(answer, "resampled"), cropped=round(answer[CROPPED]),
            histograms={channel: answer[FOREGROUND][k * HUS : (k + 1) * HUS] for k, channel in enumerate(of_ct)},
        )  # fmt: skip
        memory = run.plan_memory or min(answer[MEMORY].values(), default=USUAL_MEMORY)
        channels = list(getattr(self.task, "channels", None) or ["CT" if of_ct else "MR"])
        plan = plan_of(answers, channels=channels, outputs=len(self.task.outcome_names()) + 1, memory=memory)
        more = sum(need > memory for need in answer[MEMORY].values())
        self.journal.note(
            f"plan of {answers.cases} cases at {len(record.accepted)} sites for {memory:g} GB"
            f"{f'; {more} site(s) have more' * bool(more)}"
        )
        write_whole(
            self.journal.store.folder / PLAN, lambda path: path.write_text(json.dumps(plan, indent=1) + "\n", "utf-8")
        )
        self.journal.round_done(record)
        self.journal.store.finish("completed")

    def _sum_answers(self, number: int, target: tuple[float, ...], record: RoundRecord) -> dict[str, Any]:
        """Ask one question, and return the sums of the answers by name, with the memory of each site's GPU."""
        record.current_round = number
        asked, reports = (
            {ASKED: torch.tensor([float(number), *target], dtype=torch.float64)},
            dict[str, dict[str, Any]](),
        )
        names = [f"{kind}_{axis}" for kind in KINDS[number] for axis in range(3)]
        secure = self.sums is not None

        def use(phase: Phase, site: str, message: Message) -> None:
            reports[site] = read_counts(
                site, message, number, [] if secure else names, len(self.task.of_ct), secure=secure
            )

        sites = list(record.accepted or record.sites)
        if self.sums is not None:
            lost = self.sums.agree(number, sites)
            sites = [site for site in sites if site not in lost]
        phase = self.asking(TASK_PLAN, number, asked, sites, self.settings.validate_timeout, use)
        self.journal.record_left_out(phase, record)
        if secure and (refused := [reason for reason in phase.left_out.values() if "an earlier plan" in reason]):
            raise RoundFailed(f"plan: {refused[0]}. The sum of the other sites, less an earlier one, would show it too")
        record.accepted = sorted(phase.good)
        if len(record.accepted) < self.settings.min_sites:
            raise self.asking.too_few(phase)
        memory = {site: reports[site][MEMORY] for site in record.accepted if reports[site].get(MEMORY)}
        if self.sums is None:
            good = [reports[site] for site in record.accepted]
            return {
                **{name: total(_counts(one, name) for one in good) for name in names}, MEMORY: memory,
                CROPPED: sum(one[CROPPED] for one in good),
                FOREGROUND: sum((one[FOREGROUND] for one in good if FOREGROUND in one), np.zeros(1)),
            }  # fmt: skip
        shapes = {
            **{name: MOST[name.rpartition("_")[0]] + 1 for name in names},
            CROPPED: 1, FOREGROUND: HUS * len(self.task.of_ct),
        }  # fmt: skip
        like = {f"{name}.sum": torch.zeros(size) for name, size in shapes.items()}
        try:
            summed = self.sums.counts(record, asked, like, record.accepted)
        except SitesLost as few:
            raise RoundFailed(
                "plan: " + "; ".join([*few.args[0].values(), *(one.reason for one in record.left_out)])
            ) from few
        whole: dict[str, Any] = {
            name: sums.round() if name in names else sums for name in shapes for sums in [summed[f"{name}.sum"].numpy()]
        }
        cases = sum(reports[site][CASES] for site in record.accepted)
        for name, counts in whole.items():
            low, most = (cases, cases) if name in names else (0, cases * (1 + SLACK) * max(1, len(self.task.of_ct)))
            refuse({
                f"plan: the sum of {name} is of {counts.sum():g} cases, the sites have {cases}; the smallest count is "
                f"{counts.min(initial=0):g}; a site lies, and nobody can say which":
                    counts.min(initial=0) < -SLACK or not low <= counts.sum() <= most,
            }, RoundFailed)  # fmt: skip
        return {
            **whole, **{name: +Counter(dict(enumerate(whole[name].astype(int).tolist()))) for name in names},
            CROPPED: float(whole[CROPPED][0]), MEMORY: memory,
        }  # fmt: skip


def _axes(counts: Mapping[str, Any], kind: str) -> list[Counter[int]]:
    return [counts[f"{kind}_{axis}"] for axis in range(3)]


def _counts(report: Mapping[str, Any], name: str) -> Counter[int]:
    return Counter({int(n): int(cases) for n, cases in zip(report[name], report[f"{name}_cases"], strict=True)})


def read_counts(
    site: str, message: Message, number: int, names: list[str], channels: int, *, secure: bool = False
) -> dict[str, Any]:
    """Return a site's checked answer to the task ``plan``.

    Args:
        site, message: name and message of the site.
        number: number of the question.
        names: names of the counts in the answer; empty where they stay at the site for a secure sum.
        channels: number of CT channels.
        secure: whether all counts but the number of cases stay at the site.

    Raises:
        ReportError: the answer cannot be used; the message names site, field and value.
    """
    counts = {
        name: value
        for name, value in read_report(read_head(site, message, number).get("report"), FIELDS, site).items()
        if value is not None
    }
    vectors = {*names, *(f"{name}_cases" for name in names)}
    lacking = sorted(vectors.union([CROPPED] * (not secure)) - {*counts})
    refuse_if(site, {f"the answer lacks the field {lacking[0] if lacking else ''!r}": bool(lacking)})
    odd = {name: value for name in vectors for value in counts[name] if value != int(value)}
    cases = {name: sum(counts[f"{name}_cases"]) for name in names}
    foreground = counts.get(FOREGROUND, np.zeros(0))
    total_share = float(foreground.sum())
    refuse_if(site, {
        f"field {next(iter(odd), '')!r} must hold whole numbers, got {next(iter(odd.values()), 0):.8g}": bool(odd),
        **{
            f"field '{name}_cases' has {number:g} cases, field 'cases' {counts[CASES]}": number != counts[CASES]
            for name, number in cases.items()
        },
        f"field {CROPPED!r} is above the number of cases": counts.get(CROPPED, 0) > counts[CASES],
        f"field {FOREGROUND!r} has {len(foreground)} entries, asked were {HUS * channels}":
            number == len(KINDS) - 1 and len(foreground) != (0 if secure else HUS * channels),
        f"field {FOREGROUND!r} has a sum of {total_share:g}, above the number of cases":
            not math.isfinite(total_share) or total_share > channels * counts[CASES] * (1 + SLACK),
    })  # fmt: skip
    return counts
