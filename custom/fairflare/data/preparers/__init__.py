"""Bring public multi-site data sets into the form that a site reads: images, masks or classes, and a datalist.

================  ===================================================================================
``images``        any images with classes: folders, or a CSV file
``masks``         any images with masks: folders, or a CSV file
``nuclei``        five acquisition groups of the 2018 Data Science Bowl, from ``nuclei_*.npz``
``white-cells``   three laboratories' white blood cells, from ``wbc_*.npz``
``cell-types``    the same cells by type (five classes)
``red-cells``     twelve types of red blood cells, long-tailed, from ``rbc12_chula.npz``
``prostate-mri``  the six-site T2 prostate set (BIDMC, BMC, HK, I2CVB, RUNMC, UCL), NIfTI volumes
``folders``       any pairs of image and mask folders
================  ===================================================================================

For example::

    python -m fairflare.data.preparers nuclei --source DOWNLOADS --out DATA

writes ``DATA/<site>/images/*.png``, ``DATA/<site>/masks/*.png`` (not where a class is the label) and
``DATA/<site>/datalist.json`` for every site, and ``DATA/fairflare.json``, which says where each site's data are:
copied into the ``local`` folder of a simulator workspace, it makes the job run on them. Images are split 6:2:2 into
training, validation and test by patient (or by source image, where an image was cut into tiles). Either everything is
written or nothing.

Another data set is another module here with a ``PREPARERS``.
"""

from fairflare.data.preparers import folders, images, masks, nuclei, prostate_mri, red_cells, white_cells
from fairflare.data.preparers.common import Dealing, Item, Preparer, split_groups, write_pool, write_sites
from fairflare.data.preparers.folders import prepare_folders
from fairflare.data.preparers.images import prepare_images
from fairflare.data.preparers.masks import prepare_masks
from fairflare.data.preparers.nuclei import NUCLEI, prepare_nuclei
from fairflare.data.preparers.prostate_mri import PROSTATE_SITES, prepare_prostate_mri
from fairflare.data.preparers.red_cells import prepare_red_cells
from fairflare.data.preparers.white_cells import (
    CELL_TYPES,
    WHITE_CELL_TARGETS,
    WHITE_CELLS,
    prepare_cell_types,
    prepare_white_cells,
)

__all__ = [
    "CELL_TYPES", "NUCLEI", "PREPARERS", "PROSTATE_SITES", "WHITE_CELLS", "WHITE_CELL_TARGETS", "Dealing", "Item",
    "Preparer", "prepare_cell_types", "prepare_folders", "prepare_images", "prepare_masks", "prepare_nuclei",
    "prepare_prostate_mri", "prepare_red_cells", "prepare_white_cells", "split_groups", "write_pool", "write_sites",
]  # fmt: skip

PREPARERS: dict[str, Preparer] = {
    preparer.name: preparer
    for module in (images, masks, nuclei, white_cells, red_cells, prostate_mri, folders)
    for preparer in module.PREPARERS
}
