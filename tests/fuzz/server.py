"""Run the real controller with FLARE's own task records, and sites that answer what a bench wants.

Every answer goes FLARE's way: encoded and decoded as its messages are, handed in under the id of the task that the
site was given, and from there through ``WFCommServer`` to the controller. Only the network and its threads are missing:
sites speak in turn, and time that would pass without an answer is over at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.f3.cellnet.utils import decode_payload, encode_payload
from nvflare.fuel.f3.message import Message as CellMessage

from fairflare import __version__
from fairflare.core.features.layers import layers_of
from fairflare.core.statistics.group_sums import sums_of
from fairflare.exchange.messages import TASK_CHECK, TASK_NORMS, Message
from fairflare.flare.controller import RoundsController
from fairflare.flare.messages.wire import encode_model
from fairflare.methods.base.rule import MakesTensors, Rule, anchor_fields
from fairflare.tasks.base import Task
from fairflare.tasks.networks import GivenHead
from tests.tiny import rows

from ..federation.examples import example_report
from ..federation.network import SITES, Line, number
from ..flare.test_controller import Server

flare_decomposers.register()  # FLARE's processes do so when they start
common_decomposers.register()


class NotSent(Exception):
    """Signal that FLARE cannot carry a message: the site's own loop ends, or FLARE's decoding ends the job first."""


class Net(torch.nn.Module):
    """Define a network of few numbers with everything that a state can hold, and Fed-LWR-v2's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Linear(2, 3, bias=False)
        self.bn = torch.nn.BatchNorm1d(3)
        self.down_3 = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False))


GROUPS = ["sex=female", "sex=male", "sex=unknown"]
ASKED, BINS = ("sex",), 4
#: Methods that go by groups of people do so.
BY_GROUP = {
    "group_dro": {"dro_attribute": "sex"}, "flex_fair": {"flexfair_over": "groups"},
    "fair_fed": {"fairfed_attribute": "sex"},
}  # fmt: skip
LEDGER = "0f" * 32  # hash of a privacy ledger's last line
DRAWS = 3  # of the test images, which every run asks for


class SmallTask(Line):
    primary_metric: ClassVar[str] = "dice"

    def __init__(self, given: bool = False) -> None:
        self.given = given  # with the second classifier that CReFF's server makes

    def outcome_names(self) -> tuple[str, ...]:
        return "no", "yes"

    def build_model(self) -> torch.nn.Module:
        model = Net()
        if self.given:
            model.retrained = GivenHead(torch.nn.Linear(3, 2))
        return model


def encoded(result: Any) -> CellMessage:
    """Return the bytes that a site's process sends.

    Raises:
        NotSent: it cannot travel.
    """
    message = CellMessage({}, result)
    try:
        encode_payload(message)
    except Exception as error:
        raise NotSent(f"{type(error).__name__}: {error}") from error
    return message


def decoded(message: CellMessage) -> Shareable:
    """Return the server's decoding of a message.

    Raises:
        NotSent: it cannot be read, or is no result.
    """
    received = CellMessage(dict(message.headers), message.payload)
    try:
        decode_payload(received)
    except Exception as error:
        raise NotSent(f"{type(error).__name__}: {error}") from error
    if not isinstance(received.payload, Shareable):  # FLARE's runner drops it
        raise NotSent(f"a {type(received.payload).__name__}")
    return received.payload


