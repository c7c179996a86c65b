"""Fundus photographs: optic disc and cup of four sites (RIF), and grades of retinopathy (Messidor-2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairflare.base.for_types import Unpack
from fairflare.data.datalist import PICTURES, DataError
from fairflare.data.phantoms.fundus import GRADE_COUNTS, GRADES
from fairflare.data.preparers.common import (
    Dealing,
    Item,
    Preparer,
    Writing,
    check_pairs,
    existing_folder,
    file_name,
    files_by_ending,
    listing,
    write_sites,
)
from fairflare.data.preparers.items import Relabelled
from fairflare.data.preparers.skin import FEDMRL
from fairflare.data.preparers.tables import Images, find_below, find_table, read_table, say_counts
from fairflare.data.preparers.writing import Form, write_pool

RIF_SITES: Mapping[str, tuple[int, int]] = {  # training and test images
    "Drishti-GS": (50, 51), "RIM-ONE-r3": (99, 60), "REFUGE-train": (320, 80), "REFUGE-val": (320, 80)
}  # fmt: skip
CUP_TOP, RIM_TOP = 50, 200  # grey values of the masks: cup, rim of the disc, background
RIF_FORM = Form(
    fractions=(0.8, 0.2, 0.0),  # of what is not for the test
    task={"in_channels": 3, "num_classes": 2, "labels": [[1, 2], [2]], "class_names": ["disc", "cup"]},
)
TABLES = ("messidor_data.csv", "messidor-2.csv")


def prepare_rif(source_dir: str | Path, out_dir: str | Path, **writing: Unpack[Writing]) -> dict[str, Path]:
    """Optic disc and cup of four sites, as DoFE gives them out: training and test images as they are there.

    Masks become 0 background, 1 rim of the disc, 2 cup; ``RIF_FORM.task`` has the settings of the task that they need,
    and so has the manifest. Of the training images a fifth validates.

    Args:
        source_dir: with ``Domain1`` to ``Domain4`` (or ``site1`` to ``site4``), in each ``train/ROIs/image``,
            ``train/ROIs/mask``, and the same in ``test``.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.
    """
    source = existing_folder(Path(source_dir))
    folders = {path.name.lower(): path for path in source.iterdir() if path.is_dir()}
    sites: dict[str, list[Item]] = {}
    found = []
    for number, site in enumerate(RIF_SITES, 1):
        folder = folders.get(f"domain{number}", folders.get(f"site{number}"))
        if folder is None:
            raise DataError(
                f"'{source}': expected the folders Domain1 to Domain4 (or site1 to site4), found {listing(folders)}"
            )
        parts = {part: _pairs(site, folder / part / "ROIs") for part in ("train", "test")}
        sites[site] = [
            Item(f"{part}_{file_name(name)}", name, image, _labels(mask), splits=("test",) if part == "test" else ())
            for part, pairs in parts.items()
            for name, (image, mask) in pairs.items()
        ]
        found += [len(pairs) for pairs in parts.values()]
    expected = [count for counts in RIF_SITES.values() for count in counts]
    say_counts("RIF by site and part", [i for i, n in enumerate(found) for _ in range(n)], expected)
    return write_sites(sites, out_dir, None, RIF_FORM, **writing)


def _pairs(site: str, folder: Path) -> dict[str, tuple[Path, Path]]:
    images, masks = (dict(files_by_ending(folder / kind, PICTURES)) for kind in ("image", "mask"))
    check_pairs(site, folder, images, masks, f"pictures in '{folder}/image', each with a mask of its name in 'mask'")
    return {name: (images[name], masks[name]) for name in sorted(images)}


def _labels(mask: Path) -> Relabelled:
    return Relabelled(mask, (CUP_TOP, RIM_TOP), (2, 1, 0))


def prepare_messidor2(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing = FEDMRL, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """Messidor-2 with the adjudicated grades: five grades of retinopathy, 1,744 gradable images.

    Default: FedMRL's four sites by shards. Images that are not gradable are left out. Where ``messidor-2.csv`` (columns
    left, right) is there, the two eyes of an examination stay together.

    Args:
        source_dir: with the images (anywhere below) and ``messidor_data.csv``: ``image_id, adjudicated_dr_grade``, or
            ``id_code, diagnosis``, and ``adjudicated_gradable``.
        out_dir, dealing, writing: see :func:`fairflare.data.preparers.pictures.prepare_images`.
    """
    source = Path(source_dir)
    table = find_table(source, TABLES[:1])
    rows = read_table(table)
    columns = [("image_id", "adjudicated_dr_grade"), ("id_code", "diagnosis")]
    name, grade = next((pair for pair in columns if set(pair) <= set(rows[0])), (None, None))
    if name is None or grade is None or "adjudicated_gradable" not in rows[0]:
        raise DataError(
            f"'{table}': expected the columns image_id and adjudicated_dr_grade (or id_code and diagnosis), and "
            f"adjudicated_gradable; found: {', '.join(rows[0])}"
        )
    usable = [row for row in rows if row["adjudicated_gradable"] in ("1", "1.0")]
    eyes = _examinations(find_below(source, TABLES[1]))
    items = []
    for row, path in zip(usable, Images(source, PICTURES).all([r[name] for r in usable], table), strict=True):
        text = row[grade].removesuffix(".0")
        if text not in ("0", "1", "2", "3", "4"):
            raise DataError(f"'{table}': the grade of '{row[name]}' is '{row[grade]}'; expected 0 to 4")
        exam = eyes.get(path.stem.lower())
        items.append(Item(file_name(path.stem), exam or path.stem, path, int(text), exam))
    say_counts("Messidor-2", [item.mask for item in items], GRADE_COUNTS)
    keys = f"Examinations are read from {TABLES[1]} (left;right), which may lie anywhere below the source"
    return write_pool(items, out_dir, dealing, class_names=GRADES, keys=keys, **writing)


def _examinations(file: Path | None) -> dict[str, str]:
    """The examination of each image, by the image's name without ending."""
    if file is None:
        return {}
    rows = read_table(file, ["left", "right"])
    return {Path(name).stem.lower(): f"exam-{i}" for i, row in enumerate(rows) for name in (row["left"], row["right"])}


PREPARERS = (
    Preparer("rif", "optic disc and cup, four sites", prepare_rif),
    Preparer("messidor2", "grades of diabetic retinopathy (Messidor-2)", prepare_messidor2, dealing=FEDMRL),
)
