"""Linear CKA and cosine of two models' features, layer by layer, over a whole data set in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path

import torch
from torch import Tensor, nn

from fairflare.core.checks import choice, number
from fairflare.core.similarity.features import JointPass
from fairflare.core.similarity.formulas import LEAST_SAMPLES, UNDEFINED, Alignment, LayerSimilarity, cosine_distance
from fairflare.core.similarity.store import Store
from fairflare.core.stopping import check_stop

ESTIMATORS = ("biased", "unbiased", "minibatch_biased", "minibatch_unbiased")
COSINE_MODES = ("sample", "matrix")
CONSTANT = 1e-6  # a feature that changes less than this (relative to its size) over the images is constant
# Rounding to 16 bits averages out over images and features. Rows are kept in float32 where it would not:
FEW = 16  # the first images;
SMALL = 2**14  # layers with no more features than this, which cost little;
COMMON = 8.0  # rows that have more than this (squared norms) in common, compared to what sets them apart,
RECENT, SAMPLE = 8, 1024  # as seen in so many rows, and features of them


def layerwise_cka(
    model_a: nn.Module,
    model_b: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Iterable[str] | None = None,
    estimator: str = "biased",
    memory: float = 2**30,
    scratch: str | Path | None = None,
) -> dict[str, LayerSimilarity]:
    r"""Linear CKA of two models' features on the same images, at each layer.

    .. math:: \delta^m = HSIC(K^m, L^m) / \sqrt{HSIC(K^m, K^m) \, HSIC(L^m, L^m)}

    with the n x n Gram matrices of the outputs of layer m, flattened image by image, in the two models. Layers are
    matched by name. Over all images for ``"biased"`` and ``"unbiased"``: the relative error of 1 - delta is at most
    1e-4 for float32 models, whatever the batch size, and at most 2e-4 where a few images' features are a thousand times
    as large as the others'. Where the models are nearly equal (1 - delta below 1e-9) it can be larger. The models run
    in evaluation mode, without gradients, and are left as they were found.

    Args:
        model_a: for Fed-LWR the local model.
        model_b: a model with the same layers (the anchor), on any device.
        batches: batches of input images, (n_b, ...) each, all images of one size; read once.
        layers: names of the layers wanted (default: all of :func:`parameter_layers`).
        estimator: ``"biased"`` (the paper's Eq. 2) or ``"unbiased"`` (HSIC_1), over all images; or
            ``"minibatch_biased"``, ``"minibatch_unbiased"``, the quotient of sums of each batch's HSIC: then a batch
            with fewer than 2 or 4 images is joined to the one before it.
        memory: bytes of main memory for stored features; what exceeds them goes to a scratch file. Beyond it: features
            of some images (two, and as many as fit into 96 MiB), 32 KB for each image, and six n x n matrices.
        scratch: existing folder for that file (default: the system's temporary folder). It takes ``4 n (sum of feature
            sizes) - memory`` bytes, twice that for the first 16 images and where they differ little; always removed.

    Returns:
        Similarity by layer name, in state-dict order. delta is in [0, 1] (biased) or [-1, 1] (unbiased); 1 with
        dissimilarity 0 where the features of both models are the same for every image (dead layer). NaN where only one
        model's are, where features are not finite, where a layer cannot be compared (not called for every image, not as
        often in both models; no tensor in its output, or one without a dimension of the images, see
        :mod:`fairflare.core.similarity.layout`), and everywhere with fewer than 2 images. With fewer than 4 images an
        unbiased estimator is replaced by ``"biased"``.

    Raises:
        ValueError: a layer missing in one model, features of different shape in the two models or for different images
            (all name the layer); no layer can be compared; unknown estimator.
        TypeError: a batch that is not a tensor.
        OSError: not enough space in the scratch folder (names folder, needed, available).

    Source:
        Yan et al., MICCAI 2024, Eq. (2) and section 2.2; Kornblith et al., ICML 2019; HSIC_1 from Song et al., JMLR
        2012. The authors' code uses the sums over mini-batches (``"minibatch_unbiased"``), for which delta depends on
        the batches; a layer that runs more than once in a forward pass counts with its last output (ours).
    """
    choice("estimator", estimator, ESTIMATORS)
    number("memory", memory, low=0)
    formula = estimator.removeprefix("minibatch_")
    with JointPass(model_a, model_b, layers) as joint, Store(memory, scratch) as store:
        rows = {name: _Rows(name, store) for name in joint.names}
        alignments = {name: Alignment(formula) for name in joint.names}
        for group in [batches] if formula == estimator else _groups(batches, LEAST_SAMPLES[formula]):
            before = joint.images
            for batch in group:
                for part in joint.split(batch):
                    joint.run(part, lambda name, a, b: rows[name].add(a, b))
                    if joint.images == len(part) and isinstance(group, Sized):  # say early what will not fit
                        store.check_room(store.nbytes / len(part) * (len(batch) * len(group) - len(part)))
            for name in joint.names:
                if rows[name].complete(joint.images - before):
                    alignments[name].add(*rows[name].grams())
                rows[name].n = 0
            store.clear()
        result = dict.fromkeys(joint.names, UNDEFINED)
        for name in joint.compared() if joint.images else ():
            if joint.images >= 2:
                result[name] = rows[name].undefined() or alignments[name].similarity()
    return result


class _Rows:
    """The features of one layer, stored as rows u = a - first a and w = u - scale (b - first b).

    Adding a constant to a feature or scaling one model's features does not change CKA: both make the numbers small.
    """

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.n = 0  # rows in the store
        self.first: tuple[Tensor, Tensor] | None = None
        self.varies = [False, False]
        self.scale: float | None = None  # of model b, towards model a; known once both vary
        self.largest = 0.0
        self.recent = torch.empty(0)
        self.device = torch.device("cpu")

    def add(self, a: Tensor, b: Tensor) -> None:
        """Store the features (n, ...) of some images; a is changed."""
        self.device, a, b = a.device, a.flatten(1), b.flatten(1)
        first_a, first_b = self.first = self.first or (a[:1].clone(), b[:1].clone())
        if a.shape[1] != first_a.shape[1]:
            raise ValueError(
                f"layer {self.name!r}: {a.shape[1]} features for an image, {first_a.shape[1]} for the first; "
                "all images must have the same size"
            )
        u = a.sub_(first_a)
        v = torch.sub(b, first_b, out=self.store.work("w", b.numel(), b.dtype, b.device).view(b.shape))
        if self.scale is None:
            self._find_scale(u, v, _largest(first_a), _largest(first_b))
        w = torch.sub(u, v, alpha=self.scale or 1.0, out=v)
        self.largest = max(_largest(w), _largest(u), self.largest, key=lambda x: math.inf if math.isnan(x) else x)
        if math.isfinite(self.largest):
            exact = self.n < FEW or u.shape[1] <= SMALL or self._alike(u, w)
            self.store.append(self.name, u, w, exact=exact)
            self.n += len(u)

    def _find_scale(self, u: Tensor, v: Tensor, size_a: float, size_b: float) -> None:
        """Scale that makes model b's features as large as model a's, from the first images that differ."""
        self.varies[0] |= _largest(u) > CONSTANT * size_a
        self.varies[1] |= _largest(v) > CONSTANT * size_b
        if all(self.varies):
            ratio = float(u.norm()) / float(v.norm())
            self.scale = ratio if 0 < ratio < math.inf else 1.0

    def _alike(self, u: Tensor, w: Tensor) -> bool:
        """Whether 16 bits would mostly hold what rows have in common, for example after a first image that is blank."""
        step = u.shape[1] // SAMPLE
        sample = torch.stack((u[-RECENT:, ::step], w[-RECENT:, ::step])).float().cpu()
        self.recent = torch.cat((self.recent, sample), dim=1)[:, -RECENT:] if len(self.recent) else sample
        apart = self.recent - self.recent.mean(1, keepdim=True)
        return bool((self.recent.square().sum((1, 2)) > COMMON * apart.square().sum((1, 2))).any())

    def complete(self, n: int) -> bool:
        """Whether there are rows of all n images, and Gram matrices to make of them."""
        return self.n == n >= 2 and self.scale is not None and math.isfinite(self.largest)

    def grams(self) -> tuple[Tensor, Tensor]:
        """K = sum u u^T and, with M = sum w (u - w/2)^T, K - L = M + M^T, exact to the precision of w; float64, CPU."""
        k, m = torch.zeros(2, self.n, self.n, dtype=torch.float64)
        for pair in self.store.columns(self.name):
            check_stop()
            u, w = pair = pair.to(self.device).div_(self.largest)
            pair -= pair.mean(1, keepdim=True)  # products in float32 are then of what differs between the images
            k += (u @ u.T).cpu()
            m += (w @ u.sub_(w, alpha=0.5).T).cpu()
        return k.mul_(self.largest**2), (m + m.T).mul_(self.largest**2)

    def undefined(self) -> LayerSimilarity | None:
        """The similarity where the features leave nothing to compute; else None."""
        if not math.isfinite(self.largest) or (self.scale is None and any(self.varies)):
            return UNDEFINED
        return LayerSimilarity(1.0, 0.0) if self.scale is None else None


def _largest(x: Tensor) -> float:
    """Largest absolute value; NaN if there is one."""
    return float(torch.stack(torch.aminmax(x)).abs().max()) if x.numel() else 0.0


def _groups(batches: Iterable[Tensor], least: int) -> Iterator[list[Tensor]]:
    """Batches that make one pair of Gram matrices: each one with at least so many images, and small ones after it."""
    group: list[Tensor] = []
    for batch in batches:
        if len(batch) >= least and sum(map(len, group)) >= least:
            yield group
            group = []
        group.append(batch)
    yield group


def layerwise_cosine(
    model_a: nn.Module,
    model_b: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Iterable[str] | None = None,
    mode: str = "sample",
) -> dict[str, LayerSimilarity]:
    r"""Cosine similarity of two models' features on the same images, at each layer (Fed-LWR-v1).

    Args:
        model_a: first model.
        model_b: a model with the same layers.
        batches: batches of input images, (n_b, ...) each.
        layers: names of the layers wanted (default: all).
        mode: ``"sample"``: mean over the images of the cosine of an image's two feature vectors; ``"matrix"``: one
            cosine of the features of all images, taken as one vector.

    Returns:
        Similarity by layer name, in state-dict order; delta in [-1, 1]. Norms are at least 1e-8. Where both vectors
        are below that, delta is 1 (a dead layer is like a dead layer), where one is, about 0. NaN: no image, a layer
        that cannot be compared (see :func:`layerwise_cka`), features that are not finite.

    Raises:
        ValueError, TypeError: as :func:`layerwise_cka`; unknown mode.

    Source:
        Yan et al., MICCAI 2024, ablation v1; the paper does not say whether the cosine is per sample.
    """
    choice("mode", mode, COSINE_MODES)
    with JointPass(model_a, model_b, layers) as joint:
        sums = {name: torch.zeros(1 if mode == "sample" else 4, dtype=torch.float64) for name in joint.names}

        def visit(name: str, a: Tensor, b: Tensor) -> None:
            a, b = a.flatten(1).double(), b.flatten(1).double()
            products = torch.stack([(a * a).sum(1), (b * b).sum(1), (a * b).sum(1), (a - b).square().sum(1)]).cpu()
            sums[name] += cosine_distance(*products).sum() if mode == "sample" else products.sum(1)

        for batch in batches:
            for part in joint.split(batch):
                joint.run(part, visit)
        result = dict.fromkeys(joint.names, UNDEFINED)
        for name in joint.compared() if joint.images else ():
            total = sums[name]
            distance = float(total / joint.images if mode == "sample" else cosine_distance(*total))
            if math.isfinite(distance):
                result[name] = LayerSimilarity(1 - distance, distance)
    return result
