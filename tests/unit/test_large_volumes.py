"""Test that volumes of a hospital's size take little memory and time: one byte a label, and values by counting."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nibabel
import numpy as np
import psutil
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Spacing

from fairflare.base.machine import memory
from fairflare.base.machine.memory import free_memory, print_progress, workers
from fairflare.base.site_data import VALIDATION_PATCHES
from fairflare.base.stopping import TaskStopped
from fairflare.checking.images import check_sites
from fairflare.checking.volumes import CHECKED, look_at_masked
from fairflare.core.statistics.site_figures import AXES
from fairflare.data import intensity
from fairflare.data.datalist import Sample
from fairflare.data.image_file import Volume
from fairflare.data.intensity import counts_of, labels_of, slabs
from fairflare.data.kinds import describe_mask
from fairflare.data.preparers.__main__ import main as prepare
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.looking import MADE, Look, look_at_volume, looks_of
from fairflare.data.preparers.own import choose_patches
from fairflare.data.reading import Reading, reading_takes
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.tasks.scores.site_statistics import measure
from fairflare.tasks.volumes.base import PREPARED
from fairflare.tasks.volumes.prepared import zoom_volume
from fairflare.tasks.volumes.segmentation import FolderPatches, VolumeSegmentationTask
from tests.tiny import run_document

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
    whole = describe_mask("a", image, labels)
    assert whole.contrast == pytest.approx(contrast, rel=1e-4)
    assert whole.boxed == pytest.approx(0)  # the box is only 3 voxels thick, and the other part is half empty
    labels[4:12, 5:20, 6:12] = 1
    inside = labels > 0
    assert describe_mask("a", image, labels).boxed == pytest.approx(8 * 15 * 6 / inside.sum())
    monkeypatch.setattr(intensity, "SLAB", 100)
    by_slab = describe_mask("a", np.asfortranarray(image), labels)
    assert by_slab.image == describe_mask("a", image, labels).image
    assert by_slab.contrast == pytest.approx(describe_mask("a", image, labels).contrast)
    monkeypatch.setattr("fairflare.data.kinds.LABELLED", 300)  # every third voxel of the mask
    assert describe_mask("a", image, np.ones_like(labels)).boxed == 0  # a box as large as the image is none


def test_looking_at_a_volume_takes_its_bytes_and_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    image, mask = pair(tmp_path)
    assert look_at_volume(image, mask).values == (0, 1, 2)
    # image 2 bytes a voxel, mask 1, what is inside 1; connected parts in the box of the mask (1/64 of the volume) 4
    assert peak(lambda: look_at_volume(image, mask)) < 5 * np.prod(SHAPE)


def test_what_reading_takes_is_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    small, large = pair(tmp_path, (20, 20, 20), shift=1), pair(tmp_path)
    (tmp_path / "damaged.nii").write_bytes(b"no volume")
    said = reading_takes([Sample(tmp_path / "damaged.nii", None), Sample(*large), Sample(*small)], MADE)
    assert said == (2 + 1 + MADE) * np.prod(SHAPE) + 32 * 2**12  # by the headers: 16 bits, 8 bits
    assert said / 2 < peak(lambda: look_at_volume(*large)) < said


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
    each = reading_takes([Sample(case.image, case.mask) for case in cases], MADE)
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
    assert list(print_progress("abcde", 5, "images")) == list("abcde")
    assert capsys.readouterr().out == "2 of 5 images\n4 of 5 images\n"


def test_what_reading_takes_hides_no_stop_and_no_error_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass over what a file explains, such as a folder that may not be opened; let everything else through."""
    image, mask = pair(tmp_path, SHAPE)
    (tmp_path / "bad.nii").write_bytes(b"no volume")
    case, others = Sample(image, mask), [Sample(tmp_path / name, None) for name in ("bad.nii", "gone.nii")]
    expected = reading_takes([case], 1)
    assert reading_takes([*others, case], 1) == expected

    def closed(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "series").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", closed)
        assert reading_takes([Sample(tmp_path / "series", None), case], 1) == expected
    for error in (TaskStopped("stopped"), MemoryError()):
        monkeypatch.setattr(Volume, "facts", Mock(side_effect=error))
        with pytest.raises(type(error)):
            reading_takes([case], 1)


