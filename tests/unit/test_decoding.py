"""Test files that would take too much memory, or hold more or less than their header says, and the cost."""

from __future__ import annotations

import gzip
import struct
import threading
import tracemalloc
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from fairflare.data import reading
from fairflare.data.datalist import SPLITS, DataError, Sample, write_datalist
from fairflare.data.image_file import MAX_IMAGE_BYTES, TooLarge, Volume, image_file
from fairflare.data.reading import read_image, read_mask
from fairflare.data.whole_volumes import read_pair
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask

from .image_files import png

SIDE, SLICES = 1024, 4096  # 4 GiB of bytes


def nifti(path: Path, array: Any, **header: Any) -> Path:
    image = nibabel.Nifti1Image(np.asarray(array), np.diag([-1.0, -1.0, 1.0, 1.0]))
    if header:
        image.header.set_slope_inter(**header)
    nibabel.save(image, path)
    return path


def header_of(shape: tuple[int, ...], kind: Any = nibabel.Nifti1Header, dtype: Any = np.uint8) -> bytes:
    """Return the header of a single-file volume, with four bytes that say that no extension follows."""
    header = kind()
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    header["vox_offset"] = header.single_vox_offset
    header["magic"] = header.single_magic
    return header.binaryblock + b"\0" * (header.single_vox_offset - len(header.binaryblock))


def zeros(path: Path, head: bytes, size: int) -> Path:
    """Make a gzip file of ``size`` zeros after a header, block by block, without allocating them."""
    block = bytes(2**24)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    return path


def volume_bomb(path: Path) -> Path:
    """Make a volume of 4 GiB by its header, with some of the zeros, as their number is never looked at."""
    return zeros(path / "bomb.nii.gz", header_of((SIDE, SIDE, SLICES)), 2**26)


def volume2_bomb(path: Path) -> Path:
    return zeros(path / "bomb2.nii.gz", header_of((SIDE, SIDE, SLICES), nibabel.Nifti2Header), 2**20)


def flat_bomb(path: Path) -> Path:
    (path / "bomb.nii").write_bytes(header_of((SIDE, SIDE, SLICES)))
    return path / "bomb.nii"


def scaled_bomb(path: Path) -> Path:
    """Make 513 MiB of bytes, which become 4.0 GiB of float64."""
    header = nibabel.Nifti1Header(header_of((SIDE, SIDE, 513))[:348])
    header["scl_slope"] = 0.5
    return zeros(path / "scaled.nii.gz", header.binaryblock + bytes(4), 2**20)


def extension_bomb(path: Path) -> Path:
    """Make a volume with 2 GiB before its data, which nibabel would read as an extension."""
    header = nibabel.Nifti1Header(header_of((4, 4, 1))[:348])
    header["vox_offset"] = 2**31
    extension = b"\1\0\0\0" + struct.pack("<ii", 2**31 - 352, 0)
    return zeros(path / "extension.nii.gz", header.binaryblock + extension, 2**20)


def array_bomb(path: Path) -> Path:
    with (path / "bomb.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (SIDE, SIDE, SLICES)}
        )
    return path / "bomb.npy"


def array2_bomb(path: Path) -> Path:
    with (path / "bomb2.npy").open("wb") as file:
        np.lib.format.write_array_header_2_0(
            file, {"descr": "<f8", "fortran_order": True, "shape": (SIDE, SIDE, SLICES)}
        )
    return path / "bomb2.npy"


def picture_bomb(path: Path) -> Path:
    """Make a colour picture of 13,000 x 13,000, which is 484 MiB, just below Pillow's limit."""
    return png(path / "bomb.png", (13000, 13000), 8, bytes(2**22))


