"""Set how a network computes: the precision of its passes, the order of its tensors in memory, compiled or not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fairflare.base.checks import true_texts

if TYPE_CHECKING:
    from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "fp16"]
LOWER = {"bf16": "bfloat16", "fp16": "float16"}  # torch's names of the dtypes of mixed precision
FIRST_SCALE = 2.0**10  # first loss scale; torch's 2^16 overflows at first, and a round may be short
LEAST_SCALE = 1.0  # least loss scale: gradients that overflow even here overflow without any scaling
_NAME = "_fairflare_lowered"


@dataclass(frozen=True)
class Computing:
    """Declare how a network computes, and prepare a network accordingly.

    Args:
        precision: precision of the passes: ``"fp32"``, or mixed (``torch.autocast``): ``"bf16"``, ``"fp16"``. Weights,
            the network's outputs and the loss stay float32.
        channels_last: keep images and kernels with the channels as the last dimension in memory.
        compile: whether the network is compiled (``torch.compile``).
        deterministic: use only operations that give the same bits every time; matters on a GPU, since operations on a
            CPU are deterministic anyway.
    """

    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = False

    def apply(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Prepare a network in place as the settings say, and return it; by default it is not changed."""
        if self.channels_last:
            _channels_last(model)
        if self.precision != "fp32":
            _Lowered(device.type, getattr(torch, LOWER[self.precision])).attach(model)
        if self.compile:
            # Without these guards, a compiled graph would ignore hooks that are registered later.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            model.compile()
        return model

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Let torch use deterministic operations as ``deterministic`` says, inside the context, in the whole process.

        Afterwards torch's settings are restored.

        Raises:
            NoSuchForm: inside the context, an operation has no deterministic form on its device.
        """
        if not self.deterministic:
            yield
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by torch and cuBLAS at their first product
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        cudnn: Any = torch.backends.cudnn
        with ExitStack() as stack:
            stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
            for part, name in ((cudnn, "benchmark"), (torch.utils.deterministic, "fill_uninitialized_memory")):
                _change(stack, part, name, False)
            torch.use_deterministic_algorithms(True)
            try:
                yield
            except RuntimeError as error:
                if match := re.match(r"(\S+) does not have a deterministic implementation", str(error)):
                    raise NoSuchForm(match.group(1)) from error
                raise

    def describe(self, device: torch.device) -> str:
        """Return the chosen settings (precision and others) as text, with a warning if they are slow on the device."""
        slow = self.precision == "bf16" and device.type == "cpu" and not _cpu_has_bf16()
        return f"{self}{' (emulated by this processor: about 17 times slower than fp32)' if slow else ''}"

    def __str__(self) -> str:
        """Return the chosen ways to compute as readable text; empty if none is chosen."""
        return ", ".join(true_texts({
            self.precision: self.precision != "fp32", "channels last": self.channels_last, "compiled": self.compile,
            "deterministic": self.deterministic,
        }))  # fmt: skip


def _cpu_has_bf16() -> bool:
    """Return whether the processor computes in bfloat16, as far as PyTorch reports."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is None or bool(asked())


@contextmanager
def plainly(*models: nn.Module) -> Iterator[None]:
    """Let networks compute in float32 and without compilation, inside the context.

    Use this where small differences count, or where hooks are set on the network.
    """
    with ExitStack() as stack:
        for model in models:
            lowered = model.__dict__.get(_NAME)
            if lowered is not None:
                _change(stack, lowered, "enabled", False)
            if getattr(model, "_compiled_call_impl", None) is not None:
                _change(stack, model, "_compiled_call_impl", None)
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off TF32 and bfloat16 in float32 products and convolutions, inside the context."""
    backends: Any = torch.backends
    with ExitStack() as stack:
        try:
            before = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
        except RuntimeError:  # the program uses torch 2.9's new switches, which torch forbids to mix with the old ones
            cudnn, cpu = backends.cudnn, backends.mkldnn
            for part in (cudnn.conv, cudnn.rnn, backends.cuda.matmul, cpu.conv, cpu.matmul):
                _change(stack, part, "fp32_precision", "ieee")
        else:
            stack.callback(torch.set_float32_matmul_precision, before[0])
            _change(stack, backends.cudnn, "allow_tf32", False)
            torch.set_float32_matmul_precision("highest")
        yield


def _change(stack: ExitStack, thing: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is closed."""
    stack.callback(setattr, thing, name, getattr(thing, name))
    setattr(thing, name, value)


class NoSuchForm(RuntimeError):
    """Report that an operation, named in the text, has no deterministic form."""


class Overflow(ArithmeticError):
    """Report that a gradient was too large for float16 at the loss scale in use; the step is to be left out.

    Attributes:
        loss: loss of the batch, detached.
    """

    def __init__(self, loss: Tensor) -> None:
        super().__init__("a gradient overflowed")
        self.loss = loss


class LossScale:
    """Scale losses up before they are backpropagated in float16, and gradients down again (torch's ``GradScaler``).

    Args:
        device_type: type of the device that trains: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        self.scaler = torch.amp.GradScaler(device_type, init_scale=FIRST_SCALE)

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients of ``loss``, without the loss scale, for the optimizer's parameters.

        Raises:
            Overflow: a gradient is not finite; the next loss scale is half as large.
        """
        before = self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            optimizer.zero_grad(set_to_none=True)
            raise Overflow(loss.detach())

    @property
    def exhausted(self) -> bool:
        """Return whether gradients overflow in float16 even at the smallest loss scale."""
        return self.scaler.get_scale() < LEAST_SCALE


class _Lowered:
    """Run a network under autocast by hooks, which turn the network's output into float32.

    Hooks are used instead of a wrapped ``forward``: a copy of the network has copies of its hooks, while a wrapped
    ``forward`` would still compute with the weights of the original network.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype, self.enabled = device_type, dtype, True
        self._open: list[torch.autocast] = []

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.enter, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)
        model.__dict__[_NAME] = self

    def enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self.device_type, self.dtype, enabled=self.enabled)
        context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open:
            self._open.pop().__exit__(None, None, None)
        return _cast_to_float32(output)


def _cast_to_float32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return type(output)((key, _cast_to_float32(value)) for key, value in output.items())  # type: ignore[call-arg]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_cast_to_float32, output))
    return type(output)(map(_cast_to_float32, output)) if isinstance(output, (list, tuple)) else output


def _channels_last(model: nn.Module) -> None:
    """Lay the kernels of 2D and 3D convolutions out channels-last.

    The layout of the images follows from that of the kernels.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in model.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.ndim])