# --- prepared once, and cut ---------------------------------------------------------------------------------


def site(folder: Path, shape: tuple[int, ...] = SHAPE, **how: Any) -> Path:
    """Write a site of two training volumes, one for validation and one for the test."""
    folder.mkdir()
    files = [pair(folder, shape, shift=k, **how) for k in range(4)]
    entries = [{"image": str(image), "label": str(mask)} for image, mask in files]
    lists = {"training": entries[:2], "validation": entries[2:3], "test": entries[3:]}
    (folder / "datalist.json").write_text(json.dumps(lists))
    return folder


def opened(folder: Path, kept: Path | None = None, task: dict[str, Any] | None = None, **own: Any) -> Any:
    more = {"decoded_folder": str(kept)} if kept else {}
    settings = {"num_classes": 2, "intensity": "range", **(task or {})}
    return VolumeSegmentationTask(**settings).open_site("s", {"data_root": str(folder), **more, **own})


def patches(data: Any, size: int = 2, seed: int = 7) -> list[torch.Tensor]:
    return [torch.cat(part) for part in zip(*data.batches("training", batch_size=size, shuffle_seed=seed), strict=True)]


def test_patches_are_the_same_from_disk_from_memory_and_by_threads(tmp_path: Path) -> None:
    root, kept = site(tmp_path / "site"), tmp_path / "kept"
    wanted = patches(opened(root))
    for again in (opened(root, kept), opened(root, kept, num_workers=2), opened(root, cache_bytes=0)):
        for found, part in zip(patches(again, 3), wanted, strict=True):
            assert torch.equal(found, part)
    assert len(list(kept.glob("*.npy"))) == 2
    assert not torch.equal(patches(opened(root, kept), seed=8)[0], wanted[0])


