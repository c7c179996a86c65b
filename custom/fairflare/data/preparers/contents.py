"""List the images of a folder that the readers support, and the ignored files with commands that convert them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from fairflare.data.datalist import suffix_of
from fairflare.data.dicom import NO_IMAGES
from fairflare.data.dicom_files import (
    DICOM,
    SEGMENTATIONS,
    class_of,
    content_of,
    dicom_files,
    files_of_series,
    has_dicom_mark,
    is_companion,
)
from fairflare.data.image_file import KINDS, PICTURES, SUFFIXES, VOLUMES, Dicom
from fairflare.data.kinds import name_first
from fairflare.data.preparers.names import compose, existing_folder

# Endings of files that may lie beside images, and that are read for other purposes or ignored on purpose.
SIDECARS = (".json", ".bval", ".bvec", ".tsv", ".csv", ".txt", ".md", ".xml", ".yaml", ".yml", ".md5", ".sha256")
NIBABEL = "python -c \"import nibabel as n; n.save(n.load('{0}'), '{1}.nii.gz')\""
VOLUMES_TAKEN = "`fairflare prepare volumes` takes volumes, with --slices axial as pictures"
CONVERTERS = {
    **dict.fromkeys(SUFFIXES, "pictures: `fairflare prepare images` or `masks` takes them"),
    **dict.fromkeys(VOLUMES, VOLUMES_TAKEN),
    **dict.fromkeys(
        (".mha", ".mhd", ".nrrd", ".nhdr"),
        "python -c \"import SimpleITK as s; s.WriteImage(s.ReadImage('{0}'), '{1}.nii.gz')\"",
    ),
    **dict.fromkeys((".hdr", ".mgz", ".mgh"), NIBABEL),
    **dict.fromkeys(
        (".webp", ".pgm", ".ppm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".pcx", ".jfif", ".jpe", ".dib"),
        "python -c \"from PIL import Image; Image.open('{0}').save('{1}.png')\"",
    ),
    **dict.fromkeys(
        (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif"),
        "a whole slide, to be cut into tiles: python -c \"import openslide as o; o.OpenSlide('{0}').read_region((0, "
        "0), 0, (512, 512)).convert('RGB').save('{1}_0_0.png')\"",
    ),
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
    **dict.fromkeys((".heic", ".heif"), "a HEIC picture, which is not read"),
    **dict.fromkeys((".mp4", ".avi", ".mov", ".mkv", ".wmv"), "a video, which is not read"),
    **dict.fromkeys((".h5", ".hdf5", ".mat"), "arrays of HDF5 or MATLAB, which are not read"),
    **dict.fromkeys((".czi", ".lif", ".nd2", ".oib", ".vsi", ".lsm"), "a microscope's own format, which is not read"),
    **dict.fromkeys((".par", ".rec"), "a volume in Philips' PAR/REC, which is not read"),
    **dict.fromkeys((".vtk", ".stl", ".obj", ".ply"), "a surface, no image"),
    **{
        f"DICOM ({name})": "a segmentation in the folder of an image, which is not read there" for name in SEGMENTATIONS
    },
    "DICOM (RT Structure Set Storage)": f"no image; make a NIfTI mask of it: {NO_IMAGES['RTSTRUCT'][1]}",
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
        return compose(strip_ending(path.relative_to(self.folder).as_posix()))

    def list_unread(self) -> str:
        """Return a text on the files that are not read: for each ending their number, three names and a converter."""
        halves = {
            path.with_suffix(ending)
            for path in self.unread
            for ending, whole in DATA_OF.items()
            if path.suffix == whole
        }
        unread = sorted((path for path in self.unread if path not in halves), key=_kind_of)
        return "; ".join(_describe_files(kind, list(paths), self.folder) for kind, paths in groupby(unread, _kind_of))

    def notes(self) -> list[str]:
        """Return a list with one note on the files that are not read; an empty list if there are none."""
        return [f"'{self.folder}': not read: {in_words}"] if (in_words := self.list_unread()) else []


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
    images = [path for path in sorted(files) if (ending := suffix_of(path)) in endings
              or (ending not in SUFFIXES and DICOM[0] in endings and has_dicom_mark(path))]  # fmt: skip
    series = {path.parent for path in images if KINDS.get(suffix_of(path), Dicom) is Dicom}
    others = {path for place in series for path in {*dicom_files(place)}.difference(files_of_series(place))
              if not class_of(path)[1] or PICTURES[0] not in endings}  # fmt: skip
    images = [path for path in images if path not in others]  # a segmentation may be a mask of a picture beside it
    unread = sorted({path for path in files if suffix_of(path) not in SIDECARS} - {*images})
    return Contents(folder, tuple(images), tuple(unread), tuple(sorted(folders[1:])))


def _refuse(error: OSError) -> None:
    raise error


def find_ending(path: Path) -> str:
    """Return the ending of a file if the readers support it, else an empty text, as for ``1.2.840.5``."""
    return ending if (ending := suffix_of(path)) in SUFFIXES else ""


def strip_ending(name: str) -> str:
    """Return a name without its ending, if the readers support that ending."""
    return name[: len(name) - len(find_ending(Path(name)))]


def _kind_of(path: Path) -> str:
    """Return the ending of a file that is not read, or of a DICOM object its class; objects of a class are one kind."""
    return f"DICOM ({name})" if path.exists() and (name := class_of(path)[0]) else suffix_of(path)


def _describe_files(kind: str, paths: list[Path], folder: Path) -> str:
    names = name_first([path.relative_to(folder).as_posix() for path in paths])
    stem = strip_ending(paths[0].name).removesuffix(kind)
    content = content_of(paths[0]) if paths[0].is_file() and "DICOM" not in kind else ""
    how = (CONVERTERS.get(kind) or content or "no image").format(paths[0].name, stem)
    return f"{len(paths)} {f'{kind} ' * bool(kind)}file{'s' * (len(paths) > 1)} ({names}): {how}"
