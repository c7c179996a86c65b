"""A fundus-like image of the retina, five grades of diabetic retinopathy. No patient in it.

The grades follow the international scale: 0 none; 1 microaneurysms only; 2 some haemorrhages, exudates, cotton
wool spots; 3 many of them in all quadrants, beaded veins; 4 new vessels, preretinal haemorrhage, laser scars.
The number of lesions of neighbouring grades overlaps, as grading does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairflare_lab.phantoms.canvas import Canvas, Map, ramp

GRADES = ("no-dr", "mild-dr", "moderate-dr", "severe-dr", "proliferative-dr")
GRADE_COUNTS = (1017, 270, 347, 75, 35)  # of Messidor-2

RED = (0.36, 0.05, 0.03)
DARK_RED = (0.28, 0.03, 0.02)
EXUDATE = (0.98, 0.88, 0.45)
COTTON = (0.95, 0.85, 0.66)


def draw_fundus(c: Canvas, name: str, attribute: str | None = None) -> npt.NDArray[np.uint8]:
    """One retina of a grade; there are no attributes."""
    label = GRADES.index(name)
    side = -1 if c.chance(0.5) else 1  # where the optic disc lies: a left or a right eye
    dx, dy = side * c.uniform(0.42, 0.56), c.uniform(-0.12, 0.12)
    mx, my = dx - side * c.uniform(0.58, 0.68), dy + c.uniform(0.0, 0.12)
    _retina(c, mx, my)
    disc = c.ellipse(dx, dy, 0.145, 0.165) + 0.04 * c.noise(5)
    c.paint(ramp(disc, 1.35, 0.95) * c.uniform(0.5, 0.8), (0.97, 0.74, 0.40))
    c.paint(ramp(disc, 1.0, 0.7) * c.uniform(0.5, 0.85), (1.0, 0.90, 0.62))
    _vessels(c, dx, dy, side, beaded=c.uniform(0.25, 0.6) if label == 3 and c.chance(0.6) else 0.0)
    if label:
        _lesions(c, label, mx, my)
    elif c.chance(0.2):  # drusen, not diabetic
        x, y = _places(c, c.count(2, 8), mx, my, 0.45)
        c.paint(c.stamp(x, y, 0.022) * c.uniform(0.2, 0.5), (0.95, 0.80, 0.45))
    if label == 4:
        _proliferative(c, dx, dy, side)
    if c.chance(0.2):  # haze
        c.paint(ramp(c.noise(3), -1.0, 2.5) * c.uniform(0.1, 0.35), (0.72, 0.55, 0.38))
    if c.chance(0.15):  # dust on the lens
        x, y = c.rng.uniform(-0.8, 0.8, (2, c.count(1, 3)))
        c.paint(c.stamp(x, y, 0.03) * c.uniform(0.1, 0.3), (0.25, 0.15, 0.10))
    field = c.ellipse(0, 0, 1, 1)
    edge = c.cover((field - np.float32(c.uniform(0.93, 1.02))), 0.03)
    if c.chance(0.5):  # flattened above and below, as many cameras do
        edge = edge * c.cover(np.abs(c.y) - np.float32(c.uniform(0.8, 0.92)), 0.03)
    c.shade(edge)
    return c.finish(gain=0.12, cast=0.06, noise=0.012)


def _retina(c: Canvas, mx: float, my: float) -> None:
    red = c.uniform(0.66, 0.86)
    c.fill((red, red * c.uniform(0.40, 0.55), red * c.uniform(0.14, 0.30)))
    c.shade(1 + 0.05 * c.noise(4) + np.float32(c.uniform(0.01, 0.05)) * c.noise(13))
    far = (c.x - c.uniform(-0.3, 0.3)) ** 2 + (c.y - c.uniform(-0.3, 0.3)) ** 2
    c.shade(1 - np.float32(c.uniform(0.12, 0.4)) * far)
    macula = c.ellipse(mx, my, 0.30, 0.27)
    c.paint(ramp(macula, 1.15, 0.0) * c.uniform(0.3, 0.6), (0.42, 0.16, 0.07))


def _vessels(c: Canvas, dx: float, dy: float, side: int, beaded: float) -> None:
    """Four arcades from the disc, a vein and an artery each, with branches."""
    rng = c.rng
    n = 14  # points of a line
    # towards the macula the arcades bend around it; headings from straight away from the nose side
    away = np.array([1.25, -1.25, 2.35, -2.35])
    bend = np.array([-1.15, 1.15, 0.25, -0.25])
    away, bend = np.repeat(away, 2) + rng.normal(0, 0.12, 8), np.repeat(bend, 2) + rng.normal(0, 0.15, 8)
    vein = np.arange(8) % 2 == 0
    away = away + np.where(vein, 0.0, 0.16 * np.sign(away))
    t = np.linspace(0, 1, n)
    heading = away[:, None] + bend[:, None] * t + np.cumsum(rng.normal(0, 0.11, (8, n)), 1)
    length = np.where(np.abs(away) < 1.8, 1.75, 1.1)[:, None] / n
    px = dx - side * np.cumsum(np.cos(heading), 1) * length
    py = dy + np.cumsum(np.sin(heading), 1) * length
    width = np.where(vein, 0.062, 0.045)[:, None] * (1 - 0.6 * t)
    if beaded:
        width = width * (1 + np.where(vein, beaded, 0)[:, None] * np.sin(2 * np.pi * t * 9))
    # branches: two of each
    at = rng.integers(2, 10, 16)
    parent = np.arange(16) % 8
    turn = np.where(np.arange(16) < 8, 0.75, -0.75) + rng.normal(0, 0.15, 16)
    twigs = heading[parent, at][:, None] + turn[:, None] + np.cumsum(rng.normal(0, 0.19, (16, n)), 1)
    step = rng.uniform(0.25, 0.6, 16)[:, None] / n
    bx = px[parent, at][:, None] - side * np.cumsum(np.cos(twigs), 1) * step
    by = py[parent, at][:, None] + np.cumsum(np.sin(twigs), 1) * step
    thin = np.where(vein, 0.034, 0.026)[parent][:, None] * (1 - 0.5 * t)
    c.paint(c.stroke(bx, by, thin) * 0.8, (0.56, 0.16, 0.08))
    c.paint(c.stroke(px, py, width) * 0.85, (0.47, 0.11, 0.06))


def _places(
    c: Canvas, count: int, x: float, y: float, spread: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Points around a place, within the field."""
    px, py = c.rng.normal(x, spread, count), c.rng.normal(y, spread, count)
    return np.clip(px, -0.85, 0.85), np.clip(py, -0.8, 0.8)


