"""Draw synthetic multi-site prostate MRI: axial T2-like slices with the gland as mask, without patient data.

Every "patient" has their own anatomy (gland with peripheral and transition zone, bladder, rectum, seminal vesicles,
muscles, pelvic bones, fat) and four slices between base and apex; every site has its own scanner (field of view,
contrast of the tissues and contrast curve, bias field, endorectal coil, noise, blur) and its own population (gland
size, share of enlarged transition zones). Patients are never shared between splits.

The six sites ``site-1`` to ``site-6`` are fixed. Any other name gets a scanner that is a variation of one of
these: the number at the end of the name chooses which one, the name itself the variation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number, whole
from fairflare.base.stopping import check_stop

Array = npt.NDArray[np.float32]

SLICES = 4  # number of slices of each patient
CHUNK_PIXELS = 2**17  # number of pixels rendered at a time, to bound memory
SPLITS = ("training", "validation", "test")
ATTRIBUTE, ZONES = "zone", ("small", "enlarged")
SIDE = 4  # height and width in pixels for draws of the anatomy alone, which does not depend on the size

TISSUES: Mapping[str, float] = {
    "air": 0.0,
    "fat": 0.78,
    "muscle": 0.17,
    "marrow": 0.50,
    "cortex": 0.05,
    "bladder": 1.05,
    "peripheral": 0.80,
    "transition": 0.42,
    "stroma": 0.20,
    "capsule": 0.16,
    "vesicle": 0.95,
    "vein": 0.92,
    "wall": 0.33,
    "stool": 0.45,
}

#: Muscles and bones that lie on both sides, from back to front: whether the structure is a bone; centre, half axes in
#: mm and rotation of the ellipse on the right side.
BESIDE = (
    (False, 62, 86, 62, 30, 0.45),  # gluteus maximus
    (False, 19, -92, 24, 8, 0.1),  # rectus abdominis
    (False, 72, -72, 30, 16, 0.6),  # iliopsoas, pectineus
    (True, 83, 6, 21, 37, -0.12),  # ischium and acetabulum
    (True, 124, -16, 25, 25, 0.0),  # femoral head
    (True, 20, -60, 21, 10.5, 0.5),  # pubic ramus
    (False, 55.5, 3, 9.5, 38, -0.16),  # obturator internus
    (False, 41, 44, 4, 25, 0.42),  # levator ani
)


@dataclass(frozen=True)
class Scanner:
    """Describe a site's scanner and population. Lengths are in mm, intensities relative to the brightest tissue."""

    patients: tuple[int, int, int]  # number of patients for training, validation and test
    field_of_view: float
    tissues: Mapping[str, float] = field(default_factory=dict)
    gamma: float = 1.0
    bias: float = 0.15
    coil: float = 0.0  # brightness beside an endorectal coil; 0: the scanner uses no such coil
    noise: float = 0.03
    blur: float = 0.5  # full width of the point spread function in mm
    gland: float = 1.0  # factor on the size of the gland
    enlarged: float = 0.3  # share of patients with a large transition zone


SCANNERS: Mapping[str, Scanner] = {
    # a clean 3 T scanner with a phased-array coil
    "site-1": Scanner((12, 3, 6), 140.0, gamma=0.9, bias=0.12, noise=0.025, blur=0.8),
    # 1.5 T with an endorectal coil: bright spot behind the gland, small field of view
    "site-2": Scanner((18, 3, 6), 115.0, gamma=1.0, bias=0.25, coil=3.0, noise=0.03, blur=1.0, gland=0.95),
    # wide field of view, small glands, an old coil
    "site-3": Scanner(
        (7, 3, 6), 190.0, gamma=1.15, bias=0.35, noise=0.05, blur=2.0, gland=0.92, enlarged=0.15,
    ),
    # fat suppression: fat and marrow dark
    "site-4": Scanner(
        (11, 3, 6), 155.0, {"fat": 0.24, "marrow": 0.17, "muscle": 0.28}, gamma=0.85, bias=0.25, noise=0.055,
        blur=1.4, gland=1.05, enlarged=0.5,
    ),
    # strong contrast, large glands
    "site-5": Scanner(
        (16, 3, 6), 145.0, gamma=1.35, bias=0.18, noise=0.02, blur=0.6, gland=1.15, enlarged=0.6,
    ),
    # another sequence: zones hardly differ, the gland is a grey one on bright fat; noisy, few patients
    "site-6": Scanner(
        (7, 3, 6), 165.0,
        {"fat": 0.85, "peripheral": 0.50, "transition": 0.44, "stroma": 0.33, "capsule": 0.22, "muscle": 0.30,
         "vesicle": 0.6, "vein": 0.6},
        gamma=0.8, bias=0.4, noise=0.05, blur=1.6, gland=0.95, enlarged=0.4,
    ),
}  # fmt: skip


