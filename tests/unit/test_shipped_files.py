"""Test every image that installed packages ship, read by us and by pydicom, nibabel, Pillow or numpy alone.

Equal, or refused for a reason that the other library confirms: none wrong, none passed over. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image, ImageOps
from pydicom.pixels import apply_color_lut, apply_modality_lut

from fairflare.data.datalist import DataError, Sample
from fairflare.data.image_file import SUFFIXES, Unknown, image_file, kind_of, suffix_of
from fairflare.data.reading import Reading, read_image

#: That have images, today or in some version; those that are not installed have no files.
PACKAGES = (
    "pydicom", "nibabel", "skimage", "imageio", "tifffile", "highdicom", "sklearn", "matplotlib", "networkx", "joblib",
    "numpy", "scipy", "monai", "werkzeug", "coverage", "tensorboard",
)  # fmt: skip
NOT_READ = (".gif", ".mgz", ".mnc", ".gz", ".webp", ".img", ".hdr", ".rec", ".par", ".dcm.gz")
STORED = Reading(orientation="stored")
LIMIT = 2**30
EVERY = 9  # file in the quick tier


def is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def shipped() -> list[Path]:
    """Return all files with an ending that is read, and all with the mark of DICOM."""
    roots = [
        Path(place)
        for name in PACKAGES
        if (spec := importlib.util.find_spec(name)) is not None
        for place in spec.submodule_search_locations or ()
    ]
    files = [path for root in roots for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".py"]
    return [path for path in files if suffix_of(path) in SUFFIXES or is_dicom(path)]


# --- what the other libraries say ---------------------------------------------------------------------------


def by_pydicom(path: Path) -> np.ndarray:
    head = pydicom.dcmread(path)
    stored = head.pixel_array
    found: Any = stored
    if head.PhotometricInterpretation == "PALETTE COLOR":
        found = apply_color_lut(stored, head)
        found = (found >> 8).astype(np.uint8) if found.dtype == np.uint16 else found
    elif head.SamplesPerPixel == 1:
        found = np.asarray(apply_modality_lut(stored, head), np.float64)
        if "PixelPaddingValue" in head:
            found[stored == head.PixelPaddingValue] = np.nan
    return np.moveaxis(found, 0, 2) if int(head.get("NumberOfFrames") or 1) > 1 else found


def by_nibabel(path: Path) -> np.ndarray:
    image: Any = nibabel.load(path)
    if isinstance(image, nibabel.Cifti2Image):  # a matrix of connections in a NIfTI file
        image = nibabel.Nifti2Image.from_filename(path)
    return np.asarray(image.dataobj).swapaxes(0, 1)


def by_pillow(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        picture = ImageOps.exif_transpose(Image.open(file))
        colour = picture.mode in ("P", "RGBA", "CMYK", "YCbCr")
        return np.asarray(picture.convert("RGB" if colour else "L" if picture.mode == "LA" else picture.mode))


def by_tifffile(path: Path) -> np.ndarray:
    return np.asarray(tifffile.imread(path))


def other_of(path: Path) -> Callable[[Path], np.ndarray]:
    suffix = suffix_of(path)
    if suffix in (".nii", ".nii.gz"):
        return by_nibabel
    if suffix == ".npy":
        return lambda file: np.load(file, allow_pickle=False)
    if suffix in (".tif", ".tiff"):
        return by_tifffile
    return by_pillow if suffix in (".png", ".jpg", ".jpeg", ".bmp") else by_pydicom


def fails(path: Path) -> bool:
    try:
        other_of(path)(path)
    except Exception:
        return True
    return False


def syntax(path: Path) -> str:
    return str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", ""))


def pages_of(path: Path) -> int:
    if suffix_of(path) in (".tif", ".tiff"):
        with tifffile.TiffFile(path) as file:
            return len(file.pages)
    return int(getattr(Image.open(path), "n_frames", 1))


#: Reasons for which a file is refused, each with a look by another library at whether it is true.
REASONS: dict[str, Callable[[Path], bool]] = {
    "it is a DICOM file without an image": fails,
    "the mark DICM at byte 128 is missing": lambda path: not is_dicom(path),
    "the file is packed as a whole (deflated)": lambda path: syntax(path) == "1.2.840.10008.1.2.1.99",
    "its pixels are compressed as": lambda path: pydicom.uid.UID(syntax(path)).is_compressed and fails(path),
    "it is damaged: its pixels do not fit its header": fails,
    "its header is damaged: NumberOfFrames is '1A'": fails,
    "its pixels are transparent": lambda path: Image.open(path).convert("RGBA").getextrema()[3][0] < 255,
    "it holds Python objects, not numbers": fails,
    "it is damaged, or no .npy file": fails,
    "it is a .npy file of version": fails,
    "pictures (pages)": lambda path: pages_of(path) > 1,
    "which is not one picture": lambda path: (
        other_of(path)(path).ndim not in (2, 3, 4)
        or 0 in other_of(path)(path).shape
        or other_of(path)(path).ndim == 4
        or other_of(path)(path).shape[-1] > 4
    ),
    "it is a DICOM SEG, which is not read": lambda path: pydicom.dcmread(path).Modality == "SEG",
    "volumes (its shape is": lambda path: other_of(path)(path).ndim > 3,
    "it is a CIFTI file": lambda path: isinstance(nibabel.load(path), nibabel.Cifti2Image),
    "values, not numbers": lambda path: other_of(path)(path).dtype.kind not in "biuf",
    "channels; 1 (grey) or 3 (colour)": lambda path: other_of(path)(path).shape[-1] not in (1, 3),
    "NaN or infinite": lambda path: not np.isfinite(other_of(path)(path)).all(),
}
WORDS_OF_CODE = ("Error", "Exception", "force=", "literal for", "object at", "<_io", "NoneType")


def scaled(values: np.ndarray, whole: np.ndarray, path: Path) -> np.ndarray:
    """Scale to [0, 1] by the rule of ``auto``, in plain numpy."""
    dicom, plain = other_of(path) is by_pydicom, not str(path).endswith((".nii", ".nii.gz"))
    eight, inverted = whole.dtype == np.uint8 and plain, False
    if dicom:
        head = pydicom.dcmread(path)
        rescaled = (float(head.get("RescaleSlope", 1)), float(head.get("RescaleIntercept", 0))) != (1, 0)
        assert head.BitsAllocated != 1 or set(np.unique(whole)) <= {0, 1}
        whole = whole.astype(bool) if head.BitsAllocated == 1 else whole
        eight = head.BitsAllocated == 8 and not head.PixelRepresentation and not rescaled
        inverted = head.PhotometricInterpretation == "MONOCHROME1"
    low, high = (0.0, 255.0) if eight else (np.nanmin(whole), np.nanpercentile(whole.astype(np.float32), 99))
    if inverted and not eight:
        low, high = np.nanpercentile(whole.astype(np.float32), 1), np.nanmax(whole)
    if whole.dtype == np.bool_:
        low, high = 0, 1
    if high <= low:
        low, high = np.nanmin(whole), np.nanmax(whole)
    shown = np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros(values.shape)
    return np.nan_to_num(1 - shown if inverted and high > low else shown, nan=0.0)


def looked_at(path: Path) -> str:
    """Return the outcome for a file: "equal", or the confirmed reason why it is refused."""
    try:
        found = image_file(path).decode(is_mask=False, limit=LIMIT)
        wanted = other_of(path)(path)
        assert found.shape == wanted.shape
        if wanted.dtype.kind in "biuf":
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-4)
        facts = image_file(path).facts()
        number = None if facts.slices is None else facts.slices // 2
        shown = read_image(Sample(path, 0, number), site="a", split="test", how=STORED)
    except (DataError, ValueError) as error:
        said = str(getattr(error, "reason", None) or error)
        reason = next((words for words in REASONS if words in said), None)
        assert reason is not None, f"no known reason: {said}"
        assert not any(word in said for word in WORDS_OF_CODE), said
        assert REASONS[reason](path), f"refused without need: {said}"
        return reason
    plane = wanted if number is None else wanted[:, :, number]
    plane = plane if plane.ndim == 3 else plane[:, :, None]
    if plane.shape[2] > 4 and plane.shape[0] <= 4:
        plane = np.moveaxis(plane, 0, 2)
    np.testing.assert_allclose(shown, scaled(plane, wanted, path), atol=2e-4)
    return "equal"


def looked_at_all(files: list[Path]) -> tuple[Counter[str], list[str]]:
    results, wrong = Counter[str](), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in files:
            assert kind_of(path) is not Unknown
            try:
                results[looked_at(path)] += 1
            except Exception as error:  # all are to be seen, not the first alone
                wrong.append(f"{path}: {type(error).__name__}: {error!s:.300}")
    return results, wrong


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return shipped()


def test_some_shipped_files_are_equal_or_rightly_refused(files: list[Path]) -> None:
    results, wrong = looked_at_all(files[::EVERY])
    assert not wrong, "\n".join(wrong)
    assert results["equal"] >= 10
    assert len(results) > 2


@pytest.mark.long
def test_all_shipped_files_are_equal_or_rightly_refused(files: list[Path]) -> None:
    results, wrong = looked_at_all(files)
    assert not wrong, "\n".join(wrong)
    assert results.total() == len(files)
    kinds = Counter("dicom" if other_of(path) is by_pydicom else suffix_of(path) for path in files)
    assert kinds["dicom"] >= 150
    assert kinds[".nii"] + kinds[".nii.gz"] >= 8
    assert kinds[".png"] >= 20
    assert results["equal"] >= 90, results


def test_other_endings_are_not_guessed(files: list[Path]) -> None:
    """Check that a file with an unknown ending is known as such, and not read as a picture by chance."""
    for root in {path.parent for path in files if "nibabel" in path.parts}:
        for path in root.iterdir():
            if path.is_file() and suffix_of(path) in NOT_READ and not is_dicom(path):
                assert kind_of(path) is Unknown, path