def test_threads_that_need_one_volume_prepare_it_once_and_count_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take patches of the same volumes by four threads, in memory that holds one of the two."""
    root = site(tmp_path / "site", (32, 32, 32))
    each = sum(part.nbytes for part in opened(root).parts("training", 0).values())
    data = opened(root, num_workers=4, cache_bytes=2 * each - 1)
    real, prepared = data.prepare, []

    def slow(split: str, sample: Any) -> Any:
        prepared.append(sample.image.name)
        time.sleep(0.1)
        return real(split, sample)

    monkeypatch.setattr(data, "prepare", slow)
    monkeypatch.setattr(memory, "cores", lambda: 4)
    data.num_workers = 4
    first = data.datalist.splits["training"][0].image.name
    wanted = data._cut("training", range(4), 4, 7, 4, 0.5)
    next(iter(wanted))
    next(iter(wanted))
    assert prepared == [first]
    assert data._left == each - 1


def test_volumes_without_a_patient_are_known_by_their_values(tmp_path: Path) -> None:
    """Check that a volume counts as the same person in another file and another job, for the ledger of privacy."""
    root = site(tmp_path / "site", (32, 32, 32))
    first, second = opened(root).identities("training")
    assert first != second
    (root / "image0.nii").rename(root / "renamed.nii")
    listed = (root / "datalist.json").read_text().replace("image0.nii", "renamed.nii")
    (root / "datalist.json").write_text(listed)
    other = {"intensity": "window", "window": [0, 500], "orientation": "LPS"}
    assert opened(root, None, other).identities("training") == [first, second]


def test_a_part_is_that_of_the_whole_however_it_lies(tmp_path: Path) -> None:
    data = opened(site(tmp_path / "site", (40, 50, 34)), tmp_path / "kept")
    volume, item = data.volume("training", 0), data.item("training", 0)
    assert tuple(volume.size) == (48, 64, 48)
    assert item["image"].shape == (1, 48, 64, 48)
    stored = np.asanyarray(nibabel.load(tmp_path / "site/image0.nii").dataobj).astype(np.float64)
    scaled = (stored - stored.min()) / (stored.max() - stored.min())
    np.testing.assert_allclose(item["image"][0, 4:44, 7:57, 7:41].numpy(), scaled, atol=1e-6)
    assert set(item["label"].unique().tolist()) == {-1, 0, 1}
    assert int((item["label"] >= 0).sum()) == 2 * 40 * 50 * 34
    for start in ((0, 0, 0), (15, 17, 3), (16, 32, 16), (1, 31, 15)):
        inner = tuple(slice(begin, begin + 32) for begin in start)
        for name in ("image", "label"):
            assert torch.equal(volume.cut(name, start, (32, 32, 32)), item[name][(slice(None), *inner)])


def test_middles_of_patches_follow_the_rule(tmp_path: Path) -> None:
    """Draw structure, then voxel, with even chances; where nothing is marked, draw from the volume."""
    volume = opened(site(tmp_path / "site", (96, 96, 96)), tmp_path / "kept").volume("training", 0)
    small = {tuple(place) for place in np.argwhere(volume.whole("label")[1].numpy() > 0)}
    assert len(small) == 6**3
    assert volume.ends.tolist() == [10_000, 10_000 + 6**3]  # of the 24^3 - 6^3 voxels of the larger one, 10,000
    assert {tuple(place) for place in volume.voxels[10_000:]} == small
    inside = volume.voxels[:10_000]
    assert len(np.unique(inside, axis=0)) == 10_000
    assert (volume.whole("label")[0].numpy()[tuple(inside.T.astype(int))] == 1).all()
    size = (32, 32, 32)
    draws = np.random.default_rng(1).random((4000, 6)).tolist()
    starts = [volume.start(one, 0.5, size) for one in draws]
    middles = np.array(starts) + 16
    near = ((middles >= 24) & (middles < 48)).all(1).mean()
    assert near == pytest.approx(0.5 + 0.5 * (24 / 96) ** 3, abs=0.03)
    of_small = np.mean([tuple(middle) in small for middle in middles])
    assert of_small == pytest.approx(0.25, abs=0.03)  # half of the patches, half of the structures
    assert volume.start([0.9, 0, 0, 0.999, 0.0, 0.5], 0.5, size) == (64, 0, 32)  # moved into the volume
    empty = replace(volume, ends=np.zeros(2, np.int64))
    assert empty.start([0.0, 0, 0, 0.5, 0.5, 0.5], 1.0, size) == (32, 32, 32)


def test_a_prepared_volume_is_made_anew_when_anything_changes(tmp_path: Path) -> None:
    root, kept = site(tmp_path / "site", (32, 32, 32)), tmp_path / "kept"
    first = opened(root, kept).item("training", 0)["image"].clone()
    count = len(list(kept.glob("*.npy")))
    other = {"intensity": "window", "window": [0, 500]}
    for task in (other, {"spacing": [2.0, 2.0, 2.0]}, {"orientation": "LPS"}, {"patch_size": [48, 48, 48]}):
        opened(root, kept, task).volume("training", 0)
        count += 1
        assert len(list(kept.glob("*.npy"))) == count
    opened(root, kept, mask_values={0: 0, 1: 2, 2: 1}).volume("training", 0)
    assert len(list(kept.glob("*.npy"))) == count + 1
    assert torch.equal(opened(root, kept).item("training", 0)["image"], first)
    time.sleep(0.01)
    pair(root, (32, 32, 32), shift=0, step=2.0)  # the file is written again, with other voxels
    assert opened(root, kept).item("training", 0)["spacing"] == (2.0, 2.0, 2.0)
    assert len(list(kept.glob("*.npy"))) == count + 1  # in place of the old one


def test_damage_a_full_disk_and_a_site_that_forbids_it_change_no_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, kept = site(tmp_path / "site", (32, 40, 32)), tmp_path / "kept"
    wanted = patches(opened(root, decoded_bytes=0, decoded_folder=str(kept)))
    assert not kept.exists()
    patches(opened(root, kept))
    for file in kept.glob("*.npy"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert torch.equal(patches(opened(root, kept))[0], wanted[0])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", full)
    data = opened(root, tmp_path / "full")
    assert torch.equal(patches(data)[0], wanted[0])
    assert list((tmp_path / "full").glob("*")) == []


@pytest.mark.parametrize("end", ["killed", "no space"])
@pytest.mark.parametrize("writes", range(1, 7))
def test_an_end_at_any_write_of_a_prepared_volume_changes_no_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, writes: int
) -> None:
    """Check each of the five arrays of a volume, half of which is on disk then, and its record."""
    root, kept = site(tmp_path / "site", (32, 32, 32)), tmp_path / "kept"
    wanted = patches(opened(root, decoded_bytes=0))
    left = [writes]

    def half(write: Callable[..., Any]) -> Callable[..., Any]:
        def first_half(target: Any, content: Any, **how: Any) -> None:
            left[0] -= 1
            if left[0]:
                write(target, content, **how)
                return
            write(target, content[: len(content) // 2], **how)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")

        return first_half

    with monkeypatch.context() as patched:
        patched.setattr(np.lib.format, "write_array", half(np.lib.format.write_array))
        patched.setattr(Path, "write_text", half(Path.write_text))
        if end == "killed":
            child = os.fork()
            if child == 0:
                opened(root, kept).volume("training", 0)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            assert list(kept.iterdir())
        else:
            assert torch.equal(patches(opened(root, kept))[0], wanted[0])
    assert all(torch.equal(found, part) for found, part in zip(patches(opened(root, kept)), wanted, strict=True))
    assert len(list(kept.iterdir())) == 4  # two volumes, each with its record, and nothing that was left


def test_files_replaced_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, kept = site(tmp_path / "site", (32, 32, 32)), tmp_path / "kept"
    other = pair(tmp_path, (32, 32, 32), shift=9)
    left = [True]
    real = FolderPatches.read_sample

    def replaced(self: Any, sample: Any, split: str) -> Any:
        whole = real(self, sample, split)
        if left:
            left.clear()
            for new, old in zip(other, (sample.image, sample.label), strict=True):
                new.replace(old)
        return whole

    monkeypatch.setattr(FolderPatches, "read_sample", replaced)
    first = opened(root, kept).item("training", 0)
    assert not left
    again, plain = opened(root, kept).item("training", 0), opened(root, decoded_bytes=0).item("training", 0)
    for name in ("image", "label"):
        assert torch.equal(first[name], plain[name])
        assert torch.equal(again[name], plain[name])
    assert len(list(kept.glob("*.npy"))) == 1


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("spacing", [(1.1, 1.3, 2.7), (0.61, 0.71, 1.87)])
def test_resampling_is_monai_s(spacing: tuple[float, ...], nearest: bool) -> None:
    turned = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))[0] @ np.diag([0.83, 0.94, 2.2])
    sheared = np.diag([0.8, 0.9, 2.0]) + np.outer([0, 0.3, 0], [0, 0, 1])  # a tilted gantry
    for axes in (turned, sheared):
        affine = torch.eye(4, dtype=torch.float64)
        affine[:3, :3] = torch.from_numpy(axes)
        values = torch.from_numpy(np.random.default_rng(0).random((2, 20, 24, 13)).astype(np.float32))
        values = (9 * values).round() if nearest else values
        wanted = Spacing(spacing, mode="nearest" if nearest else "bilinear", padding_mode="border")(
            MetaTensor(values, affine=affine)
        )
        found = zoom_volume(MetaTensor(values.to(torch.int8) if nearest else values, affine=affine), spacing, nearest)
        np.testing.assert_allclose(found.affine, wanted.affine, atol=1e-9)
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-5)
        assert found.dtype == (torch.int8 if nearest else torch.float32)


@pytest.mark.parametrize("spacing", [None, [2.0, 2.0, 2.0]])
def test_preparing_a_volume_takes_what_is_reckoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spacing: Any
) -> None:
    """Count what numpy allocates: the image as stored, in 32 bits and turned; torch's own copies are not seen here."""
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    data = opened(site(tmp_path / "site"), None, {"spacing": spacing}, cache_bytes=0)
    assert data.takes() == (2 + 1 + PREPARED) * np.prod(SHAPE) + 32 * 2**12
    assert peak(lambda: data.volume("training", 0)) < 13 * np.prod(SHAPE)


