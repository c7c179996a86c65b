"""Make objects of a MONAI bundle's configuration without running any of it, for sites that permit no custom code.

``_target_`` may name the classes of a list, with arguments that reach no file, module or network; ``@`` refers to
another key; ``$`` expressions go to :mod:`fairflare.tasks.bundles.expressions`. Everything else is refused with
its key. ``bundle_config.Bundle.make`` chooses between this module and MONAI's own parser, which runs all expressions.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from fairflare.base.checks import first_of
from fairflare.tasks.bundles.expressions import BUDGET, MOST, REFERENCE, Expression, Refused, leaves

DEEPEST = 60  # largest number of references, macros and levels that lead from one to the next
LARGEST = 2**24  # largest number in an argument
LARGEST_IMAGE = 2**27  # largest number of voxels that a size in an argument may stand for
SIZES = re.compile(
    "size|border|shape|roi|times|samples|repeats|grid|cells|pixdim|zoom|onehot|classes"
)  # arguments that say how large an image becomes
POWERS = {"pixdim": -1, "zoom": 1, "max_zoom": 1}  # argument: power of its number to multiply a side of 100 by
MOST_CALLS, MOST_NUMBERS = 20_000, 10**8  # limits of calls on tensors and of their elements, per object
#: Text of an argument: no path, module, expression or number (YAML reads ``1e-05``, without a point, as text).
PLAIN = re.compile(r"(?![-+]?([\d_]+(e[-+]?\d+)?|inf|infinity|nan)$)[\w \-+:,=<>]*", re.IGNORECASE)
REACHES = re.compile(
    "pretrained|paths?$|url|filename|_dir$|logger|writer|download|pickle|^mmap"
)  # arguments that may load or write
CHOICES = {  # allowed values of arguments that name code: readers of images, torchvision's transforms
    "reader": ("nibabelreader", "itkreader", "pydicomreader", "pilreader", "nrrdreader"),
    "name": ("colorjitter", "gaussianblur", "grayscale", "normalize", "randomautocontrast", "randominvert"),
}
FURTHER = (  # arguments that classes pass on to readers of images, to numpy's pad, to torchvision's transforms
    "as_closest_canonical", "channel_dim", "max", "min", "brightness", "contrast", "saturation", "hue", "kernel_size",
    "sigma", "p", "mean", "std",
)  # fmt: skip
SPECIAL = ("_target_", "_desc_")
UNNAMED = ("self", "args", "kwargs", "pad_kwargs")  # parameters that are no arguments of a class


class Sealed:
    """Make objects from the keys of a sealed bundle's configuration.

    Args:
        config: content of the bundle's files.
        classes: full names of the classes that ``_target_`` may name; default: :func:`shipped_classes`.
    """

    def __init__(self, config: Mapping[str, Any], classes: Collection[str] | None = None) -> None:
        self.config = config
        self.classes = index_classes(frozenset(shipped_classes() if classes is None else classes))
        self._made: dict[str, Any] = {}
        self.making: list[str] = []  # keys of objects being made, each for the one before it
        self.budget = [BUDGET]  # shared by all expressions while objects are made

    def make(self, key: str) -> Any:
        """Return the object of a configuration key, which is made once.

        Raises:
            Refused: a part of the object is not allowed, or refers to a key that does not exist (names the part's key).
        """
        key = key.replace("#", "::")
        if key not in self._made:
            if key in self.making or len(self.making) >= DEEPEST or len(self._made) > MOST:
                raise Refused(
                    f"{key[-80:]!r} refers to itself, or is reached over more than {DEEPEST} keys, or the bundle has "
                    f"more than {MOST} values; write the value in place of the reference"
                )
            self.making.append(key)
            try:
                value = look(self.config, key)
            except (LookupError, TypeError) as error:
                raise Refused(
                    f"{self.making[-2:][0]!r} leads to {key[-80:]!r}, where nothing is (lacking: {error!s:.80}); "
                    "correct the name, or write the value itself"
                ) from None
            self._made[key] = self._content(key, value)
            self.making.pop()
        return self._made[key]

    def _content(self, key: str, value: Any) -> Any:
        match value:
            case {"_target_": target}:
                if str(target) not in self.classes:
                    near = "".join(
                        f", such as {name!r}" for name in get_close_matches(str(target)[:80], self.classes, 1)
                    )
                    raise Refused(
                        f"{key!r}: {target!r:.80} is not on the list of classes that a sealed bundle may name; take "
                        f"one that is (docs/bundles.md){near}, or let the site's owner add it to bundle_classes"
                    )
                arguments = {name: self.make(f"{key}::{name}") for name in value if name not in SPECIAL}
                return made(key, self.classes[str(target)], arguments)
            case dict():
                return {name: self.make(f"{key}::{name}") for name in value}
            case list():
                return [self.make(f"{key}::{place}") for place in range(len(value))]
            case str() if value.startswith("$"):
                return Expression(self, key, value, self.budget).value()
            case str() if REFERENCE.fullmatch(place := value.replace("#", "::")):
                return self.make(place[1:])
        return value


def made(key: str, cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return an object of a class; refuse arguments that may reach files, modules or a network, or are too large."""
    parameters = inspect.signature(cls).parameters
    known = {*parameters, *FURTHER}.union(*(inspect.signature(base.__init__).parameters for base in cls.__mro__))
    for name, value in {**{name: one.default for name, one in parameters.items()}, **arguments}.items():
        choices = CHOICES.get(name, ())
        harmless = any(value is one for one in (None, False, inspect.Parameter.empty)) or (
            isinstance(value, str) and value.lower() in choices
        )
        sides = value if isinstance(value, list | tuple) else [value] * 3
        numbers = [abs(side) for side in sides if isinstance(side, int | float) and side]
        voxels = math.prod(100 * side ** POWERS[name] if name in POWERS else side for side in numbers)
        odd = [
            one
            for one in leaves(arguments.get(name))
            if (isinstance(one, int | float) and not abs(one) <= LARGEST)
            or (isinstance(one, str) and not PLAIN.fullmatch(one))
        ]
        if wrong := first_of({
            "is no argument that it has; take it out": name in arguments and name not in known.difference(UNNAMED),
            f"may load or write something; take one of {', '.join(choices or ('false', 'null'))}": not harmless
            and (name in CHOICES or REACHES.search(name)),
            "is too large for an image; write a smaller one": SIZES.search(name) and voxels > LARGEST_IMAGE,
            "may be a path or the name of a module, or is a number as text, or one too large; write a plain word, or a "
            f"number up to {LARGEST} (in YAML with a point: 1.0e-5)": odd,
        }):  # fmt: skip
            raise Refused(f"{key!r}: {name!r:.80} of a {cls.__name__} {wrong}, got {[*odd, value][0]!r:.80}")
    with _Bounded():  # type: ignore[no-untyped-call]
        return cls(**arguments)


class _Bounded(TorchDispatchMode):
    """Refuse an object with very many layers or very large tensors before it is made."""

    calls = numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [one for one in args if isinstance(one, list | tuple) and all(isinstance(side, int) for side in one)]
        self.calls += 1
        self.numbers += max(map(math.prod, sizes), default=0)
        if self.calls > MOST_CALLS or self.numbers > MOST_NUMBERS:
            raise Refused(f"an object is too large to be made; a network may have up to {MOST_NUMBERS} parameters")
        return func(*args, **(kwargs or {}))


def look(config: Any, key: str) -> Any:
    """Return the value under a key such as ``train::dataset::0`` (or ``train#dataset#0``).

    A macro (``%other::key``), on the way or at the end, stands for what the other key has.

    Raises: KeyError, IndexError, ValueError, TypeError: there is no such value, or macros lead in a circle.
    """
    value, steps = config, key.replace("#", "::").split("::")
    for _ in range(DEEPEST):
        if isinstance(value, str) and value.startswith("%"):
            value, steps = config, [*value[1:].replace("#", "::").split("::"), *steps]
        elif steps:
            step, *steps = steps
            value = value[int(step)] if isinstance(value, list) else value[step]
        else:
            return value
    raise ValueError(
        f"{key[:80]!r} refers to itself, or leads over more than {DEEPEST} keys; write the value in place of the "
        "reference"
    )


@cache
def shipped_classes() -> frozenset[str]:
    """Return the full names of the classes that a sealed bundle may use unless a site's file changes the list."""
    packages = yaml.safe_load(Path(__file__).with_name("sealed_classes.txt").read_text(encoding="utf-8"))
    return frozenset(f"{package}.{name}" for package, names in packages.items() for name in names.split())


def allowed_classes(entries: Collection[str] = ("default",)) -> frozenset[str]:
    """Return the classes of a site's list: ``default`` stands for the shipped ones, ``-NAME`` takes one out."""
    taken = shipped_classes() if "default" in entries else frozenset()
    return taken.union(entry for entry in entries if "." in entry and entry[0] != "-").difference(
        entry[1:] for entry in entries if entry.startswith("-")
    )


@cache
def index_classes(classes: frozenset[str]) -> dict[str, type]:
    """Return the classes of a list by each full name that they have, and MONAI's by a short name too."""
    places = sorted({full.rpartition(".")[0] for full in classes}, reverse=True)  # of one short name the first counts
    return {
        alias: value
        for place in places
        for name, value in vars(import_module(place)).items()
        if isinstance(value, type) and f"{place}.{value.__name__}" in classes
        for alias in (f"{place}.{name}", f"{value.__module__}.{name}", *([name] if place.startswith("monai.") else ()))
    }
