"""Build a run's first model, load its weights, and select the tensors that travel between server and sites.

Where a large frozen part of a network does not travel, the server needs only its names and a checksum. So a server in a
process of its own lets a short-lived process build the network, and never holds the part that does not travel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fairflare.base.checks import first_of, refuse
from fairflare.base.machine.child import run_in_child
from fairflare.base.own_errors import describe_error
from fairflare.base.task import Task
from fairflare.core.features.adapting import network_of
from fairflare.core.features.norms import running_statistics
from fairflare.exchange.messages import clean_state, num_bytes
from fairflare.exchange.sent_tensors import ALL, SentTensors
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.plan.site_training import AtHome, find_local_tensors
from fairflare.federation.plan.task_files import brings

TRAINED = (torch.float32, torch.float64, torch.bfloat16)
AVERAGED = (*TRAINED, torch.float16)


@dataclass
class FirstModel:
    """Store what the server knows of the task's network.

    Attributes:
        state: the tensors that are sent between server and sites; the sites build all others themselves.
        parameters: names of the tensors that are trained.
        frozen: names of the tensors that travel and that no training changes.
        rest: fingerprint of the tensors that are not sent; empty if all tensors are sent.
        at_home: describes the tensors that the method keeps at the sites.
        numbers, nbytes, tensors: size of the whole model, in floating-point numbers, bytes and tensors.
        still: names of the batch norms' statistics that are not sent.
        facts: what settings may act on in the network, by their texts in :mod:`fairflare.base.acting`.
        said: lines for the server's log, each with a flag that is true for a warning.
    """

    state: dict[str, torch.Tensor]
    parameters: frozenset[str]
    frozen: frozenset[str]
    rest: str
    at_home: AtHome
    numbers: int
    nbytes: int
    tensors: int
    still: list[str]
    facts: dict[str, bool]
    said: list[tuple[str, bool]] = field(default_factory=list)

    def note(self, run: RunSettings) -> dict[str, Any]:
        """Return a note about the tensors that travel, for results and model files; empty if all tensors travel."""
        about = {"setting": run.exchange, "seed": run.seed, "sent": len(self.state), "tensors": self.tensors}
        about |= {"bytes": num_bytes(self.state), "fingerprint": self.rest}
        return {"exchange": about} if self.rest else {}


def first_model(task: Task, run: RunSettings, place: Place, makes: tuple[str, ...] = ()) -> FirstModel:
    """Build the task's network, load its initial weights, and return what the server needs of it.

    Args:
        task, run, place: the run's task, settings and folders.
        makes: prefixes of the names of tensors that the rule makes at the server.

    Raises:
        ValueError: the network cannot be built or its weights loaded, or ``exchange`` does not fit the network.
    """
    checkpoint = place.initial_weights(run)
    outside = (  # the job, whose author reads errors about the file, names one that it does not carry
        place.carried is not None and "initial_weights" not in place.settings
        and not Path(checkpoint or "/").resolve().is_relative_to(place.carried.resolve())
    )  # fmt: skip
    make = partial(_make_first, task, run, makes, checkpoint, place.site_half, outside=outside)
    if run.exchange == ALL or not place.apart:
        return make()
    names, first, content = run_in_child(_make_bytes, make, before=brings(task))
    tensors = load_bytes(content)
    return replace(first, state={name: tensors[name] for name in names})


def build(task: Task) -> torch.nn.Module:
    """Return the task's network, checked; an error in a user's own code is raised with file name and line."""
    named = f"build_model() of the task ({type(task).__name__})"
    try:
        model = network_of(task)
    except Exception as error:
        reason = getattr(error, "public", None) or f"{named} failed: {describe_error(error)}"  # our text, or the user's
        raise ValueError(reason) from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{named} must give a torch.nn.Module, got {type(model).__name__}")
    check_network(model, f"the network of the task ({type(task).__name__})")
    return model


def check_network(model: torch.nn.Module, named: str) -> None:
    """Refuse a network that cannot be trained and averaged: lazy, complex, in float16, not finite, or all frozen.

    Args:
        model: the network, newly built or with its initial weights.
        named: name of the network in the error's text.

    Raises:
        ValueError: the network cannot be used; the message names the first such tensor, and says what to do.
    """
    of_parameters = dict(model.named_parameters())
    for name, tensor in (of_parameters | dict(model.named_buffers())).items():
        refuse({
            f"{named}: {name!r} has no size before the first batch, and the server has no images; give the layer its "
            "sizes (Conv2d in place of LazyConv2d), or put a batch of zeros through the network in build_model()":
                torch.nn.parameter.is_lazy(tensor),
        })  # fmt: skip
    for name, tensor in model.state_dict().items():
        trained = name in of_parameters and of_parameters[name].requires_grad
        real = tensor.is_floating_point()
        endless = real and not bool(torch.isfinite(tensor).all())
        if problem := first_of({
            f"is {tensor.dtype}, and only real numbers are averaged; keep a tensor of real and imaginary parts "
            "(torch.view_as_real) and put them together in forward (torch.view_as_complex)": tensor.is_complex(),
            f"is {tensor.dtype}, in which steps and their squares come to 0; keep float32 (no .half() in the network) "
            "and set precision=bf16, or on a GPU precision=fp16":
                real and tensor.dtype not in (TRAINED if trained else AVERAGED),
            "is not finite": endless and name in of_parameters,
            "is a buffer that is not finite (a mask of -inf?); what travels must be: register_buffer(..., "
            "persistent=False) keeps it out of the model that is sent": endless,
        }):  # fmt: skip
            raise ValueError(f"{named}: {name!r} {problem}")
    refuse({
        f"{named} has no parameter that is trained; set requires_grad of what is to be learned":
            not any(parameter.requires_grad for parameter in of_parameters.values()),
    })  # fmt: skip


def _make_first(
    task: Task, run: RunSettings, makes: tuple[str, ...], checkpoint: str | None, site_half: Any, *, outside: bool
) -> FirstModel:
    torch.manual_seed(run.seed)  # the same seed as at each site that builds the network
    model = build(task)
    sent = SentTensors(model, run.exchange, makes)
    rest = sent.rest(model.state_dict())
    before = sent.mark(rest)
    try:
        log_lines = [(task.initialise(model, checkpoint), False)]
    except (ValueError, OSError) as error:
        if not outside:
            raise
        # The error goes to the server's own output and not to the job's log, which the job's author receives.
        print(f"a job's initial weights: {error}", file=sys.stderr)
        raise ValueError(
            f"the initial weights {checkpoint or 'of the task'!r:.200} cannot be used: the server has no such file, or "
            "it is no plain checkpoint of exactly the task's network; the standard error of the server's process says "
            "which"
        ) from None
    check_network(model, "the network with its initial weights")
    state = clean_state(model.state_dict())
    after = sent.mark(state)
    refuse({
        f"exchange={run.exchange!r}: initial_ckpt changes tensors that are not sent, and the sites have not got them; "
        "give every participant the file, as initial_weights of the task or of its local/fairflare.json, or set "
        "exchange=all": run.initial_ckpt and after != before,
    })  # fmt: skip
    if rest:
        part = sent.select(state)
        log_lines.append((
            f"exchange={run.exchange!r}: {len(part)} of {len(state)} tensors travel, {num_bytes(part)} of "
            f"{num_bytes(state)} bytes; the others are built at each site",
            False,
        ))  # fmt: skip
    return FirstModel(
        state={name: tensor.clone() for name, tensor in sent.select(state).items()} if rest else state,
        parameters=sent.parameters,
        frozen=frozenset(sent.names) - sent.changing,
        rest=after,
        at_home=find_local_tensors(site_half, model, lambda text, warning=False: log_lines.append((text, warning))),
        numbers=sum(t.numel() for t in state.values() if t.is_floating_point()),
        nbytes=num_bytes(state),
        tensors=len(state),
        still=[name for name in running_statistics(model) if name in rest],
        facts={
            "a batch norm with running statistics": bool(running_statistics(model)),
            "a convolution in the network": any(parameter.ndim in (4, 5) for parameter in model.parameters()),
            "a tensor that it leaves out": bool(rest),
        },
        said=log_lines,
    )


def _make_bytes(make: Callable[[], FirstModel]) -> tuple[list[str], FirstModel, bytes]:
    """Return a first model as names of tensors, remaining fields, and the tensors as bytes, for another process."""
    torch.set_num_threads(1)
    first = make()
    return list(first.state), replace(first, state={}), save_bytes(first.state)
