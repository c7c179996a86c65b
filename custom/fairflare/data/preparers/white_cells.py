"""White blood cells of three laboratories: nucleus and cytoplasm, or the type of the cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from fairflare.base.checks import choice
from fairflare.base.for_types import Unpack
from fairflare.data.preparers.common import (
    Dealing,
    Item,
    Preparer,
    Writing,
    file_name,
    mask_items,
    npz_files,
    read_arrays,
    write_pool,
    write_sites,
)
from fairflare.data.preparers.options import option

WHITE_CELLS = ("JTSC", "CellaVision", "BCCD")
WHITE_CELL_TARGETS: Mapping[str, Mapping[str, int] | None] = {  # 0 background, 1 cytoplasm, 2 nucleus
    "cell": {"0": 0, "1": 1, "2": 1},
    "nucleus": {"0": 0, "1": 0, "2": 1},
    "both": None,
}
CELL_TYPES = ("neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil")
UNKNOWN_TYPE = -1


def prepare_white_cells(
    source_dir: str | Path, out_dir: str | Path, *, target: str = "cell", **writing: Unpack[Writing]
) -> dict[str, Path]:
    """Three laboratories' white blood cells from ``wbc_<site>.npz``.

    Masks have the values 0 background, 1 cytoplasm, 2 nucleus.

    Args:
        source_dir: folder with the files.
        target: what ``fairflare.json`` makes of the masks, through ``mask_values``: ``"cell"`` (cytoplasm and
            nucleus) or ``"nucleus"``, for a task with one structure; ``"both"`` leaves it to the task, such
            as ``SegmentationTask(num_classes=2, labels=[[1, 2], [2]])``.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    values = WHITE_CELL_TARGETS[choice("target", target, WHITE_CELL_TARGETS)]
    files = npz_files(Path(source_dir), "wbc_", WHITE_CELLS)
    sites = {name: mask_items(name, file, (0, 1, 2)) for name, file in files.items()}
    return write_sites(sites, out_dir, None if values is None else {"mask_values": dict(values)}, **writing)


def prepare_cell_types(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing | None = None, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """The white blood cells of three laboratories by type, from ``wbc_<site>.npz``; unknown types are left out.

    Args:
        source_dir: folder with the files.
        dealing: how the images become those of sites; default: by laboratory.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site. Classes: ``CELL_TYPES``.
    """
    files = npz_files(Path(source_dir), "wbc_", WHITE_CELLS)
    items = [item for name, file in files.items() for item in _type_items(name, file)]
    return write_pool(items, out_dir, dealing or Dealing(), class_names=CELL_TYPES, stratified=False, **writing)


def _type_items(site: str, file: Path) -> Iterator[Item]:
    arrays = read_arrays(site, file, ("images", "labels", "ids"))
    for image, label, name in zip(arrays["images"], arrays["labels"].tolist(), arrays["ids"], strict=True):
        if label != UNKNOWN_TYPE:
            yield Item(file_name(str(name)), str(name), image, int(label), site=site)


OPTIONS = (option("target", Literal[tuple(WHITE_CELL_TARGETS)], "What is segmented.", "cell"),)
PREPARERS = (
    Preparer("white-cells", "white blood cells, three laboratories", prepare_white_cells, OPTIONS),
    Preparer("cell-types", "white blood cells by type, three laboratories", prepare_cell_types, dealing=Dealing()),
)
