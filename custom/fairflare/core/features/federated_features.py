r"""Compute the server part of CReFF: synthetic features with the sites' gradients, and a classifier trained on them.

Shang et al., "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated
Features", IJCAI 2022. All functions concern a linear classifier :math:`\psi = (W, b)` of C classes on d features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fairflare.base import checks

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6  # term added to the denominator of a cosine, as in the published code


def classifier_gradient(features: Tensor, label: int, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return the gradient of one class's mean cross-entropy with respect to the classifier's parameters.

    .. math:: \frac1n \sum_i (\mathrm{softmax}(W h_i + b) - e_c) [h_i^\top, 1]

    Args:
        features: features h, (n, d), n at least 1; the result is differentiable in them.
        label: class index c of all the features.
        weight, bias: parameters W and b of the classifier, (C, d) and (C,).

    Returns:
        (C, d + 1); the last column belongs to the bias.
    """
    residual = torch.softmax(torch.nn.functional.linear(features, weight, bias), 1)
    residual = residual - torch.nn.functional.one_hot(torch.tensor(label, device=weight.device), len(bias)).to(residual)
    return torch.cat([residual.T @ features / len(features), residual.mean(0).unsqueeze(1)], 1)


def matching_loss(given: Tensor, wanted: Tensor) -> Tensor:
    r"""Return how far two gradients of a classifier differ in direction, row by row.

    .. math:: \sum_{j=1}^C (1 - \cos(g_j, g'_j)) + 1 - \cos(g_b, g'_b)

    Args:
        given, wanted: two gradients, (C, d + 1) each, as :func:`classifier_gradient` returns them.

    Returns:
        A scalar in [0, 2 (C + 1)]: 0 for equal gradients, C + 1 if all rows are orthogonal. The denominator of the
        cosine has 1e-6 added, so that a zero row counts 1.

    Source:
        Shang et al., Eq. (6), and code.
    """
    checks.same_shape("found", given, "wanted", wanted)
    pairs = ((given[:, :-1], wanted[:, :-1]), (given[:, -1:].T, wanted[:, -1:].T))
    return torch.stack([(1 - _cosines(a, b)).sum() for a, b in pairs]).sum()


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    # The L2 norm is computed from clamped squares, since its gradient at 0 would be NaN.
    norms: Tensor = a.square().sum(1).clamp_min(torch.finfo(a.dtype).tiny).sqrt() * torch.linalg.vector_norm(b, dim=1)
    return (a * b).sum(1) / (norms + EPSILON)


def match_features(
    features: Tensor, wanted: Mapping[int, Tensor], weight: Tensor, bias: Tensor, *, steps: int, learning_rate: float
) -> tuple[Tensor, float, float]:
    r"""Return features moved by gradient descent until their gradients point where the sites' do.

    Args:
        features: S, n synthetic features of each class, (C, n, d); not changed.
        wanted: mean gradient of the sites by class, (C, d + 1) each; features of classes without an entry do not
            change.
        weight, bias: parameters of the classifier that the gradients belong to.
        steps, learning_rate: number of steps and learning rate of plain SGD on the sum of :func:`matching_loss` over
            the classes.

    Returns:
        The new features, and the sum of :func:`matching_loss` over the classes before and after; 0 without a class.
    """
    moved = features.clone()
    before = after = 0.0
    with torch.enable_grad():
        for label in sorted(wanted):  # each class is optimized by itself, since the loss is a sum over classes
            learned = features[label].clone().requires_grad_(True)
            for step in range(steps + 1):
                loss = matching_loss(classifier_gradient(learned, label, weight, bias), wanted[label])
                before += float(loss.detach()) if step == 0 else 0.0
                if step == steps:
                    after += float(loss.detach())
                    break
                (gradient,) = torch.autograd.grad(loss, learned)
                learned = (learned - learning_rate * gradient).detach().requires_grad_(True)
            moved[label] = learned.detach()
    return moved, before, after


def retrain_classifier(
    features: Tensor, *, epochs: int, learning_rate: float, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return a linear classifier trained from scratch on features of classes in equal parts.

    Args:
        features: n features of each class, (C, n, d).
        epochs, learning_rate, batch_size: settings of plain SGD on the cross-entropy.
        seed: seed of the initial parameters (PyTorch's for a linear layer) and of the order of the batches.

    Returns:
        Weight (C, d) and bias (C,).
    """
    classes, number, width = features.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = torch.nn.Linear(width, classes).to(features.dtype)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    x, y = features.reshape(-1, width), torch.arange(classes).repeat_interleave(number)
    targets = torch.nn.functional.one_hot(y, classes).to(x)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator).split(batch_size):
            residual = (torch.softmax(torch.nn.functional.linear(x[chosen], weight, bias), 1) - targets[chosen]) / len(
                chosen
            )
            weight -= learning_rate * residual.T @ x[chosen]
            bias -= learning_rate * residual.sum(0)
    return weight, bias
