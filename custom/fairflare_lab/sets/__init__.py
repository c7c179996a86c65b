"""Prepare public data sets in the form that sites read, and write synthetic images to disk.

===================  ================================================================================
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

``fairflare prepare`` finds these commands by the entry point ``sets`` of the group ``fairflare.preparers``. Another set
is added as an entry in :mod:`fairflare_lab.sets.published`.
"""

from fairflare_lab.sets.layouts import public_set
from fairflare_lab.sets.published import PREPARERS

__all__ = ["PREPARERS", "public_set"]
