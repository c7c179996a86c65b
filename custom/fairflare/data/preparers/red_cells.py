"""Red blood cells by type: a long-tailed set of one hospital."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairflare.base.for_types import Unpack
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, npz_files, read_arrays, write_pool

RED_CELLS = (
    "normal", "macrocyte", "microcyte", "spherocyte", "target", "stomatocyte", "ovalocyte", "teardrop", "burr",
    "schistocyte", "hypochromia", "elliptocyte",
)  # fmt: skip


def prepare_red_cells(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing | None = None, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """Twelve types of red blood cells, long-tailed, from ``rbc12_chula.npz``.

    The file's six sites are blocks of consecutive smear images of one hospital, not six hospitals; they are called
    ``block-0`` and so on. Split by smear image, since neighbouring crops overlap.

    Args:
        source_dir: folder with the file.
        dealing: how the images become those of sites; default: by the file's blocks.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    (file,) = npz_files(Path(source_dir), "rbc12_", ("chula",)).values()
    arrays = read_arrays("red cells", file, ("images", "labels", "image_no", "site"))
    images, labels, smears, blocks = arrays["images"], arrays["labels"], arrays["image_no"], arrays["site"]
    items = [
        Item(f"s{smears[i]:04d}_{i:05d}", f"s{smears[i]:04d}", images[i], int(labels[i]), site=f"block-{blocks[i]}")
        for i in np.argsort(blocks, kind="stable").tolist()
    ]
    return write_pool(items, out_dir, dealing or Dealing(), class_names=RED_CELLS, stratified=False, **writing)


PREPARERS = (
    Preparer(
        "red-cells",
        "red blood cells by type, long-tailed, six blocks of one hospital's smears",
        prepare_red_cells,
        dealing=Dealing(),
    ),
)
