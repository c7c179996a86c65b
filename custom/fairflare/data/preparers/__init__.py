"""Bring a user's own images into the form that a site reads: images, masks or classes, and a datalist.

===================  ================================================================================
``images``           any images with classes: folders, or a CSV file
``masks``            any images with masks: folders, or a CSV file
``folders``          images with masks in two folders for each site, named one by one
``volumes``          NIfTI volumes and DICOM series with masks or classes, whole or slice by slice
===================  ================================================================================

For example::

    python -m fairflare.data.preparers images --source FOLDER --out DATA

writes ``DATA/<site>/images/*.png``, ``DATA/<site>/masks/*.png`` (unless labels are classes) and
``DATA/<site>/datalist.json`` for every site, a table of counts, a manifest, and ``DATA/fairflare.json``, which names
the folder of each site's data: copied into the ``local`` folder of a simulator workspace, this file makes the job run
on the data. Images are split 6:2:2 into training, validation and test by patient, unless the data set defines the
split. Either everything is written or nothing. Other packages add preparers, such as those of public data sets, by the
entry point group ``fairflare.preparers``.
"""

from importlib.metadata import entry_points

from fairflare.base.plugins import load_object
from fairflare.data.preparers import pictures, volumes
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.options import Preparer
from fairflare.data.preparers.pictures import prepare_folders, prepare_images, prepare_masks
from fairflare.data.preparers.volumes import prepare_volumes
from fairflare.data.preparers.writing import write_pool, write_sites

__all__ = [
    "Dealing",
    "Item",
    "Preparer",
    "prepare_folders",
    "prepare_images",
    "prepare_masks",
    "prepare_volumes",
    "preparers",
    "write_pool",
    "write_sites",
]  # fmt: skip


def preparers() -> dict[str, Preparer]:
    """Return the preparers by name: those for a user's own files, and those that installed packages add."""
    by_name = {preparer.name: preparer for module in (pictures, volumes) for preparer in module.PREPARERS}
    for point in entry_points(group="fairflare.preparers"):
        by_name |= load_object(point)
    return by_name
