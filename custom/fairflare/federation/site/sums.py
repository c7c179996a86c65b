"""Take part in secure sums at a site: agree on keys, keep the update, send it masked, and release the own mask.

A refusal names the site and the reason; the rules are in :mod:`fairflare.privacy.sums`. The site's log of sums and its
key lie in its folder of the experiment, so that a restarted process continues with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from fairflare.base.cases.floor import Floor
from fairflare.base.checks import first_of, list_names
from fairflare.core.aggregation.updates import squared_norms
from fairflare.core.cells import Cell
from fairflare.core.features.batch_norms import MEAN, VARIANCE
from fairflare.core.features.layers import layers_of
from fairflare.exchange.messages import STATUS_OK, TASK_CHECK, TASK_VALIDATE, SiteReply, SiteTask, clean_meta
from fairflare.federation.site.groups import KEPT as KEPT_GROUPS
from fairflare.federation.site.groups import GroupTable
from fairflare.federation.site.norm_moments import MEASURED
from fairflare.federation.site.site_file import setting
from fairflare.methods.base.reports import CLASSES, LENGTH, ByClass
from fairflare.methods.base.training import SiteRun, SiteStore
from fairflare.privacy.sums.exposure import Limits
from fairflare.privacy.sums.journal import SumLog
from fairflare.privacy.sums.keys import Kit, Pairs, SiteKeys, SumRefused, need
from fairflare.privacy.sums.masks import BY_PART, CLASS_GRADIENTS, COUNTS, GROUPS, NORMS, SumAsked, digest
from fairflare.privacy.sums.ring import SumLayout, kinds, same_integers

if TYPE_CHECKING:
    from fairflare.federation.site.worker import SiteWorker

SHOWN = "shown"  # key beside stored numbers: names of the parts (classes, groups) of which the site has numbers
KEPT = "sum_update"  # name under which a site stores the update of a round, with the rest of its answer
KIT = ("client.crt", "client.key", "rootCA.pem")  # files of a startup kit
RUN, HELLOS, QUESTIONS, PRESENT, PARTS = "run", "hellos", "questions", "present", "parts"  # keys in a task's ``sums``
OF_ALL = "sums_of_all"  # value of the site's setting ``secure``: it takes part in no sum of a group of sites
SATURATED = "saturated"  # key in the report
Most = Annotated[float, Field(strict=True, gt=0, le=1)]


def check_asked(worker: SiteWorker, request: SiteTask) -> None:
    """Refuse a run that takes updates or sums in the clear if the site's own file allows secure sums only.

    The task ``check`` refuses such a run before any training; each later task does so too, as a site may join late. A
    job that only tests a given model, without groups of people, is not refused.

    Raises:
        SumRefused: the run does not use secure sums.
    """
    sums_only = _secure(worker)
    sends = request.num_rounds if request.name == TASK_CHECK else request.name != TASK_VALIDATE
    if sums_only and (sends or request.groups) and not request.sums:
        remedy = (
            "set secure=sums for the run (--set secure=sums)" if request.num_rounds else "leave groups out of the test"
        )
        raise SumRefused(worker.site, f"its own file has secure={sums_only}, the run has not; {remedy}")


def repeat_answer(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply | None:
    """Return the answer to ``train`` that the site gave before, where a resumed job asks about the same model again.

    Only the same numbers may be summed again: from two sums with other numbers of a site their difference could be
    computed. The result is ``None`` if the site has not answered yet.
    """
    stored = store.load_at(KEPT, request.current_round) if request.sums else None
    names = () if stored is None else (*stored["params"], *stored["buffers"])
    if stored is None or not request.state.keys() >= set(names) or stored["model"] != _digest(request, names).hex():
        return None
    fields = json.loads(stored["reply"])
    return SiteReply(**{**fields, "metrics": [Cell(**cell) for cell in fields["metrics"]]})


def keep_update_home(
    worker: SiteWorker, request: SiteTask, store: SiteStore, reply: SiteReply, local: Mapping[str, torch.Tensor],
    floor: Floor,
) -> SiteReply:  # fmt: skip
    """Store the update of an answer to ``train``, and its numbers by class, and return the answer without them.

    Raises:
        SumRefused: the training changed integers that cannot be summed.
    """
    update, model = reply.update or {}, worker.network.build(worker.task, request)
    received = {name: request.state[name] for name in update}
    same_integers(worker.site, received, local)
    trained = (name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad)
    kinds_of_tensors, reply = kinds(received, trained), replace(reply, update=None)
    if LENGTH in request.directives:
        reply.report = {
            **reply.report,
            LENGTH: math.sqrt(squared_norms({"": update}, None, kinds_of_tensors.params)[""]),
        }
    parts = {what: {name: update[name] for name in getattr(kinds_of_tensors, what)} for what in ("params", "buffers")}
    by_class, shown = reply.report.get(CLASS_GRADIENTS), list[int]()
    if isinstance(by_class, ByClass):
        shown, (classes, size) = floor.shown(by_class.split, by_class.rows), by_class.shape
        parts[CLASS_GRADIENTS] = {
            f"{label}.sum": torch.from_numpy(by_class.rows[label]) if label in shown else torch.zeros(size)
            for label in range(classes)
        }
        reply.report = {name: value for name, value in reply.report.items() if value is not by_class} | {CLASSES: shown}
    store.save(KEPT, request.current_round, {
        **parts, "model": _digest(request, (*kinds_of_tensors.params, *kinds_of_tensors.buffers)).hex(),
        "reply": json.dumps(clean_meta({**vars(reply), "metrics": list(map(vars, reply.metrics))})),
        SHOWN: [f"{label}.sum" for label in shown],
    }, kept=1)  # fmt: skip
    return reply


def moments_home(request: SiteTask, store: SiteStore, report: Mapping[str, Any], floor: Floor) -> dict[str, Any]:
    """Store the moments in an answer to ``norms`` (mean, mean square), and return the report without them."""
    means, variances = (torch.tensor(report[key], dtype=torch.float64) for key in MEASURED)
    widths = [len(request.state[f"{name}.{MEAN}"]) for name in report["norms"]]
    stored = {
        f"{name}.{kind}": part
        for kind, values in ((MEAN, means), (VARIANCE, variances + means**2))
        for name, part in zip(report["norms"], values.split(widths), strict=True)
    }
    if floor.holds("training"):
        store.save(NORMS, request.current_round, {NORMS: stored, "model": digest(request.state).hex()}, kept=1)
    return {name: value for name, value in report.items() if name not in MEASURED}


def groups_home(
    worker: SiteWorker, request: SiteTask, store: SiteStore, run: SiteRun, table: GroupTable
) -> dict[str, Any]:
    """Store the sums by group of people of a ``validate`` task, and return the fields about them for the reply's stats.

    If the same model is tested again, the earlier fields are returned, since its sums may have been opened.
    """
    model, number = digest(request.state).hex(), request.current_round
    stored = store.load_at(GROUPS, number)
    if stored is None or stored["model"] != model:
        fields, arrays = table.kept(run.min_cases, worker.sends_classes)
        numbers = {f"{place:06d}.sum": torch.from_numpy(np.nan_to_num(array)) for place, array in enumerate(arrays)}
        has = [name for name, value in zip(numbers, fields[KEPT_GROUPS], strict=True) if value > 1]
        stored = {GROUPS: numbers, SHOWN: has, "model": model, "told": fields}
        store.save(GROUPS, number, stored, kept=1)
    return dict(stored["told"])


def keys(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``keys``: send the site's public key, or check those of all sites and agree on a key with each site."""
    site_keys, run = _keys(worker), request.sums.get(RUN)
    if HELLOS not in request.sums:
        return SiteReply(STATUS_OK, report=site_keys.hello(run))
    site_keys.agree(run, _read_list(worker, request, HELLOS, Mapping))
    return SiteReply(STATUS_OK)


