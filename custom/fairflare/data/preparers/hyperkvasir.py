"""HyperKvasir's labelled images: 23 classes of gastrointestinal endoscopy."""

from __future__ import annotations

from pathlib import Path

from fairflare.base.for_types import Unpack
from fairflare.data.datalist import PICTURES, DataError
from fairflare.data.phantoms.endoscopy import HYPERKVASIR, HYPERKVASIR_COUNTS
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, file_name, listing, write_pool
from fairflare.data.preparers.tables import Images, find_folder, say_counts

FED_MAS = Dealing(partition="dirichlet", sites=8, alpha=0.5, folds=5, global_test=True, fractions=(0.72, 0.08, 0.2))
TRACTS = ("lower-gi-tract", "upper-gi-tract")


def prepare_hyperkvasir(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing = FED_MAS, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """The 10,662 labelled images of 23 classes. Default: Fed-MAS's eight sites, Dir(0.5), and five folds of
    all images; every site has a fold's whole test as ``test_global``, and its own part of it as ``test``.

    The data set does not say which images are of one patient, so images of one may be in several splits.

    Args:
        source_dir: with ``labeled-images/`` (or what is in it): ``lower-gi-tract/`` and ``upper-gi-tract/``, in each
            ``<kind of finding>/<class>/*.jpg``.
        out_dir, dealing, writing: see :func:`fairflare.data.preparers.pictures.prepare_images`.
    """
    source = Path(source_dir)
    root = source if (source / TRACTS[0]).is_dir() else find_folder(source, ["labeled-images"])
    missing = [tract for tract in TRACTS if not (root / tract).is_dir()]
    if missing:
        found = listing(path.name for path in root.iterdir())
        raise DataError(
            f"'{root}': expected the folders {', '.join(TRACTS)}; missing: {', '.join(missing)}; found {found}"
        )
    paths = [path for tract in TRACTS for path in Images(root / tract, PICTURES).paths]
    classes = {path.parent.name for path in paths}
    strange, lacking = sorted(classes - set(HYPERKVASIR)), sorted(set(HYPERKVASIR) - classes)
    if strange or lacking:
        raise DataError(
            f"'{root}': expected images in a folder for each of the 23 classes; missing: {listing(lacking)}; not "
            f"known: {listing(strange)}"
        )
    items = [
        Item(file_name(path.stem), path.stem, path, HYPERKVASIR.index(path.parent.name))
        for path in sorted(paths, key=lambda path: (path.parent.name, path.name))
    ]
    say_counts("HyperKvasir", [item.mask for item in items], HYPERKVASIR_COUNTS)
    keys = "The data set does not say whose an image is"
    return write_pool(items, out_dir, dealing, class_names=HYPERKVASIR, keys=keys, **writing)


PREPARERS = (Preparer("hyperkvasir", "gastrointestinal endoscopy, 23 classes", prepare_hyperkvasir, dealing=FED_MAS),)
