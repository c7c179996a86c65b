"""Synthetic multi-site images, made from a seed when they are needed. No patient in them.

``python -m fairflare.data.phantoms dermoscopy --out sheet.png`` draws a contact sheet.
"""

from fairflare.data.phantoms.classes import PhantomSite, class_site
from fairflare.data.phantoms.plan import PHANTOMS, ClassPhantom, PhantomPlan
from fairflare.data.phantoms.prostate import prostate_site
from fairflare.data.phantoms.volumes import volumes_site

__all__ = ["PHANTOMS", "ClassPhantom", "PhantomPlan", "PhantomSite", "class_site", "prostate_site", "volumes_site"]
