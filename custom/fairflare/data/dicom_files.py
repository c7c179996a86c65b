"""Recognise DICOM files by their ending or mark, and files that systems leave beside images."""

from __future__ import annotations

from pathlib import Path

DICOM = (".dcm", ".dicom", ".ima")
DICOM_MARK, DICOM_MARK_AT = b"DICM", 128  # bytes, and their position, that identify a DICOM file without an ending
# Names, in small letters, of files and folders that systems and programs leave beside images. Names that begin with a
# point, such as macOS's ._NAME, count as companions too.
COMPANIONS = ("thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "icon\r", "__macosx", "@eadir", "$recycle.bin")


def is_companion(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or was written by a system and not by a person."""
    return name.startswith((".", "~$")) or name.endswith("~") or name.lower() in COMPANIONS


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM by its ending or the bytes ``DICM``; reading refuses a file without the bytes."""
    return path.suffix.lower() in DICOM or has_dicom_mark(path)


def files_of_series(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder in the order of their names, without other files and system files."""
    return [
        path for path in sorted(folder.iterdir()) if not is_companion(path.name) and path.is_file() and is_dicom(path)
    ]


def has_dicom_mark(path: Path) -> bool:
    """Return whether a file has the mark ``DICM`` after the preamble of 128 bytes."""
    try:
        with path.open("rb") as file:
            file.seek(DICOM_MARK_AT)
            return file.read(len(DICOM_MARK)) == DICOM_MARK
    except OSError:
        return False