# --- check-data ---------------------------------------------------------------------------------------------


def test_a_check_reads_each_file_once_and_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, reads = site(tmp_path / "site"), list[Path]()
    real = Volume.decode
    monkeypatch.setattr(Volume, "decode", lambda file, **how: reads.append(file.path) or real(file, **how))
    monkeypatch.setattr(Volume, "count_decoded_bytes", lambda file, is_mask: 1)  # which would count as a reading here
    task = VolumeSegmentationTask(num_classes=2, intensity="window", window=(0, 500), spacing=(2.0, 2.0, 2.0))
    found = check_sites(task, {"s": {"data_root": str(root)}})
    assert sorted(reads) == sorted(file for file in root.iterdir() if file.suffix == ".nii")
    assert found.usable == 4
    assert found.grave == 0
    assert found.sites[0].labelled == {"class_1": 4, "class_2": 4}
    # of 96 x 80 x 64 voxels of 1 mm those of 2 mm, with 4 bytes for the image and 1 for each structure
    assert found.sites[0].prepared == (4 * 48 * 40 * 32 * (4 + 2), 16 * 2**30)
    monkeypatch.setattr(intensity, "SLAB", 2**12)
    data = opened(root)
    sample = data.datalist.splits["training"][0]
    assert peak(lambda: look_at_masked(data, sample, "training")) < (3 + CHECKED) * np.prod(SHAPE)