BOMBS = [
    volume_bomb, volume2_bomb, flat_bomb, scaled_bomb, extension_bomb, array_bomb, array2_bomb, picture_bomb,
]  # fmt: skip
LIMITS = {picture_bomb: 2**28}  # bytes; otherwise the default


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("what", ["image", "mask"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_by_its_header(tmp_path: Path, bomb: Callable[[Path], Path], what: str) -> None:
    """Check that no data are decoded: the refusal takes at most some kilobytes."""
    path, limit = bomb(tmp_path), LIMITS.get(bomb, MAX_IMAGE_BYTES)
    read = read_image if what == "image" else read_mask
    small = Sample(path, path)
    with pytest.raises(DataError):  # imports
        read(small, site="hospital-a", split="training", max_bytes=limit)
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read(small, site="hospital-a", split="training", max_bytes=limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**21
    text, public = str(caught.value), caught.value.public
    size = caught.value.__cause__.size
    assert size > limit
    article = "an image" if what == "image" else "a mask"
    assert text.startswith(f"site 'hospital-a': {what} '{path}' of split 'training' would take {size} bytes decoded")
    assert f"more than max_image_bytes={limit}; take it out" in text
    assert "raise 'max_image_bytes' in the site's fairflare.json" in text
    assert public == f"site 'hospital-a': {article} of split 'training' is larger than the site's max_image_bytes"


def example(path: Path, name: str) -> tuple[Path, int]:
    """Return a good file and the bytes that its array takes."""
    values = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    if name == "volume.nii.gz":
        return nifti(path / name, values), 120
    if name == "volume.nii":
        return nifti(path / name, values), 120
    if name == "scaled.nii.gz":
        return nifti(path / name, values, slope=0.5, inter=0.0), 480
    if name == "array.npy":
        np.save(path / name, values)
        return path / name, 120
    modes = {"grey.png": ("L", 1), "palette.png": ("P", 3), "colour.jpg": ("RGB", 3), "deep.tif": ("I;16", 2),
             "alpha.png": ("RGBA", 4), "grey.bmp": ("L", 1), "float.tiff": ("F", 4), "bits.png": ("1", 1)}  # fmt: skip
    mode, each = modes[name]
    noise = np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8)
    picture = Image.new(mode, (10, 6)) if mode == "I;16" else Image.fromarray(noise).convert(mode)
    picture.save(path / name)
    return path / name, 60 * each


FILES = [
    "volume.nii.gz", "volume.nii", "scaled.nii.gz", "array.npy", "grey.png", "palette.png", "colour.jpg", "deep.tif",
    "alpha.png", "grey.bmp", "float.tiff", "bits.png",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_limit_is_what_the_array_takes(tmp_path: Path, name: str) -> None:
    path, size = example(tmp_path, name)
    limit = max(size, 352) if ".nii" in name else size  # a volume's header is no larger than it says either
    array = image_file(path).decode(is_mask=False, limit=limit)
    assert array.nbytes <= size  # without its alpha
    if ".nii" not in name or size > 352:
        with pytest.raises(TooLarge) as caught:
            image_file(path).decode(is_mask=False, limit=size - 1)
        assert caught.value.size == size


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = example(tmp_path, name)
    content = path.read_bytes()
    if name in ("volume.nii.gz", "scaled.nii.gz"):
        path.write_bytes(gzip.compress(gzip.decompress(content)[:-1]))
        assert_damaged(path)
    path.write_bytes(content[: len(content) // 2])
    assert_damaged(path)


@pytest.mark.parametrize("name", ["volume.nii.gz", "volume.nii", "scaled.nii.gz", "array.npy"])
def test_a_file_with_more_than_its_header_says_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = example(tmp_path, name)
    content = path.read_bytes()
    longer = gzip.compress(gzip.decompress(content) + b"\0") if name.endswith("gz") else content + b"\0"
    path.write_bytes(longer)
    assert "the file is damaged: its header describes" in assert_damaged(path)
    if name.endswith("gz"):  # another member of the gzip file is content as well
        path.write_bytes(content + gzip.compress(b"\0"))
        assert "the file is damaged: its header describes" in assert_damaged(path)


def test_more_than_the_header_says_is_not_unpacked(tmp_path: Path) -> None:
    path = zeros(tmp_path / "small.nii.gz", header_of((4, 4, 1)), 2**26)
    with pytest.raises(ValueError, match="it has more"):
        image_file(path).decode(is_mask=False, limit=MAX_IMAGE_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has more"):
            image_file(path).decode(is_mask=False, limit=MAX_IMAGE_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


def test_a_changed_byte_in_a_packed_volume_is_found(tmp_path: Path) -> None:
    """Check gzip's checksum at the end, which is not looked at while the volume alone is read."""
    path = nifti(tmp_path / "a.nii.gz", np.random.default_rng(0).integers(0, 99, (20, 20, 3), np.uint8))
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(bytes(content))
    assert "its checksum is wrong" in assert_damaged(path)


def test_two_members_of_a_gzip_file_are_one_volume(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = gzip.decompress(nifti(tmp_path / "a.nii.gz", values).read_bytes())
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(content[:355]) + gzip.compress(content[355:]))
    assert image_file(tmp_path / "b.nii.gz").decode(is_mask=True, limit=1000).tolist() == values.T.tolist()


@pytest.mark.parametrize("shape", [(-3, 4), (0, 0), (3, -4, -5)])
def test_a_shape_that_none_can_have(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    assert_damaged(tmp_path / "a.npy")


def assert_damaged(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_image(Sample(path, path, 0), site="a", split="test")
    assert "Repair the file or take it out" in str(caught.value)
    assert caught.value.public == "site 'a': an image of split 'test' cannot be read"
    return str(caught.value)


def test_slices_of_a_volume_asked_for_at_once_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nifti(tmp_path / "a.nii.gz", np.arange(96, dtype=np.uint8).reshape(4, 3, 8))
    decoded: list[int] = []
    together, again = threading.Barrier(8), threading.Event()

    real = Volume.decode

    def slowly(*args: Any, **options: Any) -> Any:
        decoded.append(1)
        again.set() if len(decoded) > 1 else again.wait(0.5)  # for a second one, which should not come
        return real(*args, **options)

    monkeypatch.setattr(Volume, "decode", slowly)
    reading._decode.cache_clear()

    def read(number: int) -> float:
        together.wait(timeout=60)
        return float(read_mask(Sample(path, path, number), site="a", split="test")[0, 0])

    with ThreadPool(8) as threads:
        assert threads.map(read, range(8), chunksize=1) == list(range(8))
    assert len(decoded) == 1


def test_four_files_are_kept(tmp_path: Path) -> None:
    reading._decode.cache_clear()
    for number in range(9):
        path = nifti(tmp_path / f"{number}.nii.gz", np.full((4, 4), number, np.uint8))
        read_pair(Sample(path, path), site="a", split="test")
    assert reading._decode.cache_info().currsize == reading._decode.cache_info().maxsize == 4


# --- what is kept -----------------------------------------------------------------------------------------


def test_a_kept_image_is_refused_by_a_site_with_another_limit(tmp_path: Path) -> None:
    path = nifti(tmp_path / "a.nii.gz", np.ones((20, 20), np.uint8))
    read_image(Sample(path, path), site="a", split="test")
    with pytest.raises(DataError, match="max_image_bytes=399"):
        read_image(Sample(path, path), site="b", split="test", max_bytes=399)


# --- the site's setting -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("L", (40, 40)).save(tmp_path / "m.png")
    for number in range(len(SPLITS)):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{number}.png")
    for name, label in (("classes.json", 0), ("masks.json", "m.png")):
        splits = {split: [{"image": f"{number}.png", "label": label}] for number, split in enumerate(SPLITS)}
        write_datalist(tmp_path / name, splits)
    return tmp_path


TASKS = [
    (ClassificationTask(num_classes=2, image_size=(32, 32)), "classes.json"),
    (SegmentationTask(image_size=(32, 32)), "masks.json"),
]


@pytest.mark.parametrize(("task", "datalist"), TASKS)
def test_the_site_sets_the_limit(folder: Path, task: Any, datalist: str) -> None:
    own = {"data_root": str(folder), "datalist": datalist}
    data = task.open_site("hospital-a", {**own, "max_image_bytes": 4800})
    assert len(next(iter(data.batches("training", batch_size=1)))[0]) == 1
    data = task.open_site("hospital-a", {**own, "max_image_bytes": 4799})
    with pytest.raises(DataError, match=r"4800 bytes .*max_image_bytes=4799") as caught:
        next(iter(data.batches("training", batch_size=1)))
    assert str(folder) not in caught.value.public


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1 GiB"])
def test_a_limit_that_is_none_is_refused(folder: Path, value: Any) -> None:
    with pytest.raises(DataError, match="max_image_bytes must be an integer >= 1"):
        SegmentationTask().open_site("a", {"data_root": str(folder), "max_image_bytes": value})


@pytest.mark.parametrize(("task", "datalist"), TASKS)
def test_the_site_says_where_links_may_lead(folder: Path, tmp_path_factory: Any, task: Any, datalist: str) -> None:
    elsewhere = tmp_path_factory.mktemp("archive")
    (folder / "0.png").rename(elsewhere / "0.png")
    (folder / "0.png").symlink_to(elsewhere / "0.png")
    own = {"data_root": str(folder), "datalist": datalist}
    with pytest.raises(DataError, match="is a link to") as caught:
        task.open_site("hospital-a", own)
    assert str(elsewhere) not in caught.value.public
    assert task.open_site("hospital-a", {**own, "linked_roots": [str(elsewhere)]}).num_samples("training") == 1
    with pytest.raises(DataError, match=r"linked_roots.* got 'archive'"):
        task.open_site("hospital-a", {**own, "linked_roots": ["archive"]})
    with pytest.raises(DataError, match="linked_roots must be a list"):
        task.open_site("hospital-a", {**own, "linked_roots": str(elsewhere)})
