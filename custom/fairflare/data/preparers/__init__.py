"""Bring public multi-site data sets into the form that a site reads: images, masks or classes, and a datalist.

===================  ================================================================================
``images``           any images with classes: folders, or a CSV file
``masks``            any images with masks: folders, or a CSV file
``folders``          images with masks in two folders for each site, named one by one
``volumes``          NIfTI volumes and DICOM series with masks or classes, whole or slice by slice
``prostate-mri``     the six-site T2 prostate set (BIDMC, BMC, HK, I2CVB, RUNMC, UCL), NIfTI volumes
``rif``              optic disc and cup of four sites
``messidor2``        grades of diabetic retinopathy
``isic2018``         skin lesions, seven classes
``isic2019``         skin lesions, eight classes
``isic2019-flamby``  the same by FLamby's six centres
``isic2019-tones``   the same by skin tone
``hyperkvasir``      gastrointestinal endoscopy, 23 classes
``rsna``             intracranial haemorrhage on CT, five kinds
``nuclei``           five acquisition groups of the 2018 Data Science Bowl, from ``nuclei_*.npz``
``white-cells``      three laboratories' white blood cells, from ``wbc_*.npz``
``cell-types``       the same cells by type (five classes)
``red-cells``        twelve types of red blood cells, long-tailed, from ``rbc12_chula.npz``
===================  ================================================================================

For example::

    python -m fairflare.data.preparers nuclei --source DOWNLOADS --out DATA

writes ``DATA/<site>/images/*.png``, ``DATA/<site>/masks/*.png`` (not where a class is the label) and
``DATA/<site>/datalist.json`` for every site, and ``DATA/fairflare.json``, which says where each site's data are:
copied into the ``local`` folder of a simulator workspace, it makes the job run on them. Beside it: counts, a manifest.
Images are split 6:2:2 into training, validation and test by patient (or by source image, where an image was cut into
tiles), where the data set does not say otherwise. Either everything is written or nothing.

Another data set is another module here with a ``PREPARERS``.
"""

from fairflare.data.preparers import (
    eyes,
    hyperkvasir,
    nuclei,
    pictures,
    prostate_mri,
    red_cells,
    rsna,
    skin,
    volumes,
    white_cells,
)  # fmt: skip
from fairflare.data.preparers.common import Dealing, Item, Preparer, split_groups, write_pool, write_sites
from fairflare.data.preparers.eyes import prepare_messidor2, prepare_rif
from fairflare.data.preparers.hyperkvasir import prepare_hyperkvasir
from fairflare.data.preparers.nuclei import NUCLEI, prepare_nuclei
from fairflare.data.preparers.pictures import prepare_folders, prepare_images, prepare_masks
from fairflare.data.preparers.prostate_mri import PROSTATE_SITES, prepare_prostate_mri
from fairflare.data.preparers.red_cells import prepare_red_cells
from fairflare.data.preparers.rsna import prepare_rsna
from fairflare.data.preparers.skin import prepare_flamby, prepare_isic2018, prepare_isic2019, prepare_tones
from fairflare.data.preparers.volumes import prepare_volumes
from fairflare.data.preparers.white_cells import (
    CELL_TYPES,
    WHITE_CELL_TARGETS,
    WHITE_CELLS,
    prepare_cell_types,
    prepare_white_cells,
)

__all__ = [
    "CELL_TYPES", "NUCLEI", "PREPARERS", "PROSTATE_SITES", "WHITE_CELLS", "WHITE_CELL_TARGETS", "Dealing", "Item",
    "Preparer", "prepare_cell_types", "prepare_flamby", "prepare_folders", "prepare_hyperkvasir", "prepare_images",
    "prepare_isic2018", "prepare_isic2019", "prepare_masks", "prepare_messidor2", "prepare_nuclei",
    "prepare_prostate_mri", "prepare_red_cells", "prepare_rif", "prepare_rsna", "prepare_tones", "prepare_volumes",
    "prepare_white_cells",
    "split_groups", "write_pool", "write_sites",
]  # fmt: skip

MODULES = (pictures, volumes, prostate_mri, eyes, skin, hyperkvasir, rsna, nuclei, white_cells, red_cells)
PREPARERS: dict[str, Preparer] = {preparer.name: preparer for module in MODULES for preparer in module.PREPARERS}
