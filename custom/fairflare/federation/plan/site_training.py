"""Read the sites' training at the server: compare its settings with the rule's, and list tensors that stay there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import field_names, values_of
from fairflare.exchange.tensor_file import list_names
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import OwnModel
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining

COMMON, PERSONAL = "common", "personal"  # whether a run's figures are of the common model or of the sites' own models


#: Settings of local training where no published setting is used: for any task, and by kind of task. A method's paper
#: may train for hundreds of rounds on other images, so its optimizer need not suit a quick job, and methods can be
#: compared only when they are trained alike.
ANY_TASK: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3}
TRAINING_BY_TASK: dict[str, dict[str, Any]] = {
    "segmentation": {"local_epochs": 5},
    # Where sites hold different classes, Adam's moments fit the old local model, not the received global model.
    "classification": {"batch_size": 16, "local_epochs": 3, "keep_optimizer_state": False},
}


class HalvesDiffer(ValueError):
    """Report that the server and the sites are configured with different values for the same setting."""


def training_by_task(kind: str, method: Method) -> dict[str, Any]:
    """Return a quick job's settings of local training for a kind of task, without those that belong to the method."""
    settings = {**ANY_TASK, **TRAINING_BY_TASK.get(kind, {})}
    return {name: value for name, value in settings.items() if name not in (*method.keeps, *method.site)}


def training_of(site_half: Any) -> LocalTraining | None:
    """Return the sites' training as an object; ``None`` when the server cannot make the object."""
    # Only classes of this package are loaded: a job's client configuration must not name others to the server.
    path = site_half.get("path") if isinstance(site_half, dict) else None
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module.startswith("fairflare.methods."):
        return None
    try:
        cls = getattr(importlib.import_module(module), name)
        return cls(**site_half.get("args", {})) if issubclass(cls, LocalTraining) else None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def take_shared_values(cls: type, other: Rule | LocalTraining | None) -> dict[str, Any]:
    """Return the values of one half's settings that the class ``cls`` of the method's other half has as well."""
    names = () if other is None else set(field_names(type(other))) & set(field_names(cls))
    return {name: getattr(other, name) for name in sorted(names)}


def check_shared(rule: Rule, training: LocalTraining) -> None:
    """Check that rule and training have equal values of their common settings, before a job is made of them.

    Raises:
        HalvesDiffer: a setting differs; the message names the first one, with both values.
    """
    one, other = type(rule).__name__, type(training).__name__
    refuse({
        f"{name} is {getattr(rule, name)!r} in {one} and {value!r} in {other}: give both the same":
            getattr(rule, name) != value
        for name, value in take_shared_values(type(rule), training).items()
    }, HalvesDiffer)  # fmt: skip


def check_halves(rule: Rule, site_half: Any, norm_statistics: str) -> None:
    """Check that the settings that rule and training both have, such as ``preset`` or ``rho``, are equal.

    Args:
        rule: the server's half.
        norm_statistics: the run's value, which must fit the training's.
        site_half: ``{"path", "args"}`` of the training; ``None`` if the server does not know them: nothing is compared.

    Raises:
        HalvesDiffer: settings differ; the message names each of them with both values.
    """
    if not isinstance(site_half, dict):
        return
    training = training_of(site_half)
    sites = (values_of(training) if training is not None else site_half).get("args") or {}
    server = values_of(rule)["args"]
    differing = [
        f"{name} is {server[name]!r} at the server and {sites[name]!r} at the sites"
        for name in sorted(set(server) & set(sites))
        if server[name] != sites[name]
    ]
    if training is not None and (training.norm_statistics == "recalibrated") != (norm_statistics == "recalibrated"):
        differing.append(
            f"norm_statistics is {norm_statistics!r} at the server and {training.norm_statistics!r} at the sites"
        )
    refuse({
        f"the two halves of the configuration differ: {'; '.join(differing)}. Set the same value in "
        "config_fed_server.json (rule) and config_fed_client.json (training), or export the job anew with --set":
            differing,
    }, HalvesDiffer)  # fmt: skip


@dataclass(frozen=True)
class AtHome:
    """Store what the server knows about tensors that stay at the sites.

    Attributes:
        tensors: names of tensors that no site sends; in the common model they keep their initial values.
        measured: ``"personal"``: the run's figures are of the sites' own models; ``"common"``: of the common model;
            ``None`` if the server does not know the sites' training, and the sites report which of the two holds.
        own_everywhere: whether no site has a whole common model; False where sites have an own model besides it.
    """

    tensors: frozenset[str] = frozenset()
    measured: str | None = None
    own_everywhere: bool = False

    @property
    def noted(self) -> dict[str, Any]:
        """Return a note for the common model's files: sites hold further tensors, with which the model was measured."""
        return {"measured": PERSONAL, "stays_at_sites": len(self.tensors)} if self.measured == PERSONAL else {}


def find_local_tensors(site_half: Any, network: torch.nn.Module, say: Callable[..., None]) -> AtHome:
    """Return which tensors the job's training keeps at the sites, and log them.

    Args:
        site_half: as in :class:`fairflare.federation.plan.run_settings.Place`.
        network: the task's network.
        say: function that writes a line into the server's log.
    """
    training = training_of(site_half)
    if training is None:
        return AtHome()
    home = training.home
    names = home.stays(network)
    if home.model:
        say(f"every site has a model {home.model}")
    if names:
        say(
            f"at the sites stay {list_names(names)} of {len(network.state_dict())}; every site is measured with its own"
        )
    return AtHome(
        frozenset(names), PERSONAL if names or home.model else COMMON, bool(names) or isinstance(home, OwnModel)
    )
