"""Wrap a user's own training script as a task: the server's view of it, and the script's parts at its site."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.base.checks import nearest, refuse
from fairflare.base.settings import Text, settings
from fairflare.base.site_data import shuffled
from fairflare.base.task import Metric, PriorNetwork, SiteData, Task, evaluating
from fairflare.data.datalist import shareable
from fairflare.tasks import priors

if TYPE_CHECKING:
    from fairflare.base.task import Batch, Device

Criterion = Callable[[Any, Any], "torch.Tensor"]
PAIR = "(inputs, targets), or a dict with 'image' and 'label'"
NETWORKS = "networks"  # key of the server's own file that lists the classes of networks a job may name


class MeasuredByScript(Task):
    """Declare the metrics that the sites' own scripts measure.

    Attributes:
        told: declarations of the metrics in the job, as in ``metrics`` of :class:`ScriptTask`.
    """

    told: Mapping[str, Mapping[str, Any]] = {}
    primary_metric: ClassVar[str] = "accuracy"

    def declared_metrics(self) -> tuple[Metric, ...]:
        return tuple(read_metrics(self.told))

    def asks_for(self, metric: str) -> str:
        return asks_for(metric)


@settings
class ScriptTask(MeasuredByScript):
    """Define, for the server, the network and metrics of a job whose sites run their own training script.

    A name that is imported and called is code. So this class by itself builds only networks that the server's own file
    lists (``networks``); the subclass in a job's ``script_task.py``, which is custom code, builds what the job names.

    Args:
        model: class of the network, ``"module.Class"``; the module is the job's script, or one that is installed.
        model_args: arguments of that class.
        metric: the primary one of those that the scripts measure.
        metrics: ``{name: {"higher_is_better": ..., "low": ..., "high": ..., "unit": ...}}`` of all that they measure;
            without limits in [0, 1], ``null``: no limit. ``accuracy`` and the loss need no entry.
    """

    model: Text
    model_args: dict[str, Any] = field(default_factory=dict)
    metric: Text = "accuracy"
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(part.isidentifier() for part in ("." + self.model).split(".")[1:]) or "." not in self.model:
            raise ValueError(f"model must be the network's class as 'module.Class', got {self.model!r}")
        vars(self).update(primary_metric=self.metric, told=self.metrics)
        self._listed: list[str] = []
        self.by_name()

    def permit(self, settings: Mapping[str, Any]) -> None:
        listed = settings.get(NETWORKS, [])
        if not isinstance(listed, list) or not all(isinstance(entry, str) and "." in entry for entry in listed):
            raise ValueError(
                f"{NETWORKS!r} in the server's local/fairflare.json must be a list of classes ('package.module.Class') "
                f"and prefixes that end in a dot, got {listed!r:.80}"
            )
        self._listed = listed

    def build_model(self) -> torch.nn.Module:
        if type(self) is ScriptTask and not any(
            self.model == entry or (entry.endswith(".") and self.model.startswith(entry)) for entry in self._listed
        ):
            raise shareable(
                f"model {self.model!r:.200} is named by a job without code of its own, and no list of this machine has "
                f"it; put it under {NETWORKS!r} in the server's local/fairflare.json, or have the job carry its script"
            )
        module, _, name = self.model.rpartition(".")
        try:
            network_class = getattr(importlib.import_module(module), name)
            if not isinstance(network_class, type) or not issubclass(
                network_class, torch.nn.Module
            ):  # before the class is called
                raise TypeError(f"it must be a class of torch.nn.Module, got {network_class!r:.80}")
            return network_class(**self.model_args)
        except Exception as error:
            raise ValueError(f"model {self.model!r} cannot be built: {type(error).__name__}: {error}") from error

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise shareable("the sites' own script has the loss; the job's executor must be FLARE's Client API executor")

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        raise shareable("the sites' own script evaluates; the job's executor must be FLARE's Client API executor")

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        raise shareable("the sites' own script has the data; the job's executor must be FLARE's Client API executor")


class ScriptBatches:
    """Convert a script's batches to pairs (inputs, targets); ``source`` is the object that the script gave."""

    def __init__(self, split: str, source: Any, batches: Any) -> None:
        self.split, self.source, self._batches = split, source, batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:  # not begun before the first batch: a resumed run sets random states in between
            yield pair(batch, self.split)

    def __len__(self) -> int:
        return len(self._batches)


