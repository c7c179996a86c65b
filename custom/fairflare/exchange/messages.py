"""Define the messages between server and sites, for any transport, and sanitize their values in both directions.

FLARE's serializer ends the server job on a tensor it cannot decode and ends a site's loop on a value it cannot encode,
so every message passes :func:`clean_state` or :func:`clean_meta` before it is sent. A :class:`Message` from a site
contains unchecked values, which are used only after :mod:`fairflare.federation.collecting.collector` has checked them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fairflare import __version__
from fairflare.base.aspect import ASPECTS, GROUPS, NORMS, PHASES, SUMS
from fairflare.base.cases.resampling import MOST
from fairflare.base.checks import number
from fairflare.core.cells import Cell
from fairflare.exchange.sent_tensors import ALL

TASK_CHECK = "check"  # this task sends no model
TASK_TRAIN = "train"
TASK_ANCHOR = "anchor"
(TASK_NORMS,) = NORMS.phases  # this task is sent only with norm_statistics="recalibrated"
TASK_VALIDATE = "validate"
TASK_PLAN = "plan"  # this task is sent only by `fairflare plan`
TASK_KEYS, TASK_MASK, TASK_RELEASE = SUMS.tasks  # these tasks are sent only with secure="sums"
FURTHER = (TASK_ANCHOR, *PHASES)  # phases of a round behind its training
TASKS = (TASK_CHECK, TASK_TRAIN, *FURTHER, TASK_VALIDATE, *(name for one in ASPECTS for name in one.tasks))

SPLIT_TEST = "test"  # entry of a request's ``measure`` that stands for the test list and all further test lists
SPLIT_VALIDATION = "validation"

CELL = ("metric", "split", "value", "reason")  # columns of a cell that a site sends

STATUS_OK = "ok"
STATUS_SKIPPED = "skipped"  # the site refused for an expected reason: too little data, no local model
STATUS_FAILED = "failed"


Each = Callable[[str], Mapping[str, "torch.Tensor"]]  # function that returns a site's tensors, by the site's name


class NotSendable(TypeError):
    """Signal that a message contains a value that cannot be sent; the text names the position of the value."""


class VersionError(ValueError):
    """Signal that server and site run versions of FairFlare that do not understand each other.

    The text contains nothing private of the site, because it is also sent to the server.
    """

    public = property(str)


@dataclass
class Message:
    """Represent one message between server and site, as a transport carries it.

    Attributes:
        params: tensors by name, unchecked in a message from a site; ``None`` if the message has no model.
        is_update: whether ``params`` are differences to the model that the site received.
        metrics: cells of the metrics that were measured on the received model, each a dict of :data:`CELL`.
        meta: directives to a site, or status, report and statistics from a site.
        current_round: number of the round that the message belongs to.
        by_site: names of directives that have an entry for each site; see :func:`address`. This attribute is not sent.
        each: function that makes the tensors for a site, in place of a model in ``params``, when the message is sent.
            This attribute is not sent.
    """

    params: Any = None
    is_update: bool = False
    metrics: Any = None
    meta: Any = field(default_factory=dict)
    current_round: Any = None
    by_site: tuple[str, ...] = ()
    each: Each | None = None


BESIDE = "beside/"  # beginning of the names of tensors that are sent beside a model
CHANNEL_DROP = "channel_drop"  # directive of ``train``: probability with which a channel is set to 0
PATCHWISE = "patchwise"  # directive: validation is on fixed patches, as whole volumes have many windows
COMPARED = "compared"  # directive of ``validate``: names of the structures by which the sites are compared


class BySite(dict[str, Any]):
    """Store a value for each site, by the site's name; the server sends each site only its own value."""


