"""Answer the questions of a plan at a site: how many training cases have which spacing and size.

The server's half is :mod:`fairflare.federation.server.planning`; ``docs/nnunet.md`` has the protocol.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.disk.files import private_folder, write_whole
from fairflare.core.plans.counts import LOST, MOST, Case, count_values, merge_counts
from fairflare.exchange.messages import STATUS_OK, SiteReply, SiteTask
from fairflare.methods.base.reports import TOO_FEW, TRAINING, Field
from fairflare.methods.base.site_run import SiteError
from fairflare.privacy.sums.masks import COUNTS, digest

if TYPE_CHECKING:
    from fairflare.federation.site.worker import SiteWorker
    from fairflare.methods.base.training import SiteStore

ASKED = "plan"  # name of the only tensor of a question: its number, and the target spacing along each axis
KINDS = (("spacing", "size"), ("resampled",), ())  # what each question counts; the last one asks for CT foregrounds
CASES, CROPPED, MEMORY, FOREGROUND = "cases", "cropped", "memory", "foreground"
MOST_CASES, MOST_MEMORY = 10**6, 4096
MARGIN = 0.9  # share of a GPU's memory that a plan may count on
ASKED_BEFORE = ".plans"  # folder in the site's state root: of which cases the site has sent counts

_COUNTED = {
    "spacing": "spacing of the training cases in thousandths of a mm",
    "size": "size of the training cases in voxels, cropped to values other than 0",
    "resampled": "size of the training cases in voxels of the plan's spacing",
}
_STAYS = "`secure=sums`, or fewer cases than the site's `min_cases`"
#: Fields that a site reports in its answers to the task ``plan``.
FIELDS = (
    Field(CASES, "whole", low=1, high=MOST_CASES, doc="number of training cases", of=TRAINING),
    Field(CROPPED, "whole", low=0, high=MOST_CASES, required=False, of=TRAINING, keep=_STAYS,
          doc="how many of them lose a quarter of their voxels by cropping; with few such or other cases 0 or all"),
    Field(MEMORY, "whole", low=1, high=MOST_MEMORY, required=False, doc="memory of the site's GPU in GB", of=()),
    *(
        field
        for kind, most in MOST.items()
        for axis in range(3)
        for field in (
            Field(f"{kind}_{axis}", "vector", low=1, high=most, required=False, of=TRAINING, keep=_STAYS,
                  doc=f"{_COUNTED[kind]} along an axis: medians of runs of at least `min_cases` cases",
                  reveals="protocols of the scanners"),
            Field(f"{kind}_{axis}_cases", "vector", low=1, high=MOST_CASES, same_length_as=f"{kind}_{axis}",
                  required=False, of=TRAINING, keep=_STAYS, doc="how many cases each of these medians stands for"),
        )
    ),
    Field(FOREGROUND, "array", low=0, high=MOST_CASES, required=False, of=TRAINING, keep=_STAYS,
          doc="CT: sum of the cases' shares of foreground at each HU", reveals="mean density of the structures"),
)  # fmt: skip


def plan(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``plan``: count the training cases as the question asks, in runs of enough cases or for a secure sum.

    Raises:
        SiteError: the site has too few cases, its data are no volumes, or its cases differ in too few from those of an
            earlier plan.
    """
    run = worker.run(request, store)
    number, *target = request.state[ASKED].tolist()
    cases, histograms = _measure_cases(worker, run)
    least = max(1, run.floor.least)
    patients = Counter(patient for patient, _ in cases)
    if len(patients) < least:
        raise SiteError(
            f"site {run.site!r}: it takes no part in planning, since it has {TOO_FEW}; it takes the plan of the others",
            skipped=True,
        )
    every = [case for _, case in cases]
    _check_before(worker, every, least)
    counts_by_name = {
        f"{kind}_{axis}": counts
        for kind in KINDS[int(number)]
        for axis, counts in enumerate(count_values(every, kind, target))
    }
    report: dict[str, Any] = {CASES: len(every)}
    if run.device.type == "cuda":
        report[MEMORY] = int(torch.cuda.get_device_properties(run.device).total_memory * MARGIN / 2**30)
    cropped = sum(case.share < LOST for case in every)
    if request.sums:
        dense = {
            name: torch.bincount(torch.tensor([*counts.elements()]), minlength=MOST[name.rpartition("_")[0]] + 1)
            for name, counts in counts_by_name.items()
        }
        _save(request, store, {**dense, CROPPED: torch.tensor([cropped]), FOREGROUND: torch.from_numpy(histograms)})
        return SiteReply(STATUS_OK, report=report)
    # A patient may have several volumes, and a run must be of enough patients.
    runs = {name: merge_counts(counts, least * max(patients.values())) for name, counts in counts_by_name.items()}
    few = min(cropped, len(every) - cropped) < least
    report |= {CROPPED: round(cropped / len(every)) * len(every) if few else cropped}
    for name, counts in runs.items():
        report |= {name: sorted(counts), f"{name}_cases": [counts[value] for value in sorted(counts)]}
    if not KINDS[int(number)]:
        report[FOREGROUND] = histograms.astype("<f4").tobytes()
    return SiteReply(STATUS_OK, report=report)


def _measure_cases(worker: SiteWorker, run: Any) -> tuple[list[tuple[Hashable, Case]], np.ndarray[Any, Any]]:
    """Return patient and fingerprint of each training case, and the sums of the CT channels' histograms, flat."""
    if not hasattr(run.data, "fingerprints"):
        raise SiteError(f"site {run.site!r}: a plan needs whole volumes with masks; its data are of another kind")
    if worker.fingerprints is None:
        worker.fingerprints = run.data.fingerprints("training", worker.task.of_ct)
    measured = worker.fingerprints
    sums_by_channel = [sum(counts[number] for *_, counts in measured) for number in worker.task.of_ct]
    return [(patient, case) for patient, case, _ in measured], np.concatenate([*sums_by_channel, np.zeros(0)])


def _save(request: SiteTask, store: SiteStore, numbers: dict[str, torch.Tensor]) -> None:
    sums = {f"{name}.sum": tensor.double() for name, tensor in numbers.items()}
    store.save(COUNTS, request.current_round, {COUNTS: sums, "model": digest(request.state).hex()}, kept=1)


def _check_before(worker: SiteWorker, cases: Sequence[Case], least: int) -> None:
    """Refuse counts whose difference from those of an earlier plan would be of too few cases.

    The site's own file has a SHA-256 for each case, and never leaves.
    """
    named = (f"{worker.site} {case} {k}" for case, count in Counter(map(repr, cases)).items() for k in range(count))
    now = sorted(hashlib.sha256(text.encode()).hexdigest() for text in named)
    beside = worker.state.folder if worker.sent is None else worker.sent  # both lie two folders below the state root
    file = private_folder(beside.parents[1] / ASKED_BEFORE) / f"{worker.site}.json"
    before = json.loads(file.read_text("utf-8")) if file.exists() else []
    if any(0 < max(len({*now} - {*other}), len({*other} - {*now})) < least for other in before):
        raise SiteError(
            f"site {worker.site!r}: its training cases differ in {TOO_FEW} from those of an earlier plan, and the "
            "difference of both would show them; use the earlier plan, or wait until enough cases have changed"
        )
    if now not in before:
        write_whole(file, lambda path: path.write_text(json.dumps([*before, now]), "utf-8"))
