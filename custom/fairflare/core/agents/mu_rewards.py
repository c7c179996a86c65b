"""Define the actions (grid of mu), the observation of a site and the common reward of FedMRL's agents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fairflare.base import checks

#: Proximal coefficient mu that a site uses until an agent has chosen one.
INITIAL_MU = 1e-5
#: Values of the proximal coefficient mu among which an agent chooses.
MU_GRID = (1e-5, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
CAPACITY = 1000  # number of transitions in the agents' replay memory
REWARD_DELAY = 2  # a mu chosen in round r is used in r + 1; its effect is measured at the start of r + 2
#: Largest loss that an agent's observation distinguishes; a larger loss counts as this value.
LOSS_CAP = 10.0
#: Scaled label entropy assumed for a site that withholds it. A site's entropy is constant, so any constant will do.
UNKNOWN_ENTROPY = -0.5
#: Accuracy assumed for a site that withholds it.
UNKNOWN_ACCURACY = 0.5
#: Decimals to which a site rounds the entropy that it sends: the exact value would reveal its class counts.
ENTROPY_DECIMALS = 1


def label_entropy(counts: Sequence[int]) -> float:
    r"""Return the entropy of a site's labels with the paper's sign.

    .. math:: E_h = \sum_c \frac{n_{hc}}{n_h} \log \frac{n_{hc}}{n_h}

    Args:
        counts: training images of each class, ``>= 0``, at least one image.

    Returns:
        E in [-log C, 0], by the natural logarithm: 0 when all labels are equal, -log C when the classes are balanced.

    Raises:
        ValueError: a negative or non-finite count, or no image.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), Eq. (6), which has no minus sign. The authors' code uses the count of
        class 0 in every logarithm.
    """
    checks.numbers("count", dict(enumerate(counts)), of="class", low=0)
    total = math.fsum(counts)
    checks.refuse({f"counts must hold at least one image, got {list(counts)}": total <= 0})
    return math.fsum(count / total * math.log(count / total) for count in counts if count > 0) + 0.0


def round_entropy(counts: Sequence[int]) -> float:
    """Return :func:`label_entropy` rounded to :data:`ENTROPY_DECIMALS` decimals, as a site reports it.

    Rounding changes the scaled entropy E / log C that an agent sees by at most 0.05 / log C. The entropy of a site is
    the same in all rounds.
    """
    return round(label_entropy(counts), ENTROPY_DECIMALS) + 0.0


def observation(
    entropy: float | None, share: float, accuracy: float, loss: float, *, num_classes: int
) -> tuple[float, float, float, float]:
    r"""Return an agent's observation of its site: four numbers scaled for a neural network.

    .. math:: o_h = (E_h / \log C,\; P_h,\; acc_h,\; \min(loss_h, 10) / 10)

    Args:
        entropy: label entropy E_h of :func:`label_entropy`; None if the site withholds it: its scaled value is then
            -0.5.
        share: P_h, share of the site in all training images, in [0, 1].
        accuracy: accuracy of the local model after training, on the site's validation images, in [0, 1]; NaN if the
            site withholds it, which counts as 0.5.
        loss: mean training loss of the last local epoch, ``>= 0``. A loss that is not finite counts as the largest one,
            and the accuracy as 0.
        num_classes: number of classes C, ``>= 1``.

    Returns:
        Four numbers in [-1, 1].

    Raises:
        ValueError: a value is out of range; the message names the value.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), Eqs. (5) to (7); the scaling is our specification's.
    """
    most = math.log(checks.whole("num_classes", num_classes))
    if entropy is None:
        scaled = UNKNOWN_ENTROPY
    elif not -most - 1e-6 <= entropy <= 1e-6:
        raise ValueError(f"entropy must be in [-log {num_classes}, 0], got {entropy}")
    else:
        scaled = max(min(entropy, 0.0) / most, -1.0) if most else 0.0
    checks.number("share", share, low=0, high=1)
    if not math.isfinite(loss):
        return scaled, float(share), 0.0, 1.0
    accuracy = UNKNOWN_ACCURACY if math.isnan(accuracy) else checks.number("accuracy", accuracy, low=0, high=1)
    checks.number("loss", loss, low=0)
    return scaled, float(share), float(accuracy), min(float(loss), LOSS_CAP) / LOSS_CAP


def global_accuracy(
    accuracies: Mapping[str, float | None], num_validation: Mapping[str, float] | None = None
) -> float | None:
    r"""Return the accuracy of the global model over the validation images of all sites.

    .. math:: acc = \sum_h n^{val}_h gacc_h / \sum_h n^{val}_h

    Args:
        accuracies: by site, accuracy of the *received* model before local training, in [0, 1]. None or NaN: the site
            has no validation images and is left out.
        num_validation: number of validation images n_val by site, ``>= 0``; None if every site counts the same.

    Returns:
        The accuracy, or None if no site measured one.

    Raises:
        ValueError: a value out of range, or a site without a count (names the site).
    """
    total = weighted = 0.0
    for site, value in sorted(accuracies.items()):
        if value is None or math.isnan(value):
            continue
        checks.number(f"accuracy of site {site!r}", value, low=0, high=1)
        checks.refuse({
            f"site {site!r} has an accuracy and no number of validation images":
                num_validation is not None and site not in num_validation,
        })  # fmt: skip
        count = 1.0 if num_validation is None else num_validation[site]
        total += checks.number(f"number of validation images of site {site!r}", count, low=0)
        weighted += count * value
    return weighted / total if total > 0 else None


def reward(accuracy: float, zeta: float = 0.95) -> float:
    r"""Return the common reward of all agents.

    .. math:: R = e^{acc - \zeta} - 1

    Args:
        accuracy: accuracy of the global model, in [0, 1] (:func:`global_accuracy`), on validation images. The paper
            uses test images, which would leak into the training.
        zeta: target accuracy, in [0, 1].

    Returns:
        The reward R, ``> 0`` if the accuracy surpasses the target.

    Raises:
        ValueError: a value is outside [0, 1]; percentages are refused on purpose.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.1. The authors' code has zeta = 95 and no exponential.

    Example:
        >>> round(reward(0.8), 6)
        -0.139292
    """
    checks.number("accuracy", accuracy, low=0, high=1)
    checks.number("zeta", zeta, low=0, high=1)
    return math.exp(accuracy - zeta) - 1.0


def warmup_in(num_rounds: int, most: int) -> int:
    """Return how many transitions precede the first update: ``most``, or a quarter of the rounds if that is less.

    The number is at least 1.
    """
    return min(most, max(num_rounds // 4, 1))


def learning_rounds(num_rounds: int, most: int) -> int:
    """Return the number of federated rounds in which the agents learn, after the warm-up of :func:`warmup_in`."""
    return max(num_rounds - REWARD_DELAY - warmup_in(num_rounds, most) + 1, 0)
