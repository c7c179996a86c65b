"""Test that volumes of a hospital's size take little memory and time: one byte a label, and values by counting."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import psutil
import pytest

from fairflare.base.machine import memory
from fairflare.base.machine.memory import counted, free_memory, workers
from fairflare.data import intensity
from fairflare.data.image_file import reading_takes
from fairflare.data.intensity import counts_of, labels_of, slabs
from fairflare.data.kinds import drawn_of
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.looking import MADE, Look, look_at_volume, looks_of

SHAPE = (96, 80, 64)


def pair(folder: Path, shape: tuple[int, ...] = SHAPE, step: float = 1.0, shift: int = 0) -> tuple[Path, Path]:
    """Write a volume of 16 bits with two nested boxes, and its mask; return both files."""
    values = np.random.default_rng(shift).integers(-1000, 1000, shape).astype(np.int16)
    mask = np.zeros(shape, np.uint8)
    mask[tuple(slice(n // 4, n // 2) for n in shape)] = 1
    mask[tuple(slice(n // 3, n // 3 + 6) for n in shape)] = 2
    files = folder / f"image{shift}.nii", folder / f"mask{shift}.nii"
    for file, array in zip(files, (values, mask), strict=True):
        nibabel.save(nibabel.Nifti1Image(array, np.diag([step, step, step, 1.0])), file)
    return files


def peak(work: Callable[[], Any]) -> int:
    """Return the largest number of bytes that Python and numpy held at one time during a call."""
    work()  # what is imported and kept on the first call does not count
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 255], np.uint8), ([0, 256], np.uint16), ([0, 70000], np.uint32), ([0, 2**31], np.uint32),
        ([True, False], np.uint8), ([0.0, 2.0004, 255.0004], np.uint8), ([-0.0005, 1.0], np.uint8),
    ],
)  # fmt: skip
def test_labels_are_as_small_as_they_can_be(values: list[Any], kind: type[np.generic]) -> None:
    found = labels_of(np.array(values))
    assert found.dtype == kind
    assert found.tolist() == [round(value) for value in values]


@pytest.mark.parametrize("values", [[0, -1], [0, 2**31 + 1], [0.0, 0.5], [0.0, np.nan], [0.0, np.inf]])
def test_what_is_no_label_is_refused(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="1 of 2 are"):
        labels_of(np.array(values))


@pytest.mark.parametrize("values", [[3, 0, 3, 7], [0, 100000, 100000], [5], []])
def test_values_are_counted(values: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 2)
    numbers, counts = np.unique(np.array(values, np.uint32), return_counts=True)
    found = counts_of(np.array(values, np.uint32))
    assert list(found.items()) == list(zip(numbers.tolist(), counts.tolist(), strict=True))


def test_slabs_cover_an_array_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 50)
    array = np.arange(4 * 5 * 7).reshape(4, 5, 7)
    found = list(slabs(array))
    assert max(slab.size for slab in found) <= 50
    np.testing.assert_array_equal(np.concatenate(found, axis=2), array)


def test_a_mask_is_described_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    image = rng.normal(40, 9, (20, 24, 18)).astype(np.float32)
    image[0, 0] = np.nan  # padding
    labels = np.zeros(image.shape, np.uint8)
    labels[4:12, 5:20, 6:9] = 1
    labels[15:19, 5:12, 10:17] = rng.integers(0, 2, (4, 7, 7))
    inside = labels > 0
    contrast = (np.nanmean(image[inside]) - np.nanmean(image[~inside])) / np.nanstd(image)
    whole = drawn_of("a", image, labels)
    assert whole.contrast == pytest.approx(contrast, rel=1e-4)
    assert whole.boxed == pytest.approx(0)  # the box is only 3 voxels thick, and the other part is half empty
    labels[4:12, 5:20, 6:12] = 1
    inside = labels > 0
    assert drawn_of("a", image, labels).boxed == pytest.approx(8 * 15 * 6 / inside.sum())
    monkeypatch.setattr(intensity, "SLAB", 100)
    by_slab = drawn_of("a", np.asfortranarray(image), labels)
    assert by_slab.image == drawn_of("a", image, labels).image
    assert by_slab.contrast == pytest.approx(drawn_of("a", image, labels).contrast)
    monkeypatch.setattr("fairflare.data.kinds.LABELLED", 300)  # every third voxel of the mask
    assert drawn_of("a", image, np.ones_like(labels)).boxed == 0  # a box as large as the image is none


def test_looking_at_a_volume_takes_its_bytes_and_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    image, mask = pair(tmp_path)
    assert look_at_volume(image, mask, None).values == (0, 1, 2)
    # image 2 bytes a voxel, mask 1, what is inside 1; connected parts in the box of the mask (1/64 of the volume) 4
    assert peak(lambda: look_at_volume(image, mask, None)) < 5 * np.prod(SHAPE)


def test_what_reading_takes_is_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    small, large = pair(tmp_path, (20, 20, 20), shift=1), pair(tmp_path)
    (tmp_path / "damaged.nii").write_bytes(b"no volume")
    said = reading_takes([(tmp_path / "damaged.nii", None), large, small], MADE)
    assert said == (2 + 1 + MADE) * np.prod(SHAPE) + 32 * 2**12  # by the headers: 16 bits, 8 bits
    assert said / 2 < peak(lambda: look_at_volume(*large, None)) < said


def groups(root: Path, line: str, files: dict[str, str]) -> Path:
    """Write what Linux tells of a process's control group, below a folder."""
    for name, text in {"proc/self/cgroup": line, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        ("0::/a/b\n", {"a/memory.max": "50", "a/memory.current": "40", "a/memory.stat": "inactive_file 5\n"}, 15),
        ("0::/\n", {"memory.max": "max", "memory.current": "4000", "memory.stat": "inactive_file 500\n"}, None),
        ("0::/a\n", {"a/memory.max": "10", "a/memory.current": "40", "a/memory.stat": "inactive_file 1\n"}, 0),
        (
            "3:cpu:/x\n5:cpuset,memory:/x\n",
            {
                "memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "300",
                "memory/memory.stat": "total_inactive_file 50\n",
            }, 650,
        ),
    ],
)  # fmt: skip
def test_a_container_s_limit_counts(tmp_path: Path, line: str, files: dict[str, str], free: int | None) -> None:
    root = groups(tmp_path, line, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    machine = psutil.virtual_memory().total
    assert free_memory(root) == free if free is not None else 10**6 < free_memory(root) <= machine


def test_no_more_threads_than_memory_and_cores_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cores", lambda: 64)
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    assert [workers(each) for each in (1, 100, 400, 2000, 0)] == [64, 10, 2, 1, 64]
    cases = [Item("", f"{k}", *pair(tmp_path, (20, 20, 20), shift=k)) for k in range(6)]
    each = reading_takes([(case.image, case.mask) for case in cases], MADE)
    for free, most in ((0, 1), (2 * each + 1, 2)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        at_work, seen = [0], [0]

        def look(image: Path, mask: Path | None, at_work: list[int] = at_work, seen: list[int] = seen) -> Look:
            at_work[0] += 1
            seen[0] = max(seen[0], at_work[0])
            time.sleep(0.02)
            at_work[0] -= 1
            return Look()

        assert len(looks_of(cases, look)) == 6
        assert seen[0] == most


def test_it_is_said_how_far_a_command_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0, 10, 31, 31, 40, 62, 62, 99])  # seconds at the start, after each result, and after each line
    monkeypatch.setattr(memory.time, "monotonic", lambda: next(now))
    assert list(counted("abcde", 5, "images")) == list("abcde")
    assert capsys.readouterr().out == "2 of 5 images\n4 of 5 images\n"