def test_statistics_read_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, reads = site(tmp_path / "site", (34, 36, 38)), list[Path]()
    real = Volume.decode
    monkeypatch.setattr(Volume, "decode", lambda file, **how: reads.append(file.path) or real(file, **how))
    monkeypatch.setattr(Volume, "count_decoded_bytes", lambda file, is_mask: 1)
    monkeypatch.setattr(memory, "cores", lambda: 4)
    sums = measure("s", {"data_root": str(root)}, "segmentation", Reading(intensity="range"), 1)
    assert sorted(reads) == sorted(file for file in root.iterdir() if file.suffix == ".nii")
    assert sums.counts()["images"] == 4
    assert int(sums.intensity.sum()) == 4 * 34 * 36 * 38
    assert {number for number, _ in sums.records["slices"].items()} == {AXES["slices"].bin_of(38.0)}


def test_a_check_tells_what_masks_of_volumes_are(tmp_path: Path) -> None:
    root = site(tmp_path / "site", (34, 36, 38))
    masks = {k: np.zeros((34, 36, 38), np.uint8) for k in range(4)}
    masks[1][:] = 1
    masks[2][5:20, 7, 9] = 2  # a line
    masks[3][5, 5, 5] = 7  # a value without a meaning
    for k, mask in masks.items():
        nibabel.save(nibabel.Nifti1Image(mask, np.eye(4)), root / f"mask{k}.nii")
    stored = np.asanyarray(nibabel.load(root / "image0.nii").dataobj)
    nibabel.save(nibabel.Nifti1Image(stored * 2.0 + 5, np.eye(4)), root / "image2.nii")  # a copy of another scale
    nibabel.save(nibabel.Nifti1Image(np.full((34, 36, 38), 3.0, np.float32), np.eye(4)), root / "image1.nii")
    found = check_sites(VolumeSegmentationTask(num_classes=2), {"s": {"data_root": str(root)}})
    texts = "\n".join(problem.text for problem in found.problems)
    for wanted in (
        "1 image(s) of 'training' have a mask with nothing in it",
        "1 image(s) of 'training' have a mask that leaves no background",
        "has the values 7", "one image in several splits", "image1.nii' of 'training': all its pixels have one value",
    ):  # fmt: skip
        assert wanted in texts
    assert found.usable == 3
    assert found.sites[0].labelled == {"class_1": 1, "class_2": 1}
    nibabel.save(nibabel.Nifti1Image(np.full((34, 36, 38), np.nan, np.float32), np.eye(4)), root / "image1.nii")
    found = check_sites(VolumeSegmentationTask(num_classes=2), {"s": {"data_root": str(root)}})
    assert "values that are NaN or infinite" in "\n".join(problem.text for problem in found.problems)


# --- settings that suit the sites ---------------------------------------------------------------------------

