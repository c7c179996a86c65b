"""For sites that keep their own training script (FLARE's Client API): what a script adds to take part in our methods.

    site = client.Site(model, criterion, train, validation, test, metrics=evaluate)
    for epoch in site.epochs(EPOCHS):                    # of every round
        for images, labels in train:
            optimizer.zero_grad()
            loss = site.loss(images, labels)             # the method's
            loss.backward()
            site.step(optimizer)                         # the method's

The job (``ScriptRecipe``) says which method. Behind FLARE's own FedAvg controller, with
``aggregator=FairAggregator(rule=...)``, a script reports by itself: :func:`with_report`. See ``docs/own_script.md``.
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
    STATUS_FAILED,
    STATUS_OK,
    SiteReply,
    SiteTask,
    VersionError,
    clean_meta,
    decode_task,
    encode_reply,
)
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES
from fairflare.federation.site.script import ScriptSite, built_training
from fairflare.federation.site.worker import refusal
from fairflare.flare.messages.wire import META_KEY, TRAINING_KEY, from_model, to_model
from fairflare.tasks.scripts import Criterion, LoopTask, ScriptData

__all__ = ["Site", "search_distance", "sharpness_report", "site_name", "with_report"]


def site_name() -> str:
    """Return the name of this site in its federation; starts the Client API if the script has not."""
    try:
        return str(flare.get_site_name())
    except RuntimeError:  # flare.init() was not called
        flare.init()
        return str(flare.get_site_name())


class Site:
    """A script's part in the rounds of a :class:`fairflare.flare.controller.RoundsController`.

    It answers ``anchor`` and ``validate``. For ``train`` it loads the received model into ``model``, measures what the
    method asks about, and lets the script train. The script's optimizer, and what it keeps from round to round, are its
    own. Torch's random state is seeded for each round. What goes wrong in here costs this site the round: the server
    gets the reason, the site's log the details. An exception in the script's own lines ends the script, and with it the
    site's part in the job.

    Args:
        model: the network; its names and shapes are the job's.
        loss: of (outputs, targets), the mean over the batch.
        train, validation, test: DataLoaders or lists of batches; see :class:`fairflare.tasks.scripts.ScriptData`.
            ``train`` is what the method measures on: every training image, without augmentation. The script may train
            with another loader.
        metrics: ``metrics(model, validation)`` gives a number or a dict of such, each as the job declares it
            (``ScriptRecipe(metrics=...)``); called with the loaders as they were given here.
        primary_metric: the name of that number, or the job's ``primary_metric`` among the dict's.
        classes: number of classes, or of the training images of each (saves reading them); ``None``: images have none.
        prior: Fed-MAS's frozen network: a module, or the file that a hospital has it in; ``None``: as the job says.
        metrics_by_class: False: only the primary metric and the loss leave the site.
        min_cases: of a list with fewer images, or of a class in it, nothing but the update leaves; see
            ``docs/privacy.md``. A job can only raise it.
        folder: what the site keeps between tasks; ``None``: next to the job's code, as long as FLARE keeps the job.

    Raises:
        DataError, SiteError: something given here that cannot be used.
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
        primary_metric: str = "accuracy",
        classes: int | Sequence[int] | None = None,
        prior: torch.nn.Module | str | Path | None = None,
        metrics_by_class: bool = True,
        min_cases: int = 1,
        folder: str | Path | None = None,
    ) -> None:
        self.name = site_name()
        own = prior if isinstance(prior, torch.nn.Module) else None
        data = ScriptData({"training": train, "validation": validation, "test": test}, classes)
        self._model = model
        self._task = LoopTask(model, loss, data, metrics, primary_metric, own)
        self._settings: dict[str, Any] = {METRICS_BY_CLASS: metrics_by_class, MIN_CASES: min_cases}
        if prior is not None and own is None:
            self._settings["prior"] = str(prior)
        self._folder = _state_folder() if folder is None else Path(folder).expanduser()
        self._told: Any = None
        self._site: ScriptSite | None = None
        self._round: int | None = None
        self._epoch: int | None = None

    # -- the loop

    def receive(self) -> bool:
        """Wait for the next round; True: ``model`` is the received one, train it and call :meth:`send`.

        False: the job is over.
        """
        if self._round is not None:
            raise RuntimeError(f"round {self._round} is not answered yet; call site.send() first")
        while flare.is_running():
            message = from_model(flare.receive())
            if not isinstance(message.meta, Mapping):
                raise RuntimeError(
                    "the server runs none of our methods; make the job with ScriptRecipe, or take "
                    "client.with_report behind FLARE's own controllers"
                )
            task = str(flare.get_task_name())
            try:
                request = decode_task(task, message, self.name)
                answer = self._at(request, message.meta.get(TRAINING_KEY)).begin(request)
                if answer is None:
                    self._round = request.current_round
                    return True
                reply = answer
            except VersionError as error:
                reply = SiteReply(STATUS_FAILED, reason=str(error))
            except Exception as error:
                reply = refusal(self.name, task, error)
            self._answer(reply, message.current_round)
        return False

    def send(self) -> None:
        """Answer the round with the model as it is now."""
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
        """Return the method's objective of a training batch, in place of ``criterion(model(inputs), targets)``."""
        return self._training().loss(inputs, targets, self._epoch)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the method's step, in place of ``optimizer.step()``, after the backward pass of :meth:`loss`."""
        self._training().step(optimizer)

    # -- pieces

    def _training(self) -> ScriptSite:
        if self._site is None:
            raise RuntimeError("no training is going on; ask with site.receive() or site.epochs(number) first")
        return self._site

    def _at(self, request: SiteTask, told: Any) -> ScriptSite:
        if self._site is None or told != self._told:
            folder = self._folder
            if request.experiment:
                folder = folder / safe_name(request.experiment) / safe_name(self.name)
            training = built_training(told)
            self._task.told = told.get("metrics") or {}
            self._site = ScriptSite(self.name, self._task, self._model, training, self._settings, folder)
            self._told = told
        return self._site

    def _answer(self, reply: SiteReply, current_round: int | None) -> None:
        flare.send(to_model(encode_reply(reply, current_round)))


