"""Write DICOM files in the forms of scanners, with pydicom, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

AXIAL = [1, 0, 0, 0, 1, 0]


def dicom(path: Path, pixels: npt.NDArray[Any], **tags: Any) -> Path:
    """Write one DICOM file.

    Args:
        path: of it.
        pixels: (rows, columns), with 3 behind for colour, with the frames in front.
        tags: by keyword, in place of the usual ones; ``None`` leaves one out.
    """
    colour = pixels.shape[-1] == 3 and pixels.ndim > 2
    head = Dataset()
    head.SOPClassUID, head.SOPInstanceUID = CTImageStorage, generate_uid()
    head.PatientName, head.PatientID = "Meier^Anna", "4711"
    size = pixels.shape[:-1] if colour else pixels.shape
    head.Rows, head.Columns = size[-2:]
    if len(size) > 2:
        head.NumberOfFrames = size[0]
    head.SamplesPerPixel = 3 if colour else 1
    head.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        head.PlanarConfiguration = 0
    head.BitsAllocated = head.BitsStored = pixels.dtype.itemsize * 8
    head.PixelRepresentation = int(pixels.dtype.kind == "i")
    head.SeriesInstanceUID = "1.2.3"
    for name, value in tags.items():
        if value is None and name in head:
            delattr(head, name)
        elif value is not None:
            setattr(head, name, value)
    if "HighBit" not in tags:
        head.HighBit = head.BitsStored - 1
    head.PixelData = pixels.tobytes()
    head.file_meta = FileMetaDataset()
    head.file_meta.MediaStorageSOPClassUID = head.SOPClassUID
    head.file_meta.MediaStorageSOPInstanceUID = head.SOPInstanceUID
    head.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    head.save_as(path, enforce_file_format=True)
    return path


def group(**sequences: dict[str, Any]) -> Dataset:
    """Return a data set of sequences by keyword, each with one item of these tags."""
    found = Dataset()
    for name, tags in sequences.items():
        inner = Dataset()
        for tag, value in tags.items():
            setattr(inner, tag, value)
        setattr(found, name, Items([inner]))
    return found


def series(folder: Path, volume: npt.NDArray[Any], order: list[int] | None = None, **tags: Any) -> Path:
    """Write a folder with the axial slices (rows, columns, slices) of one series, under names without meaning."""
    folder.mkdir(parents=True)
    names = order or [(7 * k) % volume.shape[2] for k in range(volume.shape[2])]
    for k in range(volume.shape[2]):
        where = {"ImageOrientationPatient": AXIAL, "ImagePositionPatient": [-20, -30, 5.0 + 3 * k],
                 "PixelSpacing": [0.5, 0.7], "InstanceNumber": 100 - k}  # fmt: skip
        dicom(folder / f"IM{names[k]:04d}", np.ascontiguousarray(volume[:, :, k]), **{**where, **tags})
    return folder
