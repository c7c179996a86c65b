"""Groups of people at a site, for methods that act on them: sums by group, none of a person; and batches by group.

Sums of groups with few cases, and of those that could be solved for by them, are NaN, as in the final test
(:mod:`fairflare.core.statistics.group_sums`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.site_data import Proxy
from fairflare.base.task import evaluating
from fairflare.core.statistics.group_sums import CONFUSION, Array, hidden_groups, hidden_parts, sums_of
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, criterion_losses
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
LEAST, MOST = 0.1, 10.0  # times that the server may make an image's loss count
ACTED_ON = "method_groups"  # in the report of check


def check_attribute(run: SiteRun, attribute: str) -> dict[str, Any]:
    """Return whether a site's data have an attribute; what the server is told of it before the first round.

    Raises:
        SiteError: they have not (names it).
    """
    if attribute not in run.data.attributes:
        known = ", ".join(run.data.attributes) or "none"
        raise SiteError(
            f"site {run.site!r}: the method goes by the groups of {attribute!r}, the data declare: {known}; declare it "
            "in 'attributes' of the datalist",
            public=f"site {run.site!r}: the method goes by the groups of {attribute!r}, which its data do not declare",
        )
    return {ACTED_ON: [f"{attribute}={group}" for group in run.data.attributes[attribute]]}


def check_told(run: SiteRun, told: Sequence[float], wanted: int, what: str) -> None:
    """Check that the server told as many numbers as the site has groups (and classes).

    Raises:
        SiteError: more or fewer.
    """
    if len(told) != wanted:
        raise SiteError(f"site {run.site!r}: the server told {len(told)} {what}, the site has {wanted}; {ALIKE}")


def held(inputs: RoundInputs, images: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each site's numbers of images count in a sum over sites.

    A site's weight in that sum is bounded as its weight in a model.

    Args:
        inputs: of the round; without bounds every site's count once.
        images: of each site, in all of its groups.
    """
    total = math.fsum(images.values())
    shares = {site: images.get(site, 0.0) / total if total else 0.0 for site in inputs.sites}
    bounded = inputs.bounded(shares) if total else shares
    return {site: bounded[site] / share if share else 1.0 for site, share in shares.items()}