def _lesions(c: Canvas, label: int, mx: float, my: float) -> None:
    rng = c.rng
    if label == 4 and c.chance(0.3):
        label = 2  # proliferative eyes need not be full of haemorrhages
    aneurysms = c.count(*{1: (1, 6), 2: (3, 12), 3: (8, 20), 4: (5, 16)}[label])
    blots = c.count(*{1: (0, 0), 2: (1, 8), 3: (7, 20), 4: (3, 14)}[label])
    wide = 0.6 if label >= 3 else 0.4
    x, y = _places(c, aneurysms, mx, my, wide)
    c.paint(c.stamp(x, y, rng.uniform(0.014, 0.028, aneurysms)) * c.uniform(0.45, 1.0), RED)
    if blots:
        x, y = _places(c, blots, mx, my, wide)
        size = rng.uniform(0.03, 0.075, blots)
        flame = rng.uniform(0, 0.09, blots) * (rng.random(blots) < 0.5)
        angle = rng.uniform(0, np.pi, blots)
        shape = np.maximum(
            c.stamp(x, y, size), c.stamp(x + flame * np.cos(angle), y + flame * np.sin(angle), 0.7 * size)
        )
        c.paint(shape * c.uniform(0.65, 1.0), DARK_RED)
    if label >= 2 and c.chance(0.6):  # hard exudates, in clusters or a ring
        for _ in range(c.count(1, 3)):
            cx, cy = _places(c, 1, mx, my, 0.28)
            n = c.count(5, 16)
            if c.chance(0.4):
                angle, reach = rng.uniform(0, 2 * np.pi, n), c.uniform(0.1, 0.2)
                x, y = cx + reach * np.cos(angle), cy + reach * np.sin(angle)
            else:
                x, y = rng.normal(cx, 0.07, n), rng.normal(cy, 0.07, n)
            c.paint(c.stamp(x, y, rng.uniform(0.015, 0.035, n)) * c.uniform(0.6, 1.0), EXUDATE)
    if c.chance({1: 0.0, 2: 0.25, 3: 0.6, 4: 0.45}[label]):  # cotton wool
        for px, py in zip(*_places(c, c.count(1, 4), mx, my, 0.5), strict=True):
            spot = c.ellipse(float(px), float(py), c.uniform(0.07, 0.13), c.uniform(0.05, 0.09), c.uniform(0, 3.1))
            c.paint(ramp(spot, 1.2, 0.2) * c.uniform(0.45, 0.85), COTTON)


