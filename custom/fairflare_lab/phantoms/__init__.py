"""Draw synthetic multi-site images from a seed when they are needed; they contain no patient data."""

from fairflare_lab.phantoms.classes import PhantomSite, class_site
from fairflare_lab.phantoms.plan import PHANTOMS, ClassPhantom, PhantomPlan
from fairflare_lab.phantoms.prostate import prostate_site
from fairflare_lab.phantoms.volumes import volumes_site

__all__ = ["PHANTOMS", "ClassPhantom", "PhantomPlan", "PhantomSite", "class_site", "prostate_site", "volumes_site"]