@dataclass
class SiteTask:
    """Represent one task that the server asks a site to perform, decoded from its message."""

    name: str  # name of the task, one of TASKS
    state: dict[str, torch.Tensor]
    current_round: int
    num_rounds: int
    seed: int
    directives: dict[str, Any] = field(default_factory=dict)
    experiment: str = ""
    run: str = ""  # id of the run: the same for all jobs that resume one run of an experiment
    each: Each | None = None  # function that makes the tensors for each site, sent in place of ``state``
    measure: tuple[str, ...] = (SPLIT_TEST,)  # for validate: splits on which the model is measured
    resample: int = 0  # for validate: number of resamples of the test images for the primary metric
    min_cases: int = 1  # for every task: values of fewer cases are withheld; a site's own setting may be larger
    exchange: str = ALL  # rule for which tensors are sent, see exchange.sent_tensors
    makes: tuple[str, ...] = ()  # prefixes of the names of tensors that the server computes, which are sent too
    rest: str = ""  # fingerprint of the tensors that are not sent; empty if all tensors are sent
    groups: tuple[str, ...] = ()  # for check and the final validate: attributes whose groups are measured
    group_bins: int = 0  # number of bins in the histograms by group
    calibration_bins: int = 0  # number of bins of the calibration by group
    as_sent: bool = False  # for validate: measure the received model without the site's stored tensors; not sent
    beside: dict[str, torch.Tensor] = field(default_factory=dict)  # for train: tensors that are no part of the model
    sums: dict[str, Any] = field(default_factory=dict)  # the server's request for secure sums; empty without

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model and the tensors beside it under the names under which they travel together."""
        return {**self.state, **{BESIDE + name: tensor for name, tensor in self.beside.items()}}

    def carrying(self, tensors: Mapping[str, torch.Tensor]) -> SiteTask:
        """Return this task with tensors that travelled, in place of its own: the model, and those beside it."""
        return replace(
            self,
            state={name: tensor for name, tensor in tensors.items() if not name.startswith(BESIDE)},
            beside={name.removeprefix(BESIDE): tensor for name, tensor in tensors.items() if name.startswith(BESIDE)},
        )


@dataclass
class SiteReply:
    """Represent a site's answer to a task; with a ``status`` other than ``"ok"`` it has a reason that names no file."""

    status: str
    reason: str = ""
    update: dict[str, torch.Tensor] | None = None
    metrics: list[Cell] = field(default_factory=list)  # of the received model: also those that are withheld
    report: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    num_samples: int | None = None
    num_steps: int | None = None


def encode_task(task: SiteTask) -> Message:
    """Return the message of a server's request: the values and the tensors that the server sends with the task.

    The task ``check`` sends no tensor, and ``norms`` may send only some tensors of a model.
    """
    meta = {
        "version": __version__,
        "experiment": task.experiment,
        "run": task.run,
        "seed": task.seed,
        "current_round": task.current_round,
        "num_rounds": task.num_rounds,
        "directives": task.directives,
        "measure": list(task.measure),
        "resample": task.resample,
        "min_cases": task.min_cases,
        "exchange": task.exchange,
        "makes": list(task.makes),
        "rest": task.rest,
        "sums": task.sums,
        **({name: getattr(task, name) for name in GROUPS.fields} if task.groups else {}),
    }
    return Message(
        params=clean_state((task if task.each is None else replace(task, state={})).tensors) or None,
        meta=clean_meta(meta),
        current_round=task.current_round,
        by_site=tuple(name for name, value in task.directives.items() if isinstance(value, BySite)),
        each=task.each,
    )


def says_nothing() -> Message:
    """Return the answer to the task ``check`` for a site that does not support this task.

    With this answer the site may take part although it reports no facts about its data.
    """
    return Message(meta={"version": __version__, "status": STATUS_OK})


def address(task: Message, site: str | None) -> Message:
    """Return the message for one site: directives with an entry for each site have this site's entry only.

    With ``site=None`` return the part of the message that is the same for all sites. The model is one object for all
    sites, or is made here for this site alone.
    """
    if task.each is not None:
        task = replace(
            task,
            each=None,
            params={**(task.params or {}), **({} if site is None else clean_state(task.each(site)))} or None,
        )
    if not task.by_site:
        return task
    directives = {
        name: value if name not in task.by_site else {key: entry for key, entry in value.items() if key == site}
        for name, value in task.meta["directives"].items()
    }
    return replace(task, meta={**task.meta, "directives": directives}, by_site=())