CT = {"intensity": "window", "window": [40, 400], "norm": "layer"}
WIDE = ((0.8, 512), (0.8, 512), (1.0, 300))


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [
        ([[(WIDE, True)] * 3], {**CT, "spacing": [2.0, 2.0, 2.5], "patch_size": [48, 48, 48]}),
        ([[(((1.0, 240), (1.0, 240), (1.0, 155)), False)]], {"spacing": [2.0, 2.0, 2.0], "patch_size": [48, 48, 48]}),
        (  # thick slices stay as they are; 150 mm of them are 30 voxels
            [[(((0.7, 512), (0.7, 512), (5.0, 30)), True)]],
            {**CT, "spacing": [2.0, 2.0, 5.0], "patch_size": [48, 48, 32]},
        ),
        ([[(((1.0, 35), (1.0, 51), (1.0, 35)), False)]], {}),  # no side is longer than 80 mm
        ([[(((3.0, 100), (3.0, 100), (3.0, 100)), False)]], {}),  # 32 voxels cover 96 mm
        (  # the median of the sites' medians, however many volumes each has
            [[(((1.0, 300),) * 3, False)] * 9, [(((3.0, 100),) * 3, False)]],
            {"spacing": [2.0, 2.0, 2.0], "patch_size": [48, 48, 48]},
        ),
        ([[(WIDE, True)], [((), True), ((), True)]], CT),  # a site that does not say how its volumes lie
        ([[(WIDE, True)], [(WIDE, False)]], {"spacing": [2.0, 2.0, 2.5], "patch_size": [48, 48, 48]}),
    ],
)  # fmt: skip
def test_a_patch_covers_eight_centimetres(sites: list[list[Any]], wanted: dict[str, Any]) -> None:
    good = [
        (Item("a", "a", Path("a"), None, site=f"{number}"), Look(axes=axes, air=(air,)))
        for number, own in enumerate(sites)
        for axes, air in own
    ]
    found = choose_patches(good)
    assert found == wanted
    for voxel, side in zip(found.get("spacing", ()), found.get("patch_size", ()), strict=True):
        assert voxel * side >= 80
    VolumeSegmentationTask(**found)


