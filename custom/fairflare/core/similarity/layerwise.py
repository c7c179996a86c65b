"""Linear CKA and cosine of two models' features, layer by layer, over a whole data set in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from fairflare.base.checks import choice, number
from fairflare.base.stopping import check_stop
from fairflare.core.features.joint_pass import JointPass
from fairflare.core.similarity.formulas import LEAST_SAMPLES, UNDEFINED, Alignment, LayerSimilarity, cosine_distance
from fairflare.core.similarity.store import Store

ESTIMATORS = ("biased", "unbiased", "minibatch_biased", "minibatch_unbiased")
COSINE_MODES = ("sample", "matrix")
CONSTANT = 1e-6  # a feature that changes less than this (relative to its size) over the images is constant
BLOCK = 8000  # columns kept and multiplied side by side: few enough for a processor's cache; products are slow at 2**k
GPU_BLOCK = 2**18  # as many that what waits for the host is little
ALONE = 4.0  # products are in float64 where fewer rows than this are as large (squared norms) as all of them together


def layerwise_cka(
    model_a: nn.Module,
    model_b: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Iterable[str] | None = None,
    estimator: str = "biased",
    passes: Sequence[Iterable[Tensor]] = (),
    memory: float = 2**30,
    scratch: str | Path | None = None,
    expected: int | None = None,
) -> dict[str, LayerSimilarity]:
    r"""Linear CKA of two models' features on the same images, at each layer.

    .. math:: \delta^m = HSIC(K^m, L^m) / \sqrt{HSIC(K^m, K^m) \, HSIC(L^m, L^m)}

    with the n x n Gram matrices of the outputs of layer m, flattened image by image, in the two models. Layers are
    matched by name. The relative error of 1 - delta is at most 1e-4 for float32 models, whatever the batch size; it can
    be larger below 1 - delta = 1e-9. The models run in evaluation mode, without gradients, and are left as they were.

    Args:
        model_a: for Fed-LWR the local model.
        model_b: a model with the same layers (the anchor), on any device.
        batches: batches of input images, (n_b, ...) each, all images of one size; read once.
        layers: names of the layers wanted (default: all of :func:`parameter_layers`).
        estimator: ``"biased"`` (the paper's Eq. 2) or ``"unbiased"`` (HSIC_1), over all images; or
            ``"minibatch_biased"``, ``"minibatch_unbiased"``, the quotient of sums of each batch's HSIC (authors' code):
            then a batch with fewer than 2 or 4 images is joined to the one before it.
        passes: of each pass over the images its batches, as numbers of images (0: the first one), for minibatch
            estimators that sum over other batches than those that come. All images are then kept, and read once.
        memory: bytes for stored features, on model a's device; what exceeds them goes to a scratch file. Beyond it:
            features of some images (two, and what fits into 96 MiB), 192 KB an image (GPU: 6 MB), 7 n x n matrices.
        scratch: existing folder for that file (default: the system's temporary folder). It takes ``8 n (sum of feature
            sizes) - memory`` bytes; always removed.
        expected: so many images will come: what does not fit is then said after the first one.

    Returns:
        Similarity by layer name, in state-dict order. delta is in [0, 1] (biased) or [-1, 1] (unbiased); 1 with
        dissimilarity 0 where both models' features are the same for every image (dead layer). NaN where only one
        model's are, where they are not finite in float32, where a layer cannot be compared (:class:`JointPass`),
        and everywhere with one image. With fewer than 4 an unbiased estimator is replaced by ``"biased"``.

    Raises:
        ValueError: a layer missing in one model, features of different shape in the two models or for different images
            (all name the layer); no layer can be compared; no image; unknown estimator.
        TypeError: a batch that is not a tensor.
        OSError: not enough space in the scratch folder (names folder, needed, available).

    Source:
        Yan et al., MICCAI 2024, Eq. (2) and section 2.2; Kornblith et al., ICML 2019; HSIC_1: Song et al., JMLR 2012.
    """
    choice("estimator", estimator, ESTIMATORS[2:] if passes else ESTIMATORS)
    number("memory", memory, low=0)
    least = LEAST_SAMPLES[formula := estimator.removeprefix("minibatch_")]
    chosen: list[Tensor | slice] = [torch.cat(group) for batched in passes for group in _groups(batched, least)]
    together = formula == estimator or bool(chosen)
    with JointPass(model_a, model_b, layers) as joint, closing(Store(memory, scratch)) as store:
        rows = {name: _Rows(name, store) for name in joint.names}
        alignments = {name: Alignment(formula) for name in joint.names}
        for group in [batches] if together else _groups(batches, least):
            before = joint.images
            for piece in joint.pieces(group):
                joint.run(piece, lambda name, a, b: rows[name].add(a, b))
                if joint.images == 1 and expected and together:
                    store.check_room((store.bytes_in_memory + store.bytes_in_file) * expected)
            for name in joint.names:
                if rows[name].n == joint.images - before >= 2 and any(rows[name].varies):
                    k, e = rows[name].grams()
                    for i in chosen or [slice(None)]:
                        alignments[name].add(k[i][:, i], e[i][:, i])
                rows[name].clear()
            store.clear()
        if not joint.images:
            raise ValueError("the batches hold no image; nothing can be compared")
        result = dict.fromkeys(joint.names, UNDEFINED)
        for name in joint.compared():
            if joint.images >= 2:
                result[name] = rows[name].undefined() or alignments[name].similarity()
    return result


class _Rows:
    """The features of one layer, kept in float32 as rows u = a - first a and w = u - scale (b - first b).

    Adding a constant to a feature or scaling one model's features does not change CKA: both make the numbers small.
    """

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.n = 0  # rows in the store
        self.pieces: list[list[Callable[[], Tensor]]] = []  # of some rows each: block by block, (2, rows, columns)
        self.first: tuple[Tensor, Tensor] | None = None
        self.varies = [False, False]
        self.scale: float | None = None  # of model b, towards model a; known once both vary
        self.largest = torch.zeros(())  # value of u and w

    def clear(self) -> None:
        self.n, self.pieces = 0, []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Keep the features (n, ...) of some images."""
        a, b = a.flatten(1), b.flatten(1)
        first_a, first_b = self.first = self.first or (a[:1].clone(), b[:1].clone())
        if (width := a.shape[1]) != first_a.shape[1]:
            each = f"{width} features for an image, {first_a.shape[1]} for the first"
            raise ValueError(f"layer {self.name!r}: {each}; all images must have the same size")
        if self.scale is None and width:
            self._find_scale((a - first_a, b - first_b), (a, b))
        blocks, step = [], BLOCK if a.device.type == "cpu" else GPU_BLOCK
        for part in (slice(i, i + step) for i in range(0, width, step)):
            pair = a.new_empty(2, *a[:, part].shape)
            u, w = pair
            torch.sub(a[:, part], first_a[:, part], out=u)
            torch.sub(b[:, part], first_b[:, part], out=w)
            torch.sub(u, w, alpha=self.scale or 1.0, out=w)
            self.largest = torch.maximum(self.largest.to(pair), _largest(pair))
            blocks.append(self.store.keep(pair.float()))
        self.pieces.append(blocks)
        self.n += len(a)

    def _find_scale(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Scale that makes b's features as large as a's: by changes or by features, whichever is nearer to 1."""
        alone = self.varies[1]  # rows of b are kept already, with 1
        for i, (x, first) in enumerate(zip(pairs[0], self.first or (), strict=True)):
            self.varies[i] |= not _largest(x) <= CONSTANT * _largest(first)  # so that NaN varies
        if all(self.varies):
            norms = [[x[-1].double().norm() for x in pair] for pair in pairs]  # one image tells enough
            ratios = [float(u / v) for u, v in norms]
            usable = [ratio for ratio in ratios if 0 < ratio < math.inf and not alone]
            self.scale = min(usable, key=lambda ratio: abs(math.log(ratio)), default=1.0)

    def grams(self) -> tuple[Tensor, Tensor]:
        """K = sum u u^T and, with M = sum w (u - w/2)^T, K - L = M + M^T, exact to the precision of w; float64."""
        size = float(self.largest)  # so that no square overflows or vanishes
        for dtype in (torch.float32, torch.float64):
            k, m = torch.zeros(2, self.n, self.n, dtype=torch.float64, device=self.largest.device)
            for blocks in zip(*self.pieces, strict=True):
                check_stop()
                pair = torch.cat([block().to(k.device) for block in blocks], dim=1).to(dtype).div_(size)
                u, w = pair.sub_(pair.mean(1, keepdim=True))  # products are then of what differs between images
                k += u @ u.T
                m += w @ u.sub_(w, alpha=0.5).T
            rows = k.diagonal()
            if rows.sum() ** 2 >= ALONE * rows.square().sum():
                break
        return k.mul_(size).mul_(size), (m + m.T).mul_(size).mul_(size)

    def undefined(self) -> LayerSimilarity | None:
        """The similarity where the features leave nothing to compute; else None."""
        if any(self.varies):
            return None if all(self.varies) and self.largest <= torch.finfo(torch.float32).max else UNDEFINED
        return LayerSimilarity(1.0, 0.0)


def _largest(x: Tensor) -> Tensor:
    """Largest absolute value, on its device; NaN if there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


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
    """Cosine similarity of two models' features on the same images, at each layer (Fed-LWR-v1).

    Args:
        model_a, model_b, batches, layers: as of :func:`layerwise_cka`, and so are the errors.
        mode: ``"sample"``: mean over the images of the cosine of an image's two feature vectors; ``"matrix"``: one
            cosine of the features of all images, taken as one vector.

    Returns:
        Similarity by layer name, in state-dict order; delta in [-1, 1]. Norms are at least 1e-8. Where both vectors
        are below that, delta is 1 (a dead layer is like a dead layer), where one is, about 0. NaN: no image, a layer
        that cannot be compared, features that are not finite.

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

        for piece in joint.pieces(batches):
            joint.run(piece, visit)
        result = dict.fromkeys(joint.names, UNDEFINED)
        for name in joint.compared() if joint.images else ():
            total = sums[name]
            distance = float(total / joint.images if mode == "sample" else cosine_distance(*total))
            if math.isfinite(distance):
                result[name] = LayerSimilarity(1 - distance, distance)
    return result
