"""Write the hippocampus volumes (MR, voxels of 1 mm, two structures) as NIfTI files by site, as a hospital has them.

Run ``python benchmarks/hippocampus_folders.py REAL_DATA OUT``; REAL_DATA holds ``hippocampus_*.npz`` with images,
masks, shapes (true extent of each padded volume), ids and site. OUT/SITE/images and OUT/SITE/masks have one file a
volume.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nibabel
import numpy as np


def write_folders(real_data: Path, out: Path, limit: int | None = None) -> int:
    """Write at most ``limit`` volumes of each site, and return their number."""
    written = 0
    for file in sorted(real_data.glob("hippocampus_*.npz")):
        found = np.load(file, allow_pickle=False)
        folder = out / str(found["site"])
        for kind in ("images", "masks"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            for array, shape, name in list(zip(found[kind], found["shapes"], found["ids"], strict=True))[:limit]:
                inside = array[tuple(slice(0, side) for side in shape)]
                nibabel.save(nibabel.Nifti1Image(inside, np.eye(4)), folder / kind / f"{name}.nii.gz")
                written += kind == "images"
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("real_data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, help="volumes of each site; default: all")
    given = parser.parse_args()
    print(f"{write_folders(given.real_data, given.out, given.limit)} volumes below {given.out}")


if __name__ == "__main__":
    main()
