"""Feed hostile answers to all that secure sums need into a run of CReFF with four sites, up to the sums by group.

A refused answer costs the site the exchange, and names it. What is well formed and wrong (another key, another number)
spoils a sum that nobody can be named for: that ends the run with these words, and with no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare.exchange.messages import (
    TASK_KEYS,
    TASK_MASK,
    TASK_NORMS,
    TASK_RELEASE,
    TASK_TRAIN,
    TASK_VALIDATE,
    Message,
)
from fairflare.federation.server.rounds import RoundFailed
from fairflare.flare.controller import _unreadable
from fairflare.flare.messages.wire import decode_model, encode_model

from ..federation.summing import Classes, OfClasses, Run, Wire
from .bench import LONGEST, Verdict
from .mutations import Case, Cases
from .server import NotSent, decoded, encoded

SUMS = "sums"
#: Every exchange of the run, and how often the site was asked the same task before: to ``mask`` and ``release`` it is
#: asked for the model, for the norms, and at last for groups of people.
PHASES = (
    (TASK_KEYS, 0), (TASK_KEYS, 1), (TASK_TRAIN, 0), (TASK_MASK, 0), (TASK_RELEASE, 0), (TASK_NORMS, 0),
    (TASK_MASK, 1), (TASK_RELEASE, 1), (TASK_VALIDATE, 0), (TASK_MASK, 2), (TASK_RELEASE, 2),
)  # fmt: skip
SUMS_OF_ALL: dict[str, Any] = {
    "half": {"norm_statistics": "recalibrated", "gradient_repeats": 1}, "norm_statistics": "recalibrated",
    "rule": {"classifier_epochs": 1, "num_features": 2, "feature_steps": 1},
    "groups": ["sex"], "group_bins": 4, "calibration_bins": 3,
}  # fmt: skip
BAD = "site-2"
BY_DESIGN = ("nobody can say which",)  # of a message that is well formed


class People(OfClasses):
    """Hold images of some of four classes, of patients of two sexes."""

    attributes: ClassVar = {"sex": ("f", "m", "unknown")}

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return [place % 2 for place in range(len(self.inputs))]


class OfPeople(Classes):
    """Define four classes, of whose images each has a patient's sex and an outcome."""

    def open_site(self, site: str, settings: Any) -> People:
        return People(site, self.of_site[site], self.single.get(site))

    def outcome_names(self) -> tuple[str, ...]:
        return ("a", "b", "c", "d")

    def outcomes(self, model: Any, data: Any, split: str, device: Any) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            return data.targets.numpy(), model.eval()(data.inputs).double().softmax(1).numpy()


def attack_sums(folder: Path, method: str, phase: str, seed: int, cases: Any = (), *, replies: int = 0) -> Any:
    """Attack as :func:`tests.fuzz.bench.attack` does; the method does not matter."""
    verdicts, sent_so_far = [], 0
    for index in cases or iter(range(10**9)):
        with (
            mock.patch("fairflare.federation.record.journal.tell_listeners", return_value=[]),
            mock.patch("fairflare.federation.server.sums.PAUSE", 0.01),
            mock.patch("os.fsync", return_value=None),
        ):
            verdicts.append(_judged(folder / str(index), index, seed))
        sent_so_far += verdicts[-1].sent
        if replies and sent_so_far == replies:
            break
    return verdicts


def _judged(folder: Path, index: int, seed: int) -> Verdict:
    phase, before = PHASES[index % len(PHASES)]
    sites = dict.fromkeys(("site-1", "site-2", "site-3", "site-4"), (0, 1))
    run = Run(folder, "creff", 4, task=OfPeople(sites), num_rounds=1, **SUMS_OF_ALL)  # opens all sums but Fed-LWR's
    verdict, answer = Verdict(index, ""), Wire._answer
    told: list[Case] = []

    def hostile(wire: Wire, site: str, name: str, task: Message) -> Any:
        found = answer(wire, site, name, task)
        if (site, name, sum((BAD, phase) == one[:2] for one in wire.asked)) != (BAD, phase, before + 1) or told:
            return found
        good = FLModelUtils.to_shareable(encode_model(found))
        told.append(Cases(good, f"{SUMS}/{phase}/{before}/{seed}")[index // len(PHASES)])
        verdict.name = f"{phase} {before}: {told[0].name}"
        try:
            result = decoded(encoded(told[0].apply(FLModelUtils.to_shareable(encode_model(found)))))
        except NotSent as error:
            verdict.sent, verdict.reason = False, str(error)
            return found
        return _unreadable(site, result) or decode_model(FLModelUtils.from_shareable(result))

    run.wire._answer = hostile.__get__(run.wire)  # type: ignore[method-assign]
    try:
        results = run().results
        left = [*results["rounds"][0]["left_out"], *results["left_out"]]
    except RoundFailed as error:
        verdict.accepted, verdict.reason = True, str(error)
        if not any(words in str(error) for words in BY_DESIGN):
            verdict.fault("killed", str(error))
        return verdict
    except Exception as error:
        verdict.fault("raised", f"{type(error).__name__}: {error}")
        return verdict
    reasons = [x["reason"] for x in left if x["site"] == BAD]
    verdict.accepted = not reasons
    for reason in reasons[:1]:
        verdict.reason = reason
        if not reason.startswith(f"site {BAD!r}") or len(reason) > LONGEST or not reason.isprintable():
            verdict.fault("unnamed", repr(reason))
    if others := [x for x in left if x["site"] != BAD]:
        verdict.fault("other", f"another site is out too: {others}")
    return verdict
