r"""How alike are two models' features? Linear CKA and cosine, layer by layer, over a whole data set.

:func:`layerwise_cka` is exact (every image and every feature, no pooling, no sampling) in bounded memory.
What makes that possible:

- CKA needs, per layer, only the two n x n Gram matrices K (model a) and L (model b), and these are sums over
  features: features can be written down once, in whatever order the forward pass makes them, and read back in
  column chunks.
- The weights of Fed-LWR are made of 1 - delta, which may be 1e-4 or less. So the *difference* of the two
  models' features is stored next to the features of the first, and K - L is summed from it: rounding is then
  relative to the difference and not to the features, and half precision is enough.
- Adding a constant to a feature or scaling one model's features does not change CKA. Both freedoms are used
  to make the stored numbers small: the first image is subtracted, and the second model is scaled towards the
  first.
- A batch norm in evaluation mode is one gain and one offset per channel of the layer before it. Where the
  forward pass shows that to be so (and where it costs no accuracy, and a channel has 32 features or more),
  nothing is stored for it: its Gram matrices are made from those of its predecessor's channels. That halves the
  work in the usual U-Net or ResNet.
"""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "LayerSimilarity",
    "center",
    "gram",
    "hsic",
    "layer_owner",
    "layerwise_cka",
    "layerwise_cosine",
    "linear_cka",
    "parameter_layers",
]

ESTIMATORS = ("biased", "unbiased", "minibatch_biased", "minibatch_unbiased")
STORAGE = ("float16", "float32")
COSINE_MODES = ("sample", "matrix")
COSINE_EPS = 1e-8  # least norm in a cosine

HELD_BYTES = 96 * 2**20  # features of model a that wait for model b: sets how many images go through at once
PENDING_BYTES = 64 * 2**20  # features handed to the writer thread and not yet written
TRIAL_IMAGES = 8  # that are stored in float32 while it is found out for which layers float16 will do
TRIAL_FEATURES = 2**12  # of a layer, on which that is found out
HALF_ROUNDING = 2e-4  # of a float16, root mean square, relative
HALF_ERROR = 3e-5  # largest expected relative error of 1 - delta with which a layer is stored in float16
BLOCK_COLUMNS = 8192  # most features that are stored, and multiplied, side by side
READ_BYTES = 8 * 2**20  # read from the scratch file at once
PADDING = 16  # of a row of features, in numbers: matrix products are slow where rows are 2**k bytes apart
PRODUCTS = 2**18  # numbers in the Gram matrices, channel by channel, made at once
CONSTANT = 1e-6  # a feature that changes less than this (relative to its size) over the images is constant
SNAP = 2.0**-6  # a scale of model b this close to 1 is 1: subtracting first is then free of rounding
CANCELLATION = 8.0  # most that a derived batch norm may amplify the rounding of its stored predecessor
DERIVED_FEATURES = 32  # fewest of a channel: below, storing them costs less than a Gram matrix for each channel
DERIVED_ERROR = 1e-3  # a derived batch norm must reproduce its real output this well, relative
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Matrix = Tensor | np.ndarray


class LayerSimilarity(NamedTuple):
    """Similarity of two models' features at one layer.

    Attributes:
        delta: the similarity; 1 when alike, NaN where it is not defined.
        dissimilarity: 1 - delta, with its own relative precision when delta is close to 1.
    """

    delta: float
    dissimilarity: float


UNDEFINED = LayerSimilarity(math.nan, math.nan)


# --- two matrices -------------------------------------------------------------------------------------------


def gram(x: Matrix) -> Tensor:
    """Linear-kernel Gram matrix ``x x^T`` of an (n, p) feature matrix, (n, n) in float64."""
    features = _matrix("x", x)
    return features @ features.T


def center(k: Tensor, estimator: str = "biased") -> Tensor:
    r"""Center a Gram matrix so that HSIC is a plain inner product of two centered matrices.

    ``"biased"``: :math:`HKH`, :math:`H = I - 11^T/n`. ``"unbiased"``: U-centering; zero diagonal and, off it,
    :math:`k_{ij} - r_i/(n-2) - r_j/(n-2) + s/((n-1)(n-2))` with r, s the row and total sums of K without its
    diagonal.

    Args:
        k: symmetric (n, n) matrix; not changed. n >= 1, and n >= 3 for ``"unbiased"``.
        estimator: ``"biased"`` or ``"unbiased"``.

    Returns:
        The centered (n, n) matrix.
    """
    n = k.shape[0]
    if estimator == "biased":
        rows = k.mean(dim=1)
        return k - rows[:, None] - rows[None, :] + rows.mean()
    k = k.clone()
    k.fill_diagonal_(0)
    rows = k.sum(dim=1) / (n - 2)
    k -= rows[:, None]
    k -= rows[None, :]
    k += rows.sum() / (n - 1)
    k.fill_diagonal_(0)
    return k


def hsic(k: Tensor, l: Tensor, estimator: str = "biased") -> float:
    r"""Hilbert-Schmidt independence criterion of two Gram matrices.

    ``"biased"``: :math:`vec(HKH) \cdot vec(HLH) / (n-1)^2`. ``"unbiased"``: HSIC_1, here as the inner product
    of the two U-centered matrices over :math:`n(n-3)`, which is the same number as the form with three
    traces.

    Args:
        k: (n, n), symmetric. n >= 2, and n >= 4 for ``"unbiased"``.
        l: (n, n), symmetric.
        estimator: ``"biased"`` or ``"unbiased"``.

    Returns:
        HSIC; for ``k is l`` always >= 0.

    Raises:
        ValueError: shapes differ, too few rows, unknown estimator.

    Source:
        Biased: Yan et al., MICCAI 2024, Eq. (2). Unbiased: Song et al., JMLR 2012, HSIC_1; the U-centered
            form is
        Szekely and Rizzo's.
    """
    _check_choice("estimator", estimator, ("biased", "unbiased"))
    if k.ndim != 2 or k.shape[0] != k.shape[1] or k.shape != l.shape:
        raise ValueError(f"Gram matrices must be square and alike, got {tuple(k.shape)} and {tuple(l.shape)}")
    n, least = k.shape[0], _least_samples(estimator)
    if n < least:
        raise ValueError(f"{estimator} HSIC needs at least {least} samples, got {n}")
    return float((center(k.double(), estimator) * center(l.double(), estimator)).sum()) / _norm_factor(n, estimator)


