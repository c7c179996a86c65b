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

Another data set is an entry in :mod:`fairflare.data.preparers.public`.
"""

from collections.abc import Mapping

from fairflare.data.preparers import pictures, volumes
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.engine import Preparer, PublicSet
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.pictures import prepare_folders, prepare_images, prepare_masks
from fairflare.data.preparers.public import PUBLIC
from fairflare.data.preparers.volumes import prepare_volumes
from fairflare.data.preparers.writing import write_pool, write_sites

__all__ = [
    "PREPARERS", "PUBLIC", "Dealing", "Item", "Preparer", "PublicSet", "prepare_folders", "prepare_images",
    "prepare_masks", "prepare_volumes", "write_pool", "write_sites",
]  # fmt: skip

OWN = {preparer.name: preparer for module in (pictures, volumes) for preparer in module.PREPARERS}
PREPARERS: Mapping[str, Preparer | PublicSet] = {**OWN, **PUBLIC}
