"""Compute linear CKA and cosine of two models' features by layer, over a whole data set in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.checks import choice, number, refuse
from fairflare.base.stopping import check_stop
from fairflare.core.features.joint_pass import JointPass
from fairflare.core.similarity.formulas import LEAST_SAMPLES, UNDEFINED, Alignment, LayerSimilarity, cosine_distance
from fairflare.core.similarity.products import lower_products, products_of_rows, whole
from fairflare.core.similarity.store import Store

if TYPE_CHECKING:
    from torch import Tensor, nn

ESTIMATORS = ("biased", "unbiased", "minibatch_biased", "minibatch_unbiased")
CONSTANT = 1e-6  # a feature that varies by less than this over the images, relative to its size, counts as constant
BLOCK = 8000  # columns stored and multiplied together: they fit a processor's cache; powers of two would be slow
WIDE = 20000  # largest number of columns of a block that holds a part of one channel
GPU_BLOCK = 2**18  # columns of a block on a GPU: so many that waiting for the host takes little time
LEAST_PIXELS = 64  # a layer's products are reused for the batch norm after it if a channel has at least these pixels
PRODUCTS = 2**26  # largest number of bytes of products of single channels that are in memory at once
LEAST_TRACE = 1e-25  # products are in float64 if the sum of squared features is smaller: float32 could underflow
CANCELLED = 2e-5 * 2**23  # as above, if a difference is this many times smaller than its terms: error 2e-5
ACROSS = 1e-4 * 2**23  # as above, if terms are this many times larger than the part of the difference that changes CKA
STANDS_OUT = 4.0  # ratio of distances above which the first image is far from the others: subtracting it costs digits
FAR, LOOKED_AT = 0.05, 8  # ratio of K - L to K above which models are far apart; number of images for this test
ALONE = 4.0  # products are in float64 if fewer rows than this make up nearly the whole sum of squared norms


def layerwise_cka(
    model_a: nn.Module,
    model_b: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Iterable[str] | None = None,
    estimator: str = "biased",
    memory: float = 2**30,
    scratch: str | Path | None = None,
    expected: int | None = None,
) -> dict[str, LayerSimilarity]:
    r"""Return linear CKA of two models' features on the same images, at each layer.

    .. math:: \delta^m = HSIC(K^m, L^m) / \sqrt{HSIC(K^m, K^m) \, HSIC(L^m, L^m)}

    with the n x n Gram matrices of the outputs of layer m, flattened image by image, in the two models. Layers are
    matched by name. The relative error of 1 - delta is at most 1e-4 for the features as the pass made them (float32),
    whatever the batch size; it can be larger below 1 - delta = 1e-9, and below 1e-6 for few features of two or three
    images. The models run in evaluation mode, without gradients, and are left as they were.

    Args:
        model_a: first model; for Fed-LWR the local model.
        model_b: second model with the same layers, on any device; for Fed-LWR the anchor.
        batches: batches of input images, (n_b, ...) each, all images of one size; read once.
        layers: names of the layers to compare (default: all of :func:`parameter_layers`).
        estimator: ``"biased"`` (the paper's Eq. 2) or ``"unbiased"`` (HSIC_1), over all images; or
            ``"minibatch_biased"``, ``"minibatch_unbiased"``, the quotient of sums of each batch's HSIC (authors' code):
            then a batch with fewer than 2 or 4 images is joined to the one before it.
        memory: number of bytes for stored features on model a's device; further features go to a scratch file. Memory
            is also needed for features of some images (two, and as many as fit into 96 MiB), 256 KB per image (GPU: 8
            MB), products of channels (64 MiB) and 20 n x n matrices.
        scratch: existing folder for the scratch file (default: the system's temporary folder). The file takes
            ``8 n (sum of feature sizes) - memory`` bytes and is always removed.
        expected: number of images in all batches; if given, missing scratch space is reported after the first image.

    Returns:
        Similarity by layer name, in state-dict order. delta is in [0, 1] (biased) or [-1, 1] (unbiased). It is 1 and
        the dissimilarity 0 if the features of both models are constant over the images (dead layer). It is NaN if only
        one model's are constant, if features are not finite in float32, if a layer cannot be compared
        (:class:`JointPass`), and for every layer if there is one image. With fewer than 4 images an unbiased estimator
        is replaced by ``"biased"``.

    Raises:
        ValueError: a layer is missing in one model, or features differ in shape between the models or between images
            (the message names the layer); or no layer can be compared, there is no image, or the estimator is unknown.
        TypeError: a batch is not a tensor.
        OSError: the scratch folder has too little space (the message names the folder and the needed and available
            bytes).

    Source:
        Yan et al., MICCAI 2024, Eq. (2) and section 2.2; Kornblith et al., ICML 2019; HSIC_1: Song et al., JMLR 2012.
    """
    choice("estimator", estimator, ESTIMATORS)
    number("memory", memory, low=0)
    least = LEAST_SAMPLES[formula := estimator.removeprefix("minibatch_")]
    together = formula == estimator
    with JointPass(model_a, model_b, layers, LEAST_PIXELS) as joint, closing(Store(memory, scratch)) as store:
        rows = {name: _Rows(name, store) for name in joint.names}
        alignments = {name: Alignment(formula) for name in joint.names}

        def visit(name: str, a: Tensor, b: Tensor) -> None:
            if name in joint.scaled:
                rows[joint.scaled[name]].scaled[name] = _Scaled((a, b), [module[name] for module in joint.modules])
            else:
                rows[name].add(a, b)

        for group in [batches] if together else _groups(batches, least):
            before = joint.images
            for piece in joint.pieces(group):
                joint.run(piece, visit)
                if joint.images == 1 and expected and together:
                    store.check_room((store.bytes_in_memory + store.bytes_in_file) * expected)
            for name in joint.names:
                if rows[name].n == joint.images - before >= 2:
                    for layer, (k, e) in rows[name].grams().items():
                        alignments[layer].add(k, e)
                rows[name].clear()
            store.clear()
        refuse({"the batches hold no image; nothing can be compared": not joint.images})
        result = dict.fromkeys(joint.wanted, UNDEFINED)
        for name in joint.find_comparable():
            if joint.images >= 2:
                measured = rows[joint.scaled[name]].scaled[name] if name in joint.scaled else rows[name]
                of_constant = UNDEFINED if any(measured.varies) else LayerSimilarity(1.0, 0.0)
                result[name] = alignments[name].similarity() if all(measured.varies) else of_constant
    return result


class _Scaled:
    """Describe a batch norm whose features are those of the layer in front, multiplied by a factor for each channel.

    Args:
        first: features of the first image in both models, (1, channels, ...).
        norms: the batch norm in both models, in evaluation mode.
    """

    def __init__(self, first: tuple[Tensor, Tensor], norms: Sequence[Any]) -> None:
        self.sizes = [float(x.double().norm()) for x in first]
        self.varies = [False, False]
        scales = [1.0 if norm.weight is None else norm.weight.double().square() for norm in norms]
        #: Squared factors s_c^2 of both models, (channels,) in float64.
        self.squares: list[Tensor] = [
            (1 / (norm.running_var.double() + norm.eps) * scale).to(first[0].device)
            for norm, scale in zip(norms, scales, strict=True)
        ]
        self.ratio: float | None = None  # ratio of model a's squared features to model b's

    def factors(self, channels: slice, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared scales p of model a's and r of model b's batch norm, (1, channels) each.

        The batch norm's Gram matrix of model a is the sum over its channels of p times the channel's Gram matrix
        before the norm; that of model b is the same sum with r, but for one factor that CKA does not depend on.

        Args:
            channels: the channels for which factors are wanted.
            u, v: sums of squared features of model a and model b, (channels,).
        """
        p, r = (square[None, channels] for square in self.squares)
        if self.ratio is None:  # the first channels suffice, since the ratio need not be exact
            a, b = float(p @ u), float(r @ v)
            self.ratio = a / b if 0 < a < math.inf and 0 < b < math.inf else 1.0
        return p, self.ratio * r

    def see(self, k: Tensor, e: Tensor, scale: float) -> None:
        """Record from the centered matrices K and E whether the features of each model vary over the images."""
        squares = k.diagonal(), (k - e).diagonal() / ((self.ratio or 1.0) * scale**2)
        for i, rows in enumerate(squares):
            self.varies[i] |= not float(rows.max().clamp(min=0).sqrt()) <= CONSTANT * self.sizes[i]


class _Rows:
    """Store one layer's features in float32 as rows u = a - first a and w = u - scale v with v = b - first b.

    Adding a constant to a feature or scaling one model's features does not change CKA; both are used to make the stored
    numbers small. If the first image is far from the others, a typical image is subtracted in its place. If the models
    are far from each other, v itself is stored, since w would be no more precise.
    """

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.n = 0  # number of rows in the store
        self.pieces: list[list[Callable[[], Tensor]]] = []  # functions that read blocks (2, rows, columns)
        self.first: tuple[Tensor, Tensor] | None = None
        self.varies = [False, False]
        self.scale: float | None = None  # factor for model b's features; known once the features of both models vary
        self.far = self.cleared = False  # whether v is stored in place of w; whether stored rows were removed
        self.looked = False  # whether the first image was compared with others
        self.scaled: dict[str, _Scaled] = {}  # batch norms that are computed from this layer's features
        self.pixels = 1  # number of values of a channel

    def clear(self) -> None:
        self.n, self.pieces, self.cleared = 0, [], True

    def add(self, a: Tensor, b: Tensor) -> None:
        """Store the features, (n, ...), of some images in both models."""
        self.pixels = a.shape[2:].numel()
        a, b = a.flatten(1), b.flatten(1)
        others = slice(0 if self.first else 1, None)
        self.first = self.first or (a[:1].clone(), b[:1].clone())
        width, width_of_first = a.shape[1], self.first[0].shape[1]
        refuse({
            f"layer {self.name!r}: {width} features for an image, {width_of_first} for the first; all images must have "
            "the same size": width != width_of_first,
        })  # fmt: skip
        if self.scale is None and width:
            self._find_scale((a - self.first[0], b - self.first[1]), (a, b))
        if width and len(a[others]) and not self.looked:
            self._look_at_first(a[others], b[others])
        self.pieces.append(self._store(a, b))
        self.n += len(a)

    def _look_at_first(self, *features: Tensor) -> None:
        """Choose another image to subtract if the first is far from the others, whose features are (n, width) each."""
        assert self.first is not None
        self.looked, some = True, [x[:: -(-len(x) // LOOKED_AT)] for x in features]
        middle = int(some[0].double().norm(dim=1).argsort()[(len(some[0]) - 1) // 2])
        bases = some[0][middle : middle + 1].clone(), some[1][middle : middle + 1].clone()
        for x, first, base in zip(some, self.first, bases, strict=True):
            apart = (x - base).double().norm(dim=1).sort().values[1:]
            usual = apart.median() if len(apart) else base.double().norm()
            if (first - base).double().norm() > STANDS_OUT * usual:  # the comparison is False with NaN
                old, self.first = self.first, bases
                self.pieces = [self._store(*old)] if self.pieces else []
                return

    def _store(self, a: Tensor, b: Tensor) -> list[Callable[[], Tensor]]:
        """Write the rows of some images to the store, and return one function per block that reads the block."""
        assert self.first is not None
        (first_a, first_b), blocks = self.first, []
        for part in self._parts(a):
            pair = a.new_empty(2, *a[:, part].shape)
            u, w = pair
            torch.sub(a[:, part], first_a[:, part], out=u)
            torch.sub(b[:, part], first_b[:, part], out=w)
            if not self.far:
                torch.sub(u, w, alpha=self.scale or 1.0, out=w)
            blocks.append(self.store.keep(pair.float()))
        return blocks

    def _parts(self, a: Tensor) -> list[slice]:
        """Return the columns of each block of features: whole channels, or a part of one channel."""
        block, pixels = BLOCK if a.device.type == "cpu" else GPU_BLOCK, max(1, self.pixels)
        whole = pixels * max(1, block // pixels)
        step = -(-whole // -(-whole // max(block, WIDE)))  # divide a channel into equal parts
        return [
            slice(part, min(part + step, first + whole))
            for first in range(0, a.shape[1], whole)
            for part in range(first, min(first + whole, a.shape[1]), step)
        ]

    def _find_scale(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Find the factor to make b's features, or their changes, as large as a's; of both, the one nearer to 1."""
        alone = self.varies[1]  # rows of b are stored already, with the factor 1
        for i, (x, first) in enumerate(zip(pairs[0], self.first or (), strict=True)):
            self.varies[i] |= not _largest(x) <= CONSTANT * _largest(first)  # NaN counts as varying
        if all(self.varies):
            # The last image suffices for the ratio.
            ratios = [float(x[-1].double().norm() / y[-1].double().norm()) for x, y in pairs]
            usable = [ratio for ratio in ratios if 0 < ratio < math.inf and not alone]
            self.scale = min(usable, key=lambda ratio: abs(math.log(ratio)), default=1.0)
            # Rows of the first image are 0 in both forms. The factor must be moderate, or squares of v could underflow.
            if self.n <= 1 and not self.cleared and 1e-3 < self.scale < 1e3:
                some = torch.stack([x[-LOOKED_AT:] - x[-LOOKED_AT:].mean(0) for x in pairs[0]])
                k, l = products_of_rows(some, some)
                self.far = bool((k - self.scale**2 * l).norm() > FAR * k.norm())

    def grams(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return K and E = K - L of this layer and of the batch norms after it by name, (n, n) each in float64.

        The result is empty if no feature varies over the images.

        With g = sum u u^T and m = sum w (u - w/2)^T, E is m + m^T, exact to the precision of w. If the models are far
        from each other, m is sum v v^T, of which only one half is computed, and E is g - m. The matrices of a batch
        norm are sums of the same products, with factors by channel (:class:`_Scaled`).
        """
        if not any(self.varies):
            return {}
        for dtype in (torch.float32, torch.float64):
            g, m, terms = self._sums(dtype)
            k, e = map(whole, g)
            e += whole(m) if self.far else m + m.mT
            if all(map(_precise, k, e, terms)):
                break
        by_layer = dict(zip([self.name, *self.scaled], zip(k, e, strict=True), strict=True))
        for name, norm in self.scaled.items():
            norm.see(*by_layer[name], self.scale or 1.0)
        return by_layer

    def _sums(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Sum products over the features, in float64 from products in ``dtype``, for this layer and its batch norms.

        Returns:
            The lower half of g, for K and for the part of g in E, (2, layers, n, n); m, (layers, n, n), or its lower
            half if the models are far from each other; and the size of the terms of E, (layers,).
        """
        layers, n = 1 + len(self.scaled), self.n
        g_sum, m_sum, terms = (
            torch.zeros(*shape, dtype=torch.float64, device=self.first[0].device if self.first else None)
            for shape in ((2, layers, n, n), (layers, n, n), (layers,))
        )
        most = max(1, PRODUCTS // (2 * n**2 * dtype.itemsize))
        done = 0  # number of columns that are summed
        for blocks in zip(*self.pieces, strict=True):
            check_stop()
            rows = [block() for block in blocks]
            columns = min(self.pixels, rows[0].shape[2]) if self.scaled else rows[0].shape[2]
            pair = g_sum.new_empty(2, rows[0].shape[2] // columns, n, columns, dtype=dtype)
            for place, some in zip(pair.split([x.shape[1] for x in rows], dim=2), rows, strict=True):
                place.copy_(some.unflatten(2, (-1, columns)).transpose(1, 2))
            pair -= pair.mean(2, keepdim=True)  # so that only differences between images are multiplied
            for u, w in pair.split(most, dim=1):  # shapes (channels, n, columns)
                g = lower_products(u)
                m = lower_products(w) if self.far else products_of_rows(w, torch.sub(u, w, alpha=0.5))
                for_k, for_e, for_m = self._coefficients(done // self.pixels, g, m)
                done += len(g) * columns
                norms_g, norms_m = (torch.linalg.vector_norm(x, dim=(1, 2)).double() for x in (g, m))
                terms += for_e.abs() @ norms_g + 2 * for_m.abs() @ norms_m
                g_sum += (torch.cat([for_k, for_e]).to(dtype) @ g.flatten(1)).view_as(g_sum)
                m_sum += (for_m.to(dtype) @ m.flatten(1)).view_as(m_sum)
        return g_sum, m_sum, terms

    def _coefficients(self, first: int, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of some channels' products: of g in K, of g in E, and of m in E.

        Args:
            first: number of the first channel.
            g, m: products of the channels, (channels, n, n) each.

        Returns:
            Three factors, (layers, channels) each, in float64.
        """
        square = (self.scale or 1.0) ** 2
        u, x = (products.diagonal(dim1=1, dim2=2).sum(1).double() for products in (g, m))
        v = square * x if self.far else u - 2 * x
        one, channels = torch.ones_like(u)[None], slice(first, first + len(g))
        rows = [(one, one), *(norm.factors(channels, u, v) for norm in self.scaled.values())]
        p, r = (torch.cat(column) for column in zip(*rows, strict=True))
        return (p, p, -square * r) if self.far else (p, p - r, r)


def _precise(k: Tensor, e: Tensor, terms: Tensor) -> bool:
    """Return whether products in float32 were precise enough.

    Products are precise enough if K does not consist of a few rows alone and the terms of E do not cancel.
    """
    rows = k.diagonal()
    spread = rows.sum() > LEAST_TRACE and rows.sum() ** 2 >= ALONE * rows.square().sum()
    across = e - (e * k).sum() / k.square().sum() * k  # the part of E that changes CKA
    return bool(spread and terms <= CANCELLED * e.norm() and terms <= ACROSS * across.norm())


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor as a tensor on its device; NaN if a value is NaN."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _groups(batches: Iterable[Tensor], least: int) -> Iterator[list[Tensor]]:
    """Yield lists of batches; the batches of one list share one pair of Gram matrices.

    A list is closed by the next batch of at least ``least`` images, once it has ``least`` images itself.
    """
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
) -> dict[str, LayerSimilarity]:
    """Return the cosine similarity of two models' features on the same images, at each layer (Fed-LWR-v1).

    Args:
        model_a, model_b, batches, layers: as in :func:`layerwise_cka`, which raises the same errors.

    Returns:
        Similarity by layer name, in state-dict order: the mean over the images of the cosine of an image's two feature
        vectors; delta in [-1, 1]. A norm below 1e-8 counts as 1e-8. If both norms
        are below, delta is 1 (two dead layers are alike); if one is, delta is about 0. delta is NaN if there is no
        image, if a layer cannot be compared, or if features are not finite.

    Source:
        Yan et al., MICCAI 2024, ablation v1; the paper does not say whether the cosine is per sample.
    """
    with JointPass(model_a, model_b, layers) as joint:
        sums = {name: torch.zeros((), dtype=torch.float64) for name in joint.names}

        def visit(name: str, a: Tensor, b: Tensor) -> None:
            a, b = a.flatten(1).double(), b.flatten(1).double()
            products = torch.stack([(a * a).sum(1), (b * b).sum(1), (a * b).sum(1), (a - b).square().sum(1)]).cpu()
            sums[name] += cosine_distance(*products).sum()

        for piece in joint.pieces(batches):
            joint.run(piece, visit)
        result = dict.fromkeys(joint.names, UNDEFINED)
        for name in joint.find_comparable() if joint.images else ():
            distance = float(sums[name] / joint.images)
            if math.isfinite(distance):
                result[name] = LayerSimilarity(1 - distance, distance)
    return result
