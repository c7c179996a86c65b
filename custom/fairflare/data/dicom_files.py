"""Files of a folder that are nobody's images, and DICOM files, known by their mark and not by their names."""

from __future__ import annotations

from pathlib import Path

DICOM = (".dcm", ".dicom", ".ima")
DICOM_MARK, DICOM_MARK_AT = b"DICM", 128  # a DICOM file without an ending is known by it
# What systems and programs leave beside images, in small letters; and all that begins with a point, such as macOS's
# companions ._NAME.
COMPANIONS = ("thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "icon\r", "__macosx", "@eadir", "$recycle.bin")


def is_companion(name: str) -> bool:
    """Tell whether a file or folder of this name is hidden, or was put there by a system and not by a person."""
    return name.startswith((".", "~$")) or name.endswith("~") or name.lower() in COMPANIONS


def is_dicom(path: Path) -> bool:
    """Tell whether a file is DICOM by its ending or by its mark; one without its mark is refused when it is read."""
    return path.suffix.lower() in DICOM or has_dicom_mark(path)


def files_of_series(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder in the order of their names; other files and companions are passed over."""
    return [
        path for path in sorted(folder.iterdir()) if not is_companion(path.name) and path.is_file() and is_dicom(path)
    ]


def has_dicom_mark(path: Path) -> bool:
    """Tell whether a file has the mark of DICOM behind its preamble."""
    try:
        with path.open("rb") as file:
            file.seek(DICOM_MARK_AT)
            return file.read(len(DICOM_MARK)) == DICOM_MARK
    except OSError:
        return False