def test_prepare_writes_and_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Store volumes as left, anterior, superior: the order of the axes is that of the body, not of the file."""
    turned = np.array([[0, 0, -3.0, 0], [0, 1.0, 0, 0], [1.2, 0, 0, 0], [0, 0, 0, 1]])
    for k in range(3):
        mask = np.zeros((90, 120, 40), np.uint8)
        mask[30:50, 40:60, 10:20] = 1
        values = np.random.default_rng(k).integers(-1000, 900, mask.shape).astype(np.int16)
        for kind, array in (("images", values), ("labels", mask)):
            (tmp_path / "in" / kind).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, turned), tmp_path / "in" / kind / f"ct{k}.nii.gz")
    assert prepare(["volumes", "--source", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    told = json.loads((tmp_path / "out/manifest.json").read_text())["task"]
    assert told == {**CT, "spacing": [3.0, 2.0, 2.0], "patch_size": [48, 48, 48]}
    assert "--set 'spacing=[3.0,2.0,2.0]' --set 'patch_size=[48,48,48]'" in capsys.readouterr().out


# --- windows, costs, validation on patches ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(20, 32, 33), (48, 80, 100), (96, 64, 41), (57, 58, 24)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.6])
def test_windows_are_those_of_monai(shape: tuple[int, ...], overlap: float) -> None:
    task = VolumeSegmentationTask(overlap=overlap, windows=1)
    seen: list[torch.Size] = []

    def model(window: torch.Tensor) -> torch.Tensor:
        seen.append(window.shape)
        return window

    task.outputs(model, task.fit_size(MetaTensor(torch.zeros(1, *shape))).as_tensor()[None])  # type: ignore[arg-type]
    assert task.windows_in(shape) == len(seen)


def test_a_gpu_without_room_gets_fewer_windows_at_a_time() -> None:
    seen: list[int] = []

    def model(windows: torch.Tensor, most: int = 1) -> torch.Tensor:
        seen.append(len(windows))
        if len(windows) > most:
            raise torch.cuda.OutOfMemoryError
        return 2 * windows

    inputs = torch.rand(1, 1, 64, 32, 32)
    found = VolumeSegmentationTask(windows=4).outputs(model, inputs)  # type: ignore[arg-type]
    torch.testing.assert_close(found, 2 * inputs)
    assert seen[:3] == [3, 2, 1]  # there are three windows in all
    with pytest.raises(torch.cuda.OutOfMemoryError):
        VolumeSegmentationTask().outputs(lambda windows: model(windows, 0), inputs)  # type: ignore[arg-type]


def test_validation_patches_are_fixed_and_half_of_them_in_structures(tmp_path: Path) -> None:
    data = opened(site(tmp_path / "site", (96, 96, 96)), tmp_path / "kept", {"metrics": ["dice", "hd95"]})
    first, again = (list(data.batches(VALIDATION_PATCHES, batch_size=size)) for size in (4, 7))
    inputs, targets = (torch.cat([batch[part] for batch in first]) for part in (0, 1))
    assert inputs.shape == (50, 1, 32, 32, 32)
    assert torch.equal(inputs, torch.cat([batch[0] for batch in again]))
    assert 20 < int((targets[:, :, 16, 16, 16] > 0).any(1).sum()) < 35
    assert first[0].origins[0].spacing == (1.0, 1.0, 1.0)
    level = torch.nn.Conv3d(1, targets.shape[1], 1)
    for parameter, value in zip(level.parameters(), (1.0, -0.5), strict=True):
        torch.nn.init.constant_(parameter, value)
    bright, true = (inputs > 0.5).expand_as(targets), targets > 0
    both, sums = (values.sum((0, 2, 3, 4)) for values in (bright & true, bright.int() + true.int()))
    dice = data.task.evaluate(level, first, "cpu")["dice"]  # of the volume's patches together, not of each
    assert dice == pytest.approx(float((2 * both / sums).mean()))


@pytest.mark.long
@pytest.mark.parametrize("large", [True, False])
def test_rounds_are_validated_on_patches_where_a_volume_has_many_windows(tmp_path: Path, large: bool) -> None:
    roots = {"a": site(tmp_path / "a", (112, 112, 112) if large else SHAPE), "b": site(tmp_path / "b", (40, 32, 32))}
    settings = {"features": [2, 2, 2, 2, 2, 2], "num_classes": 2, "patches": 1}
    plan = make_plan("fed_avg", task="volume_segmentation", sites=list(roots), num_rounds=2, settings=settings)
    local = {"sites": {name: {"data_root": str(root)} for name, root in roots.items()}}
    told: list[tuple[str, int]] = []
    real = VolumeSegmentationTask.evaluate

    def evaluate(task: Any, model: Any, batches: Any, device: Any) -> Any:
        told.append((str(next(iter(batches))[0].shape[2:]), len(batches)))
        return real(task, model, batches, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VolumeSegmentationTask, "evaluate", evaluate)
        results = run_document(run_local(plan, tmp_path / "run", local))
    said = results["info"]["said"]
    assert said["a"]["windows"] == ([125, 27] if large else [36, 4])  # by hand: steps of 24
    assert said["b"]["windows"] == [2, 1]
    assert all(len(said[name]["seconds"]) == 3 for name in roots)
    assert results["info"].get("validation", "") == ("patches" if large else "")
    shapes = {shape for shape, count in told if count > 1}  # of validation on patches: 50 in batches of 2
    assert shapes == ({"torch.Size([32, 32, 32])"} if large else set())
    assert any("112, 112, 112" in shape for shape, _ in told) is large  # the test is of whole volumes
    checked = results["best"]["validation"]
    if not large:
        assert checked == {}
        return
    task = VolumeSegmentationTask(num_classes=2, patches=1, features=(2, 2, 2, 2, 2, 2))
    model = task.build_model()
    (kept,) = (tmp_path / "run").rglob("best_FL_global_model.pt")
    model.load_state_dict(torch.load(kept, weights_only=True)["model"])
    for name, root in roots.items():
        data = task.open_site(name, {"data_root": str(root)})
        wanted = task.evaluate(model, data.batches("validation", batch_size=2), "cpu")
        assert checked[name] == pytest.approx(wanted, rel=1e-4)
        assert checked[name]["loss"] != results["validation"][name]["loss"]  # of patches