def decode_task(name: str, message: Message, site: str) -> SiteTask:
    """Return the server's request from a message that a site received.

    Raises:
        VersionError: the server runs another version of FairFlare, or a field cannot be read.
    """
    meta = message.meta if isinstance(message.meta, Mapping) else {}
    if not same_version(server_version := str(meta.get("version"))):
        raise VersionError(
            f"site {site!r} has fairflare {__version__}, the server {server_version}; install the same version"
        )

    def told(field: str, convert: Callable[[Any], Any], usual: Any = None, all_of: Mapping[str, Any] = meta) -> Any:
        """Return a field of the message converted by ``convert``; an empty field counts as ``usual``."""
        value = all_of.get(field)
        try:
            return convert(value if value or usual is None else usual)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise VersionError(
                f"site {site!r}: field {field!r} of the server's task {name!r} cannot be used: {value!r:.80}; use the "
                "same version at server and sites"
            ) from error

    return SiteTask(
        name=name,
        state={},
        current_round=told("current_round", int),
        num_rounds=told("num_rounds", int),
        seed=told("seed", int),
        directives=told("directives", dict, {}),
        experiment=told("experiment", str, ""),
        run=told("run", str, ""),
        measure=told("measure", _texts, (SPLIT_TEST,)),
        resample=told("resample", lambda n: number("resample", n, low=0, high=MOST, whole=True), 0),
        min_cases=told("min_cases", int, 1),
        exchange=told("exchange", str, ALL),
        makes=told("makes", _texts, ()),
        rest=told("rest", str, ""),
        groups=told("groups", _texts, ()),
        group_bins=told("group_bins", int, 0),
        calibration_bins=told("calibration_bins", int, 0),
        sums=told("sums", dict, {}),
    ).carrying(told("params", clean_state, {}, vars(message)))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values))


def encode_reply(reply: SiteReply, current_round: int | None) -> Message:
    """Return the message of a site's answer; of a cell only the columns :data:`CELL` that are not empty are sent."""
    meta = {
        "version": __version__,
        "status": reply.status,
        "reason": reply.reason,
        "report": reply.report,
        "stats": reply.stats,
        "num_samples": reply.num_samples,
        "num_steps": reply.num_steps,
    }
    return Message(
        params=None if reply.update is None else clean_state(reply.update),
        is_update=reply.update is not None,
        metrics=[
            {name: part for name in CELL if (part := getattr(cell, name)) not in (None, "")} for cell in reply.metrics
        ],
        meta=clean_meta(meta),
        current_round=current_round,
    )


def same_version(other: str) -> bool:
    """Return whether messages of version ``other`` can be read: its major and minor number equal this version's."""
    return other.split(".")[:2] == __version__.split(".")[:2]


def clean_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state as plain, contiguous CPU tensors, detached from any graph; the values are not changed.

    Args:
        state: tensors or NumPy arrays by name, on any device.

    Raises:
        NotSendable: a value is neither a tensor nor an array, or is no plain dense tensor (the message names the key).
    """
    return {str(name): clean_tensor(name, value) for name, value in state.items()}


def clean_tensor(name: object, value: Any) -> torch.Tensor:
    """Return a value as a plain, contiguous CPU tensor of the same shape; see :func:`clean_state`."""
    if hasattr(value, "materialize"):  # the value is FLARE's reference to a tensor that is still on disk
        value = value.materialize()
    if isinstance(value, (np.ndarray, np.generic)):
        value = torch.from_numpy(np.array(value))  # np.array copies; ascontiguousarray would add a dimension to scalars
    if not isinstance(value, torch.Tensor):
        raise NotSendable(f"tensor {name!r} must be a tensor or an array, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "without data" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
        raise NotSendable(f"tensor {name!r} must be dense, got one that is {kind}")
    tensor = value.detach().to("cpu").contiguous()
    return tensor.as_subclass(torch.Tensor) if type(tensor) is not torch.Tensor else tensor


def clean_meta(value: Any, where: str = "meta") -> Any:
    """Return a value converted to dict, list, str, bytes, int, float, bool and None, also from NumPy or torch values.

    Raises:
        NotSendable: a value is of another type, or an integer needs more than 64 bits (names the value's place).
    """
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return clean_meta(value.tolist(), where)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise NotSendable(f"{where}: integer {value} needs more than 64 bits")
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): clean_meta(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_meta(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise NotSendable(f"{where}: a {type(value).__name__} cannot travel; send numbers, strings, lists or dicts")


def num_bytes(state: Any) -> int:
    """Return the number of bytes of a state's tensors; a value that is not a dense tensor counts 0."""
    return sum(_size(value) for value in state.values()) if isinstance(state, Mapping) else 0


def _size(value: Any) -> int:
    try:
        return int(getattr(value, "nbytes", 0) or 0)
    except Exception:  # a sparse tensor has no nbytes, and a site may have sent any value
        return 0