class ScriptData(SiteData):
    """Define a site's data by the batches of the site's own training script.

    A ``torch.utils.data.DataLoader`` over a data set with a length is read in the data set's order (or in the order of
    a seed) with the loader's own collation and workers: every sample once, whatever its sampler, shuffling or
    ``drop_last`` does. Any other source of batches is iterated as it is.

    Args:
        splits: ``{"training": ..., "validation": ..., "test": ...}``; loaders or lists of batches, each
            (inputs, targets) or a dict with ``"image"`` and ``"label"``. The training split should have no
            augmentation, as methods measure on it.
        classes: number of classes, or the number of training samples of each; ``None`` if samples have no class.

    Raises:
        DataError: a source can be iterated only once or is empty, or ``classes`` does not fit the targets.
    """

    description = "a script of the site's own"

    def __init__(self, splits: Mapping[str, Any], classes: int | Sequence[int] | None = None) -> None:
        for split, source in splits.items():
            if not hasattr(source, "__iter__") or iter(source) is source:
                raise shareable(
                    f"{split} must be a DataLoader or a list of batches that can be gone through many times, got "
                    f"{type(source).__name__}"
                )
        self._splits = dict(splits)
        self._sizes: dict[str, int] = {}
        self._counts = None if classes is None else self._class_counts(classes)

    def num_samples(self, split: str) -> int:
        if split not in self._sizes:
            size = _size(self._splits[split])
            if size is None:
                size = sum(len(targets) for _, targets in self.batches(split, batch_size=1))
            if size < 1:
                raise shareable(f"the {split} batches hold no sample")
            self._sizes[split] = size
        return self._sizes[split]

    def class_counts(self, split: str) -> torch.Tensor | None:
        return self._counts if split == "training" else None

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        size = _size(self._splits[split])
        return None if size is None else shuffled(size, shuffle_seed)

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> ScriptBatches:
        source, order = self._splits[split], self.order(split, shuffle_seed)
        if order is None:
            return ScriptBatches(split, source, source)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.Subset(source.dataset, order),
            batch_size=batch_size,
            collate_fn=source.collate_fn if source.batch_size is not None else None,
            num_workers=source.num_workers,
            generator=torch.Generator(),  # with its own generator, the loader leaves the script's random state alone
        )
        return ScriptBatches(split, source, loader)

    def _class_counts(self, classes: int | Sequence[int]) -> torch.Tensor:
        if not isinstance(classes, int) or isinstance(classes, bool):
            counts = torch.as_tensor(classes)
            if counts.ndim != 1 or len(counts) < 2 or counts.dtype != torch.int64 or bool((counts < 0).any()):
                raise shareable(f"classes must be a number or the training samples of each, got {classes!r:.80}")
            return counts
        counts = torch.zeros(classes, dtype=torch.int64)
        for _, targets in self.batches("training", batch_size=64):
            labels = targets.reshape(-1)
            refuse({
                f"classes={classes}, so targets must be one class number a sample, got {tuple(targets.shape)} "
                f"{targets.dtype}": labels.is_floating_point() or len(labels) != len(targets),
                f"targets must lie in [0, {classes - 1}] for classes={classes}, found others":
                    len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes,
            }, shareable)  # fmt: skip
            counts += torch.bincount(labels, minlength=classes)
        return counts


