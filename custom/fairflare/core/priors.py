r"""Compute Fed-MAS's measures: how far a model's features are from those of a frozen prior network, by class.

The measures are the distance of a sample (Eq. 1), its mean by class before training (Eq. 2) and during training, and
the rescue factor (Eq. 3) that a site computes from both means. The server turns rescue factors into weights of the
sites by :func:`fairflare.core.weighting.rescue_weights`.

Here c is a class and k a site; the paper uses k for classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fairflare.base import checks

if TYPE_CHECKING:
    from torch import Tensor

NORM_FLOOR = 1e-12  # with this floor a feature vector of zeros has the distance 2 to every vector
MIN_SUM = 1e-12  # divergences are not divided by their sum if the sum is at most this
RF_MODES = ("paper", "code", "class_mean")
#: Names of timm models, but no other source: "hf-hub:" would download from the network, "local-dir:" read a folder.
TIMM = r"^timm:[A-Za-z0-9_.-]+$"


def prior_distance(projected: Tensor, target: Tensor) -> Tensor:
    r"""Return the distance of each sample's features from the prior network's features, Fed-MAS Eq. (1).

    .. math:: \ell_f = 2 - 2 \langle y / \lVert y \rVert_2,\; y' / \lVert y' \rVert_2 \rangle

    Args:
        projected: y, (n, d), floating point, with gradient: the projector's output.
        target: y', (n, d), the frozen network's features; their length does not matter. Constant: no gradient.

    Returns:
        (n,), in [0, 4]. A vector of norm 0 (floor 1e-12) has the distance 2.

    Raises:
        ValueError: shapes that differ or are not (n, d).

    Source:
        Elbatel et al., DeCaF @ MICCAI 2023, Eq. (1); spec MAS-1.

    Example:
        >>> prior_distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.8000])
    """
    checks.shape("projected", projected, "n", "d")
    checks.same_shape("target", target, "projected", projected)
    y = torch.nn.functional.normalize(projected, dim=1, eps=NORM_FLOOR)
    y_prior = torch.nn.functional.normalize(target.detach().to(y), dim=1, eps=NORM_FLOOR)
    return (2 - 2 * (y * y_prior).sum(1)).clamp(0, 4)  # rounding may give values down to -2e-7; NaN stays NaN


class RunningClassMean:
    r"""Compute the mean of the samples' values by class, batch by batch, and the sum of these means over epochs.

    .. math:: \hat w_c = \sum_{e=1}^{E} \frac{1}{M_{c,e}} \sum_{i: \text{label } c} \ell_i

    Sums are accumulated in float64, so that neither the size nor the order of the batches matters.

    Args:
        num_classes: C, ``>= 1``.

    Source:
        Elbatel et al., section 2.2; spec MAS-3. With one epoch it is Eq. (2).

    Example:
        >>> running = RunningClassMean(2)
        >>> running.add(torch.tensor([0.2, 0.4]), torch.tensor([0, 0]))
        >>> running.add(torch.tensor([0.6]), torch.tensor([0]))
        >>> round(running.means()[0].item(), 6), running.counts.tolist()
        (0.4, [3, 0])
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = checks.whole("num_classes", num_classes)
        self.counts = torch.zeros(self.num_classes, dtype=torch.int64)
        self._sums = torch.zeros(self.num_classes, dtype=torch.float64)
        self._epochs: list[tuple[Tensor, Tensor]] = []  # class means of each closed epoch, whether classes had samples

    def add(self, values: Tensor, targets: Tensor) -> None:
        """Add a batch, which may be empty: values (n,), and the samples' classes (n,) in [0, C).

        Raises:
            ValueError: other shapes, or a class out of range.
        """
        checks.shape("values", values, values.numel())
        checks.same_shape("targets", targets, "values", values)
        labels = targets.detach().to("cpu", torch.int64)
        checks.indices("targets", labels, self.num_classes)
        self._sums.index_add_(0, labels, values.detach().to("cpu", torch.float64))
        self.counts += torch.bincount(labels, minlength=self.num_classes)

    def means(self) -> Tensor:
        """Return the class means of the current epoch, (C,) float64; NaN for a class without samples."""
        return self._sums / torch.where(self.counts > 0, self.counts.double(), math.nan)

    def end_epoch(self) -> None:
        """Close the epoch: its class means enter the sum once, whatever the number of samples."""
        self._epochs.append((self.means(), self.counts > 0))
        self.counts = torch.zeros_like(self.counts)
        self._sums = torch.zeros_like(self._sums)

    def total(self, before: Tensor | None = None) -> Tensor:
        """Return the sum of the closed epochs' class means, (C,) float64; NaN for a class without any mean.

        Args:
            before: (C,), class means of the received model, used for a class not seen in the first epoch. A class not
                seen in a later epoch has its mean of the preceding epoch. With no epoch closed ``before`` is returned.

        Raises:
            ValueError: ``before`` of another shape, or missing although no epoch was closed.
        """
        checks.refuse({
            "no epoch was closed; call end_epoch() after each, or give before": before is None and not self._epochs,
        })  # fmt: skip
        last = torch.full((self.num_classes,), math.nan) if before is None else before.detach().cpu()
        checks.shape("before", last, self.num_classes)
        last = last.double()
        total = torch.zeros(self.num_classes, dtype=torch.float64) if self._epochs else last.clone()
        for means, seen in self._epochs:
            last = torch.where(seen, means, last)
            total += last
        return total


