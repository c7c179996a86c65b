"""What the preparers share: reading arrays, naming files, splitting by patient, writing all sites or none."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from fairflare.core.checks import whole
from fairflare.data.datalist import SPLITS, DataError, write_datalist

FRACTIONS = (0.6, 0.2, 0.2)  # training, validation, test


@dataclass(frozen=True)
class Item:
    """One image on its way into a site's folder; items of one ``group`` (a patient) stay in one split."""

    name: str
    group: str
    image: npt.NDArray[np.uint8] | Path
    mask: npt.NDArray[np.uint8] | Path | int  # int: the class


class Writing(TypedDict, total=False):
    """How the sites are written: arguments that all preparers have, see :func:`write_sites`."""

    seed: int
    number: bool
    overwrite: bool


@dataclass(frozen=True)
class Preparer:
    """One data set on the command line.

    Attributes:
        name: of the command.
        text: what it is.
        prepare: the function; gets the options by name.
        add_options: adds what only this one has.
        has_source: whether it reads one folder of source files, ``source_dir``.
    """

    name: str
    text: str
    prepare: Callable[..., dict[str, Path]]
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    has_source: bool = True


# --- reading the sources ----------------------------------------------------------------------------------


def existing_folder(folder: Path) -> Path:
    """The folder, when it is there."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; give the folder that holds the source files")
    return folder


def listing(names: Iterable[str]) -> str:
    """Names as a message shows them: twelve at most."""
    shown = sorted(names)
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "nothing"


def file_name(name: str) -> str:
    """A name without the characters that some file systems refuse."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def files_by_ending(folder: Path, endings: Collection[str]) -> list[tuple[str, Path]]:
    """Name without its ending, and path, of the files that have one of the endings; in the order of their names."""
    found = []
    for path in sorted(existing_folder(folder).iterdir()):
        ending = max((e for e in endings if path.name.lower().endswith(e)), key=len, default=None)
        if ending is not None and path.is_file():
            found.append((path.name[: -len(ending)], path))
    return found


def check_pairs(site: str, folder: Path, images: Mapping[str, Path], masks: Mapping[str, Path], expected: str) -> None:
    """Every image has a mask of its name and every mask an image, and there is at least one.

    Raises:
        DataError: says what was ``expected`` and which files have no partner, or what else is in the folder.
    """
    if images and set(images) == set(masks):
        return
    pairs = ((images, masks), (masks, images))
    alone = [files[stem].name for files, others in pairs for stem in sorted(set(files) - set(others))]
    seen = f"without partner: {listing(alone)}" if alone else f"found {listing(path.name for path in folder.iterdir())}"
    raise DataError(f"site '{site}': expected {expected}; {seen}")


def npz_files(source: Path, prefix: str, names: Sequence[str]) -> dict[str, Path]:
    """The file of each site, ``<prefix><site>.npz``; all must be there."""
    existing_folder(source)
    files = {name: source / f"{prefix}{name.lower()}.npz" for name in names}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"'{source}': expected {', '.join(file.name for file in files.values())}; missing: "
            f"{', '.join(missing)}; found {listing(path.name for path in source.glob('*.npz'))}"
        )
    return files


