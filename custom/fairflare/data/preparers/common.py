"""Bring public multi-site data sets into the form that a site reads: images, masks or classes, and a datalist.

================  ===================================================================================
``nuclei``        five acquisition groups of the 2018 Data Science Bowl, from ``nuclei_*.npz``
``white-cells``   three laboratories' white blood cells, from ``wbc_*.npz``
``cell-types``    the same cells by type (five classes)
``red-cells``     twelve types of red blood cells, long-tailed, from ``rbc12_chula.npz``
``prostate-mri``  the six-site T2 prostate set (BIDMC, BMC, HK, I2CVB, RUNMC, UCL), NIfTI volumes
``folders``       any pairs of image and mask folders
================  ===================================================================================

For example::

    python -m fairflare.data.preparers nuclei --source DOWNLOADS --out DATA

writes ``DATA/<site>/images/*.png``, ``DATA/<site>/masks/*.png`` (not where a class is the label) and
``DATA/<site>/datalist.json`` for every site, and ``DATA/fairflare.json``, which says where each site's data are:
copied into the ``local`` folder of a simulator workspace, it makes the job run on them. Images are split 6:2:2 into
training, validation and test by patient (or by source image, where an image was cut into tiles). Either everything is
written or nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import SPLITS, SUFFIXES, TOP_PERCENTILE, DataError, suggest, write_datalist

FRACTIONS = (0.6, 0.2, 0.2)
NUCLEI = ("fluo256", "fluo360", "fluo520", "histology256x320", "brightfield1024")
WHITE_CELLS = ("JTSC", "CellaVision", "BCCD")
WHITE_CELL_TARGETS: Mapping[str, Mapping[str, int] | None] = {  # 0 background, 1 cytoplasm, 2 nucleus
    "cell": {"0": 0, "1": 1, "2": 1},
    "nucleus": {"0": 0, "1": 0, "2": 1},
    "both": None,
}
CELL_TYPES = ("neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil")
UNKNOWN_TYPE = -1
PROSTATE_SITES: Mapping[str, tuple[str, ...]] = {  # names of the folders that are in use
    "BIDMC": ("bidmc", "sitee"),
    "BMC": ("bmc", "isbi_1.5", "siteb"),
    "HK": ("hk", "sitef"),
    "I2CVB": ("i2cvb", "sitec"),
    "RUNMC": ("runmc", "isbi", "sitea"),
    "UCL": ("ucl", "sited"),
}
MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)


@dataclass(frozen=True)
class Item:
    """One image on its way into a site's folder; items of one ``group`` (a patient) stay in one split."""

    name: str
    group: str
    image: npt.NDArray[np.uint8] | Path
    mask: npt.NDArray[np.uint8] | Path | int  # int: the class


def split_groups(
    groups: Iterable[str], *, site: str, seed: int = 0, fractions: Sequence[float] = FRACTIONS
) -> dict[str, str]:
    """``{group: split}``: a seeded shuffle, cut at the fractions, at least one group in every split.

    Depends only on the set of names, the site's name and the seed.

    Raises:
        DataError: fewer than three groups.
    """
    names = sorted(set(groups))
    if len(fractions) != 3 or min(fractions) <= 0:
        raise ValueError(f"fractions must be three numbers > 0, got {list(fractions)}")
    if len(names) < 3:
        raise DataError(
            f"site '{site}': {len(names)} patient(s) or source image(s), but training, validation and test "
            "need one each; add cases, or write the datalist by hand",
            f"site '{site}': too few cases for three splits",
        )
    digest = hashlib.sha256(site.encode()).digest()
    rng = np.random.default_rng([seed, *np.frombuffer(digest[:16], dtype="<u4").tolist()])
    shuffled = [names[index] for index in rng.permutation(len(names))]
    share = [len(names) * fraction / sum(fractions) for fraction in fractions]
    validation, test = max(1, round(share[1])), max(1, round(share[2]))
    if validation + test >= len(names):
        validation, test = 1, 1
    training = len(names) - validation - test
    counts = dict(zip(SPLITS, (training, validation, test), strict=True))
    order = [split for split, count in counts.items() for _ in range(count)]
    return dict(zip(shuffled, order, strict=True))


