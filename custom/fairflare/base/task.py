"""Define what a site learns: the interface between a task and the parts that run the task.

A :class:`Task` defines model, loss, metrics and data source; a :class:`SiteData` gives one site's opened data. The
executor, the methods and the benchmarks use nothing else, so a new kind of task needs one subclass of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from fairflare.base.metric import LOSS as LOSS
from fairflare.base.metric import Metric as Metric
from fairflare.base.metric import metric_name as metric_name
from fairflare.base.site_data import SPLIT_GLOBAL as SPLIT_GLOBAL
from fairflare.base.site_data import Batches as Batches
from fairflare.base.site_data import PriorNetwork as PriorNetwork
from fairflare.base.site_data import Proxy as Proxy
from fairflare.base.site_data import SiteData as SiteData

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt
    import torch

    from fairflare.base.cases.resampling import Drawn
    from fairflare.base.site_data import Batch as Batch
    from fairflare.base.site_data import Device as Device

    Outcomes: TypeAlias = tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]


class Task(ABC):
    """Define the model, loss, metric and data source of what the sites learn together.

    Arguments of a subclass's constructor are plain values (numbers, strings, lists, dicts) and are stored as
    attributes of the same names, since the export of a job reads them back; a class made by
    :func:`fairflare.base.settings.settings` stores them by itself.
    """

    primary_metric: ClassVar[str]
    #: Names of the metrics in the fairness table; empty for all metrics. The results file has all metrics in any case.
    shown_metrics: ClassVar[tuple[str, ...]] = ()
    #: Whether the task has its own optimizer, which local training uses with ``optimizer="task"``.
    has_optimizer: bool = False
    #: Names of findings; an image may have several, and its label need not state all of them. None: the task has none.
    findings: list[str] | None = None
    #: Names of the channels of an image, in the order of the network's input; ``None``: it names none.
    channels: tuple[str, ...] | None = None
    #: Whether each sample has exactly one of several classes; ``None`` if this is not known.
    has_classes: ClassVar[bool | None] = None

    #: Numbers of the images' channels that are CT, whose intensities a plan of nnU-Net takes from all cases.
    of_ct: tuple[int, ...] = ()
    #: How the task learns from images without labels: ``"teacher"`` or ``"fixmatch"``; empty if it cannot.
    consistency: ClassVar[str] = ""
    #: Whether structures exclude each other: outputs are a softmax of the background, which comes first, and of them.
    exclusive: ClassVar[bool] = False

    @property
    def classes(self) -> int | None:
        """Return the number of classes that the network predicts, or ``None`` if there is none, or it is unknown."""
        return None

    def groups(self) -> Mapping[str, Sequence[int]]:
        """Return the class numbers of each group (head, medium, tail) that has a metric; default: no group."""
        return {}

    def check(self) -> None:  # noqa: B027
        """Check, when a run is built, whether the task can be learned at all.

        Raises:
            ValueError: the task cannot be learned.
        """

    def permit(self, settings: Mapping[str, Any]) -> None:  # noqa: B027
        """Read, at the server and before anything is built, the server's own settings file.

        Args:
            settings: content of ``local/fairflare.json``; a task whose settings may name code reads there which code is
                permitted.

        Raises:
            ValueError: one of the task's keys in the file is not usable.
        """

    def is_overridden(self, *names: str) -> bool:
        """Return whether a class outside this package defines one of the named methods."""
        return any(
            not method.__module__.startswith("fairflare.")
            for method in (getattr(type(self), name, None) for name in names)
            if method is not None
        )

    def training_settings(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Return settings of local training that the task prescribes.

        Settings that the user gives, and those that are part of the method (its ``keeps``), override them.

        Args:
            given: names of the settings that the user gives.

        Raises:
            ValueError: a setting that the task prescribes cannot be used.
        """
        return {}

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the task's own optimizer; its learning rate is set before each round.

        Raises:
            ValueError: the task has no optimizer.
        """
        raise ValueError(f"{type(self).__name__} has no optimizer of its own; set optimizer to adam, adamw or sgd")

    def suited_to(self, data: SiteData) -> Task:
        """Return the task adapted to a site's opened data.

        The result is the task itself, or a copy that names the classes as the data name them.
        """
        return self

    def check_site(self, model: torch.nn.Module, data: SiteData, device: Device) -> None:  # noqa: B027
        """Check, at a site and before any training, whether network and loss can process the site's images.

        Raises:
            DataError: the images cannot be processed.
        """

    def costs(self, model: torch.nn.Module, data: SiteData, device: Device, samples: int) -> dict[str, Any]:
        """Return, for the check before the first round, what a round costs; default: nothing is known.

        Args:
            model, data, device: the network, a site's data and its device.
            samples: number of training samples in a round.

        Returns:
            ``windows``: sliding windows of the largest validation volume, and the same with voxels twice as large along
            each axis; ``seconds``: for reading, training and validation in a round.
        """
        return {}

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Return a new model, initialised from torch's current random state."""

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        """Load the initial weights into a new model, at the server, and return one line about them for the log.

        Args:
            model: a new model from :meth:`build_model`.
            checkpoint: path of a weights file, from the job or the server's private file; None if neither names one.

        Raises:
            ValueError: the checkpoint cannot be used.
        """
        if checkpoint is not None:
            raise ValueError(f"{type(self).__name__} does not load initial_weights ({checkpoint!r}); remove the key")
        return "random initial weights"

    def load_prior(self, network: str, checkpoint: str | None, image_size: int | None) -> PriorNetwork:
        """Return a frozen encoder of the task's images, loaded from a file.

        Raises:
            ValueError: the task has no such encoder, or the file cannot be used.
        """
        raise ValueError(f"{type(self).__name__} has no prior networks; choose a classification task")

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the scalar training loss, the mean over the samples of the batch."""

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """Return the given network outputs, or targets, restricted to structures or classes that the site annotates."""
        return values

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, (n,). Their mean is :meth:`loss`; a subclass may compute them faster."""
        import torch

        return torch.stack([self.loss(o[None], t[None]) for o, t in zip(outputs, targets, strict=True)])

    @abstractmethod
    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Return metrics over all samples of ``batches``, independent of how they were cut into batches.

        Returns:
            values by the metric's name: the primary metric, ``"loss"`` and, if there are several classes, metrics by
            class; each metric is declared by :meth:`declared_metrics`.
        """

    def resampled(
        self, model: torch.nn.Module, data: SiteData, drawn: Sequence[Drawn], device: Device
    ) -> list[float] | None:
        """Return the primary metric on draws of a site's test images.

        Args:
            model: the model to measure.
            data: the site's data, whose test split is used.
            drawn: for each draw, the indices of its images in the order of the split. Draws of patients differ in
                length; see :class:`fairflare.base.cases.resampling.Units`.
            device: the device to measure on.

        Returns:
            one value for each draw, NaN if the metric is not defined on the draw; ``None`` if the primary metric is
            not declared as a mean over images (:attr:`Metric.mean_of_images`), and the task does not override this.
        """
        import numpy as np

        scores = self.image_scores(model, data, device)
        counted = None if scores is None else np.ma.masked_invalid(scores)  # an image with NaN counts in no mean
        return None if counted is None else [float(np.ma.filled(counted[one].mean(), np.nan)) for one in drawn]

    def image_scores(self, model: torch.nn.Module, data: SiteData, device: Device) -> list[float] | None:
        """Return the primary metric of each test image.

        A value is NaN if its image does not count in the mean. Return ``None`` if the metric is no mean over images.
        """
        if not self.primary.mean_of_images:
            return None
        return [self.evaluate(model, [b], device)[self.primary_metric] for b in data.batches("test", batch_size=1)]

    def annotating(self, numbers: tuple[int, ...] | None) -> Any:
        """Return the task restricted to these classes or structures (``None`` for all); default: the task itself."""
        return self

    def outcome_names(self) -> Sequence[str]:
        """Return the names of the classes or structures in the result of :meth:`outcomes`; default: none."""
        return ()

    def output_tensors(self) -> Sequence[str]:
        """Return the names of the network's tensors with one row for each structure or finding; default: none known."""
        return ()

    def input_tensors(self) -> Sequence[str]:
        """Return the names of the network's weights with a column (second axis) for each channel of the images.

        Raises:
            ValueError: the network has no such weights, or a channel has a part in it that is no column; says why.
        """
        raise ValueError(f"{type(self).__name__} does not know the weights of its input's channels")

    def outcomes(self, model: torch.nn.Module, data: SiteData, split: str, device: Device) -> Outcomes | None:
        """Return the model's result for each sample of a split, from which sums by group of people are computed.

        None of these results leaves a site.

        Returns:
            For a classifier the true classes, (n,), and the probabilities, (n, parts). For other tasks ``None`` and the
            primary metric of each sample and part, (n, parts). ``None`` (the default) if the task does not support it.
        """
        return None

    def sampling(self, model: torch.nn.Module, data: SiteData, device: Device) -> dict[str, Any]:
        """Measure how far chance in the choice of a site's test cases moves the primary metric.

        The figures are computed over all cases together and name no case. What they may still reveal about single cases
        is in :data:`~fairflare.federation.site.sampling.SAMPLING`.

        Returns:
            some of ``test_cases`` (number of independent cases), ``standard_error`` of the metric over these cases,
            ``case_scores`` (:func:`fairflare.base.cases.sampling.case_scores`), and ``classes`` with ``class_support``
            (names, numbers of test images); see :data:`fairflare.federation.site.sampling.SAMPLING`. A task whose
            primary metric is not declared as a mean over images overrides this, or its sites have no intervals.
        """
        from fairflare.base.cases.sampling import report_mean

        scores = self.image_scores(model, data, device)
        return {} if scores is None else report_mean(scores, data.cases("test"), self.primary.low, self.primary.high)

    @property
    def primary(self) -> Metric:
        """Return the declaration (:class:`Metric`) of the task's primary metric."""
        metrics = {metric.name: metric for metric in self.declared_metrics()}
        return metrics.get(self.primary_metric) or Metric(name=self.primary_metric, doc="the primary metric")

    def declared_metrics(self) -> tuple[Metric, ...]:
        """Return every metric that :meth:`evaluate` gives, with direction and range; a metric not listed is refused.

        A site that withholds metrics by class reports only the primary metric, the loss, and each metric that is listed
        as not by class.
        """
        return (Metric(name=self.primary_metric, doc="the primary metric"), LOSS)  # the first has no direction

    def by_name(self) -> dict[str, Metric]:
        """Return the declared metrics and the loss; ``dice_<class>`` stands for every name that begins with ``dice_``.

        Raises:
            ValueError: the primary metric is not declared, or a metric has no direction; the message says where to
                declare it.
        """
        metrics = {LOSS.name: LOSS, **{metric.name: metric for metric in self.declared_metrics()}}
        for name in (*metrics, self.primary_metric):
            if name not in metrics or metrics[name].higher_is_better is None:
                raise ValueError(self.asks_for(name))
        return metrics

    def asks_for(self, metric: str) -> str:
        """Return the text that asks a task's author to declare a metric's direction and range."""
        return (
            f"declare whether more of {metric!r} is better, and its range unless that is [0, 1], in declared_metrics() "
            f"of the task ({type(self).__name__}): Metric(name={metric!r}, doc=..., higher_is_better=True or False)"
        )

    def directions(self) -> dict[str, bool]:
        """Return for every declared metric whether larger values are better.

        Raises:
            ValueError: a metric or its direction is not declared, see :meth:`by_name`.
        """
        return {name: bool(metric.higher_is_better) for name, metric in self.by_name().items()}

    def heed(self, settings: Mapping[str, Any]) -> None:  # noqa: B027
        """Apply the private settings of this machine (a server or a site) that concern the task."""

    @abstractmethod
    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """Open the data of ``site`` by the site's own private settings.

        Raises:
            DataError: the settings, or the data that the settings name, are not usable.
        """


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode and compute no gradients, inside the context.

    Afterwards every module is in its earlier mode again.
    """
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
