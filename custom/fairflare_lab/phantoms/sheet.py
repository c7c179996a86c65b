"""Contact sheets: a picture of what a phantom draws, with a row for each class, or site of the prostate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairflare.base.checks import choice, whole
from fairflare_lab.phantoms.plan import MIN_SIZE, PHANTOMS, Images
from fairflare_lab.phantoms.prostate import SCANNERS, prostate_site


def class_sheet(
    path: str | Path, phantom: str, *, columns: int = 12, image_size: int = 96, seed: int = 0,
    attribute: str | None = None,
) -> Path:  # fmt: skip
    """Write a row of images for each class of a phantom for classification."""
    kind = PHANTOMS[choice("phantom", phantom, PHANTOMS)]
    whole("image_size", image_size, low=MIN_SIZE)
    rows = []
    for label in range(len(kind.class_names)):
        generators = np.random.default_rng([seed, label]).spawn(whole("columns", columns))
        rows.append([kind.draw(label, rng, image_size, attribute) for rng in generators])
    return _save(path, rows)


def prostate_sheet(
    path: str | Path, *, sites: Sequence[str] = tuple(SCANNERS), columns: int = 12, image_size: int = 128,
    seed: int = 0,
) -> Path:  # fmt: skip
    """Write a row of training slices for each site, with the gland outlined in the right half."""
    whole("columns", columns)
    rows = []
    for site in sites:
        images, masks = prostate_site(site, image_size=(image_size, image_size), seed=seed)["training"]
        tiles = np.repeat(images[:columns, 0, :, :, None], 3, axis=3)
        for tile, mask in zip(tiles[columns // 2 :], masks[columns // 2 :, 0], strict=False):
            inside = mask > 0
            around = [np.roll(inside, step, axis) for axis in (0, 1) for step in (-1, 1)]
            tile[inside & ~np.logical_and.reduce(around)] = (255, 220, 0)
        rows.append(list(tiles))
    return _save(path, rows)


def _save(path: str | Path, rows: Sequence[Sequence[Images]]) -> Path:
    from PIL import Image

    drawn = [np.concatenate([np.pad(tile, ((1, 1), (1, 1), (0, 0))) for tile in tiles], axis=1) for tiles in rows]
    width = max(row.shape[1] for row in drawn)
    sheet = np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in drawn])
    Image.fromarray(sheet).save(path)
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fairflare_lab.phantoms",
        description="Contact sheet of a phantom, a row for each class, or site of the prostate.",
    )
    parser.add_argument("phantom", choices=["prostate", *PHANTOMS])
    parser.add_argument("--out", required=True, help="picture to write, such as sheet.png")
    parser.add_argument("--columns", type=int, help="images of each row (default 12)")
    parser.add_argument("--size", type=int, help="height and width of an image (default 96, prostate 128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attribute", help="such as dark; default: the first one (not of the prostate)")
    parser.add_argument(
        "--sites", nargs="+", metavar="SITE",
        help="of the prostate: names (default: the six sites)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    kind = PHANTOMS.get(options.phantom)
    if kind is None and options.attribute is not None:
        parser.error(f"{options.phantom} has no --attribute")
    if kind is not None and options.sites is not None:
        parser.error(f"{options.phantom} has no --sites")
    given = {"seed": options.seed}
    given |= {} if options.columns is None else {"columns": options.columns}
    given |= {} if options.size is None else {"image_size": options.size}
    try:
        if kind is None:
            rows = options.sites or list(SCANNERS)
            path, title = prostate_sheet(options.out, sites=rows, **given), "T2-like prostate slices"
        else:
            rows, title = list(kind.class_names), kind.title
            path = class_sheet(options.out, kind.name, attribute=options.attribute, **given)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{path}: synthetic {title}, no patient data; rows: {', '.join(rows)}")
    return 0
