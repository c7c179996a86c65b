"""DICOM files in a folder, known by their mark and not by their names."""

from __future__ import annotations

from pathlib import Path

DICOM_MARK, DICOM_MARK_AT = b"DICM", 128  # a DICOM file without an ending is known by it


def files_of_series(folder: Path) -> list[Path]:
    """The DICOM files of a folder, in the order of their names; other files and hidden ones are passed over."""
    return [
        path
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and path.name != "DICOMDIR" and path.is_file() and has_dicom_mark(path)
    ]


def has_dicom_mark(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(DICOM_MARK_AT)
            return file.read(len(DICOM_MARK)) == DICOM_MARK
    except OSError:
        return False
