"""Compute sums and batches by group of people at a site, for methods that treat groups fairly.

Only sums over groups leave a site, no value of a single person. Sums of groups with few cases are NaN, and so are sums
from which those could be computed, as in the final test (:mod:`fairflare.core.statistics.group_sums`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.site_data import Proxy
from fairflare.base.task import evaluating
from fairflare.core.statistics.group_sums import CONFUSION, Array, find_hidden_groups, find_hidden_parts, sums_of
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, criterion_losses, refuse_at
from fairflare.methods.parts.probes import MAX_LOSS

if TYPE_CHECKING:
    from fairflare.base.task import Batch, Batches
    from fairflare.methods.base.rule import RoundInputs

GROUP_LOSSES = Field(
    "group_losses", "vector", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True, of=TRAINING, home_ok=True,
    doc="mean training loss of the received model by group (FlexFair: of all, then by group; by class where its "
    "measure is by class); NaN: it stays",
)  # fmt: skip
GROUP_IMAGES = Field(
    "group_images", "vector", low=0, high=1e9, nan_ok=True, same_length_as="group_losses", of=TRAINING, home_ok=True,
    doc="training images of each of these", reveals="how many people of a group the site has, and of each class",
    keep="groups with few cases, with others: `min_cases`; by class also `metrics_by_class`",
)  # fmt: skip
ALIKE = "declare the attribute with the same groups in every datalist"
MOST_GROUPS = 1000
LEAST, MOST = 0.1, 10.0  # range of the factor by which the server may weight an image's loss
ACTED_ON = "method_groups"  # field of the report before the first round that lists the groups used by the method


def check_attribute(run: SiteRun, attribute: str) -> dict[str, Any]:
    """Check that a site's data declare an attribute, and return its groups for the report before the first round.

    Nothing is checked or returned for an empty attribute: the method goes by no groups.

    Raises:
        SiteError: the data do not declare the attribute (names it).
    """
    if not attribute:
        return {}
    if attribute not in run.data.attributes:
        known = ", ".join(run.data.attributes) or "none"
        raise SiteError(
            f"site {run.site!r}: the method goes by the groups of {attribute!r}, the data declare: {known}; declare it "
            "in 'attributes' of the datalist",
            public=f"site {run.site!r}: the method goes by the groups of {attribute!r}, which its data do not declare",
        )
    return {ACTED_ON: [f"{attribute}={group}" for group in run.data.attributes[attribute]]}


def check_told(run: SiteRun, values: Sequence[float], wanted: int, what: str) -> None:
    """Check that the server sent as many numbers as the site has groups (and classes).

    Raises:
        SiteError: the server sent more or fewer numbers.
    """
    refuse_at(
        run.site, {f"the server sent {len(values)} {what}, the site has {wanted}; {ALIKE}": len(values) != wanted}
    )


def require_numbers(numbers: list[int] | None, site: str, method: str) -> list[int]:
    """Return the numbers of a batch's images, which a method needs; raise ``SiteError`` if they are not known."""
    if numbers is None:
        raise SiteError(
            f"site {site!r}: {method} needs to know which images a batch has, and this task's data do not say; choose "
            "another task or method"
        )
    return numbers


def bound_counts(inputs: RoundInputs, images: Mapping[str, float]) -> dict[str, float]:
    """Return, by site, the factor on its numbers of images in a sum over sites that bounds the site's share.

    The share in this sum gets the same bound as the site's weight in the model.

    Args:
        inputs: inputs of the rule in this round; without bounds on weights every factor is 1.
        images: number of images of each site, in all of its groups together.
    """
    total = math.fsum(images.values())
    shares = {site: images.get(site, 0.0) / total if total else 0.0 for site in inputs.sites}
    bounded = inputs.bounded(shares) if total else shares
    return {site: bounded[site] / share if share else 1.0 for site, share in shares.items()}