def scanner(site: str) -> Scanner:
    """Return the scanner of ``site``; a name other than the fixed six always gets the same variation of one of them."""
    if site in SCANNERS:
        return SCANNERS[site]
    draw = np.random.default_rng(entropy("scanner", site))
    ending = re.search(r"(\d+)$", site)
    index = int(ending.group(1)) - 1 if ending else int(draw.integers(len(SCANNERS)))
    base = list(SCANNERS.values())[index % len(SCANNERS)]
    change = draw.uniform(-1.0, 1.0, 7)
    return replace(
        base,
        patients=(max(2, base.patients[0] + round(3 * change[0])), *base.patients[1:]),
        field_of_view=base.field_of_view * (1 + 0.1 * float(change[1])),
        gamma=base.gamma * (1 + 0.12 * float(change[2])),
        bias=base.bias * (1 + 0.4 * float(change[3])),
        noise=base.noise * (1 + 0.3 * float(change[4])),
        blur=base.blur * (1 + 0.3 * float(change[5])),
        gland=base.gland * (1 + 0.08 * float(change[6])),
    )


def prostate_site(
    site: str, *, image_size: Sequence[int] = (64, 64), seed: int = 0, cases: float = 1.0
) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Return all images and masks of one site.

    Args:
        site: name of the site; any name is possible.
        image_size: height and width, at least 32. A patient has the same anatomy at every size.
        seed: random seed of the patients; the scanners do not depend on the seed.
        cases: factor on the number of patients of each split (at least one remains).

    Returns:
        ``{split: (images, masks)}``, both (n, 1, height, width) uint8, images 0 to 255, masks 0 and 1; the
        slices of a patient lie next to each other. Every mask has some gland.
    """
    height, width = (whole("each of image_size", edge, low=32) for edge in image_size)
    whole("phantom_seed", seed, low=0)
    number("phantom_cases", cases, above=0, high=1000)
    machine = scanner(site)
    drawn = patients_of(site, seed, cases)
    return {split: _draw_split(machine, generators, height, width) for split, generators in drawn.items()}


def patients_of(site: str, seed: int, cases: float) -> dict[str, list[np.random.Generator]]:
    """Return a random generator for each patient of each split, so that patients do not depend on each other."""
    return {
        split: np.random.default_rng([seed, *entropy(split, site)]).spawn(max(1, round(patients * cases)))
        for split, patients in zip(SPLITS, scanner(site).patients, strict=True)
    }


def entropy(purpose: str, site: str) -> list[int]:
    """Return numbers that seed a random generator for a purpose and a site, from a hash of both."""
    digest = hashlib.sha256(f"{purpose}/{site}".encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u4").tolist()


def _draw_split(
    machine: Scanner, generators: Sequence[np.random.Generator], height: int, width: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    each = max(1, CHUNK_PIXELS // (height * width * SLICES))  # number of patients rendered together
    groups = [generators[first : first + each] for first in range(0, len(generators), each)]
    images, masks = zip(*(_render(machine, group, height, width) for group in groups), strict=True)
    return np.concatenate(images)[:, None], np.concatenate(masks)[:, None]


class _Draws:
    """Draw random numbers for a block of slices, by patient or by slice, each patient from separate generators.

    Pixel noise has separate generators, so that the anatomy does not depend on the image size.
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self.generators, self.pixels = zip(*(g.spawn(2) for g in generators), strict=True)

    def patient(self, low: float, high: float) -> Array:
        values = np.array([g.uniform(low, high) for g in self.generators], np.float32)
        return np.repeat(values, SLICES)[:, None, None]

    def slice(self, low: float, high: float) -> Array:
        values = [g.uniform(low, high, SLICES) for g in self.generators]
        return np.concatenate(values).astype(np.float32)[:, None, None]

    def noise(self, height: int, width: int) -> Array:
        return np.concatenate([g.standard_normal((SLICES, height, width), np.float32) for g in self.pixels])


