"""Test volumes on the site's own disk: decoded once for any order of requests; damaged, outdated, too many."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from fairflare.base.task import SiteData
from fairflare.data import reading
from fairflare.data.datalist import SPLITS, DataError, Sample, write_datalist
from fairflare.data.decoded import DECODED_BYTES, UNUSED_DAYS, DecodedVolumes
from fairflare.data.image_file import KINDS, ImageFile
from fairflare.data.reading import Reading, read_image
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.segmentation import SegmentationTask

from .dicom_files import series

pytestmark = pytest.mark.usefixtures("one_thread")
VOLUMES, SLICES = 8, 6
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def volume(seed: int = 0, slices: int = SLICES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 999, (34, 40, slices)).astype(np.int16)


def nifti(path: Path, values: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(values, LPS), path)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make a site with the slices of many volumes and their masks."""
    root = tmp_path / "data"
    root.mkdir()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in zip(SPLITS, (VOLUMES, 1, 1), strict=True):
        splits[split] = []
        for number in range(count):
            values = volume(number)
            nifti(root / f"{split}{number}.nii.gz", values)
            nifti(root / f"{split}{number}_m.nii.gz", (values > 500).astype(np.uint8))
            splits[split] += [
                {"image": f"{split}{number}.nii.gz", "label": f"{split}{number}_m.nii.gz", "slice": k}
                for k in range(SLICES)
            ]
    write_datalist(root / "datalist.json", splits)
    return root


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the files that are really decoded from now on."""
    found: list[Path] = []

    real = {kind: kind.decode for kind in KINDS.values()}

    def counted(file: ImageFile, **how: Any) -> Any:
        found.append(file.path)
        return real[type(file)](file, **how)

    for kind in real:
        monkeypatch.setattr(kind, "decode", counted)
    forget()
    return found


def forget() -> None:
    """Forget decoded volumes as in a new process."""
    reading._decode.cache_clear()
    reading._measure_bounds.cache_clear()


def opened(site: Path, **own: Any) -> SiteData:
    task = SegmentationTask(image_size=(32, 32))
    return task.open_site("a", {"data_root": str(site), "cache_bytes": 0, **own})


def passed(data: SiteData, seed: int | None = 5) -> list[torch.Tensor]:
    parts = list(data.batches("training", batch_size=4, shuffle_seed=seed))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def one(path: Path, kept: DecodedVolumes, number: int = 1) -> np.ndarray:
    forget()
    return read_image(Sample(path, 0, number), site="a", split="test", how=Reading(kept=kept))


# --- once -------------------------------------------------------------------------------------------------


def test_shuffled_slices_decode_every_volume_once(site: Path, decodings: list[Path], tmp_path: Path) -> None:
    """Check images and masks; also in the next pass, in a new process, with threads; with equal tensors."""
    wanted = passed(opened(site))
    without = len(decodings)
    decodings.clear()
    for again in range(3):
        forget()
        data = opened(site, decoded_folder=str(tmp_path / "kept"), num_workers=2 * (again > 1))
        for found, expected in zip(passed(data), wanted, strict=True):
            assert torch.equal(found, expected)
        assert len(decodings) == len(set(decodings)) == 2 * VOLUMES
    assert without > 3 * len(decodings)
    names = [path.name for path in (tmp_path / "kept").iterdir()]
    assert len(names) == 4 * VOLUMES
    assert not any("training" in name for name in names)
    assert not any("training" in path.read_text() for path in (tmp_path / "kept").glob("*.json"))
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_the_scale_of_a_volume_is_measured_once(
    site: Path, decodings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    real = reading.bounds_of
    monkeypatch.setattr(
        reading, "bounds_of", lambda array, kind, padded: measured.append(kind) or real(array, kind, padded)
    )
    for _ in range(2):
        forget()
        passed(opened(site, decoded_folder=str(tmp_path / "kept")))
    assert measured == ["percentile"] * VOLUMES


def test_a_site_keeps_them_in_its_state(site: Path, decodings: list[Path], tmp_path: Path) -> None:
    for own, kept in (({}, True), ({"decoded_bytes": 0}, False), ({"decoded_folder": str(tmp_path / "own")}, True)):
        folder = tmp_path / "own" if "decoded_folder" in own else tmp_path / "state" / "decoded"
        worker = SiteWorker("a", SegmentationTask(image_size=(32, 32)), LocalTraining(),
                            {"data_root": str(site), **own}, tmp_path / "state",
                            decoded=tmp_path / "state" / "decoded")  # fmt: skip
        run = worker.run(_Request(), worker.state.store())  # type: ignore[arg-type]
        list(run.data.batches("validation", batch_size=3))
        assert len(list(folder.glob("*.npy"))) == (2 if kept else 0)
        for path in folder.glob("*"):
            path.unlink()


class _Request:
    current_round, num_rounds, seed, min_cases, measure = 0, 1, 0, 1, ()
    directives: dict[str, Any] = {}  # noqa: RUF012
    beside: dict[str, Any] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"decoded_bytes": -1}, "decoded_bytes.* got -1"),
        ({"decoded_folder": "kept"}, "decoded_folder.* got 'kept'"),
    ],
)
def test_bad_settings(site: Path, own: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(site, **own)


# --- what is kept -----------------------------------------------------------------------------------------


def test_a_series_is_kept_and_pictures_are_not(tmp_path: Path, decodings: list[Path]) -> None:
    kept = DecodedVolumes(tmp_path / "kept")
    folder = series(tmp_path / "series", volume())
    np.save(tmp_path / "a.npy", volume()[:, :, 0])
    flat = nifti(tmp_path / "flat.nii", volume(slices=1))
    for path, number in ((folder, 2), (tmp_path / "a.npy", None), (flat, 0)):
        forget()
        first = one(path, kept, number)  # type: ignore[arg-type]
        assert np.array_equal(one(path, kept, number), first)  # type: ignore[arg-type]
    assert decodings == [folder, tmp_path / "a.npy", tmp_path / "a.npy", flat, flat]
    time.sleep(0.01)
    (folder / "IM0000").write_bytes((folder / "IM0000").read_bytes())  # a file of it was written again
    one(folder, kept)
    assert decodings[5:] == [folder]
    assert len(list(kept.folder.glob("*.npy"))) == 1


def test_a_changed_file_is_decoded_again_and_its_old_state_goes(tmp_path: Path, decodings: list[Path]) -> None:
    kept = DecodedVolumes(tmp_path / "kept")
    path = nifti(tmp_path / "a.nii.gz", volume(0))
    before = one(path, kept)
    nifti(path, volume(1))
    os.utime(path, ns=(1, 1))
    assert not np.array_equal(one(path, kept), before)
    assert len(decodings) == 2
    assert len(list(kept.folder.glob("*.npy"))) == 1


@pytest.mark.parametrize("harm", ["byte", "shorter", "empty", "header", "no json", "bad json", "other json"])
def test_a_damaged_one_is_made_anew(tmp_path: Path, decodings: list[Path], harm: str) -> None:
    path = nifti(tmp_path / "a.nii.gz", volume())
    wanted = one(path, DecodedVolumes(tmp_path / "kept"))
    (file,) = (tmp_path / "kept").glob("*.npy")
    content, said = bytearray(file.read_bytes()), file.with_suffix(".json")
    if harm == "byte":
        content[-5] ^= 1
    elif harm == "header":
        content[3] ^= 1
    elif harm in ("shorter", "empty"):
        del content[len(content) // 2 if harm == "shorter" else 0 :]
    file.write_bytes(content)
    if harm == "no json":
        said.unlink()
    elif harm.endswith("json"):
        said.write_text("{" if harm == "bad json" else json.dumps({"crc": 0, "size": file.stat().st_size}))
    for _ in range(2):
        assert np.array_equal(one(path, DecodedVolumes(tmp_path / "kept")), wanted)
    assert len(decodings) == 2


def test_the_room_is_bounded_and_what_was_not_used_longest_goes(tmp_path: Path, decodings: list[Path]) -> None:
    paths = [nifti(tmp_path / f"{k}.nii", volume(k)) for k in range(5)]
    each = volume().nbytes + 4096
    kept = DecodedVolumes(tmp_path / "kept", 3 * each)
    for number in (0, 1, 2):
        one(paths[number], kept)
        time.sleep(0.02)
    one(paths[0], DecodedVolumes(tmp_path / "kept", 3 * each))  # used again, by another process
    for number in (3, 4):
        one(paths[number], kept)
    assert sum(file.stat().st_size for file in kept.folder.glob("*.npy")) <= 3 * each
    decodings.clear()
    for number in (0, 3, 4):
        one(paths[number], kept)
    assert decodings == []
    one(paths[1], kept)
    assert decodings == [paths[1]]
    small = DecodedVolumes(tmp_path / "small", 1000)
    one(paths[0], small)
    assert not small.folder.exists()
    assert DECODED_BYTES == 16 * 2**30


def test_what_is_unused_for_long_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    kept = DecodedVolumes(tmp_path / "kept")
    one(nifti(tmp_path / "a.nii", volume(0)), kept)
    (said,) = kept.folder.glob("*.json")
    long_ago = time.time() - (UNUSED_DAYS + 1) * 86400
    os.utime(said, (long_ago, long_ago))
    (kept.folder / ".x.npy.4194301.partial").write_bytes(b"half")
    one(nifti(tmp_path / "b.nii", volume(1)), DecodedVolumes(tmp_path / "kept"))
    assert not said.exists()
    assert len(list(kept.folder.iterdir())) == 2


def test_a_disk_that_takes_nothing_costs_no_image(
    tmp_path: Path, decodings: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = nifti(tmp_path / "a.nii", volume())
    (tmp_path / "kept").write_text("a file")
    blocked = DecodedVolumes(tmp_path / "kept")
    for _ in range(3):
        assert one(path, blocked).any()
    assert caplog.text.count("decoded volumes cannot be kept in") == 1

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    kept = DecodedVolumes(tmp_path / "other")
    monkeypatch.setattr("fairflare.data.decoded._save", full)
    assert one(path, kept).any()
    assert list(kept.folder.iterdir()) == []


def test_the_limit_of_the_site_holds_for_kept_volumes_too(tmp_path: Path) -> None:
    path = nifti(tmp_path / "a.nii", volume())
    kept = DecodedVolumes(tmp_path / "kept")
    one(path, kept)
    forget()
    with pytest.raises(DataError, match="max_image_bytes=999"):
        read_image(Sample(path, 0, 1), site="b", split="test", max_bytes=999, how=Reading(kept=kept))
