"""Draw synthetic multi-site images from a seed when they are needed; they contain no patient data."""

from fairflare_lab.phantoms.classes import PhantomSite, class_site
from fairflare_lab.phantoms.plan import PHANTOMS, ClassPhantom, PhantomPlan
from fairflare_lab.phantoms.prostate import PELVIS
from fairflare_lab.phantoms.volumes import ABDOMEN

__all__ = ["ABDOMEN", "PELVIS", "PHANTOMS", "ClassPhantom", "PhantomPlan", "PhantomSite", "class_site"]