def numbers_of(run: SiteRun, attribute: str, split: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the group number of each image of a split, (n,)."""
    return np.asarray(run.data.group_numbers(split, attribute), np.int64)


def count_groups(run: SiteRun, attribute: str) -> int:
    """Return the number of an attribute's groups, without the last group, which has the images without a value."""
    return len(run.data.attributes[attribute]) - 1


def withhold_groups(run: SiteRun, attribute: str, split: str) -> frozenset[int]:
    """Return the numbers of an attribute's groups whose sums the site withholds, as too few cases belong to them."""
    numbers = numbers_of(run, attribute, split)
    return find_hidden_groups(_cases(run, split), numbers, count_groups(run, attribute) + 1, run.min_cases)


def confusions(run: SiteRun, model: torch.nn.Module, attribute: str, split: str) -> Array:
    """Return the counts TP, FP, FN, TN of each known group and class, (groups, classes, 4); NaN for a withheld count.

    Raises:
        SiteError: the task does not assign a class to an image.
    """
    with torch.random.fork_rng(devices=[]):
        outcomes = run.task_on(split).outcomes(model, run.data, split, run.device)
    labels, scores = outcomes or (None, np.zeros((0, 0)))
    if labels is None:
        raise SiteError(f"site {run.site!r}: the gap between groups needs a task with classes")
    numbers, withheld = numbers_of(run, attribute, split), withhold_groups(run, attribute, split)
    tables = np.stack([
        sums_of(labels, scores, numbers == group, 1, 1)[CONFUSION] for group in range(count_groups(run, attribute))
    ])  # fmt: skip
    tables[sorted(withheld & set(range(len(tables))))] = np.nan
    tables[:, sorted(find_hidden_classes(run, attribute, split, labels, scores.shape[1]))] = np.nan
    return tables


def find_hidden_classes(
    run: SiteRun, attribute: str, split: str, labels: np.ndarray[Any, np.dtype[np.int64]], classes: int
) -> frozenset[int]:
    """Return classes whose sums the site withholds in all groups of ``attribute`` (empty: one group of all images)."""
    if run.settings.get("metrics_by_class") is False:
        return frozenset(range(classes))
    numbers = numbers_of(run, attribute, split) if attribute else np.zeros(len(labels), np.int64)
    withheld = withhold_groups(run, attribute, split) if attribute else frozenset[int]()
    return find_hidden_parts(_cases(run, split), labels, numbers, withheld, run.min_cases, classes)


def training_losses(
    training: LocalTraining, run: SiteRun, model: torch.nn.Module
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the loss and class of each training image with the received model, (n,) in the order of the list.

    For a task without classes all class numbers are 0.
    """
    losses: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=[]), evaluating(model):
        for inputs, targets in run.data.batches("training", batch_size=training.batch_size):
            outputs = model(inputs.to(run.device))
            losses.append(criterion_losses(training, run, outputs, targets.to(run.device)).double().cpu())
            labels.append(targets.long().cpu() if targets.ndim == 1 else torch.zeros(len(inputs), dtype=torch.long))
    return torch.cat(losses).numpy(), torch.cat(labels).numpy()


def losses_by_group(
    training: LocalTraining, run: SiteRun, model: torch.nn.Module, attribute: str, classes: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return mean losses and numbers of training images, by report field, as tables of groups and classes.

    Args:
        training: the method's site half, whose criterion is the loss.
        run: the server's task that this site performs, with the site's data.
        model: the received model.
        attribute: the attribute of people that defines the groups; empty if the table has only the row of all images.
        classes: number of columns, one for each class; 1: one column for all classes.

    Returns:
        For each field (rows, classes): a row for all images, then one for each known group. NaN: the value is withheld,
        or there is no such image.
    """
    losses, labels = training_losses(training, run, model)
    rows, out = [np.ones(len(losses), bool)], np.zeros((1, classes), bool)
    if attribute:
        numbers, withheld = numbers_of(run, attribute, "training"), withhold_groups(run, attribute, "training")
        rows += [numbers == group for group in range(count_groups(run, attribute))]
        out = np.array([[row in withheld] * classes for row in range(-1, len(rows) - 1)])
    if classes > 1:
        out[:, sorted(find_hidden_classes(run, attribute, "training", labels, classes))] = True
    column = labels if classes > 1 else np.zeros_like(labels)
    images = np.stack([np.bincount(column[row], minlength=classes) for row in rows])
    sums = np.stack([np.bincount(column[row], losses[row], classes) for row in rows])
    tables = {GROUP_LOSSES.name: sums / np.maximum(images, 1), GROUP_IMAGES.name: images}
    return {name: np.where(out | (images == 0), np.nan, table) for name, table in tables.items()}


def _cases(run: SiteRun, split: str) -> list[object]:
    cases = run.data.cases(split)
    return list(range(run.data.num_samples(split))) if cases is None else list(cases)


class ByPeople(LocalTraining):
    """Let a method's training use adapters by group of people: each image uses the adapters of its group."""

    @property
    @abstractmethod
    def attribute(self) -> str:
        """Return the attribute that defines the groups; if a site's data lack it, no image has a known group."""

    def shown(self, run: SiteRun, model: torch.nn.Module) -> Any:
        """Return the site's data wrapped such that the network's adapters are set to the groups of a batch's images."""
        return run.data if self.attribute not in run.data.attributes else _OfPeople(run, model, self.attribute)


class _OfPeople(Proxy):
    """Provide a site's data; while a batch is in use, the network's adapters are set to the groups of its images."""

    def __init__(self, run: SiteRun, model: torch.nn.Module, attribute: str) -> None:
        super().__init__(run.data)
        self._site, self._model, self._attribute = run.site, model, attribute

    def batches(self, split: str, **options: Any) -> Batches:
        """Return batches as :meth:`fairflare.base.task.SiteData.batches` does; each sets the adapters' groups."""
        order = require_numbers(self._inner.order(split, options.get("shuffle_seed")), self._site, "fair_lora")
        numbers = self._inner.group_numbers(split, self._attribute)
        return _Told(self._inner.batches(split, **options), self._model, [numbers[index] for index in order])


class _Told(Proxy):
    """Iterate over batches of images, and set the groups of the network's adapters for each batch in turn."""

    def __init__(self, inner: Batches, model: torch.nn.Module, numbers: list[int]) -> None:
        super().__init__(inner)
        self._model, self._numbers = model, numbers

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        from fairflare.core.features.group_adapter import people

        numbers = iter(self._numbers)
        for batch in self._inner:
            with people(self._model, [*islice(numbers, len(batch[0]))]):
                yield batch