class LoopTask(MeasuredByScript):
    """Define a task by a script's own network, loss and metrics, for the part of a method that runs at sites.

    Args:
        model: the script's network; :meth:`build_model` returns copies.
        criterion: loss function of (outputs, targets), which returns the mean over the batch or one loss a sample.
        data: the site's data.
        metrics: function of (network, batches as the script gave them), which returns the primary metric, or a dict
            with ``metric`` in it.
        metric: name of the primary metric.
        prior: a frozen network of the script's own for Fed-MAS; ``None`` to load the one that the job's settings name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Criterion,
        data: ScriptData,
        metrics: Callable[[Any, Any], Any],
        metric: str = "accuracy",
        prior: torch.nn.Module | None = None,
    ) -> None:
        self.model, self.criterion, self.data, self.metrics = model, criterion, data, metrics
        self.prior = None if prior is None else OwnPrior(prior)
        vars(self)["primary_metric"] = metric

    def build_model(self) -> torch.nn.Module:
        import copy

        return copy.deepcopy(self.model)

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        return self.data

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.criterion(outputs, targets)
        if not isinstance(loss, torch.Tensor):
            raise shareable(f"the loss must give a tensor, got {type(loss).__name__}")
        return loss.mean() if loss.ndim else loss

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        plain = self.criterion
        if type(plain) is torch.nn.CrossEntropyLoss and plain.weight is None and targets.ndim == 1:
            return torch.nn.functional.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=plain.label_smoothing
            )
        losses = self.criterion(outputs, targets)
        if losses.ndim and len(losses) == len(targets):
            return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
        return super().sample_losses(outputs, targets)

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        with evaluating(model):
            metrics = self.metrics(model, getattr(batches, "source", batches))
        if not isinstance(metrics, Mapping):
            metrics = {self.primary_metric: metrics}
        if self.primary_metric not in metrics:
            raise shareable(
                f"metrics must give {self.primary_metric!r} (or primary_metric name another one), got "
                f"{', '.join(map(repr, metrics)) or 'nothing'}"
            )
        return {str(name): _metric(str(name), value) for name, value in metrics.items()}

    def load_prior(self, network: str, checkpoint: str | None, image_size: int | None) -> PriorNetwork:
        return self.prior or priors.load_prior(network, checkpoint, image_size)


class OwnPrior(priors.FrozenPrior):
    """Encode images with a script's frozen encoder, which gets the images as the script prepares them.

    Raises:
        DataError: the encoder has neither an attribute ``width`` nor a linear layer.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        linear = [module for module in encoder.modules() if isinstance(module, torch.nn.Linear)]
        width = getattr(encoder, "width", linear[-1].out_features if linear else None)
        if not isinstance(width, int):
            raise shareable("the prior network must have an attribute width, the number of its features")
        super().__init__(encoder, type(encoder).__name__, width)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs)


OF_METRIC = ("higher_is_better", "low", "high", "unit", "mean_of_images")


def read_metrics(described: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Convert a script's metrics from a job's plain values, where ``None`` means no limit, to ``Metric`` objects.

    A job does not declare whether a metric is about one class. So a site that withholds metrics by class withholds all
    of them but the primary metric.

    Raises:
        ValueError: a metric has an unknown key, no direction, or an unusable value; the message names the metric.
    """
    for name, entry in {"accuracy": {"higher_is_better": True}, **described}.items():
        unknown = next((key for key in entry if key not in OF_METRIC), "")
        refuse({
            f"metrics: {name!r} has no {unknown!r}{nearest(unknown, OF_METRIC)}": unknown,
            asks_for(name): not isinstance(entry.get("higher_is_better"), bool),
        })  # fmt: skip
        low, high = entry.get("low", 0.0), entry.get("high", 1.0)
        given = {**entry, "low": -math.inf if low is None else low, "high": math.inf if high is None else high}
        yield Metric(name=name, doc="measured by the sites' own script", by_class=True, **given)


def asks_for(metric: str) -> str:
    """Return the text that asks a job's author to declare a metric which the script measures."""
    return (
        f"declare whether more of {metric!r} is better, and its range unless that is [0, 1], where the job is made: "
        f"ScriptRecipe(..., metrics={{{metric!r}: {{'higher_is_better': True or False}}}})"
    )


def pair(batch: Any, split: str) -> Batch:
    """Return inputs and targets of a script's batch.

    Raises:
        DataError: the batch is no pair of tensors; the message names the split.
    """
    if isinstance(batch, Mapping) and "image" in batch and "label" in batch:
        batch = (batch["image"], batch["label"])
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise shareable(
            f"a batch of the {split} split must be {PAIR}, got a {type(batch).__name__}"
            f"{f' of {len(batch)}' if isinstance(batch, (tuple, list, Mapping)) else ''}"
        )
    inputs, targets = batch
    if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise shareable(
            f"a batch of the {split} split must be {PAIR} of tensors, got {type(inputs).__name__} and "
            f"{type(targets).__name__}"
        )
    return inputs, targets


def _size(source: Any) -> int | None:
    """Return the number of samples of a ``DataLoader`` over a data set with length and order; else ``None``."""
    ordered = (
        isinstance(source, torch.utils.data.DataLoader)
        and source.batch_size is not None
        and not isinstance(source.dataset, torch.utils.data.IterableDataset)
        and hasattr(source.dataset, "__len__")
    )
    return len(source.dataset) if ordered else None


def _metric(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise shareable(f"metric {name!r} must be a number, got {value!r:.80}") from None
    if not math.isfinite(number):
        raise shareable(f"metric {name!r} must be a finite number, got {number!r}")
    return number