def prepare_nuclei(
    source_dir: str | Path,
    out_dir: str | Path,
    seed: int = 0,
    *,
    number: bool = False,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Five groups of nucleus images from ``nuclei_<group>.npz``; masks 0 and 1, split by source image.

    Args:
        source_dir: folder with the files.
        out_dir: folder to write to.
        seed: of the split.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their groups.
        overwrite: replace what an earlier call wrote.

    Returns:
        the folder of each site.
    """
    files = _npz_files(Path(source_dir), "nuclei_", NUCLEI)
    sites = {name: _npz_items(name, file, (0, 1)) for name, file in files.items()}
    return _write(sites, Path(out_dir), seed=seed, number=number, overwrite=overwrite)


def prepare_white_cells(
    source_dir: str | Path,
    out_dir: str | Path,
    seed: int = 0,
    *,
    target: str = "cell",
    number: bool = False,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Three laboratories' white blood cells from ``wbc_<site>.npz``.

    Masks have the values 0 background, 1 cytoplasm, 2 nucleus.

    Args:
        source_dir: folder with the files.
        out_dir: folder to write to.
        seed: of the split.
        target: what ``fairflare.json`` makes of the masks, through ``mask_values``: ``"cell"`` (cytoplasm and
            nucleus) or ``"nucleus"``, for a task with one structure; ``"both"`` leaves it to the task, such
            as ``SegmentationTask(num_classes=2, labels=[[1, 2], [2]])``.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace what an earlier call wrote.

    Returns:
        the folder of each site.
    """
    if target not in WHITE_CELL_TARGETS:
        raise ValueError(f"unknown target '{target}'{suggest(target, tuple(WHITE_CELL_TARGETS))}")
    values = WHITE_CELL_TARGETS[target]
    files = _npz_files(Path(source_dir), "wbc_", WHITE_CELLS)
    sites = {name: _npz_items(name, file, (0, 1, 2)) for name, file in files.items()}
    settings = {} if values is None else {"mask_values": dict(values)}
    return _write(sites, Path(out_dir), seed=seed, number=number, overwrite=overwrite, settings=settings)


def prepare_cell_types(
    source_dir: str | Path, out_dir: str | Path, seed: int = 0, *, number: bool = False, overwrite: bool = False
) -> dict[str, Path]:
    """The white blood cells of three laboratories by type, from ``wbc_<site>.npz``; unknown types are left out.

    Args and returns: as :func:`prepare_nuclei`. Classes: ``CELL_TYPES``.
    """
    files = _npz_files(Path(source_dir), "wbc_", WHITE_CELLS)
    sites = {name: list(_type_items(name, file)) for name, file in files.items()}
    return _write(sites, Path(out_dir), seed=seed, number=number, overwrite=overwrite)


def prepare_red_cells(
    source_dir: str | Path, out_dir: str | Path, seed: int = 0, *, number: bool = False, overwrite: bool = False
) -> dict[str, Path]:
    """Twelve types of red blood cells, long-tailed, from ``rbc12_chula.npz``.

    The file's six sites are blocks of consecutive smear images of one hospital, not six hospitals; they are called
    ``block-0`` and so on. Split by smear image, since neighbouring crops overlap.

    Args and returns: as :func:`prepare_nuclei`.
    """
    (file,) = _npz_files(Path(source_dir), "rbc12_", ("chula",)).values()
    arrays = _arrays("red cells", file, ("images", "labels", "image_no", "site"))
    images, labels, smears, blocks = arrays["images"], arrays["labels"], arrays["image_no"], arrays["site"]
    sites = {
        f"block-{block}": [
            Item(f"s{smears[i]:04d}_{i:05d}", f"s{smears[i]:04d}", images[i], int(labels[i]))
            for i in np.flatnonzero(blocks == block).tolist()
        ]
        for block in np.unique(blocks).tolist()
    }
    return _write(sites, Path(out_dir), seed=seed, number=number, overwrite=overwrite)


def prepare_prostate_mri(
    source_dir: str | Path,
    out_dir: str | Path,
    seed: int = 0,
    *,
    sites: Sequence[str] | None = None,
    split_unit: str = "patient",
    neighbours: bool = False,
    number: bool = False,
    overwrite: bool = False,
) -> dict[str, Path]:
    """The six-site prostate set: ``<site>/CaseNN.nii.gz`` with ``<site>/CaseNN_segmentation.nii.gz``.

    Every slice (third axis) with some prostate (mask > 0) becomes an image, clipped to [minimum, 99th
    percentile] of its volume and scaled to 8 bit. Upper and lower case do not matter; folders may also be
    called ``SiteA`` to ``SiteF``, ``ISBI`` (RUNMC) or ``ISBI_1.5`` (BMC).

    Args:
        source_dir: folder with a folder for each site.
        out_dir: folder to write to.
        seed: of the split.
        sites: the sites to use; default all six, which must then be there.
        split_unit: ``"patient"``, or ``"slice"`` as in some published figures, where slices of one patient
            may be in training and test at once.
        neighbours: make images of three channels: the slice before, the slice, the slice after.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace what an earlier call wrote.

    Returns:
        the folder of each site.
    """
    if split_unit not in ("patient", "slice"):
        raise ValueError(f"unknown split_unit '{split_unit}'{suggest(split_unit, ('patient', 'slice'))}")
    source = _existing(Path(source_dir))
    wanted = list(PROSTATE_SITES) if sites is None else list(sites)
    for name in wanted:
        if name not in PROSTATE_SITES:
            raise ValueError(f"unknown site '{name}'{suggest(name, tuple(PROSTATE_SITES))}")
    folders = {path.name.lower(): path for path in sorted(source.iterdir()) if path.is_dir()}
    found = {name: folders[alias] for name in wanted for alias in PROSTATE_SITES[name][::-1] if alias in folders}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(
            f"'{source}': expected a folder for each of {', '.join(wanted)} (or SiteA to SiteF), found "
            f"{_listing(path.name for path in folders.values())}; missing: {', '.join(missing)}. "
            "Name the sites that you have with 'sites' (--sites)"
        )
    items = {name: _prostate_items(name, folder, split_unit, neighbours) for name, folder in found.items()}
    return _write(items, Path(out_dir), seed=seed, number=number, overwrite=overwrite)


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]],
    out_dir: str | Path,
    seed: int = 0,
    *,
    group: str | None = None,
    number: bool = False,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Any images with masks; the files are copied as they are.

    An image and its mask have the same file name, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: folders by site.
        out_dir: folder to write to.
        seed: of the split.
        group: regular expression whose first group is the patient, searched in the name of the image, such as
            ``"^(p[0-9]+)_"``; without it every image is a patient of its own.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace what an earlier call wrote.

    Returns:
        the folder of each site.
    """
    if group is not None and re.compile(group).groups < 1:
        raise ValueError(f"group must have a part in brackets that is the patient, got {group!r}")
    items = {name: _folder_items(name, Path(images), Path(masks), group) for name, (images, masks) in sites.items()}
    return _write(items, Path(out_dir), seed=seed, number=number, overwrite=overwrite)


# --- reading the sources ----------------------------------------------------------------------------------


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; give the folder that holds the source files")
    return folder


def _listing(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "nothing"


def _npz_files(source: Path, prefix: str, names: Sequence[str]) -> dict[str, Path]:
    _existing(source)
    files = {name: source / f"{prefix}{name.lower()}.npz" for name in names}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"'{source}': expected {', '.join(file.name for file in files.values())}; missing: "
            f"{', '.join(missing)}; found {_listing(path.name for path in source.glob('*.npz'))}"
        )
    return files


def _arrays(site: str, file: Path, keys: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in keys}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"site '{site}': '{file}' cannot be read: {error}; fetch the file again") from error
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or arrays["images"].dtype != np.uint8:
        raise DataError(f"site '{site}': '{file}': expected uint8 images and as many of each array, got {lengths}")
    return arrays


def _type_items(site: str, file: Path) -> Iterator[Item]:
    arrays = _arrays(site, file, ("images", "labels", "ids"))
    for image, label, name in zip(arrays["images"], arrays["labels"].tolist(), arrays["ids"], strict=True):
        if label != UNKNOWN_TYPE:
            yield Item(_file_name(str(name)), str(name), image, int(label))


def _npz_items(site: str, file: Path, values: Sequence[int]) -> Iterator[Item]:
    arrays = _arrays(site, file, ("images", "masks", "ids"))
    images, masks, ids = arrays["images"], arrays["masks"], [str(name) for name in arrays["ids"]]
    if images.shape[:3] != masks.shape or len(ids) != len(images) or images.dtype != np.uint8:
        raise DataError(
            f"site '{site}': '{file}': expected images (n, height, width, 3) uint8, masks (n, height, width) "
            f"and n ids, got images {images.shape} {images.dtype}, masks {masks.shape} and {len(ids)} ids"
        )
    strange = sorted(set(np.unique(masks).tolist()) - set(values))
    if strange:
        raise DataError(f"site '{site}': '{file}': masks have the values {strange}; expected {list(values)}")
    for image, mask, name in zip(images, masks, ids, strict=True):
        grey = image[:, :, 0] if (image == image[:, :, :1]).all() else image
        yield Item(_file_name(name), name.split("_t")[0], grey, mask.astype(np.uint8))


def _prostate_items(site: str, folder: Path, split_unit: str, neighbours: bool) -> Iterator[Item]:
    import nibabel

    files = {path.name[: -len(ending)].lower(): path for path, ending in _nifti(folder)}
    masks = {stem[: -len("_segmentation")]: path for stem, path in files.items() if stem.endswith("_segmentation")}
    cases = {stem: path for stem, path in files.items() if not stem.endswith("_segmentation")}
    if not cases or set(cases) != set(masks):
        alone = [cases[stem].name for stem in sorted(set(cases) - set(masks))]
        alone += [masks[stem].name for stem in sorted(set(masks) - set(cases))]
        raise DataError(
            f"site '{site}': '{folder}': expected CaseNN.nii.gz, each with CaseNN_segmentation.nii.gz; "
            + (
                f"without partner: {_listing(alone)}"
                if cases or masks
                else f"found {_listing(p.name for p in folder.iterdir())}"
            )
        )
    for stem in sorted(cases):
        try:
            volume = np.asarray(nibabel.load(cases[stem]).dataobj, np.float32)
            inside = np.asarray(nibabel.load(masks[stem]).dataobj) > 0
        except Exception as error:  # nibabel raises what it likes for a damaged file
            raise DataError(
                f"site '{site}': '{cases[stem]}' or its segmentation cannot be read: {error}; fetch the file again"
            ) from error
        if volume.ndim != 3 or volume.shape != inside.shape:
            raise DataError(
                f"site '{site}': '{cases[stem]}' has the shape {volume.shape} and its segmentation "
                f"{inside.shape}; both must be the same three-dimensional volume"
            )
        if not np.isfinite(volume).all():
            raise DataError(f"site '{site}': '{cases[stem]}' has values that are NaN or infinite; repair the file")
        slices = np.flatnonzero(inside.any(axis=(0, 1))).tolist()
        if not slices:
            raise DataError(f"site '{site}': '{masks[stem]}' has no prostate in it; repair or remove the case")
        low, high = float(volume.min()), float(np.percentile(volume, TOP_PERCENTILE))
        scale = 255.0 / (high - low) if high > low else 0.0
        pictures = np.round(np.clip((volume - low) * scale, 0, 255)).astype(np.uint8).transpose(2, 1, 0)
        last = len(pictures) - 1
        for index in slices:
            around = (max(index - 1, 0), index, min(index + 1, last))
            image = np.stack([pictures[k] for k in around], axis=-1) if neighbours else pictures[index]
            name = f"{_file_name(stem)}_{index:03d}"
            yield Item(name, stem if split_unit == "patient" else name, image, inside[:, :, index].T.astype(np.uint8))


def _nifti(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir()):
        for ending in (".nii.gz", ".nii"):
            if path.name.lower().endswith(ending):
                yield path, ending
                break


def _folder_items(site: str, images: Path, masks: Path, group: str | None) -> Iterator[Item]:
    def stems(folder: Path, is_mask: bool) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in sorted(_existing(folder).iterdir()):
            ending = next((e for e in sorted(SUFFIXES, key=len, reverse=True) if path.name.lower().endswith(e)), None)
            if ending is None or not path.is_file():
                continue
            stem = path.name[: -len(ending)]
            if MASK_ENDING.search(stem):
                if not is_mask and images == masks:
                    continue
                stem = MASK_ENDING.sub("", stem)
            elif is_mask and images == masks:
                continue
            if stem in found:
                raise DataError(
                    f"site '{site}': '{found[stem]}' and '{path}' have the same name apart from the ending; "
                    "rename or remove one of them"
                )
            found[stem] = path
        return found

    pictures, partners = stems(images, False), stems(masks, True)
    if not pictures or set(pictures) != set(partners):
        alone = [pictures[stem].name for stem in sorted(set(pictures) - set(partners))]
        alone += [partners[stem].name for stem in sorted(set(partners) - set(pictures))]
        raise DataError(
            f"site '{site}': expected an image in '{images}' and a mask of the same name in '{masks}'; "
            f"without partner: {_listing(alone)}"
        )
    for stem, path in pictures.items():
        match = re.search(group, stem) if group is not None else None
        if group is not None and match is None:
            raise DataError(f"site '{site}': '{path}' does not match group '{group}', so its patient is not known")
        yield Item(_file_name(stem), match.group(1) if match else stem, path, partners[stem])


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


# --- writing the sites ------------------------------------------------------------------------------------


def _write(
    sites: Mapping[str, Iterable[Item]],
    out: Path,
    *,
    seed: int,
    number: bool,
    overwrite: bool,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    """All sites into a hidden folder first, then moved into place."""
    if not sites:
        raise ValueError("at least one site is needed")
    out = out.expanduser().absolute()
    names = {site: f"site-{index + 1}" if number else _file_name(site) for index, site in enumerate(sites)}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two sites would have the same folder: {', '.join(sorted(names))}")
    targets = {site: out / name for site, name in names.items()}
    existing = [path for path in (*targets.values(), out / "fairflare.json") if path.exists()]
    if existing and not overwrite:
        raise DataError(f"'{existing[0]}' is there already; choose another folder, or overwrite it (--overwrite)")
    foreign = [path for path in targets.values() if path.exists() and not (path / "datalist.json").is_file()]
    if foreign:
        raise DataError(f"'{foreign[0]}' is not a folder with a datalist.json, so it is not overwritten; move it away")
    out.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".prepare-", dir=out))
    try:
        for site, items in sites.items():
            folder = draft / names[site]
            _write_site(folder, site, items, seed)
        blocks = {names[site]: {"data_root": str(targets[site]), **(settings or {})} for site in sites}
        text = json.dumps({"sites": blocks}, indent=1, ensure_ascii=False) + "\n"
        (draft / "fairflare.json").write_text(text, encoding="utf-8")
        for path in existing:
            path.rename(draft / f"old-{path.name}")
        for site, target in targets.items():
            (draft / names[site]).rename(target)
        (draft / "fairflare.json").rename(out / "fairflare.json")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {names[site]: target for site, target in targets.items()}


def _write_site(folder: Path, site: str, items: Iterable[Item], seed: int) -> None:
    (folder / "images").mkdir(parents=True)
    entries: list[tuple[str, dict[str, Any]]] = []
    used: set[str] = set()
    for item in items:
        if item.name.lower() in used:
            raise DataError(f"site '{site}': two images are called '{item.name}'; give them different names")
        used.add(item.name.lower())
        label = item.mask if isinstance(item.mask, int) else _put(folder, "masks", item.name, item.mask)
        entry = {"image": _put(folder, "images", item.name, item.image), "label": label}
        entries.append((item.group, entry))
    chosen = split_groups((group for group, _ in entries), site=site, seed=seed)
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for group, entry in entries:
        splits[chosen[group]].append(entry)
    write_datalist(folder / "datalist.json", splits, name=site)


def _put(folder: Path, kind: str, name: str, content: npt.NDArray[np.uint8] | Path) -> str:
    (folder / kind).mkdir(exist_ok=True)
    if isinstance(content, Path):
        ending = ".nii.gz" if content.name.lower().endswith(".nii.gz") else content.suffix.lower()
        shutil.copyfile(content, folder / kind / (name + ending))
        return f"{kind}/{name}{ending}"
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(content)).save(folder / kind / f"{name}.png")
    return f"{kind}/{name}.png"


# --- command line -----------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fairflare.data.preparers",
        description="Per-site folders with datalists from public data sets.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, source: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if source:
            sub.add_argument("--source", required=True, help="folder with the source files")
        sub.add_argument("--out", required=True, help="folder to write to")
        sub.add_argument("--seed", type=int, default=0, help="of the split (default 0)")
        sub.add_argument("--number", action="store_true", help="call the sites site-1, site-2, ...")
        sub.add_argument("--overwrite", action="store_true", help="replace what an earlier call wrote")
        return sub

    command("nuclei", "nucleus segmentation, five acquisition groups")
    cells = command("white-cells", "white blood cells, three laboratories")
    cells.add_argument("--target", choices=list(WHITE_CELL_TARGETS), default="cell", help="default: cell")
    command("cell-types", "white blood cells by type, three laboratories")
    command("red-cells", "red blood cells by type, long-tailed, six blocks of one hospital's smears")
    prostate = command("prostate-mri", "T2 prostate MRI, six sites")
    prostate.add_argument("--sites", nargs="+", metavar="SITE", help=f"default: {' '.join(PROSTATE_SITES)}")
    prostate.add_argument("--split-unit", choices=["patient", "slice"], default="patient", help="default: patient")
    prostate.add_argument("--neighbours", action="store_true", help="three neighbouring slices as channels")
    folders = command("folders", "any folders of images and masks", source=False)
    folders.add_argument(
        "--site",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "IMAGES", "MASKS"),
        help="repeatable",
    )
    folders.add_argument("--group", help="regular expression; its first group is the patient")

    options = parser.parse_args(arguments)
    common: dict[str, Any] = {"seed": options.seed, "number": options.number, "overwrite": options.overwrite}
    run: Mapping[str, Callable[[], dict[str, Path]]] = {
        "nuclei": lambda: prepare_nuclei(options.source, options.out, **common),
        "white-cells": lambda: prepare_white_cells(
            options.source, options.out, target=options.target, **common
        ),
        "cell-types": lambda: prepare_cell_types(options.source, options.out, **common),
        "red-cells": lambda: prepare_red_cells(options.source, options.out, **common),
        "prostate-mri": lambda: prepare_prostate_mri(
            options.source, options.out, sites=options.sites, split_unit=options.split_unit,
            neighbours=options.neighbours, **common,
        ),
        "folders": lambda: prepare_folders(
            {name: (images, masks) for name, images, masks in options.site}, options.out,
            group=options.group, **common,
        ),
    }  # fmt: skip
    try:
        written = run[options.command]()
    except (OSError, ValueError, re.error) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for site, folder in written.items():
        content = json.loads((folder / "datalist.json").read_text(encoding="utf-8"))
        sizes = ", ".join(f"{len(content[split])} {split}" for split in SPLITS)
        print(f"{site} ({content['name']}): {sizes}")
    print(f"Copy {Path(options.out) / 'fairflare.json'} into the 'local' folder of the simulator workspace.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
