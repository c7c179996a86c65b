"""What a site says of its data before the first round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairflare.base.task import SPLIT_GLOBAL, SiteData

if TYPE_CHECKING:
    import torch

    from fairflare.base.cases.floor import Floor

GLOBAL_LIST = "global_list"


def facts_of(data: SiteData, device: torch.device, sends_classes: bool, floor: Floor) -> dict[str, Any]:
    """What a site says of its opened data; of real ones, an image of each list is read to see whether it can be.

    Args:
        data: of the site.
        device: that it trains on.
        sends_classes: False: which classes it has stays at home.
        floor: lists with too few cases are named, and their sizes stay at home.

    Raises:
        DataError: the image of a list cannot be read.
    """
    splits = ["training", "validation", *data.test_splits]
    if not data.synthetic:
        for split in splits:
            next(iter(data.batches(split, batch_size=1)), None)
    told = [split for split in splits if floor.holds(split)]
    facts: dict[str, Any] = {
        "splits": told,
        "images": [data.num_samples(split) for split in told],
        **({"suppressed": [split for split in splits if split not in told]} if len(told) < len(splits) else {}),
        **({"min_cases": floor.least} if floor.least > 1 else {}),
        "synthetic": bool(data.synthetic),
        "device": device.type,
    }
    if SPLIT_GLOBAL in told and (fingerprint := data.fingerprint(SPLIT_GLOBAL)) is not None:
        facts[GLOBAL_LIST] = fingerprint
    if data.class_names is not None:
        facts["class_names"] = list(data.class_names)
    if data.class_groups is not None:
        facts["class_groups"] = [f"{name} {number}" for name, own in data.class_groups.items() for number in own]
    # Where no names tell it, the last class is one that the site has.
    last = sends_classes and all(floor.holds(split) for split in splits) and _has_many(data.num_classes, floor)
    if data.num_classes is not None and (last or data.class_names is not None):
        facts["num_classes"] = data.num_classes
    return facts


def _has_many(num_classes: int | None, floor: Floor) -> bool:
    enough = floor.classes("training") if floor.least > 1 else None
    if enough is None or num_classes is None:
        return floor.least <= 1
    return num_classes <= len(enough) and bool(enough[num_classes - 1])
