"""Nuclei in five acquisition groups of the 2018 Data Science Bowl."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Unpack

from fairflare.data.preparers.common import Preparer, Writing, mask_items, npz_files, write_sites

NUCLEI = ("fluo256", "fluo360", "fluo520", "histology256x320", "brightfield1024")


def prepare_nuclei(source_dir: str | Path, out_dir: str | Path, **writing: Unpack[Writing]) -> dict[str, Path]:
    """Five groups of nucleus images from ``nuclei_<group>.npz``; masks 0 and 1, split by source image.

    Args:
        source_dir: folder with the files.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    files = npz_files(Path(source_dir), "nuclei_", NUCLEI)
    return write_sites({name: mask_items(name, file, (0, 1)) for name, file in files.items()}, out_dir, **writing)


PREPARERS = (Preparer("nuclei", "nucleus segmentation, five acquisition groups", prepare_nuclei),)
