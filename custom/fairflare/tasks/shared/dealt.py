"""Define how synthetic images with classes are dealt to sites, the same for the task and for the phantom's plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fairflare.base.settings import Flag, Fraction, NonNegativeInt, settings


@settings
class Dealt:
    """Define in what the sites of a synthetic federation differ: classes, quality, wrong labels, cameras, people.

    Args:
        camera_shift: how much the cameras of the synthetic sites differ, 0 (not at all) to 1.5.
        partition: ``"iid"``, ``"dirichlet"`` (with ``alpha``), ``"two_pool"`` (FedISM; with ``alpha`` and
            ``corrupted_sites``) or ``"shards"`` (FedMRL; with ``eta`` and ``shard_mode``); see
            :mod:`fairflare.data.partitions`.
        alpha: concentration of the Dirichlet and two-pool partitions; the smaller, the less alike the sites.
        eta: parameter of the shard partition; the larger, the more shards of its dominant class a site gets.
        shard_mode: which form of the shard partition; see :mod:`fairflare.data.partitions`.
        corrupted_sites: so many last sites have images of lower quality.
        corruption: ``"gaussian_noise"`` or ``"motion_blur"``.
        severity: severity of the corruption, from 1 (slight) to 5.
        label_noise_sites: so many last sites train on labels of which some are wrong; their labels for validation and
            test are right.
        label_noise: share of the training labels there that are wrong.
        label_noise_kind: ``"symmetric"``: each other class is as likely; ``"pair"``: always the next class (of the last
            class the first).
        attributes: split the phantom's common test set by its attribute (skin tone) as well, which runs may ask for as
            groups of ``tone``. Without, all images have the first one.
        attribute_prevalence: share of the images of the second attribute in training, validation and the sites' own
            tests whose class is made the last one, so that it is more frequent there; 0: no class depends on it.
        attribute_noise: share of the images of the second attribute, in all splits, that are drawn as the next class:
            nobody can tell these right, whatever the model.
    """

    camera_shift: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1.5)] = 1.0
    partition: Literal["iid", "dirichlet", "two_pool", "shards"] = "two_pool"
    alpha: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-6, le=1e9)] = 1.0
    eta: Fraction = 1.0
    shard_mode: Literal["literal", "complement"] = "literal"
    corrupted_sites: NonNegativeInt = 1
    corruption: Literal["gaussian_noise", "motion_blur"] = "gaussian_noise"
    severity: Annotated[int, Field(strict=True, ge=1, le=5)] = 3
    label_noise_sites: NonNegativeInt = 0
    label_noise: Fraction = 0.4
    label_noise_kind: Literal["symmetric", "pair"] = "symmetric"
    attributes: Flag = False
    attribute_prevalence: Fraction = 0.0
    attribute_noise: Fraction = 0.0