def _render(
    machine: Scanner, generators: Sequence[np.random.Generator], height: int, width: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Draw the anatomy of patients, then apply the scanner; return images and masks."""
    check_stop()
    pelvis = Pelvis(machine, generators, height, width)
    for draw in (pelvis.body, pelvis.veins, pelvis.rectum, pelvis.bladder, pelvis.gland, pelvis.transition_zone):
        draw()
    return _acquire(pelvis), pelvis.mask


class Pelvis:
    """Draw the anatomy of a block of slices; ``image`` is (slices, height, width), 1 is the brightest tissue.

    Lengths are in mm. ``x, y`` are coordinates from the middle of the prostate. ``ellipse`` uses these coordinates,
    ``ellipse_of_body`` scales them to the size of the patient.
    """

    def __init__(self, machine: Scanner, generators: Sequence[np.random.Generator], height: int, width: int) -> None:
        draw = self.draw = _Draws(generators)
        self.machine = machine
        self.tissue = {**TISSUES, **machine.tissues}
        self.pixel = machine.field_of_view / min(height, width)
        self.edge = max(self.pixel, 0.8)
        x0 = ((np.arange(width, dtype=np.float32) - (width - 1) / 2) * self.pixel)[None, None, :]
        y0 = ((np.arange(height, dtype=np.float32) - (height - 1) / 2) * self.pixel)[None, :, None]
        self.grid = x0, y0
        # Shift the patient's position, and deform the whole pelvis smoothly.
        x = x0 + draw.patient(-7, 7) + draw.slice(-1.5, 1.5)
        y = y0 + draw.patient(-8, 6) + draw.slice(-1.5, 1.5)
        x, y = np.broadcast_arrays(x, y)
        self.x, self.y = _warp(x, y, draw)
        habitus = draw.patient(0.9, 1.12)  # size of the patient around the prostate
        self.ellipse = partial(_ellipse, self.x, self.y)
        self.ellipse_of_body = partial(_ellipse, self.x / habitus, self.y / habitus)
        self._shape_gland(len(generators))
        self.image = np.full(x.shape, self.tissue["air"], np.float32)
        self.texture = _smooth(draw.noise(height, width), 2.2 / self.pixel)
        self.coarse = _smooth(draw.noise(height, width), 7.0 / self.pixel)

    def _shape_gland(self, patients: int) -> None:
        """Set the size of the gland in each slice; ``level`` is 1 at the base (under the bladder), -1 at the apex."""
        draw = self.draw
        levels = np.tile(np.linspace(0.8, -0.7, SLICES, dtype=np.float32), patients)
        self.level = levels[:, None, None] + draw.slice(-0.12, 0.12)
        self.apex = np.clip(-self.level, 0, 1)
        self.enlarged = draw.patient(0, 1) < self.machine.enlarged
        size = self.machine.gland * draw.patient(0.88, 1.14) * _choose(self.enlarged, 1.16, 0.98)
        profile = np.sqrt(np.clip(1 - 0.62 * self.level**2 - 0.18 * self.apex, 0.12, 1))
        self.half_width = 24.0 * size * profile * draw.patient(0.93, 1.07)
        self.half_height = 16.5 * size * profile * draw.patient(0.9, 1.12) * _choose(self.enlarged, 1.12, 1.0)

    def paint(self, distance: Array, value: Any, strength: Any = 1.0) -> None:
        """Blend an intensity over the pixels inside a shape, where ``distance`` to its edge is negative."""
        cover = np.clip(0.5 - distance / self.edge, 0, 1)
        self.image = self.image + cover * strength * (value - self.image)

    def body(self) -> None:
        """Paint subcutaneous fat, then the pelvis: fat with darker strands, muscles and bones."""
        tissue, texture, at = self.tissue, self.texture, self.ellipse_of_body
        self.paint(at(0, 6, 182, 118), tissue["fat"])
        strands = np.clip(np.abs(self.coarse) - 0.7, 0, 1) * 0.2
        self.paint(at(0, 4, 160, 99), tissue["fat"] * (0.85 + 0.05 * texture - strands))
        muscle = tissue["muscle"] * (1 + 0.22 * texture)
        for side in (-1, 1):
            for is_bone, cx, cy, a, b, turn in BESIDE:
                outer = at(side * cx, cy, a, b, side * turn)
                self.paint(outer, tissue["cortex"] if is_bone else muscle)
                if is_bone:
                    self.paint(outer + 2.6, tissue["marrow"] * (1 + 0.13 * texture))
        sacrum = at(0, 96, 20, 9)
        self.paint(sacrum, tissue["cortex"])
        self.paint(sacrum + 2.5, tissue["marrow"])

    def veins(self) -> None:
        """Paint veins before and beside the prostate."""
        draw = self.draw
        for _ in range(7):
            angle = draw.patient(-2.6, 2.6) - np.pi / 2
            reach = draw.patient(1.12, 1.4)
            cx, cy = self.half_width * reach * np.cos(angle), self.half_height * reach * np.sin(angle)
            spot = draw.patient(1.5, 3.4)
            self.paint(self.ellipse(cx + draw.slice(-2, 2), cy, spot * 1.3, spot), self.tissue["vein"], 0.85)

    def rectum(self) -> None:
        """Paint the rectum's wall, then a lumen with gas or stool, or the balloon of an endorectal coil."""
        draw, tissue = self.draw, self.tissue
        coil = self.machine.coil > 0
        radius = draw.patient(19, 23) if coil else draw.patient(10.5, 18)
        depth = self.half_height * 0.93 + radius * (0.94 if coil else 1.02) + draw.slice(0.5, 3)
        shift = draw.patient(-5, 5)
        self.behind = shift, depth, radius  # position and radius of the rectum, which may contain a coil
        lumen = self.ellipse(shift, depth, radius * draw.patient(0.98, 1.25), radius, draw.patient(-0.3, 0.3))
        self.paint(lumen, tissue["wall"])
        if coil:
            self.paint(lumen + 2.0, 0.03)
        else:
            gas = draw.patient(0, 1) < 0.45
            self.paint(lumen + 3.6, np.where(gas, np.float32(0.02), tissue["stool"] * (1 + 0.5 * self.coarse)))

    def bladder(self) -> None:
        """Paint bladder and seminal vesicles, only near the base."""
        draw, tissue, half_height = self.draw, self.tissue, self.half_height
        shown = np.clip((self.level - 0.35) / 0.4, 0, 1)
        reach = draw.patient(17, 30)
        wall = self.ellipse(draw.patient(-4, 4), -half_height * 0.75 - reach * 0.75, reach * 1.45, reach)
        wall = wall + (1 - shown) * 60
        self.paint(wall, tissue["wall"] * 0.9)
        self.paint(wall + 3.0, tissue["bladder"])
        for side in (-1, 1):
            for lobe in range(3):
                cx = side * (7 + 7.5 * lobe + draw.patient(-2, 2))
                cy = half_height * (0.95 - 0.06 * lobe) + draw.slice(-1.5, 1.5)
                blob = self.ellipse(cx, cy, 5.4, 3.3, side * 0.4)
                self.paint(blob + (1 - shown) * 40, tissue["vesicle"] * (1 + 0.2 * self.texture), 0.9)

    def gland(self) -> None:
        """Paint capsule and peripheral zone (a wavy ellipse with a flat or hollow back); set ``outline``, ``mask``."""
        draw, tissue, x, y = self.draw, self.tissue, self.x, self.y
        angle = np.arctan2(y / self.half_height, x / self.half_width)
        waves = np.ones_like(x)
        for order, amount in ((2, 0.055), (3, 0.05), (4, 0.03)):
            even = draw.patient(-amount, amount) + 0.35 * draw.slice(-amount, amount)
            odd = 0.6 * draw.patient(-amount, amount)
            waves = waves + np.hypot(even, odd) * np.cos(order * angle - np.arctan2(odd, even))
        hollow = draw.patient(0.03, 0.15) * np.exp(-(((angle - np.pi / 2) / 0.5) ** 2))
        rho = np.sqrt((x / self.half_width) ** 2 + (y / self.half_height) ** 2) / (waves - hollow)
        self.outline = (rho - 1) * np.sqrt(self.half_width * self.half_height)
        self.mask = (self.outline < 0).astype(np.uint8)
        self.paint(self.outline - 1.0, tissue["capsule"], 0.85)  # capsule and fascia
        speck = 1 + 0.10 * self.texture + 0.10 * self.coarse
        self.paint(self.outline + 0.8, tissue["peripheral"] * draw.patient(0.82, 1.05) * speck)

    def transition_zone(self) -> None:
        """Paint the transition zone with nodules, its dark front, the urethra, and at times a dark focus behind."""
        draw, tissue, texture, gland = self.draw, self.tissue, self.texture, self.outline
        half_width, half_height = self.half_width, self.half_height
        share = _choose(self.enlarged, draw.patient(0.74, 0.84), draw.patient(0.5, 0.66)) * (1 - 0.35 * self.apex)
        tx, ty = half_width * share * 0.98, half_height * share * 1.02
        cy = -half_height * (1 - share) * 0.72
        zone = self.ellipse(draw.patient(-1.5, 1.5), cy, tx, ty) + 1.5 * self.coarse
        inside = np.maximum(zone, gland + 1.2)
        self.paint(inside - 0.8, tissue["stroma"], 0.7)  # surgical capsule
        self.paint(inside + 0.6, tissue["transition"] * (1 + 0.32 * texture + 0.22 * self.coarse))
        for _ in range(5):
            nx = draw.patient(-0.6, 0.6) * tx
            ny = cy + draw.patient(-0.55, 0.55) * ty
            radius = draw.patient(0.16, 0.36) * ty
            nodule = np.maximum(self.ellipse(nx, ny, radius * 1.15, radius), inside + 1)
            bright = draw.patient(0.35, 1.45)
            there = _choose(self.enlarged | (draw.patient(0, 1) < 0.35), 0.8, 0.0)
            self.paint(nodule, tissue["stroma"], there)
            self.paint(nodule + 0.9, tissue["transition"] * bright * (1 + 0.15 * texture), there)
        front = np.maximum(self.ellipse(0, -half_height * 0.95, half_width * 0.5, half_height * 0.34), gland + 0.5)
        self.paint(front, tissue["stroma"] * (1 + 0.15 * texture), 0.85)
        self.paint(self.ellipse(0, cy * 0.3, 2.2, 2.6), tissue["peripheral"], 0.6)
        focus = self.ellipse(half_width * draw.patient(-0.65, 0.65), half_height * draw.patient(0.3, 0.7), 5.5, 3.4)
        strength = _choose(draw.patient(0, 1) < 0.4, 0.75, 0.0)
        self.paint(np.maximum(focus, gland + 0.8), tissue["stroma"] * 1.3, strength)


def _ellipse(px: Array, py: Array, cx: Any, cy: Any, a: Any, b: Any, turn: Any = 0.0) -> Array:
    """Return the approximate signed distance of points to an ellipse, negative inside."""
    c, s = np.cos(turn, dtype=np.float32), np.sin(turn, dtype=np.float32)
    dx, dy = px - cx, py - cy
    rho = np.sqrt(((c * dx + s * dy) / a) ** 2 + ((c * dy - s * dx) / b) ** 2)
    return (rho - 1) * np.minimum(a, b)


def _acquire(pelvis: Pelvis) -> npt.NDArray[np.uint8]:
    """Apply the scanner's contrast curve, bias field, blur and Rician noise, and a window as viewers choose it."""
    machine, draw = pelvis.machine, pelvis.draw
    x, y = pelvis.grid
    image = np.clip(pelvis.image, 0, 1.4)
    height, width = image.shape[1:]
    image = np.power(image, machine.gamma * draw.patient(0.94, 1.06), dtype=np.float32)
    far = machine.field_of_view / 2
    ramp = draw.patient(-1, 1) * x / far + draw.patient(-1, 1) * y / far
    bowl = (x**2 + y**2) / far**2
    image = image * np.exp(machine.bias * (ramp - draw.patient(0.1, 0.9) * bowl))
    image = _smooth(image, machine.blur / 2.355 / pelvis.pixel, unit=False)
    if machine.coil:
        shift, depth, radius = pelvis.behind
        distance = (x - shift) ** 2 + (y - depth + 0.75 * radius) ** 2
        image = image * (0.55 + machine.coil * draw.patient(0.8, 1.2) * np.exp(-distance / (2 * 24.0**2)))
    sigma = machine.noise * draw.patient(0.8, 1.25)
    real = image + sigma * draw.noise(height, width)
    image = np.sqrt(real**2 + (sigma * draw.noise(height, width)) ** 2)
    low = image.min(axis=(1, 2), keepdims=True)
    high = np.percentile(image, 99.0, axis=(1, 2), keepdims=True).astype(np.float32)
    return np.round(np.clip((image - low) / np.maximum(high - low, 1e-6), 0, 1) * 255).astype(np.uint8)


def _choose(condition: npt.NDArray[np.bool_], yes: Any, no: Any) -> Array:
    return np.where(condition, np.float32(yes), np.float32(no)).astype(np.float32)


def _warp(x: Array, y: Array, draw: _Draws) -> tuple[Array, Array]:
    """Return coordinates that are smoothly deformed by some long sine waves, by a few mm."""
    dx, dy = np.zeros_like(x), np.zeros_like(y)
    for length, amount in ((140.0, 4.0), (75.0, 2.0), (45.0, 0.9)):
        for shift in (dx, dy):
            kx, ky = draw.patient(-1, 1), draw.patient(-1, 1)
            phase = draw.patient(0, 2 * np.pi) + draw.slice(-0.3, 0.3)
            shift += amount * np.sin(2 * np.pi / length * (kx * x + ky * y) + phase)
    return x + dx, y + dy


def _smooth(image: Array, sigma: float, unit: bool = True) -> Array:
    """Smooth each picture by a Gaussian with ``sigma`` in pixels; ``unit``: scale noise to standard deviation 1."""
    if sigma < 0.2:
        return image
    height, width = image.shape[1:]
    fy = np.fft.fftfreq(height)[:, None].astype(np.float32)
    fx = np.fft.rfftfreq(width)[None, :].astype(np.float32)
    kernel = np.exp(-2 * (np.pi * sigma) ** 2 * (fx**2 + fy**2))
    smooth = np.fft.irfft2(np.fft.rfft2(image) * kernel, s=(height, width)).astype(np.float32)
    if unit:
        smooth /= np.maximum(smooth.std(axis=(1, 2), keepdims=True), 1e-6)
    return smooth


# groups of patients, and an artificial gap between the groups


def zones(site: str, *, seed: int = 0, cases: float = 1.0) -> dict[str, npt.NDArray[np.int64]]:
    """Return for each image of each split whether the patient's transition zone is enlarged, as index in :data:`ZONES`.

    An enlarged zone fills the gland, which is then larger too; sites differ in the share of patients with an enlarged
    zone (``Scanner.enlarged``).

    Args:
        site, seed, cases: as in :func:`fairflare_lab.phantoms.prostate.prostate_site`.
    """
    return {
        split: Pelvis(scanner(site), generators, SIDE, SIDE).enlarged[:, 0, 0].astype(np.int64)
        for split, generators in patients_of(site, seed, cases).items()
    }


def one_sided(
    masks: npt.NDArray[np.uint8], numbers: npt.NDArray[np.int64], share: float, seed: int
) -> npt.NDArray[np.uint8]:
    """Return masks in which only one half of the gland is outlined for a share of patients.

    The patients are chosen at random among those with an enlarged zone, so no model can predict them: a perfect outline
    of the gland has a Dice of about 2/3 on these images.

    Args:
        masks: (n, 1, height, width) masks, the slices of a patient next to each other.
        numbers: (n,) indices of zones, as :func:`zones` returns them.
        share: share of the patients with an enlarged zone, 0 to 1.
        seed: random seed of the choice.
    """
    of_group = np.flatnonzero(numbers[::SLICES] == 1)
    chosen = np.random.default_rng([seed, 1]).permutation(of_group)[: round(share * len(of_group))]
    found = masks.copy()
    for index in (chosen[:, None] * SLICES + np.arange(SLICES)).ravel():
        columns = np.flatnonzero(masks[index, 0].any(0))
        found[index, 0, :, (columns[0] + columns[-1] + 1) // 2 :] = 0
    return found
