"""Provide calls with which a site's own training script (FLARE's Client API) takes part in FairFlare's methods.

    site = client.Site(model, criterion, train, validation, test, metrics=evaluate)
    for epoch in site.epochs(EPOCHS):                    # of every round
        for images, labels in train:
            optimizer.zero_grad()
            loss = site.loss(images, labels)             # the method's
            loss.backward()
            site.step(optimizer)                         # the method's

The job (``ScriptRecipe``) defines the method. Under FLARE's own FedAvg controller, with
``aggregator=FairAggregator(rule=...)``, a script adds its report by :func:`with_report`. See ``docs/own_script.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fairflare import __version__
from fairflare.base.checks import whole
from fairflare.base.disk.files import safe_name
from fairflare.core.sharpness import search_distance, sharpness
from fairflare.exchange.messages import (
    STATUS_OK,
    SiteReply,
    SiteTask,
    clean_meta,
    decode_task,
    encode_reply,
)
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES
from fairflare.federation.site.script import ScriptSite, build_training
from fairflare.federation.site.worker import refusal
from fairflare.flare.messages.wire import META_KEY, TRAINING_KEY, decode_model, encode_model
from fairflare.tasks.scripts import Criterion, LoopTask, ScriptData

__all__ = ["Site", "search_distance", "sharpness_report", "site_name", "with_report"]


def site_name() -> str:
    """Return the name of this site in its federation; start the Client API if the script has not done so."""
    try:
        return str(flare.get_site_name())
    except RuntimeError:  # flare.init() was not called
        flare.init()
        return str(flare.get_site_name())


class Site:
    """Take part with a training script in the rounds of a :class:`fairflare.flare.controller.RoundsController`.

    The object itself answers the tasks ``anchor`` and ``validate``. For ``train`` it loads the received model into
    ``model``, measures the values that the method needs, and lets the script train. The script has its own optimizer
    and may hold its own state from round to round. Torch's random state is seeded for each round. An error in a call of
    this object costs the site the round: the server gets the reason, and the site's log the details. An exception in
    the script's own lines ends the script, and with it the site's part in the job.

    Args:
        model: the network; names and shapes of its tensors must be those of the job's network.
        loss: loss function of (outputs, targets), the mean over the batch.
        train, validation, test: DataLoaders or lists of batches; see :class:`fairflare.tasks.scripts.ScriptData`. The
            method measures on ``train``: every training image, without augmentation. The script may train with another
            loader.
        metrics: function such that ``metrics(model, validation)`` returns a number or a dict of numbers, each declared
            in the job (``ScriptRecipe(metrics=...)``); it is called with the loaders that are given here.
        primary_metric: name of the number that ``metrics`` returns; ``None``: as the job names it (``ScriptRecipe``).
        annotated: numbers, from 0, of the structures that this site annotated in masks (n, structures, ...). ``loss``
            gets their channels alone; use :meth:`known` in ``metrics`` to select them. Default: all structures.
        classes: number of classes, or number of training images of each class (then they are not counted); ``None``
            if images have no class.
        prior: Fed-MAS's frozen network: a module, or the path of the hospital's file; ``None`` if the job defines it.
        metrics_by_class: False: only the primary metric and the loss leave the site.
        min_cases: if a split, or a class in it, has fewer images, nothing about it leaves the site but the update; see
            ``docs/privacy.md``. A job can only raise this number.
        folder: folder for the site's state between tasks; ``None`` for a folder next to the job's code, which exists as
            long as FLARE keeps the job.

    Raises:
        DataError, SiteError: an argument cannot be used.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Criterion,
        train: Any,
        validation: Any,
        test: Any,
        *,
        metrics: Callable[[Any, Any], Any],
        primary_metric: str | None = None,
        annotated: Sequence[int] | None = None,
        classes: int | Sequence[int] | None = None,
        prior: torch.nn.Module | str | Path | None = None,
        metrics_by_class: bool = True,
        min_cases: int = 1,
        folder: str | Path | None = None,
    ) -> None:
        self.name = site_name()
        own_prior = prior if isinstance(prior, torch.nn.Module) else None
        self._model = model
        self.annotated = annotated
        criterion = loss if annotated is None else lambda outputs, masks: loss(self.known(outputs), self.known(masks))
        try:
            self._task = LoopTask(
                model,
                criterion,
                ScriptData({"training": train, "validation": validation, "test": test}, classes),
                metrics,
                prior=own_prior,
            )
        except Exception as error:
            # The server learns why this site takes no part. A script that ended now would take its answer with it.
            while flare.is_running():
                message = decode_model(flare.receive())
                self._answer(refusal(self.name, str(flare.get_task_name()), error), message.current_round)
            raise
        self._named = primary_metric
        of_file = {} if prior is None or own_prior is not None else {"prior": str(prior)}
        self._settings: dict[str, Any] = {METRICS_BY_CLASS: metrics_by_class, MIN_CASES: min_cases, **of_file}
        self._folder = _state_folder() if folder is None else Path(folder).expanduser()
        self._told: Any = None
        self._site: ScriptSite | None = None
        self._round: int | None = None
        self._epoch: int | None = None

    # -- calls of the script's training loop

    def receive(self) -> bool:
        """Wait for the next round; return True once it has begun, False if the job is over.

        When it has begun, ``model`` holds the received weights: train it, then call :meth:`send`.
        """
        if self._round is not None:
            raise RuntimeError(f"round {self._round} is not answered yet; call site.send() first")
        while flare.is_running():
            message = decode_model(flare.receive())
            if not isinstance(message.meta, Mapping):
                raise RuntimeError(
                    "the server runs none of FairFlare's methods; make the job with ScriptRecipe, or, with FLARE's own "
                    "controllers, use client.with_report in place of client.Site"
                )
            task = str(flare.get_task_name())
            try:
                request = decode_task(task, message, self.name)
                reply = self._open_site(request, message.meta.get(TRAINING_KEY)).begin(request)
            except Exception as error:
                reply = refusal(self.name, task, error)
            if reply is None:
                self._round = request.current_round
                return True
            self._answer(reply, message.current_round)
        return False

    def send(self) -> None:
        """Send the current state of the model to the server as the answer to the round."""
        current_round, self._round, self._epoch = self._round, None, None
        if current_round is None or self._site is None:
            raise RuntimeError("there is no round to answer; call site.receive() first")
        self._answer(self._site.finish(), current_round)

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs of every round: ``for epoch in site.epochs(2)``.

        The loop receives the model before the first epoch of a round and sends the model after the last one.
        """
        whole("number", number)
        while self.receive():
            for epoch in range(number):
                self._epoch = epoch
                yield epoch
            self.send()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the method's loss of a training batch, in place of ``criterion(model(inputs), targets)``."""
        return self._training().loss(inputs, targets, self._epoch)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the method's optimizer step in place of ``optimizer.step()``, after ``backward()`` of :meth:`loss`."""
        self._training().step(optimizer)

    def known(self, values: torch.Tensor) -> torch.Tensor:
        """Return the channels of the structures that the site annotates, from outputs or masks (n, structures, ...)."""
        return values if self.annotated is None else values[:, list(self.annotated)]

    # -- internal parts

    def _training(self) -> ScriptSite:
        if self._site is None:
            raise RuntimeError("no training is in progress; call site.receive() or site.epochs(number) first")
        return self._site

    def _open_site(self, request: SiteTask, description: Any) -> ScriptSite:
        if self._site is None or description != self._told:
            names = (safe_name(request.experiment), safe_name(self.name)) if request.experiment else ()
            folder = self._folder.joinpath(*names)
            training = build_training(description)
            self._task.told = description.get("metrics") or {}
            vars(self._task)["primary_metric"] = str(self._named or description.get("primary", "accuracy"))
            self._site = ScriptSite(self.name, self._task, self._model, training, self._settings, folder)
            self._told = description
        return self._site

    def _answer(self, reply: SiteReply, current_round: int | None) -> None:
        flare.send(encode_model(encode_reply(reply, current_round)))


