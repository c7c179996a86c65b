"""Synthetic multi-site images, made from a seed when they are needed. No patient in them."""

from fairflare_lab.phantoms.classes import PhantomSite, class_site
from fairflare_lab.phantoms.plan import PHANTOMS, ClassPhantom, PhantomPlan
from fairflare_lab.phantoms.prostate import prostate_site
from fairflare_lab.phantoms.volumes import volumes_site

__all__ = ["PHANTOMS", "ClassPhantom", "PhantomPlan", "PhantomSite", "class_site", "prostate_site", "volumes_site"]