def mask(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``mask``: send the site's weighted numbers under masks that cancel only in the sum of all sites."""
    asked, number = list(_read_questions(worker, request)), request.current_round
    stored = (
        store.load_at(
            next(
                (
                    asked_question.label
                    for _, asked_question, _ in asked
                    if asked_question.label in (NORMS, GROUPS, COUNTS)
                ),
                KEPT,
            ),
            number,
        )
        or {}
    )
    need(stored, SumRefused(worker.site, f"it keeps no numbers of round {number}; it takes part in the next one"))
    vectors, saturated = {}, 0
    for log, question, pairs in asked:
        row, part = question.table.get(worker.site, ()), BY_PART.get(question.label)
        names = sorted(stored.get(question.vectors, ())) if part else ()
        weighed = {name for name, weight in zip(names, row, strict=False) if weight}
        opened = {
            name for name, totals in zip(names, zip(*question.table.values(), strict=True), strict=False) if any(totals)
        }
        problem = first_of({
            "what it received is not the model that the server names; a filter on the way changes it":
                question.model.hex() != stored["model"],
            "it keeps no such numbers; update the server's FairFlare": question.vectors not in stored,
            f"a {part} that it has no numbers of has a weight, so that they would be of fewer sites":
                not weighed <= {*stored.get(SHOWN, ())},
            "it is left out of some sums of its groups, which beside the others would show its numbers":
                question.label == GROUPS and not opened & {*stored.get(SHOWN, ())} <= weighed,
        })  # fmt: skip
        need(not problem, SumRefused(worker.site, f"sum {question.label!r} of round {number}: {problem}"))
        # Each part has its own weight: a common one would open the numbers of a class that only one site has.
        layout = SumLayout.make(update := stored[question.vectors], layers_of(update) if part or len(row) > 1 else None)
        vectors[question.label], clipped = log.mask_update(question, pairs, layout, update)
        saturated += clipped
    return SiteReply(STATUS_OK, update=vectors, report={SATURATED: saturated})


def release(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``release``: send the keys of the site's own masks, after the vectors of all members have arrived."""
    present = _read_list(worker, request, PRESENT, str)
    return SiteReply(STATUS_OK, report={
        question.label: log.release(question, pairs, present)
        for log, question, pairs in _read_questions(worker, request)
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ pieces


def _keys(worker: SiteWorker) -> SiteKeys:
    pins = _own(worker, "secure_pins", {}, dict[str, str])
    startup = worker.startup
    files = {name: (startup / name).read_bytes() for name in KIT if startup and (startup / name).is_file()}
    whole, lacking = len(files) == len(KIT), list_names([name for name in KIT if name not in files])
    why = f"its startup kit lacks {lacking}, so nobody would sign; bring it back, or take secure_pins out"
    need(whole or not (files or pins), SumRefused(worker.site, why))
    return SiteKeys(
        worker.site,
        worker.state.folder,
        Kit(files[KIT[0]], files[KIT[1]], files[KIT[2]], pins) if whole else None,
    )


def _read_questions(worker: SiteWorker, request: SiteTask) -> Iterator[tuple[SumLog, SumAsked, Pairs]]:
    limits = Limits(
        _own(worker, "secure_max_weight", Limits().max_weight, Most),
        _own(worker, "secure_max_exposure", Limits().max_exposure, Most),
    )
    parts = _read_list(worker, request, PARTS, dict) if PARTS in request.sums else []
    why = f"its own file has secure={OF_ALL}, and sums are opened in groups of sites now"
    need(not parts or _secure(worker) != OF_ALL, SumRefused(worker.site, why))
    log = SumLog(worker.site, worker.state.folder, request.experiment or request.run, limits, parts)
    pairs = _keys(worker).pairs(request.sums.get(RUN))
    questions = [SumAsked.read(worker.site, plain) for plain in _read_list(worker, request, QUESTIONS, Mapping)]
    for question in (
        question_of_part for question_of_part in questions if not parts or worker.site in question_of_part.table
    ):
        why = f"field 'round' is {question.round} in round {request.current_round}"
        need(question.round == request.current_round, SumRefused(worker.site, why))
        yield log, question, pairs


def _read_list(worker: SiteWorker, request: SiteTask, name: str, kind: type) -> list[Any]:
    """Return a list in the server's task; refuse another value, and an empty list."""
    value = request.sums.get(name)
    if not (isinstance(value, list) and value and all(isinstance(one, kind) for one in value)):
        raise SumRefused(
            worker.site,
            f"field {name!r} of the server's task {request.name!r} must be a list of "
            f"{'names' if kind is str else 'objects'}, got {value!r:.80}; use the same version at server and sites",
        )
    return value


def _secure(worker: SiteWorker) -> str:
    return str(_own(worker, "secure", "", Literal["", "sums", "sums_of_all"]))


def _own(worker: SiteWorker, name: str, usual: Any, kind: Any) -> Any:
    return setting(worker.site, worker.settings, name, usual, kind)


def _digest(request: SiteTask, names: Any) -> bytes:
    return digest({name: request.state[name] for name in names})