def linear_cka(x: Matrix, y: Matrix, estimator: str = "biased") -> float:
    r"""Linear centered kernel alignment of two feature matrices of the same samples.

    .. math:: \delta = HSIC(K, L) / \sqrt{HSIC(K, K) \, HSIC(L, L)}, \quad K = x x^T, \; L = y y^T

    Args:
        x: (n, p), row i the features of sample i; tensor or array, computed in float64.
        y: (n, q), of the same samples.
        estimator: ``"biased"`` or ``"unbiased"``.

    Returns:
        delta in [0, 1] (biased) or [-1, 1] (unbiased). 1 when x and y are both constant over the samples, NaN
        when only one is, when n < 2, when a value is not finite, and when an unbiased denominator is 0.

    Raises:
        ValueError: not two matrices with the same number of rows, unknown estimator, ``"unbiased"`` with n 2
            or 3.

    Source:
        Yan et al., MICCAI 2024, Eq. (2); Kornblith et al., ICML 2019. Unbiased: HSIC_1 of Song et al., JMLR
        2012.
    """
    _check_choice("estimator", estimator, ("biased", "unbiased"))
    x, y = _matrix("x", x), _matrix("y", y)
    n = x.shape[0]
    if y.shape[0] != n:
        raise ValueError(f"x and y must have the same number of rows, got {n} and {y.shape[0]}")
    if n < 2:
        return math.nan
    if n < _least_samples(estimator):
        raise ValueError(f"the unbiased estimator needs at least 4 samples, got {n}")
    if not (bool(x.isfinite().all()) and bool(y.isfinite().all())):
        return math.nan
    x, x_constant = _unit_features(x)
    y, y_constant = _unit_features(y)
    if x_constant or y_constant:
        return 1.0 if x_constant and y_constant else math.nan
    k, l = center(x @ x.T, estimator), center(y @ y.T, estimator)
    norms = float(k.norm()) * float(l.norm())
    if not norms > 0:
        return math.nan
    low = 0.0 if estimator == "biased" else -1.0
    return min(1.0, max(low, float((k * l).sum()) / norms))


def _matrix(name: str, value: Matrix) -> Tensor:
    matrix = torch.as_tensor(value).detach().to(device="cpu", dtype=torch.float64)
    if matrix.ndim != 2:
        raise ValueError(f"{name} must be a matrix (samples, features), got shape {tuple(matrix.shape)}")
    return matrix


def _unit_features(x: Tensor) -> tuple[Tensor, bool]:
    """x scaled to largest value 1 and centered, and whether nothing but rounding is left of it."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0:
        return x, True
    x = x / largest
    x = x - x[0]  # first, so that equal rows leave exact zeros
    constant = float(x.abs().max()) <= 1e-14
    return x - x.mean(dim=0), constant


def _norm_factor(n: int, estimator: str) -> float:
    return float((n - 1) ** 2) if estimator == "biased" else float(n * (n - 3))


def _least_samples(estimator: str) -> int:
    return 2 if estimator.endswith("_biased") or estimator == "biased" else 4


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}. Available: {', '.join(map(repr, choices))}")


# --- layers of a model --------------------------------------------------------------------------------------


def layer_owner(model: nn.Module) -> dict[str, str]:
    """Which layer each entry of the state dict belongs to.

    The layer is the module that holds the tensor: the key without its last part. A parametrized weight (as in
    ``torch.nn.utils.parametrizations``) belongs to the module that it is the weight of.

    Returns:
        Layer name by state-dict key, in state-dict order; the model itself is ``""``.
    """
    return {
        key: key.split(".parametrizations.")[0] if ".parametrizations." in key else key.rpartition(".")[0]
        for key in model.state_dict()
    }


def parameter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model: every module with parameters or (persistent) buffers of its own.

    Returns:
        Module by name, in state-dict order. A module registered under two names is there twice, as in the
        state dict.

    Source:
        Fed-LWR counts layers m = 1..M without defining them; one layer for each such module is our reading.
    """
    return {name: model.get_submodule(name) for name in dict.fromkeys(layer_owner(model).values())}


# --- both models over the images ----------------------------------------------------------------------------