def read_arrays(site: str, file: Path, keys: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one length, ``images`` among them as uint8."""
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in keys}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"site '{site}': '{file}' cannot be read: {error}; fetch the file again") from error
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or arrays["images"].dtype != np.uint8:
        raise DataError(f"site '{site}': '{file}': expected uint8 images and as many of each array, got {lengths}")
    return arrays


def mask_items(site: str, file: Path, values: Sequence[int]) -> Iterator[Item]:
    """Images (n, height, width, 3) with masks (n, height, width) of the given values and ids ``<source>_t<tile>``."""
    arrays = read_arrays(site, file, ("images", "masks", "ids"))
    images, masks, ids = arrays["images"], arrays["masks"], [str(name) for name in arrays["ids"]]
    if images.ndim != 4 or images.shape[:3] != masks.shape:
        raise DataError(
            f"site '{site}': '{file}': expected images (n, height, width, 3) uint8, masks (n, height, width) "
            f"and n ids, got images {images.shape} {images.dtype}, masks {masks.shape} and {len(ids)} ids"
        )
    strange = sorted(set(np.unique(masks).tolist()) - set(values))
    if strange:
        raise DataError(f"site '{site}': '{file}': masks have the values {strange}; expected {list(values)}")
    for image, mask, name in zip(images, masks, ids, strict=True):
        grey = image[:, :, 0] if (image == image[:, :, :1]).all() else image
        yield Item(file_name(name), name.split("_t")[0], grey, mask.astype(np.uint8))


# --- splitting and writing --------------------------------------------------------------------------------


def split_groups(groups: Iterable[str], *, site: str, seed: int = 0) -> dict[str, str]:
    """``{group: split}``: a seeded shuffle, cut at 6:2:2, at least one group in every split.

    Depends only on the set of names, the site's name and the seed.

    Raises:
        DataError: fewer than three groups.
    """
    names = sorted(set(groups))
    if len(names) < 3:
        raise DataError(
            f"site '{site}': {len(names)} patient(s) or source image(s), but training, validation and test "
            "need one each; add cases, or write the datalist by hand",
            f"site '{site}': too few cases for three splits",
        )
    digest = hashlib.sha256(site.encode()).digest()
    rng = np.random.default_rng([seed, *np.frombuffer(digest[:16], dtype="<u4").tolist()])
    shuffled = [names[index] for index in rng.permutation(len(names))]
    share = [len(names) * fraction / sum(FRACTIONS) for fraction in FRACTIONS]
    validation, test = max(1, round(share[1])), max(1, round(share[2]))
    if validation + test >= len(names):
        validation, test = 1, 1
    training = len(names) - validation - test
    counts = dict(zip(SPLITS, (training, validation, test), strict=True))
    order = [split for split, count in counts.items() for _ in range(count)]
    return dict(zip(shuffled, order, strict=True))


def write_sites(
    sites: Mapping[str, Iterable[Item]],
    out_dir: str | Path,
    settings: Mapping[str, Any] | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """A folder with a datalist for each site, and ``fairflare.json``: all of it or nothing.

    Everything goes into a hidden folder first and is then moved into place; what an earlier call wrote is put back
    when that fails.

    Args:
        sites: images of each site.
        out_dir: folder to write to.
        settings: what else ``fairflare.json`` says for every site.
        seed: of the split; default 0.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace what an earlier call wrote.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source files are not as expected, or something is in the way.
    """
    if not sites:
        raise ValueError("at least one site is needed")
    seed = whole("seed", writing.get("seed", 0), low=0)
    out = Path(out_dir).expanduser().absolute()
    numbered = writing.get("number", False)
    names = {site: f"site-{index + 1}" if numbered else file_name(site) for index, site in enumerate(sites)}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two sites would have the same folder: {', '.join(sorted(names))}")
    targets = {site: out / name for site, name in names.items()}
    existing = _in_the_way(out, list(targets.values()), writing.get("overwrite", False))
    out.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".prepare-", dir=out))
    try:
        new, old = draft / "new", draft / "old"
        old.mkdir()
        for site, items in sites.items():
            _write_site(new / names[site], site, items, seed)
        blocks = {names[site]: {"data_root": str(targets[site]), **(settings or {})} for site in sites}
        text = json.dumps({"sites": blocks}, indent=1, ensure_ascii=False) + "\n"
        (new / "fairflare.json").write_text(text, encoding="utf-8")
        moves = [(path, old / path.name) for path in existing]
        moves += [(new / path.name, path) for path in (*targets.values(), out / "fairflare.json")]
        _move(moves)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {names[site]: target for site, target in targets.items()}


def _in_the_way(out: Path, targets: Sequence[Path], overwrite: bool) -> list[Path]:
    """What is to be replaced."""
    existing = [path for path in (*targets, out / "fairflare.json") if path.exists()]
    if existing and not overwrite:
        raise DataError(f"'{existing[0]}' is there already; choose another folder, or overwrite it (--overwrite)")
    foreign = [path for path in targets if path.exists() and not (path / "datalist.json").is_file()]
    if foreign:
        raise DataError(f"'{foreign[0]}' is not a folder with a datalist.json, so it is not overwritten; move it away")
    return existing


def _move(moves: Sequence[tuple[Path, Path]]) -> None:
    """All or none."""
    done: list[tuple[Path, Path]] = []
    try:
        for here, there in moves:
            here.rename(there)
            done.append((here, there))
    except OSError:
        for here, there in reversed(done):
            there.rename(here)
        raise


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
