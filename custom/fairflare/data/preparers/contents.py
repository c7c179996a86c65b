"""List the images of a folder that the readers support, and the ignored files with commands that convert them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from fairflare.data.datalist import suffix_of
from fairflare.data.dicom_files import DICOM, files_of_series, has_dicom_mark, is_companion
from fairflare.data.image_file import SUFFIXES, VOLUMES
from fairflare.data.kinds import named
from fairflare.data.preparers.names import composed, existing_folder

# Endings of files that may lie beside images, and that are read for other purposes or ignored on purpose.
SIDECARS = (".json", ".bval", ".bvec", ".tsv", ".csv", ".txt", ".md", ".xml", ".yaml", ".yml", ".md5", ".sha256")
ITK = "python -c \"import SimpleITK as s; s.WriteImage(s.ReadImage('{0}'), '{1}.nii.gz')\""
NIBABEL = "python -c \"import nibabel as n; n.save(n.load('{0}'), '{1}.nii.gz')\""
PILLOW = "python -c \"from PIL import Image; Image.open('{0}').save('{1}.png')\""
SLIDE = (
    "a whole slide, to be cut into tiles: python -c \"import openslide as o; o.OpenSlide('{0}').read_region((0, 0), 0, "
    "(512, 512)).convert('RGB').save('{1}_0_0.png')\""
)
VOLUMES_TAKEN = "`fairflare prepare volumes` takes volumes, with --slices axial as pictures"
CONVERTERS = {
    **dict.fromkeys(SUFFIXES, "pictures: `fairflare prepare images` or `masks` takes them"),
    **dict.fromkeys(VOLUMES, VOLUMES_TAKEN),
    **dict.fromkeys((".mha", ".mhd", ".nrrd", ".nhdr"), ITK),
    **dict.fromkeys((".hdr", ".mgz", ".mgh"), NIBABEL),
    **dict.fromkeys((".webp", ".pgm", ".ppm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".pcx"), PILLOW),
    **dict.fromkeys((".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif"), SLIDE),
    **dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"), "unpack it"),
    # A GIF is converted to RGB, because its palette indices are no labels.
    ".gif": "python -c \"from PIL import Image; Image.open('{0}').convert('RGB').save('{1}.png')\"",
    ".mnc": NIBABEL + " (of MINC 2 with pip install h5py)",
    ".npy": (
        'an array that does not say where its voxels lie: python -c "import nibabel as n, numpy as p; '
        "n.save(n.Nifti1Image(p.load('{0}'), p.eye(4)), '{1}.nii.gz')\""
    ),
    ".npz": "python -c \"import numpy as n; n.save('{1}.npy', n.load('{0}')['ARRAY'])\"",
    ".xlsx": "save it as CSV",
    ".xls": "save it as CSV",
}
DATA_OF = {".img": ".hdr", ".raw": ".mhd", ".zraw": ".mhd"}  # endings of data files, each with that of its header file


@dataclass(frozen=True)
class Contents:
    """Represent the content of a folder at any depth, without hidden files, system files and sidecar files.

    Attributes:
        folder: the folder.
        images: files that can be read as images, in the order of their paths.
        unread: all other files.
        folders: all subfolders that were searched.
    """

    folder: Path
    images: tuple[Path, ...]
    unread: tuple[Path, ...]
    folders: tuple[Path, ...]

    @cached_property
    def series(self) -> list[Path]:
        """Return the subfolders that hold DICOM files."""
        return [folder for folder in self.folders if files_of_series(folder)]

    def key(self, path: Path) -> str:
        """Return a key to compare files by: the path below the folder, without its ending, with composed letters."""
        return composed(without_ending(path.relative_to(self.folder).as_posix()))

    def passed_over(self) -> str:
        """Return a text on the files that are not read: for each ending their number, three names and a converter."""
        halves = {
            path.with_suffix(half) for path in self.unread for half, whole in DATA_OF.items() if path.suffix == whole
        }
        unread = sorted((path for path in self.unread if path not in halves), key=suffix_of)
        return "; ".join(_told(ending, list(paths), self.folder) for ending, paths in groupby(unread, suffix_of))

    def notes(self) -> list[str]:
        """Return a list with one note on the files that are not read; an empty list if there are none."""
        return [f"'{self.folder}': not read: {told}"] if (told := self.passed_over()) else []


def contents(folder: Path, endings: Collection[str] = SUFFIXES, besides: Iterable[Path] = ()) -> Contents:
    """List the content of a folder at any depth, following links.

    Args:
        folder: folder to search.
        endings: endings of wanted images; a file without a known ending counts as ``.dcm`` if it has DICOM's mark.
        besides: subfolders to skip.

    Raises:
        DataError: the folder does not exist.
        OSError: a subfolder cannot be read.
    """
    seen = {path.resolve() for path in besides}
    folders: list[Path] = []
    files: list[Path] = []
    for place, below, names in os.walk(existing_folder(folder), followlinks=True, onerror=_refuse):
        here = Path(place)
        if (real := here.resolve()) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not is_companion(name))
        folders.append(here)
        # Leave out pipes, since opening one would wait for ever; keep broken links, which reading refuses later.
        files += (
            path for name in names if not is_companion(name) and ((path := here / name).is_file() or not path.exists())
        )
    images = [path for path in sorted(files) if (own := suffix_of(path)) in endings
              or (own not in SUFFIXES and DICOM[0] in endings and has_dicom_mark(path))]  # fmt: skip
    unread = sorted({path for path in files if suffix_of(path) not in SIDECARS} - {*images})
    return Contents(folder, tuple(images), tuple(unread), tuple(sorted(folders[1:])))


def _refuse(error: OSError) -> None:
    raise error


def known_ending(path: Path) -> str:
    """Return the ending of a file if the readers support it, else an empty text, as for ``1.2.840.5``."""
    return ending if (ending := suffix_of(path)) in SUFFIXES else ""


def without_ending(name: str) -> str:
    """Return a name without its ending, if the readers support that ending."""
    return name[: len(name) - len(known_ending(Path(name)))]


def _told(ending: str, paths: list[Path], folder: Path) -> str:
    names = named([path.relative_to(folder).as_posix() for path in paths])
    kind = f"{ending} " if ending else ""
    stem = without_ending(paths[0].name).removesuffix(ending)
    how = CONVERTERS.get(ending, "no image").format(paths[0].name, stem)
    return f"{len(paths)} {kind}file{'s' * (len(paths) > 1)} ({names}): {how}"
