"""Interpret the stored values of a DICOM picture by its header: bits, padding, lookup tables, palettes.

The steps follow the order of the standard: stored bits (PS3.5, 8.1.1), padding, which is given in stored values (PS3.3,
C.7.5.1.1.2), then the modality's table or slope and intercept (C.11.1). Palettes are defined in C.7.6.3.1.5 and, where
segmented, in C.7.9.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse, true_texts
from fairflare.base.own_errors import is_of_machine, reading_as

PALETTE, INVERTED = "PALETTE COLOR", "MONOCHROME1"
COLOURS = ("Red", "Green", "Blue")
PADDINGS = tuple((f"{kind}PixelPaddingValue", f"{kind}PixelPaddingRangeLimit") for kind in ("", "Float", "DoubleFloat"))
FLOATS = ("FloatPixelData", "DoubleFloatPixelData")
#: Header elements that are not applied when reading, by tag, each with the note that reports this.
NOT_APPLIED: dict[Any, str] = {
    "VOILUTSequence": "a lookup table for the display (VOI LUT) is not applied",
    "RealWorldValueMappingSequence": "a mapping to real-world values (RealWorldValueMapping) is not applied",
    0x2005100E: "the private scale of Philips (2005,100E) is not applied",
    "ICCProfile": "an ICC profile is not applied",
    "ShutterShape": "a shutter (ShutterShape) is not applied: what it hides is read",
}
#: Tags that are read before the pixels.
HEADER_TAGS = (
    "HighBit", "PresentationLUTShape", "ModalityLUTSequence", "LossyImageCompression", "Units",
    "RedPaletteColorLookupTableDescriptor", "AlphaPaletteColorLookupTableDescriptor",
    *(name for names in PADDINGS for name in names), *NOT_APPLIED,
)  # fmt: skip
#: Tags that are read together with the pixels.
PIXEL_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation", "PlanarConfiguration",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", *FLOATS, "ExtendedOffsetTable",
    "ExtendedOffsetTableLengths", "ModalityLUTSequence",
    *(f"{kind}{colour}PaletteColorLookupTable{part}"
      for colour in COLOURS for kind, part in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))),
)  # fmt: skip
#: Packages that were found by trial to decode transfer syntaxes, given by UID, that Pillow and pydicom cannot decode.
JPEG, JPEG_2000 = "pylibjpeg pylibjpeg-libjpeg", "pylibjpeg pylibjpeg-openjpeg"
DECODERS = {
    "1.2.840.10008.1.2.4.51": JPEG, "1.2.840.10008.1.2.4.57": JPEG, "1.2.840.10008.1.2.4.70": JPEG,
    "1.2.840.10008.1.2.4.80": JPEG, "1.2.840.10008.1.2.4.81": JPEG,
    "1.2.840.10008.1.2.4.90": JPEG_2000, "1.2.840.10008.1.2.4.91": JPEG_2000,
}  # fmt: skip
LOSSY = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.81")
RLE, BIG_ENDIAN = "1.2.840.10008.1.2.5", "1.2.840.10008.1.2.2"

Padding = tuple[float, float]


def padding_of(head: Any) -> tuple[Padding | None, str]:
    """Return the range of stored values that mark padding, both ends included, and a note if the range is ignored.

    A value outside the range of the stored bits is taken modulo 2^BitsAllocated: some files write -2000 as 63536.
    """
    declared = next((names for names in PADDINGS if head.get(names[0]) is not None), None)
    if (
        declared is None
        or int(head.get("SamplesPerPixel") or 1) != 1
        or head.get("PhotometricInterpretation") == PALETTE
    ):
        return None, ""
    ends = [head.get(name) for name in declared if head.get(name) is not None]
    if declared is not PADDINGS[0]:
        return (float(min(ends)), float(max(ends))), ""
    bits, allocated = int(head.get("BitsStored") or head.BitsAllocated), int(head.BitsAllocated)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if head.get("PixelRepresentation") else (0, 2**bits - 1)
    values = (int.from_bytes(end, "little") if isinstance(end, bytes) else int(end) for end in ends)
    readings = [(value, value % 2**allocated, value % 2**allocated - 2**allocated) for value in values]
    usable = [fitting[0] for each in readings if (fitting := [one for one in each if low <= one <= high])]
    if len(usable) < len(ends):
        return None, "a PixelPaddingValue outside the range of the stored bits is ignored"
    return (min(usable), max(usable)), ""


def notes_of(head: Any, padded: bool) -> tuple[str, ...]:
    """Return notes, for readers of the results, on how the header changes the values or which parts are not applied."""
    return tuple(true_texts({
        **{words: bool(head.get(tag)) for tag, words in NOT_APPLIED.items()},
        "pixels of the PixelPaddingValue are 0 and count in no minimum, percentile or mean": padded,
        "a lookup table (Modality LUT) gives the measured values": "ModalityLUTSequence" in head,
        "values are in Bq/ml, not in SUV": head.get("Units") == "BQML",
        "a supplemental palette is not applied: the grey values alone are read":
            "RedPaletteColorLookupTableDescriptor" in head and head.get("PhotometricInterpretation") != PALETTE,
    }))  # fmt: skip


def stored_values(dataset: Any) -> npt.NDArray[Any]:
    """Return the pixels as they are stored: (rows, columns), with frames as first and three colours as last axis.

    Raises:
        ValueError: the pixels are damaged, or compressed in a way that this machine cannot read; the message names
            a package that can.
    """
    from pydicom.pixels import get_decoder, pixel_array

    syntax = dataset.file_meta.TransferSyntaxUID
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ValueError(
            f"its pixels are stored as {syntax.name!r}, which is not known here; convert the file"
        ) from None
    remedy = f"`pip install {DECODERS[syntax]}`" if syntax in DECODERS else "store the file uncompressed"
    bits, allocated = int(dataset.get("BitsStored") or dataset.BitsAllocated), int(dataset.BitsAllocated)
    above = allocated - 1 - int(dataset.get("HighBit", bits - 1))
    moved = above != allocated - bits and "PixelData" in dataset and allocated > 1
    refuse({
        f"its pixels are compressed as {syntax.name!r}, and no package that reads this is installed: {remedy}":
            not decoder.is_available,
        f"its header is damaged: HighBit is {dataset.get('HighBit')}, with {bits} bits stored":
            moved and ((syntax.is_encapsulated and syntax != RLE) or not 0 <= above <= allocated - bits),
    })  # fmt: skip
    try:
        values: npt.NDArray[Any] = pixel_array(dataset, **({"correct_unused_bits": False} if moved else {}))
    except Exception as error:
        if is_of_machine(error):
            raise
        raise ValueError(
            f"its pixels are compressed as {syntax.name!r}, and what is installed cannot read them: {remedy}; "
            "else the file is damaged"
            if syntax.is_encapsulated
            else "it is damaged: its pixels do not fit its header"
        ) from error
    values = values.astype(bool if allocated == 1 else values.dtype.newbyteorder("="), copy=False)
    return (values << above) >> (allocated - bits) if moved else values


def modality_table(dataset: Any, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the values that the Modality LUT gives for stored values; values beyond its ends get those of the ends.

    Raises:
        ValueError: the table is damaged.
    """
    item = dataset.ModalityLUTSequence[0]
    entries, first = _ends(item.LUTDescriptor, dataset)
    table = _entries(item.LUTData, entries, dataset, "Modality LUT")
    return table[np.clip(stored.astype(np.int64) - first, 0, entries - 1)].astype(np.float32)