def rescue_factor(
    before: Tensor | Sequence[float],
    during: Tensor | Sequence[float],
    counts: Tensor | Sequence[int],
    mode: str = "paper",
) -> float:
    r"""Return a site's rescue factor, Fed-MAS Eq. (3): how much the site has that the global model has not captured.

    .. math:: RF_k = \sum_{c: M_{k,c} > 0} w_{k,c}\, \hat w_{k,c}

    Args:
        before: w, (C,), class-aware divergence of the *received* model, before training.
        during: :math:`\hat w`, (C,), class-aware divergence while training, summed over the epochs.
        counts: M, (C,), the site's training samples by class. Classes with 0 are left out, whatever their divergence.
        mode: ``"paper"``: as above. ``"code"``: w and :math:`\hat w` are divided by their own sums first, as in the
            authors' code. ``"class_mean"``: the paper's divided by the number of the site's classes.

    Returns:
        A number ``>= 0``; NaN if a class that is present has a divergence that is not finite (the server then
        takes the mean of the other sites'). ``"code"`` with divergences that are all 0: 0.

    Raises:
        ValueError: shapes that differ, no class present, a negative divergence (names the class), unknown mode.

    Source:
        Elbatel et al., Eq. (3); spec MAS-4 and section 4. The paper's factor grows with the number of classes at a
        site, the code's shrinks: they can rank sites in opposite order.

    Example:
        >>> round(rescue_factor([0.5, 1.0, 1.5], [0.4, 0.8, 1.2], [3, 2, 1]), 6)
        2.8
    """
    checks.choice("mode", mode, RF_MODES)
    w, w_hat = (torch.as_tensor(x, dtype=torch.float64, device="cpu").detach() for x in (before, during))
    present = torch.as_tensor(counts, device="cpu") > 0
    checks.shape("before", w, "C")
    checks.same_shape("during", w_hat, "before", w)
    checks.same_shape("counts", present, "before", w)
    checks.refuse({"counts must not all be 0": not bool(present.any())})
    for name, values in (("before", w), ("during", w_hat)):
        by_class = enumerate(torch.where(present, values, 0.0).tolist())
        checks.numbers(name, {c: value for c, value in by_class if value < 0}, of="class", low=0)
    w, w_hat = w[present], w_hat[present]
    if not bool(torch.isfinite(w).all() and torch.isfinite(w_hat).all()):
        return math.nan
    if mode == "code":
        sums = w.sum(), w_hat.sum()
        if min(sums) <= MIN_SUM:
            return 0.0
        w, w_hat = w / sums[0], w_hat / sums[1]
    factor = float((w * w_hat).sum())
    return factor / int(present.sum()) if mode == "class_mean" else factor
