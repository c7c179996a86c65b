"""Implement ``fairflare predict``, which applies a run's model to images."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from fairflare.base.checks import first_of, group_by_key, refuse
from fairflare.base.disk.files import csv_text, write_whole
from fairflare.cli.options import Device, OfModels, Overwrite, OwnCode, refuse_to_replace, which_model
from fairflare.cli.screen import console, errors, note, say, user_errors

if TYPE_CHECKING:
    import torch

    from fairflare.prediction.predictor import Predictor

CSV_FILE = "predictions.csv"
MOST_SHOWN = 30  # largest number of lines on the screen; the CSV file has all
THRESHOLD = 0.5  # probability threshold of the evaluation
Told = tuple[list[dict[str, Any]], list[tuple[str, ...]]]  # rows of the CSV file, and lines for the screen


@dataclass(frozen=True)
class Wanted:
    """Describe the files that ``predict`` writes: their folder, threshold and kinds.

    ``more`` has the files of further channels, by the file of the first.
    """

    out: Path
    overlay: bool
    threshold: float
    probabilities: bool = False
    more: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)


def predict(
    model: Annotated[
        Path, typer.Argument(help="Folder of a run (runs/fed_lwr-seed0), a FLARE download, or a model file (.pt).")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or patterns: PNG, JPEG, BMP, TIFF, .npy, NIfTI, DICOM (each slice of a volume)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder for masks or probabilities, and predictions.csv."),
    ] = None,
    best: OfModels = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Segmentation: a pixel is found above this probability; default 0.5, as in the evaluation.",
        ),
    ] = None,
    overlay: Annotated[
        bool, typer.Option("--overlay", help="Segmentation: also a PNG of each image with its mask in colour.")
    ] = False,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Segmentation: also each structure's probabilities, as a file.")
    ] = False,
    exported: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--as",
            metavar="KIND DIR",
            help="In place of images: the model into a new folder, for programs without FairFlare; KIND is "
            "torchscript, onnx, bundle (MONAI) or nnunet.",
        ),
    ] = None,
    device: Device = None,
    task_file: OwnCode = None,
    overwrite: Overwrite = False,
) -> None:
    """Write masks or class probabilities of images, by a run's model. Research use only: this is not a medical device.

    Network and preprocessing are those of the training; the model's file has
    them. A mask has its image's size and orientation: PNG for a picture,
    NIfTI with the same affine for NIfTI. Exit code 1 when an image could not
    be used.
    """
    with user_errors(out or (exported or [None])[-1]):
        if exported is not None:
            from fairflare.prediction.export import export

            if any((images, out, threshold is not None, overlay, probabilities, device, overwrite)):
                raise ValueError("--as writes the model and no masks; it goes with --best, --last, --task-file alone")
            for path in export(_load(model, best, task_file, "cpu"), *exported):
                say(f"written: {path}", console)
            return
        if not images or out is None:
            raise ValueError("give images and --out, or --as with the kind of file that is wanted and a folder for it")
        images_by_file = find_images(images, out)
        predictor = _load(model, best, task_file, device)
        images_by_file, more = cases_of(images_by_file, predictor.task.channels or (), in_order=len(images) > 1)
        wanted = Wanted(out, overlay, _threshold(predictor, threshold, overlay, probabilities), probabilities, more)
        refuse_to_replace(_targets(predictor, images_by_file, wanted), overwrite)
        failed = _predict_all(predictor, images_by_file, wanted)
    raise typer.Exit(int(failed > 0))


# ------------------------------------------------------------------------------------------------ input


def find_images(given: Sequence[str], out: Path) -> dict[Path, str]:
    """Find images by files, folders (with their subfolders) and patterns; files in the folder ``out`` are left out.

    Returns:
        The name in the output for each image file: its path below the folder that was given, else its own name.

    Raises:
        ValueError: a path does not exist, a folder has no image, or two images would have one name in the output.
    """
    from fairflare.prediction.masks import stem_of

    by_path: dict[Path, tuple[Path, str]] = {}
    for text in given:
        for image, name in _images_of(text, out).items():
            by_path.setdefault(image.resolve(), (image, name))
    by_output: dict[str, Path] = {}
    for image, name in by_path.values():
        other = by_output.setdefault(stem_of(name), image)
        if other is not image:
            raise ValueError(
                f"{other} and {image} would be written under one name; "
                + ("rename one of them" if other.parent == image.parent else "give the folder that holds both")
                + ", or call predict for each, with an --out of its own"
            )
    return dict(by_path.values())


def cases_of(
    files_and_names: Mapping[Path, str], channels: Sequence[str], in_order: bool
) -> tuple[dict[Path, str], dict[Path, tuple[Path, ...]]]:  # fmt: skip
    """Group files by case, where a model takes several images a case.

    Args:
        files_and_names: name in the output of each file.
        channels: names of the model's channels.
        in_order: whether files whose names say no channel are one case, in the order of the channels.

    Returns:
        The name in the output of each case, and its further files, by its first file.

    Raises:
        ValueError: a case has another number of images than the model has channels.
    """
    from fairflare.data.preparers.names import key_cases
    from fairflare.prediction.masks import stem_of

    if len(channels) < 2:
        return dict(files_and_names), {}
    files = key_cases(
        ((stem_of(name), path) for path, name in files_and_names.items()), channels, (), "are one image of one case"
    )
    cases = {
        key: dict(sorted(by_channel))
        for key, by_channel in group_by_key((key, (k, path)) for (key, k), path in files.items()).items()
    }
    if (
        in_order
        and len(files_and_names) == len(channels)
        and {k for _, k in files} == {-1}
        and not any(map(_has_all, files_and_names))
    ):
        cases = {stem_of(next(iter(files_and_names.values()))): dict(enumerate(files_and_names))}
    for key, case in cases.items():
        if case.keys() != {*range(len(channels))} and (case.keys() != {-1} or not _has_all(case[-1])):
            raise ValueError(
                f"the model takes {len(channels)} images a case ({', '.join(channels)}), and '{key}' has {len(case)}: "
                f"{', '.join(path.name for path in case.values())}; give the files of one case in this order, or name "
                f"them '{key}_{channels[0]}', ... or '{key}_0000', ..."
            )
        in_words = [f"{channels[k]} = {path.name}" for k, path in case.items() if k >= 0]
        say(f"{key}: {', '.join(in_words) or 'all channels in one file'}")
    lists = {key: [*by_channel.values()] for key, by_channel in cases.items()}
    names = {
        paths[0]: key + files_and_names[paths[0]][len(stem_of(files_and_names[paths[0]])) :]
        for key, paths in lists.items()
    }
    return names, {paths[0]: tuple(paths[1:]) for paths in lists.values()}


def _has_all(path: Path) -> bool:
    """Return whether a file has several volumes; one that cannot be opened is refused when it is read."""
    from fairflare.data.image_file import image_file

    with suppress(Exception):
        return image_file(path).facts().volumes > 1
    return False


def _images_of(text: str, out: Path) -> dict[Path, str]:
    path = Path(text).expanduser()
    # A path that exists is taken literally, since its name may contain wildcard characters such as [ or *.
    matching = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    if not matching:
        raise ValueError(f"{text}: there is no such file, folder or matching name")
    by_file = {file: file.name for file in matching if file.is_file()}
    for folder in filter(Path.is_dir, matching):
        by_file |= _images_in(folder, out)
    return by_file


def _images_in(folder: Path, out: Path) -> dict[Path, str]:
    from fairflare.data.image_file import SUFFIXES
    from fairflare.data.preparers.contents import contents

    if out.resolve() == folder.resolve():
        raise ValueError(f"--out {out} is the folder of the images; give another one")
    seen = contents(folder, besides=[out])
    series = _series_in((folder, *seen.folders))
    images = dict.fromkeys(file.parent if file.parent in series else file for file in seen.images)
    by_file = {image: folder.name if image == folder else image.relative_to(folder).as_posix() for image in images}
    passed = seen.list_unread()
    if not by_file:
        known = f"not read: {passed}" if passed else f"known are {', '.join(SUFFIXES)}"
        raise ValueError(f"{folder} holds no image; {known}")
    if passed:
        say(f"{folder}: not read: {passed}")
    return by_file


def _series_in(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that hold the files of a single DICOM series and no other file; each is one volume."""
    from fairflare.data import dicom
    from fairflare.data.dicom_files import files_of_series
    from fairflare.data.geometry import NO_SERIES, Misfit
    from fairflare.data.image_file import Dicom, Unknown, kind_of

    places = []
    for place in folders:
        files = files_of_series(place)
        if len(files) < 2 or any(kind_of(path) not in (Dicom, Unknown) for path in place.iterdir()):
            continue
        try:
            dicom.headers(place)
        except Misfit as error:  # a broken series counts as one image, which is left out later, with the reason
            if error.cause in NO_SERIES:
                say(f"{place}: no volume, each file is an image by itself: {error}")
                continue
        except Exception:  # in colour, or damaged: each file is an image of its own
            continue
        places.append(place)
    return places