def palette_colours(dataset: Any, stored: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the colours of a palette's indices, three channels as last axis; an index beyond an end gets its colour.

    Tables of 16 bits are reduced to their upper byte, unless no entry is above 255.

    Raises:
        ValueError: the header has no palette, or the palette is damaged.
    """
    from pydicom.pixels import apply_color_lut

    names = [f"{colour}PaletteColorLookupTable" for colour in COLOURS]
    full, segmented = (all(f"{kind}{name}Data" in dataset for name in names) for kind in ("", "Segmented"))
    refuse({
        "its colours are those of a palette, which its header does not have; export the file again":
            "RedPaletteColorLookupTableDescriptor" not in dataset or not (full or segmented),
    })  # fmt: skip
    entries, first = _ends(dataset.RedPaletteColorLookupTableDescriptor, dataset)
    if full:
        table = np.stack([_entries(dataset[f"{name}Data"].value, entries, dataset, "palette") for name in names], 1)
    else:
        with reading_as("palette"):
            dataset.RedPaletteColorLookupTableDescriptor[1] = 0
            table = apply_color_lut(np.arange(entries), dataset)
    if table.dtype != np.uint8:
        table = (table if table.max() <= 255 else table >> 8).astype(np.uint8)
    return np.asarray(table[np.clip(stored.astype(np.int64) - first, 0, entries - 1)], np.uint8)


def _ends(descriptor: Any, dataset: Any) -> tuple[int, int]:
    """Return the number of a lookup table's entries, and the stored value of the first entry, signed as the pixels."""
    entries, first = int(descriptor[0]) or 2**16, int(descriptor[1]) % 2**16
    return entries, first - 2**16 if dataset.get("PixelRepresentation") and first >= 2**15 else first


def _entries(data: Any, entries: int, dataset: Any, what: str) -> npt.NDArray[Any]:
    """Return the entries of a lookup table that is not segmented, of 8 or 16 bits as its length implies."""
    if isinstance(data, bytes):  # pydicom leaves the words of a big endian file as they are
        word = ">u2" if dataset.file_meta.TransferSyntaxUID == BIG_ENDIAN else "<u2"
        data = np.frombuffer(data, word if len(data) >= 2 * entries else "u1")
    entries_there = np.atleast_1d(np.asarray(data))[:entries]
    refuse({
        f"its {what} is damaged: it has {len(entries_there)} of {entries} entries; export the file again":
            len(entries_there) < entries,
    })  # fmt: skip
    return entries_there