def _state_folder() -> Path:
    """Return the folder ``fairflare_state`` in the job's run folder at this site.

    For a script that did not come with the job, it is in the current working directory.
    """
    script = Path(sys.argv[0]).resolve()
    return (script.parents[2] if script.parent.name == "custom" else Path.cwd()) / "fairflare_state"


def with_report(model: FLModel, report: Mapping[str, Any], *, num_samples: int | None = None) -> FLModel:
    """Add the report that a method's rule reads to a model that a script sends, and return the model.

    Args:
        model: the model that the script is about to send; changed in place.
        report: values of the fields that the rule declares (its ``report_fields``): numbers, texts or lists of them.
        num_samples: number of training samples, for rules that weigh sites by it; ``>= 1``.

    Raises:
        TypeError: a value of the report cannot be sent (the message names its field), or ``model`` is no FLModel.
        ValueError: ``num_samples`` is less than 1.
    """
    if not isinstance(model, FLModel):
        raise TypeError(f"model must be an FLModel, got {type(model).__name__}")
    if num_samples is not None:
        whole("num_samples", num_samples)
    content = {"version": __version__, "status": STATUS_OK, "report": dict(report), "num_samples": num_samples}
    model.meta = {**(model.meta or {}), META_KEY: clean_meta(content)}
    return model


def sharpness_report(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batches: Iterable[tuple[Any, Any]],
    rho: float,
) -> dict[str, float]:
    """Return the values that a site reports to :class:`fairflare.methods.fed_ism.FedISM`, of the received model.

    Args:
        model, loss_fn, batches, rho: as in :func:`fairflare.core.sharpness.sharpness`; ``batches`` is the whole
            training set, without augmentation. For FedISM+ ``rho=search_distance(round, rounds, 0.1, 0.5)``.

    Returns:
        ``sharpness`` and ``perturbed_loss``.
    """
    measured = sharpness(model, loss_fn, batches, rho)
    return {"sharpness": measured.sharpness, "perturbed_loss": measured.perturbed_loss}