def good_reply(rule: Rule, site: str, name: str, current_round: int, like: dict[str, torch.Tensor]) -> Shareable:
    """Return a healthy site's reply, as the executor sends it."""
    k = number(site)
    layers = list(dict.fromkeys(layers_of(like).values()))
    meta: dict[str, Any] = {"version": __version__, "status": "ok", "reason": "", "report": {}}
    meta["stats"] = {"train_loss": 1.0 / k, "epoch_losses": [2.0 / k, 1.0 / k], "seconds": 0.5, "synthetic": False}
    reply = Message(meta=meta, current_round=current_round)
    if name == "train":
        reply.params = {
            key: torch.full_like(value, 0.01 * k if value.is_floating_point() else 1)
            for key, value in like.items()
            if not key.startswith(getattr(rule, "makes", ()))
        }
        reply.is_update = True
        reply.metrics = rows({"dice": 0.2 + 0.1 * k, "loss": 1.5 / k, "site_a/dice": 0.5}, "validation")
        meta.update(num_samples=10 * k, num_steps=3)
        meta["stats"] |= {"epsilon": 0.5 * k, "ledger": LEDGER}
        meta["report"] = {**example_report(rule.report_fields, k, layers), **group_report(rule, k)}
    elif name == "anchor":
        meta["report"] = example_report(anchor_fields(type(rule)), k, layers)
    elif name == TASK_NORMS:
        meta["num_samples"] = 10 * k
        meta["report"] = {
            "norms": ["bn"], "values": [20.0 * k], "means": [0.1 * k, -0.2, 0.3], "variances": [1.0, 0.5 * k, 2.0],
            "more": False,
        }  # fmt: skip
    elif name == TASK_CHECK:
        splits = ["training", "validation", "test"]
        meta["report"] = {"splits": splits, "images": [10 * k] * 3, "synthetic": False, "device": "cpu",
                          "class_names": ["no", "yes"], "num_classes": 2, "group_names": [*GROUPS]}  # fmt: skip
        meta["report"] |= {"method_groups": GROUPS} if group_report(rule, k) else {}
        meta["report"] |= {"privacy": ["patient", "DP-SGD", "all that is sent"], "budget": [8.0, 1e-3, 1e4, 9.0]}
    else:
        reply.metrics = rows({"dice": 0.2 * k, "loss": 0.4 / k}, withheld=["auc"])
        meta["num_samples"] = 10 * k
        meta["stats"] |= {"resampled": [0.2 * k] * DRAWS, "drawn_units": "images", "num_units": 10 * k}
        meta["stats"] |= {"group_names": [*GROUPS], **group_sums(10 * k), "ledger": LEDGER}
    return FLModelUtils.to_shareable(encode_model(reply))


def group_report(rule: Rule, k: int) -> dict[str, Any]:
    """Return a report on two groups for a method that uses groups of people, where the bench asks for them."""
    losses = [0.5 + 0.01 * k, 0.8]
    if getattr(rule, "dro_attribute", ""):
        return {"group_losses": losses, "group_images": [6.0 * k, 3.0 * k]}
    if getattr(rule, "flexfair_over", "sites") != "sites":
        return {"rows": 3.0, "group_losses": [0.6, *losses], "group_images": [10.0 * k, 6.0 * k, 3.0 * k]}
    if getattr(rule, "fairfed_attribute", ""):
        return {"groups": 2.0, "group_counts": [2.0 * k, k, k, 2.0 * k, 2.0 * k, k, k, 2.0 * k] + [1.0 * k] * 8}
    return {}


def group_sums(images: int) -> dict[str, Any]:
    """Return sums over the groups of a site's test images, as a site makes them."""
    labels, scores = np.arange(images) % 2, np.linspace(0.05, 0.95, images)
    of = np.stack([1 - scores, scores], 1)
    numbers = np.arange(images) % 3
    made = [sums_of(labels, of, numbers == group, BINS, BINS) for group in range(3)]
    return {f"group_{name}": np.stack([sums[name] for sums in made]).reshape(-1).tolist() for name in made[0]}


@dataclass
class Delivery:
    """Describe one message on its way to the server.

    Attributes:
        sender: who sends it.
        result: decoded.
        task_of: the site whose task it answers; default: the sender's own.
        task_id: in place of any that was given out.
        task_name: that it claims to answer.
    """

    sender: str
    result: Any
    task_of: str = ""
    task_id: str = ""
    task_name: str = ""


