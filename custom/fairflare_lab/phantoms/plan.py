"""Define the phantoms for classification, and the plan that determines a synthetic federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairflare.base.checks import choice, number, refuse
from fairflare.base.settings import NonNegative, NonNegativeInt, PositiveInt, settings
from fairflare.tasks.shared.dealt import Dealt
from fairflare_lab.phantoms.scene import TONES, draw_spot
from fairflare_lab.sets.published import GRADES, HYPERKVASIR, ISIC2018, ISIC2019

Images = npt.NDArray[np.uint8]

MIN_SIZE = 32  # least height and width in pixels; in smaller images the patterns vanish
OWN_CLASS = 4  # least number of images of a class in a site's own test set, for a meaningful recall


@dataclass(frozen=True)
class ClassPhantom:
    """Describe the classes of a published data set, of which one scene draws synthetic images."""

    name: str
    title: str
    classes: Mapping[str, int]  # number of images in the real data set by class; only the proportions matter
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # classes by group of frequency; empty for none
    attributes: tuple[str, ...] = ()  # attributes of the person, such as skin tones; empty for none
    called: str = "tone"  # name in a datalist of the attribute whose values are ``attributes``

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes in the order of their numbers."""
        return tuple(self.classes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of images of each class in the real data set that the phantom imitates."""
        return tuple(self.classes.values())

    def draw(self, label: int, rng: np.random.Generator, size: int, attribute: str | None = None) -> Images:
        """Draw one image.

        Args:
            label: number of the class.
            rng: random generator; the image is a function of its state.
            size: height and width in pixels.
            attribute: one of ``attributes``; None for the first one, if the phantom has any.

        Returns:
            (size, size, 3) uint8.

        Raises:
            ValueError: the phantom does not have this class or attribute.
        """
        number("label", label, low=0, high=len(self.classes) - 1, whole=True)
        if attribute is not None:
            self.check_attributes()
            choice("attribute", attribute, self.attributes)
        return draw_spot(size, rng, label, attribute)

    def check_attributes(self) -> None:
        """Raise ValueError if images of this phantom have no attributes."""
        having = [name for name, phantom in PHANTOMS.items() if phantom.attributes]
        refuse({f"phantom {self.name!r} has no attributes; these have: {', '.join(having)}": not self.attributes})


#: Groups of classes by the number of images in a training fold (80 %): head > 700, medium 70 to 700, tail < 70.
LONG_TAIL = {"head": tuple(range(7)), "medium": tuple(range(7, 16)), "tail": tuple(range(16, 23))}
PHANTOMS: Mapping[str, ClassPhantom] = {
    phantom.name: phantom
    for phantom in (
        ClassPhantom("dermoscopy", "spots, classes of ISIC 2019", ISIC2019, attributes=TONES),
        ClassPhantom("dermoscopy7", "spots, classes of ISIC 2018", ISIC2018, attributes=TONES),
        ClassPhantom("fundus", "spots, classes of Messidor-2", GRADES),
        ClassPhantom("endoscopy", "spots, classes of HyperKvasir", HYPERKVASIR, LONG_TAIL),
    )
}


@settings
class PhantomPlan(Dealt):
    """Store all settings that determine a synthetic federation. The defaults are a small FedISM setting.

    Plans of equal settings are equal and share cached images. A plan cannot be changed; ``dataclasses.replace`` makes
    another plan.

    Args:
        phantom: a name in :data:`PHANTOMS`.
        seed: random seed of images, class counts and partition.
        image_size: height and width.
        num_sites: sites of the federation.
        num_samples: images for training and validation, all sites together; the classes in the proportions of
            the real data set.
        num_test: images of the common test set.
        num_own_test: images of each site's own test set, in its own mix of classes.
        validation_fraction: share of a site's images that it keeps for validation.
        min_site: images that every site must have (Dirichlet partitions draw again until it is so).
        min_class: images of every class in ``num_samples``; rarer classes are raised to it.
        min_class_test: the same for the common test set.
        attribute_shares: share of each attribute among the training and validation images; empty: the first
            attribute has 3/4, the others the rest. The test set has them in equal parts.
    """

    phantom: str = "dermoscopy"
    seed: NonNegativeInt = 0
    image_size: Annotated[int, Field(strict=True, ge=MIN_SIZE)] = 48
    num_sites: PositiveInt = 5
    num_samples: PositiveInt = 2000
    num_test: PositiveInt = 400
    num_own_test: PositiveInt = 150
    validation_fraction: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=0.9)] = 0.1
    min_site: PositiveInt = 10
    min_class: PositiveInt = 4
    min_class_test: PositiveInt = 8
    attribute_shares: tuple[NonNegative, ...] = ()

    def __post_init__(self) -> None:
        choice("phantom", self.phantom, PHANTOMS)
        sites, classes = self.num_sites, len(self.kind.classes)
        for name in ("corrupted_sites", "label_noise_sites"):
            number(f"{name} of num_sites={sites}", getattr(self, name), low=0, high=sites, whole=True)
        least_images = {
            "num_samples": max(classes * self.min_class, sites * self.min_site),
            "num_test": classes * self.min_class_test,
            "num_own_test": classes * OWN_CLASS,
        }
        refuse({
            f"{name} must be at least {least} for {classes} classes and {sites} sites (see min_class, min_class_test, "
            f"min_site), got {getattr(self, name)}": getattr(self, name) < least
            for name, least in least_images.items()
        })  # fmt: skip
        if self.attributes:
            self.kind.check_attributes()
        known, shares = self.kind.attributes, self.attribute_shares
        refuse({
            **{
                f"{name} is set, but attributes is False": getattr(self, name) and not self.attributes
                for name in ("attribute_prevalence", "attribute_noise", "attribute_shares")
            },
            f"attribute_shares must be {len(known)} shares of sum 1 ({known}), got {shares}":
                shares and (len(shares) != len(known) or abs(sum(shares) - 1) > 1e-6),
        })  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PhantomPlan) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(astuple(self))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} of a plan cannot be set; dataclasses.replace(plan, {name}=...) makes another plan"
        )

    @property
    def kind(self) -> ClassPhantom:
        """Return the description of the phantom whose images the plan draws."""
        return PHANTOMS[self.phantom]

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits that every site has."""
        worse = ("test_clean", "test_corrupted") if self.corrupted_sites else ()
        of_people = (f"test_{attribute}" for attribute in (self.kind.attributes if self.attributes else ()))
        return ("training", "validation", "test", "test_common", *worse, *of_people)

    def is_corrupted(self, index: int) -> bool:
        """Return whether site number ``index`` (from 0) has corrupted images."""
        return index >= self.num_sites - self.corrupted_sites

    def has_label_noise(self, index: int) -> bool:
        """Return whether site number ``index`` (from 0) trains on wrong labels."""
        return index >= self.num_sites - self.label_noise_sites
