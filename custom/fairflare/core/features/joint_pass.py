"""Run two models on the same images and pass both models' features of each layer to a function."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from fairflare.base.checks import refuse
from fairflare.base.machine.computing import full_precision
from fairflare.base.stopping import check_stop
from fairflare.base.task import evaluating
from fairflare.core.features.layers import parameter_layers

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

HELD_BYTES = 96 * 2**20  # bytes of model a's features that wait for model b's; limits the images per forward pass
SAME = 1e-3  # relative difference by rounding between features of an image run alone and run with another
SAME_NORM = 1e-5  # relative difference by rounding between a norm's features and the same computed again
NORM = ("running_mean", "running_var", "weight", "bias")
SEED = 0


class JointPass:
    """Run two models on the same images and pass their features to a function, layer by layer.

    This is a context manager: inside it both models are in evaluation mode with hooks on their layers, and float32
    products and convolutions keep float32's precision; the exit undoes all changes. If a layer is called several times
    for an image, the last call counts. If its output has the images in another dimension than the first (sequence
    first, windows of tokens), they are moved to the first. A layer cannot be compared if it is not called for every
    image or not equally often in both models, or if its output has no tensor or no dimension of the images (see
    :class:`Layout`).

    Args:
        model_a, model_b: models to compare.
        layers: names of the layers to compare; ``None`` for all of :func:`parameter_layers`.
        least_pixels: a batch norm whose input is the output of another layer, with at least this many values per
            channel and image, is computed from that layer: it is listed in :attr:`scaled`, its features are passed for
            the first image alone, and those of the other layer for all images. With ``None`` the features of every
            layer are passed.

    Attributes:
        wanted: names of the layers to compare.
        names: names of the layers whose features may be passed: the wanted layers, and layers in front of a batch norm;
            an ordered set (the keys of a dict).
        images: number of images seen so far.
        scaled: name of the layer in front, by name of each batch norm that is computed from it.

    Raises:
        ValueError: one of the models lacks a layer.
    """

    def __init__(
        self, model_a: nn.Module, model_b: nn.Module, layers: Iterable[str] | None, least_pixels: int | None = None
    ) -> None:
        layers_of_both = parameter_layers(model_a), parameter_layers(model_b)
        self.wanted = list(layers_of_both[0] if layers is None else dict.fromkeys(layers))
        refuse({
            f"layer {name!r} is not in {which}": name not in known
            for name in [*self.wanted, *(layers_of_both[1] if layers is None else ())]
            for which, known in zip(("model_a", "model_b"), layers_of_both, strict=True)
        })  # fmt: skip
        # Compute each batch norm in the same way whichever layers are requested, since the way changes the last bits.
        in_front = [name for name in layers_of_both[0] if name in layers_of_both[1]] if least_pixels is not None else []
        self.names = dict.fromkeys([*self.wanted, *in_front])
        self.models = (model_a, model_b)
        self.modules = tuple({name: known[name] for name in self.names} for known in layers_of_both)
        self.images = 0
        self.scaled: dict[str, str] = {}
        self._least_pixels = least_pixels
        self._last: tuple[str, Tensor, int, Tensor] | None = None  # last layer that ran, as :meth:`_ran` records it
        # Modules that have hooks of other code, which may change the module's inputs or outputs.
        self._hooked = {
            m for known in layers_of_both for m in known.values() if m._forward_hooks or m._forward_pre_hooks
        }
        self._sources: dict[str, str] = {}  # layer in front, by batch norm of model a
        self._odd: dict[str, str] = {}  # reason why a layer cannot be compared, by layer
        self._reached: Counter[str] = Counter()  # number of images with features in both models, by layer
        self._held: dict[str, Tensor] = {}  # features of model a; memory is reused, since allocating is slow
        self._turn: int | None = None  # model that runs now; hooks of the other one do nothing
        self._stack = ExitStack()
        self._divisible = all(map(looks_at_images_alone, self.models))  # whether batches may be divided and joined

    def __enter__(self) -> JointPass:
        with self._stack as stack:  # undoes all changes here if a step fails, else at the exit
            stack.enter_context(torch.autocast(_device(self.models[0]).type, enabled=False))
            stack.enter_context(full_precision())
            for turn, model in enumerate(self.models):
                stack.enter_context(evaluating(model))
                for name, module in self.modules[turn].items():
                    stack.callback(module.register_forward_hook(partial(self._hook, turn, name)).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.clear()
        self._stack.close()

    def pieces(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images in batches of as many as fit into memory; the very first image comes alone.

        With large batches, the work per layer and batch is small in comparison with the forward passes.
        """
        waiting: list[Tensor] = []
        for batch in batches:
            refuse({
                f"batches must give tensors of images, got {type(batch).__name__}": not isinstance(batch, torch.Tensor),
            }, TypeError)  # fmt: skip
            if waiting and (batch.shape[1:] != waiting[0].shape[1:] or not self._divisible):
                yield torch.cat(waiting)
                waiting = []
            waiting.append(batch)
            while self._divisible and sum(map(len, waiting)) >= (most := self._most()):
                images = torch.cat(waiting)
                yield images[:most]
                waiting = [images[most:]] if len(images) > most else []
        if sum(map(len, waiting)):
            yield torch.cat(waiting)

    def run(self, images: Tensor, visit: Callable[[str, Tensor, Tensor], None]) -> None:
        """Run one forward pass of each model and visit each layer that both models reach.

        For each layer, ``visit(layer, feature_a, feature_b)`` is called.

        Features are (n, ...), float32 or float64, on the device of model a; ``visit`` must not change them.
        """
        if self.images == 0:
            self._channels_last = all(_takes_channels_last(model, images[:1]) for model in self.models)
            model = self.models[0]
            self._layouts = layouts(model, images[:1].to(_device(model)), self.modules[0], alone=self._divisible)
        if self._channels_last:
            images = channels_last(images)
        self._size, self._visit, self._calls = len(images), visit, (Counter[str](), Counter[str]())
        for turn, model in enumerate(self.models):
            check_stop()
            self._turn = turn
            model(images.to(_device(model)))
            self._last = None
            if self.images == 0:  # only the wanted layers and those in front of wanted batch norms run from now on
                sources = self._sources if turn == 0 else self.scaled
                still_run = {*self.wanted, *(sources.get(name, "") for name in self.wanted)}
                self.names = dict.fromkeys(name for name in self.names if name in still_run)
        self._turn = None
        self.images += len(images)
        for name in self.names:
            calls_a, calls_b = (calls[name] for calls in self._calls)
            if calls_a != calls_b:
                self._odd.setdefault(name, f"called {calls_a} times in model_a and {calls_b} times in model_b")
            elif name in self.scaled and any(calls[self.scaled[name]] != calls_a for calls in self._calls):
                self._odd.setdefault(name, f"layer {self.scaled[name]!r} in front of it ran another number of times")
            elif calls_a:
                self._reached[name] += len(images)

    def find_comparable(self) -> list[str]:
        """Return the layers with features of every image in both models; the log says why other layers lack them.

        Raises:
            ValueError: no layer can be compared although images and layers were given.
        """
        for name in self.wanted:
            if self._reached[name] < self.images:
                self._odd.setdefault(name, f"called for {self._reached[name]} of {self.images} images")
        odd = {name: reason for name, reason in self._odd.items() if name in self.wanted}
        reasons = "; ".join(f"layer {name!r}: {reason}" for name, reason in odd.items())
        refuse({f"no layer can be compared: {reasons:.1000}": self.wanted and len(odd) == len(self.wanted)})
        if reasons:
            log.warning("layers without a similarity: %.1000s", reasons)
        return [name for name in self.wanted if name not in odd]

    def _most(self) -> int:
        """Return the largest number of images that go through the models at once."""
        held = sum(feature[0].nbytes for feature in self._held.values())
        return max(1, HELD_BYTES // held) if held else 1

    def _hook(self, turn: int, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._turn != turn or name in self._odd or name not in self.names:  # both models may share a module
            return
        source, output = self._source(module, args), first_tensor(output)
        if source and self.images == 0 and not _scales(module, self._last, output):
            source = ""
        self._ran(name, output)
        if output is not None and name in self._layouts:
            output = self._layouts[name].images_first(output, self._size)
        if output is None:
            self._odd[name] = "its output holds no tensor"
        elif output.shape[:1] != (self._size,):
            self._odd[name] = (
                f"the {self._size} images are no dimension of its output, which has shape {tuple(output.shape)}"
            )
        else:
            self._calls[turn][name] += 1
            if name in self.scaled and self.images:
                if source != self.scaled[name]:
                    self._odd[name] = f"its input is not what layer {self.scaled[name]!r} gave, as it was at first"
                return
            if self.images == 0 and self._size == 1 and self._least_pixels is not None:
                self._note(turn, name, source, output)
            output = output[:, None] if output.ndim == 1 else output  # one-dimensional outputs are one feature
            self._take(turn, name, output if output.dtype in (torch.float32, torch.float64) else output.float())

    def _ran(self, name: str, output: Tensor | None) -> None:
        """Record the layer that ran, its output, the output's version counter, and a copy of its last image's features.

        Torch's version counter misses writes through ``.data``, which a comparison with the copy finds, and does not
        exist for inference tensors, which are therefore left out.
        """
        useful = (
            self._divisible and self._least_pixels is not None and (not self.images or name in self.scaled.values())
        )
        self._last = None
        if useful and output is not None and output.ndim > 1 and len(output) and not output.is_inference():
            self._last = name, output, output._version, output[-1:].clone()

    def _source(self, module: nn.Module, args: tuple[Any, ...]) -> str:
        """Return the name of the layer whose unchanged output is the input of a batch norm.

        The name is empty if the module is no plain batch norm in evaluation mode or its input is not a layer's output.
        """
        usual = (
            isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            and type(module).forward is torch.nn.modules.batchnorm._BatchNorm.forward
            and not module.training
        )
        if self._last is None or not usual or module in self._hooked or "forward" in vars(module):
            return ""
        name, output, written, image = self._last
        same = bool(args) and args[0] is output and output._version == written
        return name if same and torch.allclose(output[-1:], image, rtol=0, atol=0, equal_nan=True) else ""

    def _note(self, turn: int, name: str, source: str, output: Tensor) -> None:
        """Record a batch norm as computed from the layer in front if the first image shows this in both models."""
        if turn == 0:
            self._sources[name] = source
        elif source and source == self._sources.get(name) and not {name, source} & self._layouts.keys():
            once = self._calls[0][name] == self._calls[0][source] == 1
            if once and output[0, 0].numel() >= (self._least_pixels or 0):
                self.scaled[name] = source

    def _take(self, turn: int, name: str, feature: Tensor) -> None:
        held = self._held.get(name)
        if turn == 0:
            if held is None or (held.shape, held.dtype) != (feature.shape, feature.dtype):
                held = self._held[name] = torch.empty_like(feature, memory_format=torch.contiguous_format)
            held.copy_(feature)  # copied since a later layer may change the feature in place
        elif held is not None and self._calls[1][name] == self._calls[0][name]:
            refuse({
                f"layer {name!r}: features of model_a have shape {tuple(held.shape)}, of model_b "
                f"{tuple(feature.shape)}": held.shape != feature.shape,
            })  # fmt: skip
            self._visit(name, held, feature.to(held.device))


def looks_at_images_alone(model: nn.Module) -> bool:
    """Return whether, in evaluation mode, features of an image do not depend on the other images of its batch.

    Features depend on the batch if a batch norm has no running statistics or stays in training mode.
    """
    with evaluating(model):
        return all(
            module.running_mean is not None and not module.training
            for module in model.modules()
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        )


def channels_last(images: Tensor) -> Tensor:
    """Return images with the channels as the last dimension in memory, also for images with one channel.

    Convolutions and pooling layers keep this memory layout in their outputs.
    """
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def _takes_channels_last(model: nn.Module, image: Tensor) -> bool:
    """Return whether a model on a CPU runs with the channels-last layout, in which its convolutions are faster.

    A model that calls ``view`` may fail. The test runs two images, since a dimension of size 1 fits every layout.
    """
    if image.ndim == 4 and _device(model).type == "cpu":
        # A user's network may raise any error.
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(channels_last(torch.cat([image, image])))
            return True
    return False


def _scales(norm: nn.Module, last: tuple[str, Tensor, int, Tensor] | None, output: Tensor | None) -> bool:
    """Return whether a norm's output for one image is its input normalised by its running statistics, in float32.

    The input is taken to be the output of the layer in front (``last``). The result is False with half precision, whose
    rounding shows in small differences, with variances below 0, and if other operations stand between the two layers.
    """
    if last is None or output is None or output.dtype not in (torch.float32, torch.float64) or len(output) != 1:
        return False
    image, (mean, variance, weight, bias) = last[3], (getattr(norm, name) for name in NORM)
    wanted = torch.nn.functional.batch_norm(
        image, mean, variance, weight, bias, False, 0.0, cast(torch.nn.modules.batchnorm._BatchNorm, norm).eps
    )
    size = float(wanted.abs().max())
    return math.isfinite(size) and torch.allclose(output, wanted, rtol=SAME_NORM, atol=SAME_NORM * size)


def _device(model: nn.Module) -> torch.device:
    return next((x.device for part in (model.parameters(), model.buffers()) for x in part), torch.device("cpu"))


# Position of the images in a layer's output: the first dimension, another one, or several rows per image (windows).


@dataclass(frozen=True)
class Layout:
    """Describe where a layer's output has its images if they are not one row each of the first dimension.

    Args:
        dim: dimension of the images.
        rows: number of rows of this dimension that belong to each image.
        together: True: the rows of one image follow each other. False: the first rows of all images come first, then
            the second rows, and so on.
    """

    dim: int
    rows: int
    together: bool

    def images_first(self, output: Tensor, images: int) -> Tensor:
        """Return a layer's output with the images as first dimension, (n, ...); unchanged if its shape does not fit."""
        if output.ndim <= self.dim or output.shape[self.dim] != self.rows * images:
            return output
        sizes = (images, self.rows) if self.together else (self.rows, images)
        return torch.movedim(output.unflatten(self.dim, sizes), self.dim if self.together else self.dim + 1, 0)


def first_tensor(output: Any) -> Tensor | None:
    """Return the tensor that counts as a layer's output: the output itself, or the first tensor in it."""
    if isinstance(output, (tuple, list)):
        output = next((part for part in output if isinstance(part, torch.Tensor)), None)
    return output if isinstance(output, torch.Tensor) else None


def layouts(
    model: nn.Module, image: Tensor, layers: Mapping[str, nn.Module], *, alone: bool = True
) -> dict[str, Layout]:
    """Return the layout of the images in the outputs of layers that do not have them first, found by test passes.

    The image runs alone and, for layers that do not have one row for it, together with a synthetic image: the dimension
    whose size has doubled is that of the images, and the rows with unchanged values belong to the first image. Thus
    windows of tokens (B * windows, tokens, channels) and sequence-first features (tokens, B, channels) are
    distinguished whatever their sizes are. If features depend on the batch, both images run together first and then
    twice each, which does not change the batch's means and variances.

    Args:
        model: network in evaluation mode.
        image: one input image, (1, ...), on the model's device.
        layers: layers of the model, by name.
        alone: whether features of an image do not depend on its batch (:func:`looks_at_images_alone`).

    Returns:
        Layout by layer name. Layers have no entry if they have one row for each image, if their output depends on no
        image or (with ``alone``) on both images, or if it has no tensor.
    """
    some = image if alone else torch.cat([image, _another(image)])
    first = _outputs(model, some, layers)
    odd = [name for name, output in first.items() if not alone or output.shape[:1] != (1,)]
    if not odd:
        return {}
    more = torch.cat([some, _another(image) if alone else some])
    beside = _outputs(model, more, {name: layers[name] for name in odd})
    by_layer = {name: _layout(first[name], beside[name], len(some)) for name in odd if name in beside}
    return {name: layout for name, layout in by_layer.items() if layout is not None}


def _outputs(model: nn.Module, images: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the output of each layer's last call in one forward pass."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            outputs[name] = tensor.clone()  # cloned since a later layer may change the tensor in place

    with ExitStack() as stack, torch.no_grad():
        for name, module in layers.items():
            stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        model(images)
    return outputs


def _another(image: Tensor) -> Tensor:
    if not image.is_floating_point():
        return image.flip(-1)
    return torch.rand(image.shape, generator=torch.Generator().manual_seed(SEED)).to(image)


def _layout(some: Tensor, more: Tensor, images: int) -> Layout | None:
    """Find the layout of the images in a layer's output from two outputs, or ``None`` if no layout explains them.

    Args:
        some: the layer's output for ``images`` images.
        more: the layer's output for twice as many images, the first half of which are the images of ``some``.
        images: number of images of ``some``.
    """
    grown = [dim for dim, (n, m) in enumerate(zip(some.shape, more.shape, strict=False)) if n != m]
    if some.ndim != more.ndim or len(grown) != 1 or more.shape[grown[0]] != 2 * some.shape[grown[0]]:
        return None
    rows, over = divmod(some.shape[grown[0]], images)
    if over or (grown[0] == 0 and rows == 1):
        return None
    tried = [Layout(grown[0], rows, together) for together in (True, False)]
    pairs = [
        (layout.images_first(more, 2 * images)[:images].double(), layout.images_first(some, images).double())
        for layout in tried
    ]
    away = [float((x - y).norm()) - SAME * float(y.norm()) for x, y in pairs]
    best = min(range(len(tried)), key=lambda i: away[i])
    return tried[best] if away[best] <= 0 else None