def numbers_of(run: SiteRun, attribute: str, split: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the number of each image's group, (n,)."""
    return np.asarray(run.data.group_numbers(split, attribute), np.int64)


def known_groups(run: SiteRun, attribute: str) -> int:
    """Return how many groups there are, without that of the images without a value, which is the last one."""
    return len(run.data.attributes[attribute]) - 1


def hidden(run: SiteRun, attribute: str, split: str) -> frozenset[int]:
    """Return groups whose sums stay at the site."""
    numbers = numbers_of(run, attribute, split)
    return hidden_groups(_cases(run, split), numbers, known_groups(run, attribute) + 1, run.min_cases)


def confusions(run: SiteRun, model: torch.nn.Module, attribute: str, split: str) -> Array:
    """Count TP, FP, FN, TN of each known group and class, (groups, classes, 4); NaN: the count stays at the site.

    Raises:
        SiteError: the task tells no class of an image.
    """
    with torch.random.fork_rng(devices=[]):
        outcomes = run.task.outcomes(model, run.data, split, run.device)
    labels, scores = outcomes or (None, np.zeros((0, 0)))
    if labels is None:
        raise SiteError(f"site {run.site!r}: the gap between groups needs a task with classes")
    numbers, kept = numbers_of(run, attribute, split), hidden(run, attribute, split)
    classes = scores.shape[1]
    parts = hidden_classes(run, attribute, split, labels, classes)
    found = np.stack([
        sums_of(labels, scores, numbers == group, 1, 1)[CONFUSION] for group in range(known_groups(run, attribute))
    ])  # fmt: skip
    found[sorted(kept & set(range(len(found))))] = np.nan
    found[:, sorted(parts)] = np.nan
    return found


def hidden_classes(
    run: SiteRun, attribute: str, split: str, labels: np.ndarray[Any, np.dtype[np.int64]], classes: int
) -> frozenset[int]:
    """Return classes whose sums stay at the site in all groups of an attribute (empty: all images are one group)."""
    if run.settings.get("metrics_by_class") is False:
        return frozenset(range(classes))
    numbers = numbers_of(run, attribute, split) if attribute else np.zeros(len(labels), np.int64)
    kept = hidden(run, attribute, split) if attribute else frozenset[int]()
    return hidden_parts(_cases(run, split), labels, numbers, kept, run.min_cases, classes)


def training_losses(
    half: LocalTraining, run: SiteRun, model: torch.nn.Module
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the loss and class of each training image with the received model, (n,) in the order of the list.

    Of a task without classes the second is 0 everywhere.
    """
    losses: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=[]), evaluating(model):
        for inputs, targets in run.data.batches("training", batch_size=half.batch_size):
            outputs, targets = model(inputs.to(run.device)), targets.to(run.device)
            losses.append(criterion_losses(half, run, outputs, targets).double().cpu())
            labels.append(targets.long().cpu() if targets.ndim == 1 else torch.zeros(len(inputs), dtype=torch.long))
    return torch.cat(losses).numpy(), torch.cat(labels).numpy()


def losses_by_group(
    half: LocalTraining, run: SiteRun, model: torch.nn.Module, attribute: str, classes: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return mean losses and numbers of training images, by field: rows of all images, then of each known group.

    Args:
        half: whose criterion it is.
        run: of the task.
        model: the received one.
        attribute: whose groups; empty: all images are the only row.
        classes: columns; 1: not by class.

    Returns:
        (rows, classes); NaN: it stays at the site, or there is no such image.
    """
    losses, labels = training_losses(half, run, model)
    rows, out = [np.ones(len(losses), bool)], np.zeros((1, classes), bool)
    if attribute:
        numbers, kept = numbers_of(run, attribute, "training"), hidden(run, attribute, "training")
        rows += [numbers == group for group in range(known_groups(run, attribute))]
        out = np.array([[row in kept] * classes for row in range(-1, len(rows) - 1)])
    if classes > 1:
        out[:, sorted(hidden_classes(run, attribute, "training", labels, classes))] = True
    column = labels if classes > 1 else np.zeros_like(labels)
    images = np.stack([np.bincount(column[row], minlength=classes) for row in rows])
    sums = np.stack([np.bincount(column[row], losses[row], classes) for row in rows])
    told = {GROUP_LOSSES.name: sums / np.maximum(images, 1), GROUP_IMAGES.name: images}
    return {name: np.where(out | (images == 0), np.nan, of) for name, of in told.items()}


def _cases(run: SiteRun, split: str) -> list[object]:
    cases = run.data.cases(split)
    return list(range(run.data.num_samples(split))) if cases is None else list(cases)


class ByPeople(LocalTraining):
    """Capability of a training: its network has adapters by group, and goes through the site's images by group."""

    @property
    @abstractmethod
    def attribute(self) -> str:
        """Whose groups; where a site's data lack it, as at a site that was no part of the run, all count alike."""

    def shown(self, run: SiteRun, model: torch.nn.Module) -> Any:
        """Return the site's data, whose batches tell the network which groups they are of."""
        return run.data if self.attribute not in run.data.attributes else _OfPeople(run, model, self.attribute)


class _OfPeople(Proxy):
    """A site's data; while a batch is out, the network's adapters are told its groups."""

    def __init__(self, run: SiteRun, model: torch.nn.Module, attribute: str) -> None:
        super().__init__(run.data)
        self._site, self._model, self._attribute = run.site, model, attribute

    def batches(self, split: str, **options: Any) -> Batches:
        """See :meth:`fairflare.base.task.SiteData.batches`."""
        order = self._inner.order(split, options.get("shuffle_seed"))
        if order is None:
            raise SiteError(f"site {self._site!r}: fair_lora needs data that say which image is which in a batch")
        numbers = self._inner.group_numbers(split, self._attribute)
        return _Told(self._inner.batches(split, **options), self._model, [numbers[index] for index in order])


class _Told(Proxy):
    """Batches of images whose groups are known, in their order."""

    def __init__(self, inner: Batches, model: torch.nn.Module, numbers: list[int]) -> None:
        super().__init__(inner)
        self._model, self._numbers = model, numbers

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        from fairflare.core.features.group_adapter import people

        seen = 0
        for batch in self._inner:
            count = len(batch[0])
            with people(self._model, self._numbers[seen : seen + count]):
                yield batch
            seen += count
