"""Recognise DICOM files, the images among them, files that systems leave beside images, and files by their content."""

from __future__ import annotations

import gzip
import re
import zlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from fairflare.base.own_errors import reading_as

DICOM = (".dcm", ".dicom", ".ima")
# Names, in small letters, of files and folders that systems and programs leave beside images. Names that begin with a
# point, such as macOS's ._NAME, count as companions too.
COMPANIONS = ("thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "icon\r", "__macosx", "@eadir", "$recycle.bin")
#: Patterns of the first bytes of files, by ending for what is read here, and else by words for a message.
CONTENTS = {
    "empty (0 bytes)": rb"\Z", ".nii": rb"(?s).{344}n[+i]1\0|.{4}n[+i]2\0", ".nii.gz": rb"\x1f\x8b",
    ".npy": rb"\x93NUMPY", ".dcm": rb"(?s).{128}DICM", ".png": rb"\x89PNG", ".jpg": rb"\xff\xd8\xff",
    ".bmp": rb"(?s)BM.{4}\0\0\0\0", ".tif": rb"II[*+]\0|MM\0[*+]", "a GIF picture": rb"GIF8",
    "a WebP picture": rb"(?s)RIFF.{4}WEBP", "a HEIC picture": rb"(?s).{4}ftyp(hei|mif)",
    "a video": rb"(?s).{4}ftyp|\x1a\x45\xdf\xa3", "NRRD": rb"NRRD", "MetaImage": rb"(?i)(ObjectType|NDims) *=",
    "HDF5": rb"\x89HDF", "an array of MATLAB": rb"MATLAB 5",
    "a ZIP archive": rb"PK\x03\x04", "a TAR archive": rb"(?s).{257}ustar", "a 7z archive": rb"7z\xbc\xaf",
    "a RAR archive": rb"Rar!", "packed by xz": rb"\xfd7zXZ", "packed by bzip2": rb"BZh",
    "packed by Zstandard": rb"\x28\xb5\x2f\xfd", "a PDF document": rb"%PDF", "XML": rb"\s*<\?xml",
    "a web page, perhaps of a log-in": rb"(?i)\s*<(!doctype )?html", "JSON": rb"\s*[{\[]\s*[\"{\[\d]",
    "a pointer of Git LFS, not the file itself": rb"version https://git-lfs",
    "a pointer of git-annex, not the file itself": rb"/?(\.\./)*(\.git/)?annex/objects",
}  # fmt: skip
SEGMENTATIONS = ("Segmentation Storage", "Label Map Segmentation Storage")


def is_companion(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or was written by a system and not by a person."""
    return name.startswith((".", "~$")) or name.endswith("~") or name.lower() in COMPANIONS


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM by its ending or the bytes ``DICM``; reading refuses a file without the bytes."""
    return path.suffix.lower() in DICOM or has_dicom_mark(path)


def files_of_series(folder: Path) -> list[Path]:
    """Return the DICOM images of a folder in the order of their names; a segmentation only where no other image is."""
    images = [path for path in dicom_files(folder) if class_of(path)[1]]
    return [path for path in images if class_of(path)[0] not in SEGMENTATIONS] or images


def dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder in the order of their names, without other files and system files."""
    return [
        path for path in sorted(folder.iterdir()) if not is_companion(path.name) and path.is_file() and is_dicom(path)
    ]


def class_of(path: Path) -> tuple[str, bool]:
    """Return the name of a DICOM file's class, such as ``Enhanced SR Storage``, and whether the file is an image.

    The name of other and damaged files is empty, and they count as images, whose reader says what is wrong with them.
    """
    return _class_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=65536)
def _class_of(path: Path, stamp: int) -> tuple[str, bool]:
    import pydicom

    with suppress(ValueError), reading_as("DICOM file"):
        name = pydicom.filereader.read_file_meta_info(path).get("MediaStorageSOPClassUID", pydicom.uid.UID("")).name
        sized = "Image" in name or "Rows" in pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["Rows"])
        return name, not name or (sized and "Spectroscopy" not in name)
    return "", True


def content_of(path: Path) -> str:
    """Return what a file is by its first bytes: an ending or words of :data:`CONTENTS`; an empty text if not known.

    A file packed by gzip is ``.nii.gz`` unless its first bytes inside are those of another kind.
    """

    def kind(head: bytes) -> str:
        return next((name for name, pattern in CONTENTS.items() if re.match(pattern, head)), "")

    with path.open("rb") as file:
        what = kind(file.read(512))
    if what == ".nii.gz":
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as packed:
            inside = kind(packed.read(512))
            what = what if inside in ("", ".nii") else f"packed by gzip, and inside is {describe_content(inside)}"
    return what


def describe_content(content: str) -> str:
    """Return words for what :func:`content_of` returns, such as ``a .dcm file``."""
    return f"a {content} file" if content[:1] == "." else content


def has_dicom_mark(path: Path) -> bool:
    """Return whether a file has the mark ``DICM`` after the preamble of 128 bytes."""
    with suppress(OSError):
        return content_of(path) == ".dcm"
    return False