def _load(place: Path, best: bool | None, task_file: Path | None, device: str | None) -> Predictor:
    from fairflare.prediction.predictor import load_predictor

    predictor = load_predictor(place, which_model(best), task_file=task_file, device=pick_device(device))
    say(f"model: {predictor.model.path} ({predictor.model.describe()})".removesuffix(" ()"), console)
    if predictor.model.record.get("synthetic"):
        say(" images: what it says of real ones means nothing", console, mark="trained on [yellow]SYNTHETIC[/yellow]")
    for text in predictor.notes:
        note(text)
    return predictor


def pick_device(device: str | None) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        ValueError: the device cannot be used on this machine.
    """
    from fairflare.federation.site import site_file
    from fairflare.methods.base.training import SiteError

    try:
        return site_file.pick_device("", device)
    except SiteError as error:
        raise ValueError(f"--device {device}: not usable here: {error.__cause__}") from error


def _threshold(predictor: Predictor, given: float | None, overlay: bool, probabilities: bool) -> float:
    of_masks = first_of({
        "--threshold": given is not None, "--overlay": overlay, "--probabilities": probabilities,
    })  # fmt: skip
    threshold = THRESHOLD if given is None else given
    refuse({
        f"{of_masks} is for segmentation; this model tells classes, whose probabilities {CSV_FILE} has":
            of_masks and predictor.kind == "classification",
        f"--threshold must lie between 0 and 1, got {threshold:g}": not 0 < threshold < 1,
        "--threshold: of this model's structures the most probable is marked (output=softmax)":
            given is not None and predictor.task.exclusive,
    })  # fmt: skip
    return threshold


def _targets(predictor: Predictor, names: Mapping[Path, str], wanted: Wanted) -> list[Path]:
    """Return the paths of the files that will be written."""
    from fairflare.prediction.masks import overlay_name, probability_file

    targets = [wanted.out / CSV_FILE]
    if predictor.kind == "segmentation":
        masks = [wanted.out / _mask_of(image, name) for image, name in names.items()]
        parts = range(len(predictor.names)) if wanted.probabilities else ()
        targets += [*masks, *(probability_file(mask, part) for mask in masks for part in parts)]
        targets += [wanted.out / overlay_name(name) for name in names.values() if wanted.overlay]
    return targets


def _mask_of(image: Path, name: str) -> str:
    """Return the name of the mask of an image with this name in the output."""
    from fairflare.data.image_file import Dicom, image_file
    from fairflare.prediction.masks import mask_name

    try:
        file = image_file(image)
        volume = isinstance(file, Dicom) and file.facts().slices is not None
    except Exception:  # the image's problem is reported when it is read
        volume = False
    return mask_name(name, volume)


# ------------------------------------------------------------------------------------------------ output


def _predict_all(predictor: Predictor, names: Mapping[Path, str], wanted: Wanted) -> int:
    """Apply the model to all images, write the results, and return the number of images that could not be used."""
    from rich.progress import track

    from fairflare.data.datalist import DataError
    from fairflare.data.image_file import SUFFIXES, Unknown, kind_of

    rows: list[dict[str, Any]] = []
    lines: list[tuple[str, ...]] = []
    failed = 0
    tell = _segment if predictor.kind == "segmentation" else _classify
    for image in track(names, "images", console=errors, transient=True, disable=not errors.is_terminal):
        try:
            if kind_of(image) is Unknown:
                raise DataError("", reason=f"its ending is not known; known are {', '.join(SUFFIXES)}")
            new_rows, shown = tell(predictor, image, names[image], wanted)
        except DataError as error:
            failed += 1
            say(f"{image}: {error.reason}", mark="[red]left out[/red]: ")
            continue
        if predictor.blank:
            note(f"{image}: all its pixels have one value; what the model finds there says nothing")
        rows += new_rows
        lines += shown
    if rows:
        wanted.out.mkdir(parents=True, exist_ok=True)
        text = csv_text([list(rows[0]), *(list(row.values()) for row in rows)])
        write_whole(
            wanted.out / CSV_FILE,
            lambda file: file.write_text(text, "utf-8", "surrogateescape"),
            durable=False,
            shared=True,
        )
        _show(predictor, lines)
        say(f"written: {wanted.out / CSV_FILE}", console)
    if failed:
        say(f"{failed} of {len(names)} image(s) could not be used")
    return failed


def _segment(predictor: Predictor, image: Path, name: str, wanted: Wanted) -> Told:
    """Write the mask of a picture, of each slice of a volume, or of a whole volume in its own grid."""
    import numpy as np

    from fairflare.data.datalist import DataError
    from fairflare.data.reading import turn_and_size
    from fairflare.prediction import masks
    from fairflare.tasks.placing import back_in_place

    task: Any = predictor.task
    whole = getattr(task, "spatial_dims", 2) == 3
    if whole and wanted.overlay:
        raise DataError("", reason="--overlay shows pictures; it is not for tasks on whole volumes")
    turn, height, width = (None, 0, 0) if whole else turn_and_size(image, how=task.reading())
    known = masks.labels_of(task)
    numbers, planes, sure = [], [], []
    for prediction in predictor(image, wanted.more.get(image, ())):
        labels, probabilities = (
            masks.label_map(task.decide(prediction.probabilities), known, wanted.threshold),
            prediction.probabilities,
        )
        numbers.append(prediction.slice)
        planes.append(labels.numpy() if whole else masks.resize_labels(labels, height, width, task.resize))
        if wanted.probabilities:
            sure.append(
                (
                    probabilities if whole else back_in_place(probabilities.double(), (height, width), task.resize)
                ).numpy()
            )
    sliced = numbers[0] is not None
    mask = wanted.out / _mask_of(image, name)
    mask.parent.mkdir(parents=True, exist_ok=True)
    stacked = np.stack(planes, axis=2) if sliced else planes[0]
    masks.write_mask(mask, masks.code_labels(stacked, task, mask), image, turn)
    if wanted.probabilities:
        masks.write_probabilities(mask, np.stack(sure, axis=3) if sliced else sure[0], image, turn)
    counts = [[int(np.isin(plane, structure).sum()) for structure in task.structures] for plane in planes]
    if wanted.overlay:
        most = max(range(len(planes)), key=lambda place: np.count_nonzero(planes[place]))
        path = wanted.out / masks.overlay_name(name)
        masks.write_overlay(path, image, numbers[most], planes[most], list(known), task.reading())
    unit = "voxels" if whole else "pixels"
    rows = [
        {"image": str(image), "slice": "" if number is None else number, "mask": str(mask)}
        | {f"{unit}_{part}": count for part, count in zip(predictor.names, counts_of_parts, strict=True)}
        | {unit: planes[0].size}
        for number, counts_of_parts in zip(numbers, counts, strict=True)
    ]
    total = np.sum(counts, axis=0) / stacked.size
    shares = ", ".join(
        f"{_name_structure(part, structure)} {100 * share:.1f} %"
        for part, structure, share in zip(predictor.names, task.structures, total, strict=True)
    )
    slices = f" of {len(planes)} slices" if sliced else ""
    return rows, [(str(image), str(mask.relative_to(wanted.out)), shares + slices)]


def _name_structure(part: str, structure: Iterable[int]) -> str:
    """Return the name of a structure, or words with its labels where it has no name of its own."""
    return f"label {' and '.join(map(str, sorted(structure)))}" if re.fullmatch(r"class_\d+", part) else part


def _classify(predictor: Predictor, image: Path, name: str, wanted: Wanted) -> Told:
    rows: list[dict[str, Any]] = []
    lines: list[tuple[str, ...]] = []
    for prediction in predictor(image, wanted.more.get(image, ())):
        values = dict(zip(predictor.names, prediction.probabilities.tolist(), strict=True))
        first, second = (sorted(values, key=lambda part: -values[part]) * 2)[:2]
        rows.append({
            "image": str(image), "slice": "" if prediction.slice is None else prediction.slice,
            **({} if predictor.task.findings else {"class": first}),
            **{f"p_{part}": repr(value) for part, value in values.items()},
        })  # fmt: skip
        where = str(image) if prediction.slice is None else f"{image}, slice {prediction.slice}"
        lines.append((where, first, f"{values[first]:.3f}", f"{second} {values[second]:.3f}"))
    return rows, lines


def _show(predictor: Predictor, lines: Sequence[tuple[str, ...]]) -> None:
    columns = {"segmentation": ("image", "mask", "found"), "classification": ("image", "class", "p", "next")}
    table = Table(*(Column(name, overflow="fold") for name in columns[predictor.kind]), box=None, pad_edge=False)
    for line in lines[:MOST_SHOWN]:
        table.add_row(*map(escape, line))
    console.print(table)
    if len(lines) > MOST_SHOWN:
        console.print(f"and {len(lines) - MOST_SHOWN} more", highlight=False)