def _proliferative(c: Canvas, dx: float, dy: float, side: int) -> None:
    rng = c.rng
    signs = 0
    if c.chance(0.75):  # new vessels on the disc or elsewhere: fine tangles
        for _ in range(c.count(1, 3)):
            at_disc = c.chance(0.5)
            x = dx + rng.normal(0, 0.06) if at_disc else dx - side * c.uniform(0.1, 0.9)
            y = dy + rng.normal(0, 0.06) if at_disc else dy + c.uniform(0.3, 0.6) * (1 if c.chance(0.5) else -1)
            lines = c.count(5, 9)
            heading = rng.uniform(0, 2 * np.pi, (lines, 1)) + np.cumsum(rng.normal(0, 0.75, (lines, 9)), 1)
            px, py = x + np.cumsum(np.cos(heading), 1) * 0.036, y + np.cumsum(np.sin(heading), 1) * 0.036
            c.paint(c.stroke(px, py, 0.026) * c.uniform(0.6, 0.95), (0.50, 0.06, 0.04))
        signs += 1
    if c.chance(0.5):  # preretinal haemorrhage: a boat with a level surface
        x, y = dx - side * c.uniform(0.2, 0.9), c.uniform(0.1, 0.5)
        boat: Map = c.ellipse(x, y, c.uniform(0.16, 0.32), c.uniform(0.14, 0.22)) + 0.06 * c.noise(6)
        c.paint(ramp(boat, 1.05, 0.9) * ramp(c.y, y - 0.03, y + 0.01) * c.uniform(0.75, 1.0), (0.30, 0.02, 0.02))
        signs += 1
    if c.chance(0.45) or not signs:  # laser scars in the periphery
        n = c.count(14, 40)
        angle, reach = rng.uniform(0, 2 * np.pi, n), rng.uniform(0.62, 0.92, n)
        sx, sy = reach * np.cos(angle), reach * np.sin(angle)
        c.paint(c.stamp(sx, sy, 0.045) * c.uniform(0.3, 0.6), (0.86, 0.68, 0.42))
        c.paint(c.stamp(sx + 0.008, sy, 0.02) * c.uniform(0.2, 0.6), (0.30, 0.16, 0.10))
    if c.chance(0.3):  # fibrous bands
        heading = c.uniform(0, 6.28) + np.cumsum(rng.normal(0, 0.15, (2, 10)), 1)
        px, py = dx + np.cumsum(np.cos(heading), 1) * 0.05, dy + np.cumsum(np.sin(heading), 1) * 0.05
        c.paint(c.stroke(px, py, 0.05) * c.uniform(0.3, 0.65), (0.88, 0.80, 0.66))