def _state_folder() -> Path:
    """Return ``fairflare_state`` in the job's run folder at this site.

    For a script that did not come with the job, the folder is in the current one.
    """
    script = Path(sys.argv[0]).resolve()
    run = script.parents[2] if script.parent.name == "custom" else Path.cwd()
    return run / "fairflare_state"


def with_report(model: FLModel, report: Mapping[str, Any], *, num_samples: int | None = None) -> FLModel:
    """Return the model to send, with the report that a rule reads.

    Args:
        model: what the script is about to send; changed in place.
        report: the fields that the rule declares (its ``report_fields``); numbers, texts or lists of them.
        num_samples: number of training samples, for rules that weigh by it; ``>= 1``.

    Raises:
        TypeError: a value that cannot travel (names the field), or ``model`` is no FLModel.
        ValueError: num_samples < 1.
    """
    if not isinstance(model, FLModel):
        raise TypeError(f"model must be an FLModel, got {type(model).__name__}")
    if num_samples is not None:
        whole("num_samples", num_samples)
    content = {
        "version": __version__,
        "status": STATUS_OK,
        "report": dict(report),
        "num_samples": num_samples,
    }
    model.meta = {**(model.meta or {}), META_KEY: clean_meta(content)}
    return model


def sharpness_report(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batches: Iterable[tuple[Any, Any]],
    rho: float,
) -> dict[str, float]:
    """Return what :class:`fairflare.methods.fed_ism.FedISM` asks of a site, measured on the received model.

    Args:
        model, loss_fn, batches, rho: as in :func:`fairflare.core.sharpness.sharpness`; ``batches`` is the whole
            training set, without augmentation. For FedISM+ ``rho=search_distance(round, rounds, 0.1, 0.5)``.

    Returns:
        ``sharpness`` and ``perturbed_loss``.
    """
    found = sharpness(model, loss_fn, batches, rho)
    return {"sharpness": found.sharpness, "perturbed_loss": found.perturbed_loss}