@dataclass
class _Trace:
    """What one forward pass of one model did: calls of each layer, and which layer fed which batch norm
    directly."""

    calls: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    fed_by: dict[str, tuple[str, int]] = field(default_factory=dict)

    def record(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.fed_by.pop(name, None)
        if type(module) in BATCH_NORMS and args and isinstance(args[0], Tensor):
            for source, (made, version) in self.outputs.items():
                # the very tensor, not changed in place since
                if made() is args[0] and args[0]._version == version:
                    self.fed_by[name] = (source, self.calls[source])
        self.calls[name] = self.calls.get(name, 0) + 1
        self.outputs[name] = (weakref.ref(output), output._version)

    def sources(self) -> dict[str, str]:
        """Batch norm -> the layer whose *last* output it got in its own last call."""
        return {name: source for name, (source, call) in self.fed_by.items() if call == self.calls[source]}


class _JointPass:
    """Runs two models on the same images and hands over their features of each layer side by side.

    A context manager: inside it both models are in evaluation mode with hooks on their layers; afterwards
        neither has
    a trace of it. Several calls of a layer in one forward pass: the last one counts.
    """

    def __init__(self, model_a: nn.Module, model_b: nn.Module, layers: Iterable[str] | None) -> None:
        found_a, found_b = parameter_layers(model_a), parameter_layers(model_b)
        names = list(found_a if layers is None else dict.fromkeys(layers))
        for name in [*names, *(found_b if layers is None else ())]:
            for which, found in (("model_a", found_a), ("model_b", found_b)):
                if name not in found:
                    raise ValueError(f"layer {name!r} is not in {which}")
        self.models = (model_a, model_b)
        self.names = names
        self.modules = ({n: found_a[n] for n in names}, {n: found_b[n] for n in names})
        self.skipped: set[str] = set()  # layers whose features nobody asks for
        self.held_bytes = 0  # of the last forward pass, for each image
        self.most: int | None = None  # images at once, if there is another limit
        self._held: dict[str, Tensor] = {}  # features of model a that wait for model b
        self._copies: dict[str, Tensor] = {}  # where they are kept, pass after pass: new memory is slow
        self._late: dict[str, Tensor] = {}  # of model b, from layers that model a called more often
        self._traces = (_Trace(), _Trace())
        self._turn: int | None = None
        self._size = 0
        self._visit: Callable[[str, Tensor, Tensor], None] | None = None
        self._undo: list[Callable[[], object]] = []
        # a batch norm without running statistics looks at its whole batch: then a batch must stay in one
        # piece
        self.divisible = not any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None
            for model in self.models
            for m in model.modules()
        )

    def __enter__(self) -> _JointPass:
        modes = [(module, module.training) for model in self.models for module in model.modules()]

        def restore() -> None:
            for module, mode in modes:
                module.training = mode

        self._undo.append(restore)
        for turn, model in enumerate(self.models):
            model.eval()
            for name, module in self.modules[turn].items():
                self._undo.append(module.register_forward_hook(self._hook(turn, name)).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._held.clear()
        self._copies.clear()
        self._late.clear()
        while self._undo:
            self._undo.pop()()

    def restart(self) -> None:
        """Forget what the forward passes so far have shown."""
        self.skipped.clear()
        self.held_bytes = 0

    def split(self, images: Tensor) -> Iterator[Tensor]:
        """The images in pieces small enough for their features to be held; the very first image alone."""
        start = 0
        while start < len(images):
            left = len(images) - start
            if not self.divisible:
                size = left
            elif not self.held_bytes:
                size = 1
            else:
                most = min(max(1, HELD_BYTES // self.held_bytes), self.most or left)
                size = math.ceil(left / math.ceil(left / most))
            yield images[start : start + size]
            start += size

    def run(self, images: Tensor, visit: Callable[[str, Tensor, Tensor], None]) -> dict[str, str]:
        """One forward pass of each model; ``visit(layer, feature_a, feature_b)`` for each layer that both
        reach.

        Features are (n, ...) and of at least float32; they may be changed. Returns, of the batch norms fed
        directly by another layer in both models, that layer's name.
        """
        self._size, self._visit = len(images), visit
        self._traces = (_Trace(), _Trace())
        self._held.clear()
        self._late.clear()
        self.held_bytes = 1
        with torch.no_grad():
            for turn, model in enumerate(self.models):
                self._turn = turn
                model(images.to(_device(model)))
        self._turn = None
        for name, feature in self._late.items():
            self._compare(name, feature)
        self._late.clear()
        self._held.clear()
        sources_a, sources_b = (trace.sources() for trace in self._traces)
        return {name: source for name, source in sources_a.items() if sources_b.get(name) == source}

    def _hook(self, turn: int, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._turn != turn or self._visit is None:  # the two models may share modules
                return
            raw = self._feature(name, output)
            self._traces[turn].record(name, module, args, raw)
            if name in self.skipped:
                self._copies.pop(name, None)
                return
            feature = raw if raw.dtype in (torch.float32, torch.float64) else raw.float()
            if turn == 0:
                if name not in self._held:
                    self.held_bytes += feature.numel() * feature.element_size() // self._size
                # a copy: a later layer may work in place
                self._held[name] = self._copy(name, feature) if feature is raw else feature
                return
            calls_a, calls_b = (trace.calls.get(name, 0) for trace in self._traces)
            if not calls_a:
                return
            if calls_b > calls_a:
                raise ValueError(f"layer {name!r} is called {calls_a} times in model_a and more often in model_b")
            if calls_b < calls_a:  # perhaps not the last one
                self._late[name] = feature.clone()
                return
            self._late.pop(name, None)
            self._compare(name, feature)

        return hook

    def _copy(self, name: str, feature: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (feature.shape, feature.dtype, feature.device):
            copy = self._copies[name] = torch.empty(feature.shape, dtype=feature.dtype, device=feature.device)
        return copy.copy_(feature)

    def _compare(self, name: str, feature: Tensor) -> None:
        held = self._held.pop(name)
        if held.shape != feature.shape:
            raise ValueError(
                f"layer {name!r}: features of model_a have shape {tuple(held.shape)}, of model_b {tuple(feature.shape)}"
            )
        if self._visit is not None:
            self._visit(name, held, feature.to(held.device))

    def _feature(self, name: str, output: Any) -> Tensor:
        if isinstance(output, (tuple, list)):
            output = next((part for part in output if isinstance(part, Tensor)), None)
        if not isinstance(output, Tensor):
            raise ValueError(f"layer {name!r}: its output holds no tensor")
        if output.ndim == 0 or output.shape[0] != self._size:
            raise ValueError(
                f"layer {name!r}: the first dimension of its output must be the {self._size} images, "
                f"got shape {tuple(output.shape)}"
            )
        return output


def _device(model: nn.Module) -> torch.device:
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def _images(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    for batch in batches:
        if not isinstance(batch, Tensor):
            raise TypeError(f"batches must give tensors of images, got {type(batch).__name__}")
        if batch.ndim == 0:
            raise ValueError("a batch must have a first dimension for the images, got a scalar")
        if len(batch):
            yield batch


# --- the store ----------------------------------------------------------------------------------------------


Blocks = list[tuple[int, int]]  # first and last + 1 column of each


def _blocks(width: int, each: int) -> Blocks:
    """The columns of a layer in blocks: whole channels of ``each`` features or, of large ones, part of one."""
    if each <= BLOCK_COLUMNS:
        size = BLOCK_COLUMNS // each * each
        return [(start, min(start + size, width)) for start in range(0, width, size)]
    size = math.ceil(each / math.ceil(each / BLOCK_COLUMNS))
    return [
        (start, min(start + size, channel + each))
        for channel in range(0, width, each)
        for start in range(channel, channel + each, size)
    ]


@dataclass
class _Piece:
    """Features u and differences w of some rows of one layer, in memory or in the scratch file.

    Flat, block after block, each block row by row: then a block of columns is in one place.
    """

    rows: int
    size: int  # numbers in u
    factor_u: float  # stored values times these are in the layer's common scale
    factor_w: float
    dtype: torch.dtype
    u: Tensor | None = None
    w: Tensor | None = None
    offset: int = -1


class _Store:
    """Rows of features by layer: in memory up to a budget, in one scratch file beyond it.

    The file is written by a thread while the next images are in the models, and read ahead while the last
    chunk is being multiplied. It has no name in the folder where the system allows that, and is gone in any
    case on close.
    """

    def __init__(self, memory: int, folder: str | Path | None) -> None:
        self.memory = memory
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.pieces: dict[str, list[_Piece]] = {}
        self.blocks: dict[str, Blocks] = {}
        self.bytes_in_memory = 0
        self.bytes_in_file = 0
        self._file: IO[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Future[None], int]] = deque()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            self._file.close()
        self._thread, self._file = None, None
        self._pending.clear()
        self.clear()

    def clear(self) -> None:
        """Forget all rows (the scratch file is used again from its start)."""
        self._drain(0)
        self.pieces.clear()
        self.blocks.clear()
        self.bytes_in_memory = self.bytes_in_file = 0

    def reserve(self, nbytes: int) -> None:
        """Check that ``nbytes`` more fit into memory and the scratch folder."""
        needed = nbytes - (self.memory - self.bytes_in_memory)
        if needed > 0:
            available = shutil.disk_usage(self.folder).free
            if needed > available:
                raise OSError(errno.ENOSPC, self._full(needed, available))

    def append(
        self, name: str, blocks: Blocks, rows: int, u: Tensor, w: Tensor, factor_u: float, factor_w: float
    ) -> None:
        """Add rows u, w: flat, in blocks (the same for all rows of a layer), of one type, on the CPU; kept as
        they are."""
        nbytes = u.nbytes + w.nbytes
        self.blocks[name] = blocks
        piece = _Piece(rows, len(u), factor_u, factor_w, u.dtype)
        if self.bytes_in_memory + nbytes <= self.memory:
            piece.u, piece.w = u, w
            self.bytes_in_memory += nbytes
        else:
            piece.offset = self.bytes_in_file
            self.bytes_in_file += nbytes
            self._drain(max(0, PENDING_BYTES - nbytes))
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, prefix="cka-", buffering=0)  # noqa: SIM115
            self._pending.append((self._worker().submit(self._write, piece.offset, u, w), nbytes))
        self.pieces.setdefault(name, []).append(piece)

    def drop(self, name: str) -> None:
        for piece in self.pieces.pop(name, []):
            if piece.u is not None and piece.w is not None:
                self.bytes_in_memory -= piece.u.nbytes + piece.w.nbytes

    def rows(self, name: str) -> int:
        return sum(piece.rows for piece in self.pieces.get(name, []))

    def columns(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
        """All rows of a layer, one block of columns at a time: (first column, u, w).

        The matrices are overwritten by the next step of the iteration.
        """
        n = self.rows(name)
        buffers = torch.empty(2, n, BLOCK_COLUMNS + PADDING, dtype=dtype)
        for blocks, loaded in self._loaded(name):
            first = blocks[0][0]
            for start, stop in blocks:
                u, w = buffers[:, :, : stop - start]
                row = 0
                for piece, halves in loaded:
                    place = slice(piece.rows * (start - first), piece.rows * (stop - first))
                    for matrix, values, factor in zip((u, w), halves, (piece.factor_u, piece.factor_w), strict=True):
                        target = matrix[row : row + piece.rows]
                        target.copy_(values[place].view(target.shape))
                        if factor != 1:
                            target *= factor
                    row += piece.rows
                yield start, u, w

    def _loaded(self, name: str) -> Iterator[tuple[Blocks, list[tuple[_Piece, tuple[Tensor, Tensor]]]]]:
        """Some blocks at a time and their u and w of each piece; from the file, the next ones are read ahead."""
        self._drain(0)
        pieces, blocks = self.pieces[name], self.blocks[name]
        spilled = [piece for piece in pieces if piece.u is None]
        if not spilled:
            yield blocks, self._load(pieces, blocks)
            return
        number = max(1, READ_BYTES // (2 * sum(piece.rows * piece.dtype.itemsize for piece in spilled) * BLOCK_COLUMNS))
        groups = [blocks[i : i + number] for i in range(0, len(blocks), number)]
        ahead = self._worker().submit(self._load, pieces, groups[0])
        for group, later in zip(groups, [*groups[1:], None], strict=True):
            loaded = ahead.result()
            if later is not None:
                ahead = self._worker().submit(self._load, pieces, later)
            yield group, loaded

    def _worker(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cka-scratch")
        return self._thread

    def _drain(self, most: int) -> None:
        while self._pending and sum(nbytes for _, nbytes in self._pending) > most:
            self._pending.popleft()[0].result()

    def _write(self, offset: int, u: Tensor, w: Tensor) -> None:
        assert self._file is not None
        try:
            self._file.seek(offset)
            for values in (u, w):
                view = _bytes(values)
                while len(view):
                    view = view[self._file.write(view) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            left = shutil.disk_usage(self.folder).free
            raise OSError(errno.ENOSPC, self._full(u.nbytes + w.nbytes, left)) from error

    def _load(self, pieces: list[_Piece], blocks: Blocks) -> list[tuple[_Piece, tuple[Tensor, Tensor]]]:
        """u and w of some blocks next to each other, of each piece."""
        loaded = []
        for piece in pieces:
            start, stop = (piece.rows * column for column in (blocks[0][0], blocks[-1][1]))
            if piece.u is not None and piece.w is not None:
                loaded.append((piece, (piece.u[start:stop], piece.w[start:stop])))
                continue
            halves = torch.empty(2, stop - start, dtype=piece.dtype)
            for values, skip in zip(halves, (start, piece.size + start), strict=True):
                self._fill(values, piece.offset + skip * values.itemsize)
            loaded.append((piece, (halves[0], halves[1])))
        return loaded

    def _fill(self, target: Tensor, offset: int) -> None:
        assert self._file is not None
        view = _bytes(target)
        self._file.seek(offset)
        while len(view):
            got = self._file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise OSError(errno.EIO, f"scratch file in {self.folder} ended early")
            view = view[got:]

    def _full(self, needed: int, available: int) -> str:
        return (
            f"scratch folder {str(self.folder)!r} is too small for the features: {needed} bytes needed, "
            f"{available} available; choose another folder (scratch) or allow more memory"
        )


def _bytes(values: Tensor) -> memoryview:
    array: Any = values.numpy()
    return memoryview(array).cast("B")


# --- CKA over a data set ------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """How the features of one layer are written down: u = a - first_a and w = u - scale (b - first_b)."""

    first_a: Tensor | None = None  # feature of the first image
    first_b: Tensor | None = None
    blocks: Blocks = field(default_factory=list)  # of columns, in which it is stored
    scale: float = 1.0
    scaled: bool = False  # scale is known, and the feature varies over the images in both models
    half: bool = False  # stored in float16 from here on
    close: bool = False  # model b's features are nearer to model a's than another image's are
    size_a: float = 0.0  # largest absolute value of the first image's feature
    size_b: float = 0.0
    varies_a: bool = False
    varies_b: bool = False
    finite: bool = True
    exponent_u: int | None = None  # stored u = true u times 2 ** exponent_u
    exponent_w: int | None = None


@dataclass
class _Derived:
    """A batch norm whose differences are ``(gain - kappa) u + kappa w`` of its source's, channel by
    channel."""

    name: str
    gain: Tensor
    kappa: Tensor


@dataclass
class _Moments:
    """Sums over batches of inner products of centered Gram matrices K, L and their difference E = K - L."""

    kk: float = 0.0
    ll: float = 0.0
    ee: float = 0.0
    e_sum: float = 0.0  # of E with K + L

    def add(self, k: Tensor, e: Tensor, estimator: str) -> None:
        factor = _norm_factor(len(k), estimator)
        k, e = center(k, estimator), center(e, estimator)
        self.kk += float((k * k).sum()) / factor
        self.ee += float((e * e).sum()) / factor
        l = k.sub_(e)
        self.ll += float((l * l).sum()) / factor
        self.e_sum += float((e * l.mul_(2).add_(e)).sum()) / factor  # K + L = 2 L + E

    def similarity(self, low: float) -> LayerSimilarity:
        """1 - delta = (|E|^2 - (|K| - |L|)^2) / (2 |K| |L|), with |K| - |L| = <E, K + L> / (|K| + |L|)."""
        if not (self.kk > 0 and self.ll > 0 and math.isfinite(self.kk + self.ll + self.ee)):
            return UNDEFINED
        a, b = math.sqrt(self.kk), math.sqrt(self.ll)
        difference = self.e_sum / (a + b)
        dissimilarity = (self.ee - difference * difference) / (2 * a * b)
        dissimilarity = min(max(dissimilarity, 0.0), 1.0 - low)
        return LayerSimilarity(1.0 - dissimilarity, dissimilarity)


class _NotDerivableError(Exception):
    """A batch norm taken as derived was fed by something else in a later batch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Engine:
    """Writes the features of a data set into a store and makes Gram matrices of them."""

    def __init__(self, joint: _JointPass, store: _Store, storage: str, independent: set[str]) -> None:
        self.joint = joint
        self.store = store
        self.storage = storage
        self.layers = {name: _Layer() for name in joint.names}
        self.derived: dict[str, list[_Derived]] = {}  # by source
        self.source: dict[str, str] = {}  # of each derived batch norm
        self.independent = independent  # batch norms with features of their own, for good
        self.partial: set[str] = set()  # layers that some images reach and others do not
        self.n = 0  # images since the last reset
        self.expected: int | None = None  # of them in all, if known
        self._passes = 0
        self._seen = 0  # images, resets or not
        self._decided = storage == "float32"  # which layers are stored in half precision
        self._trial: dict[str, list[tuple[Tensor, Tensor]]] = {}  # some columns of (u, w)
        joint.most = None if self._decided else TRIAL_IMAGES - 1
        self._reserved = False
        self._rows: dict[str, tuple[int, Tensor, Tensor, float, float]] = {}  # of this pass, for the store
        self._work = torch.empty(0)  # memory for one matrix, used again and again
        self._raw: dict[str, tuple[Tensor, Tensor]] = {}  # (u, w) of the pass that decides what is derived

    def add(self, images: Tensor) -> None:
        for part in self.joint.split(images):
            self._rows.clear()
            fed_by = self.joint.run(part, self._visit)
            for name, source in self.source.items():
                if fed_by.get(name) != source:
                    raise _NotDerivableError(name)
            if self._passes == 1:  # the first one holds no differences yet when it is of one image
                self._derive(fed_by)
                self._raw.clear()
            self._commit(len(part))
            self._passes += 1
            self._seen += len(part)
            self.n += len(part)
            if not self._decided and self._passes > 1 and self._seen >= TRIAL_IMAGES:
                self._choose_storage()
                self._decided = True
                self.joint.most = None

    def reset(self) -> None:
        self.store.clear()
        self.n = 0
        self._reserved = False

    def close(self) -> None:
        """Note which layers were not reached by every image (before reading Gram matrices)."""
        for name in self.layers:
            if 0 < self.store.rows(name) < self.n:
                self.partial.add(name)

    def _visit(self, name: str, a: Tensor, b: Tensor) -> None:
        """Turn the features of one layer into rows of the store."""
        layer = self.layers[name]
        if not layer.finite:
            return
        each = a[0, 0].numel() if a.ndim > 1 and a.numel() else 1
        a, b = a.flatten(1), b.flatten(1)
        if layer.first_a is None or layer.first_b is None:
            layer.first_a, layer.first_b = a[:1].clone(), b[:1].clone()
            layer.size_a, layer.size_b = _largest(layer.first_a), _largest(layer.first_b)
            layer.blocks = _blocks(a.shape[1], each)
        if layer.first_a.shape[1] != a.shape[1]:
            raise ValueError(
                f"layer {name!r}: {a.shape[1]} features for an image, {layer.first_a.shape[1]} for the first; "
                "all images must have the same size"
            )
        w = self._matrix(a, b)
        if not layer.scaled:
            self._find_scale(layer, a, b, w)
        if layer.close:
            torch.sub(a, b, out=w)  # first, which loses nothing when a and b are close
            w -= layer.first_a - layer.first_b
            u = a.sub_(layer.first_a)
        else:
            u = a.sub_(layer.first_a)
            torch.sub(b, layer.first_b, out=w)
            torch.add(u, w, alpha=-layer.scale, out=w)
        largest_u, largest_w = _largest(u), _largest(w)
        if not (math.isfinite(largest_u) and math.isfinite(largest_w)):
            layer.finite = False
            return
        if self._passes == 1:
            self._raw[name] = (u[-1:].clone(), w[-1:].clone())  # one image will do
        if not self._decided:
            self._sample(name, u, w)
        layer.exponent_u, stored_u, factor_u = self._pack(u, largest_u, layer.exponent_u, layer)
        layer.exponent_w, stored_w, factor_w = self._pack(w, largest_w, layer.exponent_w, layer)
        self._rows[name] = (len(u), stored_u, stored_w, factor_u, factor_w)

    def _matrix(self, a: Tensor, b: Tensor) -> Tensor:
        """Room for a - b."""
        dtype = torch.result_type(a, b)
        if (self._work.dtype, self._work.device) != (dtype, a.device) or self._work.numel() < a.numel():
            self._work = torch.empty(a.numel(), dtype=dtype, device=a.device)
        return self._work[: a.numel()].view(a.shape)

    @staticmethod
    def _find_scale(layer: _Layer, a: Tensor, b: Tensor, work: Tensor) -> None:
        """Scale that makes model b's features as large as model a's, from the first images that differ."""
        assert layer.first_a is not None
        assert layer.first_b is not None
        u = torch.sub(a, layer.first_a, out=work)
        layer.varies_a = layer.varies_a or _largest(u) > CONSTANT * layer.size_a
        square_u = _square(u)
        v = torch.sub(b, layer.first_b, out=work)
        layer.varies_b = layer.varies_b or _largest(v) > CONSTANT * layer.size_b
        if layer.varies_a and layer.varies_b:
            layer.scaled = True
            ratio = math.sqrt(square_u / _square(v))
            if math.isfinite(ratio) and abs(ratio - 1) > SNAP:
                layer.scale = ratio
            else:
                layer.close = _square(layer.first_a - layer.first_b) * len(a) <= square_u

    @staticmethod
    def _pack(values: Tensor, largest: float, exponent: int | None, layer: _Layer) -> tuple[int | None, Tensor, float]:
        """(Exponent of the layer, values as they are stored, their factor to the scale of the layer)."""
        factor = 1.0
        if largest > 0:
            best = 9 - math.frexp(largest)[1]  # puts the largest value into [2**8, 2**9)
            if exponent is None:
                exponent = 0 if 2**-3 <= largest <= 2**13 else best
            used = 0
            if layer.half:
                used = exponent if -3 <= math.frexp(largest)[1] + exponent <= 15 else best
                if used:
                    values.mul_(2.0**used)
            factor = 2.0 ** (exponent - used)
        rows = len(values)
        stored = torch.empty(values.numel(), dtype=torch.float16 if layer.half else torch.float32, device=values.device)
        for start, stop in layer.blocks:
            stored[rows * start : rows * stop].view(rows, -1).copy_(values[:, start:stop])
        return exponent, stored.cpu(), factor

    def _sample(self, name: str, u: Tensor, w: Tensor) -> None:
        columns = torch.linspace(0, u.shape[1] - 1, min(u.shape[1], TRIAL_FEATURES), device=u.device).long()
        self._trial.setdefault(name, []).append((u[:, columns].double().cpu(), w[:, columns].double().cpu()))

    def _choose_storage(self) -> None:
        """Half precision for the layers where its rounding will not show in 1 - delta."""
        for name, rows in self._trial.items():
            if name in self.source or not self.layers[name].scaled:
                continue
            u, w = (torch.cat(parts) for parts in zip(*rows, strict=True))
            width = self.layers[name].blocks[-1][1]
            columns = torch.linspace(0, width - 1, u.shape[1]).long()
            worst = _half_error(u, torch.zeros_like(u), w, width)
            for norm in self.derived.get(name, []):
                channels = columns // (width // len(norm.gain))
                gain, kappa = norm.gain[channels], norm.kappa[channels]
                worst = max(worst, _half_error(gain * u, (gain - kappa) * u, kappa * w, width))
            self.layers[name].half = worst <= HALF_ERROR
        self._trial.clear()

    def _derive(self, fed_by: dict[str, str]) -> None:
        """Decide which batch norms need no features of their own."""
        for name, source in fed_by.items():
            norm, fed = self.layers[name], self.layers[source]
            if (
                name in self.independent
                or not {name, source} <= self._raw.keys()
                or not (norm.scaled and fed.scaled)
                or source in self.source
            ):
                continue
            gain_a, gain_b = (_gain(modules[name]) for modules in self.joint.modules)
            kappa = gain_b * (norm.scale / fed.scale)
            (u, w), (norm_u, norm_w) = self._raw[source], self._raw[name]
            if not self._trustworthy(gain_a, kappa, u.double(), w.double(), norm_u.double(), norm_w.double()):
                continue
            self.derived.setdefault(source, []).append(_Derived(name, gain_a, kappa))
            self.source[name] = source
            self.joint.skipped.add(name)
            self._rows.pop(name, None)
            self.store.drop(name)

    @staticmethod
    def _trustworthy(gain: Tensor, kappa: Tensor, u: Tensor, w: Tensor, norm_u: Tensor, norm_w: Tensor) -> bool:
        """Does (gain, kappa) give the real output, without amplifying the rounding of u and w?"""
        each = u.shape[1] // len(gain)
        if u.shape != norm_u.shape or u.shape[1] % len(gain) or each < DERIVED_FEATURES:
            return False
        gain, kappa = gain.to(u.device).repeat_interleave(each), kappa.to(u.device).repeat_interleave(each)
        from_u, from_w = (gain - kappa) * u, kappa * w
        size_u, size_w = float(norm_u.norm()), float(norm_w.norm())
        return (
            float((gain * u - norm_u).norm()) <= DERIVED_ERROR * size_u
            and float((from_u + from_w - norm_w).norm()) <= DERIVED_ERROR * size_w + 1e-5 * size_u
            and math.hypot(float(from_u.norm()), float(from_w.norm())) <= CANCELLATION * size_w
        )

    def _commit(self, count: int) -> None:
        nbytes = sum(u.nbytes + w.nbytes for _, u, w, *_ in self._rows.values())
        if not self._reserved:
            left = count
            if self.expected is not None and self._passes > 1 and self._decided:
                left = max(count, self.expected - self.n)
                self._reserved = True
            self.store.reserve(nbytes // count * left)
        for name in self.joint.names:
            if name in self._rows:
                self.store.append(name, self.layers[name].blocks, *self._rows[name])
        self._rows.clear()

    def grams(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(layer, K, K - L), uncentered, in float64 on the CPU, of every layer that varies in both models."""
        for name, layer in self.layers.items():
            if (
                layer.scaled
                and layer.finite
                and name not in self.source
                and name not in self.partial
                and self.store.rows(name) == self.n
            ):
                yield from self._layer_grams(name, layer)

    def _layer_grams(self, name: str, layer: _Layer) -> Iterator[tuple[str, Tensor, Tensor]]:
        """K = sum u u^T and, with M = sum w (u - w/2)^T, K - L = M + M^T: exact to the precision of w.

        Those of a derived batch norm are sums over channels: gain^2 K and gain^2 K - kappa^2 L, which is
        (gain^2 - kappa^2) K + kappa^2 (K - L), of the channel.
        """
        assert layer.first_a is not None
        device = layer.first_a.device
        dtype = torch.float64 if self.storage == "float32" else torch.float32
        if device.type == "mps":  # has no doubles
            device = torch.device("cpu")
        derived = self.derived.get(name, [])
        unit_u, unit_w = layer.exponent_u or 0, layer.exponent_w or 0
        ratio = 2.0 ** (unit_u - unit_w)  # from stored w to the scale of stored u
        channels = len(derived[0].gain) if derived else 1
        each = layer.blocks[-1][1] // channels
        of_k, of_l = torch.ones(2, 1 + len(derived), channels, dtype=torch.float64)
        for i, norm in enumerate(derived, 1):
            of_k[i], of_l[i] = norm.gain.square(), norm.kappa.square()
        k = torch.zeros(1 + len(derived), self.n * self.n, dtype=torch.float64)
        m = torch.zeros_like(k)
        most = max(1, PRODUCTS // self.n**2) * each
        middle = torch.empty(self.n, BLOCK_COLUMNS + PADDING, dtype=dtype, device=device)
        for start, u, w in self.store.columns(name, dtype):
            u, w = u.to(device), w.to(device)
            s = torch.add(u, w, alpha=-ratio / 2, out=middle[:, : u.shape[1]])
            for first in range(0, u.shape[1], most):
                parts = [values[:, first : first + most] for values in (u, w, s)]
                here = slice((start + first) // each, (start + first + parts[0].shape[1] - 1) // each + 1)
                u_part, w_part, s_part = (_by_channel(part, here.stop - here.start) for part in parts)
                products = _products(u_part, u_part)
                k.addmm_(of_k[:, here], products)
                m.addmm_((of_k - of_l)[:, here] / 2, products)
                m.addmm_(ratio * of_l[:, here], _products(w_part, s_part))
        for i, owner in enumerate([name, *(norm.name for norm in derived)]):
            own_k, own_m = (sums[i].view(self.n, self.n).mul_(4.0**-unit_u) for sums in (k, m))
            yield owner, own_k, own_m + own_m.T

    def defined(self, name: str) -> LayerSimilarity | None:
        """The similarity of a layer where its features leave nothing to compute; else None."""
        layer, source = self.layers[name], self.layers[self.source.get(name, name)]
        if layer.first_a is None or not (layer.finite and source.finite):
            return UNDEFINED
        if name in self.partial or self.source.get(name) in self.partial:
            return UNDEFINED
        if not layer.scaled:
            return UNDEFINED if layer.varies_a or layer.varies_b else LayerSimilarity(1.0, 0.0)
        return None


def _by_channel(values: Tensor, channels: int) -> Tensor:
    """(n, features) as (channels, n, features of a channel)."""
    return values.unflatten(1, (channels, -1)).transpose(0, 1)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of each channel, (channels, n n), in float64 on the CPU."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.bmm(x, y.mT).flatten(1).cpu().double()


def _half_error(u: Tensor, from_u: Tensor, from_w: Tensor, width: int) -> float:
    """Expected relative error of 1 - delta if u and the two parts of w = from_u + from_w are rounded to float16.

    Each row's rounding, projected on another row, is about its norm / sqrt(width) times the relative
    rounding. Taken at its worst (all rows alike), it is set against the part of K - L that 1 - delta is
    made of.
    """
    w = from_u + from_w
    rounded = (from_u.square().sum(1) + from_w.square().sum(1)).sqrt()
    if not bool(rounded.any()):
        return 0.0
    noise = float((rounded * (u.norm(dim=1) + (u - w).norm(dim=1))).sum()) * HALF_ROUNDING / math.sqrt(width)
    m = w @ (u - w / 2).T
    moments = _Moments()
    moments.add(u @ u.T, m + m.T, "biased")
    value = moments.similarity(0.0).dissimilarity * 2 * math.sqrt(moments.kk * moments.ll)
    signal = math.sqrt(value) * (len(u) - 1)
    return 2 * noise / signal if signal > 0 else math.inf


def _largest(values: Tensor) -> float:
    """Largest absolute value; NaN if there is one."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return float(torch.maximum(low.abs(), high.abs()))


def _square(values: Tensor) -> float:
    return float(values.norm()) ** 2


def _gain(norm: nn.Module) -> Tensor:
    """Factor by channel of a batch norm in evaluation mode, float64 on the CPU."""
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_var is not None
    gain = 1 / torch.sqrt(norm.running_var.detach().double().cpu() + norm.eps)
    return gain if norm.weight is None else gain * norm.weight.detach().double().cpu()


def layerwise_cka(
    model_a: nn.Module,
    model_b: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Iterable[str] | None = None,
    estimator: str = "biased",
    memory: int = 2**30,
    scratch: str | Path | None = None,
    storage: str = "float16",
) -> dict[str, LayerSimilarity]:
    r"""Linear CKA of two models' features on the same images, at each layer.

    .. math:: \delta^m = HSIC(K^m, L^m) / \sqrt{HSIC(K^m, K^m) \, HSIC(L^m, L^m)}

    with the n x n Gram matrices of the outputs of layer m, flattened image by image, in model a and model b.
    Layers are matched by name. Exact over all images for ``"biased"`` and ``"unbiased"``: the result does not
    depend on the batch size, beyond rounding. Both models run in evaluation mode, without gradients, and are
    left as they were found.

    Args:
        model_a: for Fed-LWR the local model.
        model_b: a model with the same layers (the anchor), on any device.
        batches: batches of input images, (n_b, ...) each, all images of one size. Re-iterable: seldom, a
            second pass is needed. The order of the images must be the same then.
        layers: names of the layers wanted (default: all of :func:`parameter_layers`).
        estimator: ``"biased"`` (the paper's Eq. 2) or ``"unbiased"`` (HSIC_1), over all images; or
            ``"minibatch_biased"``, ``"minibatch_unbiased"``, the quotient of sums of each batch's HSIC. For
            these a batch with fewer than 2 or 4 images is joined to the one before it.
        memory: bytes of main memory for stored features; what exceeds them goes to a scratch file. Beyond it:
            the features of as many images as fit into 96 MiB (at least one), 64 MiB waiting to be written,
            100 to 200 KiB for each image (by storage), 16 MiB read ahead, and about six n x n matrices of doubles.
        scratch: existing folder for that file (default: the system's temporary folder). It takes
            ``4 n (sum of stored feature sizes) - memory`` bytes and is always removed.
        storage: ``"float16"``: relative error of 1 - delta well below 1e-4. ``"float32"``: below 1e-6, twice
            the bytes.

    Returns:
        Similarity by layer name, in state-dict order. delta is in [0, 1] (biased) or [-1, 1] (unbiased); 1
        with dissimilarity 0 where the features of both models are the same for every image (dead layer), NaN
        where only one model's are, where a layer is not reached by every image or has features that are not
        finite, and everywhere with fewer than 2 images. With fewer than 4 images an unbiased estimator is
        replaced by ``"biased"``.

    Raises:
        ValueError: a layer missing in one model, an output whose first dimension is not the images, features
            of different shape in the two models or for different images (all name the layer); unknown
            estimator or storage.
        TypeError: a batch that is not a tensor.
        OSError: not enough space in the scratch folder (names folder, needed, available).

    Source:
        Yan et al., MICCAI 2024, Eq. (2) and section 2.2; Kornblith et al., ICML 2019; HSIC_1 from Song et
        al., JMLR 2012. The authors' code uses the sums over mini-batches (``"minibatch_unbiased"``), for
        which delta depends on the batches; a layer that runs more than once in a forward pass counts with its
        last output (ours).
    """
    _check_choice("estimator", estimator, ESTIMATORS)
    _check_choice("storage", storage, STORAGE)
    if memory < 0:
        raise ValueError(f"memory must be >= 0, got {memory}")
    with _JointPass(model_a, model_b, layers) as joint:
        independent: set[str] = set()
        if isinstance(batches, Iterator):  # cannot be read twice
            independent.update(joint.names)
        while True:
            joint.restart()
            store = _Store(memory, scratch)
            try:
                return _cka(_Engine(joint, store, storage, independent), batches, estimator)
            except _NotDerivableError as error:
                independent.add(error.name)
            finally:
                store.close()


def _cka(engine: _Engine, batches: Iterable[Tensor], estimator: str) -> dict[str, LayerSimilarity]:
    moments = {name: _Moments() for name in engine.layers}
    formula = estimator.removeprefix("minibatch_")
    total = 0
    with _full_precision():
        for group, number in _groups(batches, estimator):
            engine.expected = None
            for images in group:
                if engine.expected is None and number is not None:
                    engine.expected = number * len(images)
                engine.add(images)
            total += engine.n
            if engine.n >= 2:
                engine.close()
                for name, k, e in engine.grams():
                    moments[name].add(k, e, formula if engine.n >= 4 else "biased")
            engine.reset()
    if total < 2:
        return dict.fromkeys(engine.layers, UNDEFINED)
    low = 0.0 if formula == "biased" else -1.0
    return {name: engine.defined(name) or moments[name].similarity(low) for name in engine.layers}


def _groups(batches: Iterable[Tensor], estimator: str) -> Iterator[tuple[Iterable[Tensor], int | None]]:
    """Batches that make one pair of Gram matrices, and how many batches that is (None: unknown)."""
    if not estimator.startswith("minibatch_"):
        try:
            number = len(batches)  # type: ignore[arg-type]
        except TypeError:
            number = None
        yield _images(batches), number
        return
    least = _least_samples(estimator)
    group: list[Tensor] = []
    size = 0
    for images in _images(batches):
        if len(images) >= least and size >= least:
            yield group, len(group)
            group, size = [], 0
        group.append(images)
        size += len(images)
    if group:
        yield group, len(group)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Float32 matrix products in float32, whatever the program around allows for speed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- cosine, for the ablation -------------------------------------------------------------------------------


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
        mode: ``"sample"``: mean over the images of the cosine of an image's two feature vectors;
            ``"matrix"``: one cosine of the features of all images, taken as one vector.

    Returns:
        Similarity by layer name, in state-dict order; delta in [-1, 1]. Norms are at least 1e-8. Where both
        vectors are below that, delta is 1 (a dead layer is like a dead layer), where one is, about 0. NaN: no
        image, a layer not reached by every image, features that are not finite.

    Raises:
        ValueError, TypeError: as :func:`layerwise_cka`; unknown mode.

    Source:
        Yan et al., MICCAI 2024, ablation v1; the paper does not say whether the cosine is per sample.
    """
    _check_choice("mode", mode, COSINE_MODES)
    sums: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    n = 0
    with _JointPass(model_a, model_b, layers) as joint:
        rows: dict[str, Tensor] = {}

        def visit(name: str, a: Tensor, b: Tensor) -> None:
            a, b = a.flatten(1).double(), b.flatten(1).double()
            norms = [(x * x).sum(1) for x in (a, b)]
            rows[name] = torch.stack([*norms, (a * b).sum(1), (a - b).square().sum(1)], dim=1).cpu()

        for images in _images(batches):
            for part in joint.split(images):
                rows.clear()
                joint.run(part, visit)
                n += len(part)
                for name, values in rows.items():
                    if mode == "sample":
                        values = _cosine_distance(values)
                    sums[name] = sums.get(name, torch.zeros(())) + values.sum(0)
                    seen[name] = seen.get(name, 0) + len(part)
    result = dict.fromkeys(joint.names, UNDEFINED)
    for name, total in sums.items():
        distance = float(total / n) if mode == "sample" else float(_cosine_distance(total[None]))
        if seen[name] == n and math.isfinite(distance):
            result[name] = LayerSimilarity(1 - distance, distance)
    return result


def _cosine_distance(rows: Tensor) -> Tensor:
    """1 - cosine from rows (a.a, b.b, a.b, |a - b|^2): (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|)."""
    aa, bb, ab, difference = rows.T
    a, b = aa.sqrt(), bb.sqrt()
    distance = ((difference - (a - b).square()) / (2 * a * b)).clamp(0, 2)
    small = (a < COSINE_EPS) | (b < COSINE_EPS)
    plain = 1 - ab / (a.clamp_min(COSINE_EPS) * b.clamp_min(COSINE_EPS))
    dead = torch.where((a < COSINE_EPS) & (b < COSINE_EPS), torch.zeros_like(plain), plain)
    return torch.where(small, dead, distance)