Play = Callable[["FuzzServer", str, int], list[Delivery]]


@dataclass
class Heard:
    """Record output where none may come."""

    raised: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)


class FuzzServer(Server):
    """Run the server half of a round for attacks, as the module describes.

    Args:
        folder: of the run.
        play: ``play(server, task_name, current_round)`` -> what the sites send, in this order.
    """

    def __init__(self, folder: Path, play: Play, rule: Rule, task: Task | None = None, **settings: Any) -> None:
        super().__init__(
            folder,
            task=task or SmallTask(isinstance(rule, MakesTensors)),
            rule=rule,
            **{"bootstrap": DRAWS, "groups": ASKED, "group_bins": BINS, "calibration_bins": BINS, **settings},
        )
        self.play = play
        self.heard = Heard()
        self.late: list[tuple[Client, str, str, Any]] = []  # handed in when the next task is out
        self.clients = {site: Client(site, f"token of {site}") for site in SITES}
        self.fl_ctx = _context()
        comm = WFCommServer()
        comm.fire_event = lambda *args, **kwargs: None
        comm.log_info = comm.log_debug = lambda *args, **kwargs: None
        comm.log_warning = lambda fl_ctx, text, *args, **kwargs: None
        comm.log_exception = lambda fl_ctx, text, *args, **kwargs: self.heard.raised.append(text)
        comm._engine = SimpleNamespace(get_clients=lambda: list(self.clients.values()), new_context=_new_context)
        self.set_communicator(comm)

    # FLARE's own again, where the parent replaces it
    send_model = RoundsController.send_model
    cancel_all_tasks = RoundsController.cancel_all_tasks

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Schedule the task as FLARE does; then the sites fetch it and answer in turn."""
        super().broadcast(*args, **kwargs)
        task = kwargs["task"]
        given: dict[str, str] = {}
        for site in sorted(self.clients):
            name, task_id, _ = self.communicator.process_task_request(self.clients[site], _context())
            if name:
                given[site] = task_id
        late, self.late = self.late, []
        for client, name, task_id, result in late:
            self._hand_in(client, name, task_id, result)
        current_round = task.data.get_header("current_round")
        for delivery in self.play(self, task.name, int(current_round)):
            task_id = delivery.task_id or given.get(delivery.task_of or delivery.sender, "")
            self._hand_in(self.clients[delivery.sender], delivery.task_name or task.name, task_id, delivery.result)
        self.given = given

    def _hand_in(self, client: Client, name: str, task_id: str, result: Any) -> None:
        try:
            self.communicator.process_submission(client, name, task_id, result, _context())
        except Exception as error:  # FLARE's runner logs it; only its own complaints may come this far
            if "doesn't match" not in str(error):
                self.heard.raised.append(f"{type(error).__name__}: {error}")

    def get_num_standing_tasks(self) -> int:
        """Return no standing task: a site that has not answered by now never will."""
        self.communicator.check_tasks()
        if RoundsController.get_num_standing_tasks(self):
            self.cancel_all_tasks()
            self.communicator.check_tasks()
        return 0

    def _process_result(self, client_task: Any, fl_ctx: FLContext) -> None:
        try:
            super()._process_result(client_task, fl_ctx)
        except Exception as error:
            self.heard.raised.append(f"{type(error).__name__}: {error}")
            raise

    def info(self, message: str) -> None:
        self.heard.lines.append(("info", message))

    def warning(self, message: str) -> None:
        self.heard.lines.append(("warning", message))

    def error(self, message: str) -> None:
        if message.startswith("Unsuccessful callback"):
            self.heard.raised.append(message)
        self.heard.lines.append(("error", message))

    def panic(self, reason: str) -> None:
        self.heard.raised.append(f"panic: {reason}")


def _context() -> FLContext:
    context = FLContext()
    context.set_prop("__run_num__", "job", private=True, sticky=False)
    return context


@contextmanager
def _new_context() -> Any:
    yield _context()
