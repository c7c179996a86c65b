"""Declare the options of ``fairflare prepare`` as parameters, from which typer makes commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fairflare.base.checks import refuse

if TYPE_CHECKING:
    from fairflare.data.preparers.dealing import Dealing

Plane = Literal["axial", "coronal", "sagittal"]
TOGETHER = "\n"  # separator between the words of one value


def option(
    name: str, kind: Any, text: str, default: Any = Parameter.empty, *flags: str,
    convert: Callable[[Any], Any] | None = None, **more: Any,
) -> Parameter:  # fmt: skip
    """Return an option as the keyword argument of a function.

    Args:
        name: name of the argument; the flag is the same with dashes, unless ``flags`` are given.
        kind: type of the argument; the values of a list follow one flag, or the flag is repeated.
        text: help text of the option.
        default: default value; without one, the option is required.
        flags: flags of the option, such as ``"--site"``.
        convert: function that converts the given value for the function of the command; None for no conversion.
        more: further arguments of :func:`typer.Option`. With a ``metavar`` of several words, one value consists of as
            many words, which ``split(TOGETHER)`` separates.
    """
    declared = typer.Option(*flags, help=text, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared, convert])


def values_of(declared: Sequence[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the given options to the arguments of a command's function, each by its function ``convert``."""
    makers = {parameter.name: parameter.annotation.__metadata__[1] for parameter in declared}
    return {name: value if makers[name] is None else makers[name](value) for name, value in given.items()}


@dataclass(frozen=True)
class Preparer:
    """Describe a command of ``fairflare prepare``.

    Attributes:
        name: name of the command.
        text: help text of the command.
        prepare: function of the command, which gets the options by name.
        options: options of this command, but for those that all commands have.
        dealing: default rule by which images are dealt to sites; None if the command does not deal images.
    """

    name: str
    text: str
    prepare: Callable[..., dict[str, Path]]
    options: Sequence[Parameter] = ()
    dealing: Dealing | None = None


def parse_pairs(items: Sequence[str] | None) -> dict[str, str]:
    """Convert texts ``NAME=VALUE``, such as ``["image=id_code"]``, to a dict.

    Raises:
        ValueError: a text is no such pair.
    """
    pairs = [item.partition("=") for item in items or ()]
    if wrong := [name + equals + value for name, equals, value in pairs if not (name and equals and value)]:
        raise ValueError(f"expected NAME=VALUE, got {', '.join(wrong)}")
    return {name: value for name, _, value in pairs}


def sites_of(values: Sequence[str] | None) -> dict[str, tuple[Path, Path]]:
    """Return the two paths (images and labels) of each option ``--site``, by the site's name.

    Raises:
        ValueError: an option does not have three words, or a site is named twice.
    """
    sites = [value.split(TOGETHER) for value in values or ()]
    if wrong := [words for words in sites if len(words) != 3]:
        raise ValueError(
            f"--site takes NAME and two paths, got {' '.join(wrong[0])}; they hold images and their labels"
        )
    given = {name: (Path(images), Path(masks)) for name, images, masks in sites}
    refuse({f"--site names a site twice: {', '.join(name for name, _, _ in sites)}": len(given) != len(sites)})
    return given


SITE_FLAG: Any = {"metavar": "NAME IMAGES LABELS", "convert": sites_of}
#: Options of the commands that prepare a user's own files, by the name of the function's argument.
OPTIONS: Mapping[str, Parameter] = {declared.name: declared for declared in (
    option(
        "source_dir", str, "Folder with the source files; of volumes a tree (Decathlon, BIDS, images/ and masks/), or "
        "a folder with one for each site.", Parameter.empty, "--source", metavar="SOURCE",
    ),
    option(
        "sites", list[str], "LABELS: a folder of masks, or a table of classes. Repeatable.", Parameter.empty, "--site",
        **SITE_FLAG,
    ),
    option(
        "folders", list[str] | None, "In place of --source; LABELS: a folder of masks, or a table of classes. "
        "Repeatable.", None, "--site", **SITE_FLAG,
    ),
    option(
        "csv", str | None, "Table of the images: below SOURCE, or as seen from the working folder.", None,
        metavar="FILE",
    ),
    option(
        "columns", list[str] | None,
        "What the columns are called, where not image, label (or mask), site, patient, split.", None,
        metavar="NAME=COLUMN", convert=parse_pairs,
    ),
    option(
        "attributes", list[str] | None, "Attributes of the people, by their columns of the CSV file: sex=sex, or with "
        "the inner edges of bins age=age_approx:40,60.", None, metavar="NAME=COLUMN(:EDGES)", convert=parse_pairs,
    ),
    option("classes", list[str] | None, "In the order of their numbers.", None, metavar="NAME"),
    option(
        "uncertain", Literal["ignore", "zero", "one"] | None,
        "What -1 in a column of findings becomes: not known, 0 or 1.", None,
    ),
    option(
        "blank", Literal["zero", "missing"] | None,
        "What an empty cell in a column of findings becomes: 0, or not known.", None,
    ),
    option("slices", Plane | None, "List slices of this plane, for 2D tasks; default: whole volumes.", None),
    option("keep_empty", bool, "With --slices: also those without a label.", False, "--keep-empty"),
    option("leave_out", bool, "Go on without what cannot be used.", False, "--leave-out"),
    option(
        "unlabelled", list[str] | None,
        "Folder of images without labels. Repeatable; SITE= where there are several sites.", None,
        metavar="(SITE=)FOLDER",
    ),
    option(
        "suffix", list[str] | None, "Of the images of a BIDS tree, such as T1w; several are channels.", None,
        metavar="SUFFIX",
    ),
    option(
        "channels", list[str] | None, "Names of a case's images, in order: ends of their names, columns of the table, "
        "or for _0000, _0001, ...", None, metavar="NAME",
    ),
    option(
        "group", list[str] | None, "Regular expression, searched in the name of an image (images, volumes: in its "
        "path); its first part in brackets is the patient. One for all, or repeated with one for each site.", None,
        metavar="(SITE=)EXPR",
    ),
    option(
        "mask_values", list[str] | None, "Such as 0=0 128=1 255=2.", None, metavar="VALUE=LABEL", convert=parse_pairs,
    ),
    option(
        "mask_drawn_on", Literal["stored", "upright"] | None, "Where only one of image and mask says how it lies: the "
        "mask is drawn on the pixels as they are stored, or as they are shown.", None,
    ),
)}  # fmt: skip


def declare_preparer(
    name: str, text: str, prepare: Callable[..., dict[str, Path]], names: Sequence[str], dealing: Dealing | None
) -> Preparer:  # fmt: skip
    """Return the command that calls ``prepare``, with options for its arguments and for the options ``names``."""
    named = [
        OPTIONS[parameter.name].replace(default=parameter.default)
        for parameter in signature(prepare).parameters.values()
        if parameter.name in OPTIONS
    ]
    return Preparer(name, text, prepare, [*named, *(OPTIONS[option] for option in names)], dealing)
