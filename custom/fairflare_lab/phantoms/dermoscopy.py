"""A dermoscopy-like image of a skin lesion, eight classes. No patient in it.

Pigment and blood darken the skin as they do in reality: melanin near the surface brown, melanin deep in the
skin blue-grey, blood red. Each class has the patterns that dermatologists look for (network, globules, veil,
cysts, vessels, scale ...), each present with a probability and a strength of its own, so that atypical
cases exist and classes are confused as the real ones are: MEL with NV and BKL, AK with SCC and BCC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fairflare_lab.phantoms.canvas import Canvas, Colour, Map, ramp

ISIC2019 = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
ISIC2019_COUNTS = (4522, 12875, 3323, 867, 2624, 239, 253, 628)
ISIC2018 = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
ISIC2018_COUNTS = (1113, 6705, 514, 327, 1099, 115, 142)
TONES = ("light", "dark")

MELANIN: Colour = (0.55, 1.0, 1.45)
BLOOD: Colour = (0.16, 1.0, 0.85)
DEEP: Colour = (1.1, 0.75, 0.42)
PALE_SKIN: Colour = (0.93, 0.76, 0.67)
WHITE: Colour = (0.95, 0.90, 0.86)
SCALE: Colour = (0.93, 0.87, 0.74)
KERATIN: Colour = (0.92, 0.80, 0.52)
CRUST: Colour = (0.55, 0.30, 0.12)


class _Lesion:
    """Outline and pigment maps of one lesion."""

    def __init__(self, canvas: Canvas, *, ragged: float, elongated: float = 1.3, radius: tuple[float, float]) -> None:
        c = self.canvas = canvas
        self.cx, self.cy = c.uniform(-0.16, 0.16), c.uniform(-0.16, 0.16)
        ratio = np.sqrt(c.uniform(1.0, elongated))
        self.radius = c.uniform(*radius)
        self.turn = c.uniform(0, np.pi)
        rho = c.ellipse(self.cx, self.cy, self.radius * ratio, self.radius / ratio, self.turn)
        self.rho = rho + np.float32(ragged) * (c.noise(4) + 0.5 * c.noise(9))
        self.melanin = np.zeros_like(rho)
        self.blood = np.zeros_like(rho)
        self.deep = np.zeros_like(rho)
        self.over: list[tuple[Map, Colour]] = []

    def inside(self, edge: float) -> Map:
        """1 within the lesion, falling to 0 over a share ``edge`` of its radius."""
        return ramp(self.rho, 1 + edge / 2, 1 - edge / 2)

    def scatter(self, count: int, low: float, high: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Points between two relative radii, evenly over the area."""
        rng = self.canvas.rng
        r = np.sqrt(rng.uniform(low**2, high**2, count)) * self.radius
        angle = rng.uniform(0, 2 * np.pi, count)
        return self.cx + r * np.cos(angle), self.cy + r * np.sin(angle)

    def dots(self, count: int, low: float, high: float, size: tuple[float, float]) -> Map:
        x, y = self.scatter(count, low, high)
        return self.canvas.stamp(x, y, self.canvas.rng.uniform(*size, count))

    def network(self, period: float, warp: float) -> Map:
        """The pigment network: a honeycomb of lines, 1 on them and 0 in the holes."""
        c = self.canvas
        x, y = c.x + np.float32(warp) * c.noise(5), c.y + np.float32(warp) * c.noise(5)
        k = 2 * np.pi / (period * np.sqrt(0.75))
        x, y = x + np.float32(c.uniform(0, period)), y + np.float32(c.uniform(0, period))
        total = np.zeros_like(x)
        turn = c.uniform(0, np.pi)
        for angle in (turn, turn + np.pi / 3, turn + 2 * np.pi / 3):
            total += np.cos(np.float32(k * np.cos(angle)) * x + np.float32(k * np.sin(angle)) * y)
        return ramp(total, 0.4, -1.1)

    def curls(self, count: int, low: float, high: float, length: float, width: float) -> Map:
        """Short bent vessels (hairpins, loops)."""
        rng = self.canvas.rng
        x, y = self.scatter(count, low, high)
        heading = rng.uniform(0, 2 * np.pi, (count, 1)) + np.linspace(0, 1, 6) * rng.uniform(2.5, 5.0, (count, 1))
        px = x[:, None] + np.cumsum(np.cos(heading), 1) * length / 6
        py = y[:, None] + np.cumsum(np.sin(heading), 1) * length / 6
        return self.canvas.stroke(px, py, width)

    def tree(self, trunks: int, width: float) -> Map:
        """Arborising vessels: trunks from the border inwards that fork."""
        rng = self.canvas.rng
        lines_x, lines_y, widths = [], [], []
        for _ in range(trunks):
            start = rng.uniform(0, 2 * np.pi)
            x, y = self.cx + self.radius * 0.95 * np.cos(start), self.cy + self.radius * 0.95 * np.sin(start)
            stack = [(x, y, start + np.pi + rng.normal(0, 0.5), 1.0, 0)]
            while stack:
                x, y, heading, size, level = stack.pop()
                turns = heading + np.cumsum(rng.normal(0, 0.28, 8))
                step = self.radius * size * 0.15
                px, py = x + np.cumsum(np.cos(turns)) * step, y + np.cumsum(np.sin(turns)) * step
                lines_x.append(px)
                lines_y.append(py)
                widths.append(np.full(8, width * size))
                if level < 2:
                    for side in (-0.6, 0.6):
                        at = int(rng.integers(3, 8))
                        stack.append((px[at], py[at], turns[at] + side + rng.normal(0, 0.2), size * 0.65, level + 1))
        return self.canvas.stroke(np.array(lines_x), np.array(lines_y), np.array(widths))


def _melanoma(c: Canvas) -> _Lesion:
    early = 0.5 if c.chance(0.35) else 1.0  # early ones show less of everything
    k = _Lesion(c, ragged=c.uniform(0.03, 0.2) * early, elongated=1 + 0.8 * early, radius=(0.38, 0.78))
    inside = k.inside(c.uniform(0.08, 0.45))
    k.melanin += inside * c.uniform(0.4, 0.9) * (1 + early * c.uniform(0.0, 0.5) * np.clip(c.noise(3), -1.2, 1.5))
    if c.chance(0.65 * early):
        _blotch(k, inside)
    if c.chance(0.65):  # atypical network, in a part only
        where = ramp(c.noise(3), -0.5, 0.5)
        k.melanin += inside * where * k.network(c.uniform(0.14, 0.2), 0.045) * c.uniform(0.3, 0.75)
    if c.chance(0.65):  # irregular dots and globules towards the border
        k.melanin += 0.9 * k.dots(c.count(5, 14), 0.4, 1.05, (0.015, 0.06)) * c.uniform(0.5, 1.0)
    if c.chance(0.35 * early):  # streaks
        n = c.count(5, 12)
        angle = c.uniform(0, 6.28) + np.linspace(0, c.uniform(1.2, 3.5), n) + c.rng.normal(0, 0.06, n)
        reach = np.linspace(0.85, 1.22, 3)[None, :] * k.radius
        px, py = k.cx + reach * np.cos(angle)[:, None], k.cy + reach * np.sin(angle)[:, None]
        k.melanin += 0.7 * c.stroke(px, py, np.array([0.07, 0.055, 0.03]))
    if c.chance(0.5 * early):  # blue-white veil
        x, y = k.scatter(1, 0.0, 0.5)
        veil = inside * ramp(c.ellipse(float(x[0]), float(y[0]), 0.3, 0.24) + 0.3 * c.noise(4), 1.3, 0.6)
        k.deep += veil * c.uniform(0.2, 0.55)
        k.over.append((veil * c.uniform(0.15, 0.4), (0.66, 0.72, 0.84)))
    if c.chance(0.3):  # regression: scar-like patch
        x, y = k.scatter(1, 0.2, 0.7)
        patch = inside * ramp(c.ellipse(float(x[0]), float(y[0]), 0.24, 0.18) + 0.3 * c.noise(5), 1.2, 0.7)
        k.over.append((patch * c.uniform(0.2, 0.55), (0.86, 0.78, 0.76)))
    k.blood += inside * c.uniform(0, 0.25)
    return k


def _nevus(c: Canvas) -> _Lesion:
    odd = c.chance(0.35)  # dysplastic: what makes nevi look like melanoma
    k = _Lesion(c, ragged=c.uniform(0.05, 0.17) if odd else c.uniform(0.01, 0.08), elongated=1.6, radius=(0.32, 0.72))
    inside = k.inside(c.uniform(0.1, 0.55))
    centre = ramp(k.rho, 1.1, 0.1)
    k.melanin += inside * c.uniform(0.35, 0.95) * (0.75 + c.uniform(-0.1, 0.5) * centre)
    if odd:
        k.melanin += inside * c.uniform(0.1, 0.35) * np.clip(c.noise(3), -1, 1.5)
        if c.chance(0.35):
            _blotch(k, inside * np.float32(0.7))
    kind = c.rng.random()
    if kind < 0.5:  # regular network
        k.melanin += inside * k.network(c.uniform(0.14, 0.2), 0.01) * c.uniform(0.25, 0.65)
    elif kind < 0.75:  # globules, regular
        k.melanin += inside * k.dots(c.count(16, 32), 0.0, 0.9, (0.03, 0.05)) * c.uniform(0.4, 0.8)
    k.blood += inside * c.uniform(0, 0.25)
    if c.chance(0.1):
        k.deep += inside * centre * c.uniform(0.2, 0.5)  # blue nevus
    return k


def _blotch(k: _Lesion, inside: Map) -> None:
    """An eccentric dark area without structure."""
    c = k.canvas
    x, y = k.scatter(1, 0.25, 0.75)
    spot = c.ellipse(float(x[0]), float(y[0]), k.radius * c.uniform(0.3, 0.55), k.radius * c.uniform(0.25, 0.5))
    k.melanin += inside * ramp(spot + 0.25 * c.noise(7), 1.25, 0.7) * c.uniform(0.3, 1.0)


def _basal_cell(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.05, 0.17), elongated=1.6, radius=(0.4, 0.78))
    inside = k.inside(c.uniform(0.3, 0.85))
    k.blood += inside * c.uniform(0.12, 0.46) * (1 + 0.22 * c.noise(5))
    k.melanin += inside * c.uniform(0, 0.16)
    k.over.append((inside * c.uniform(0.0, 0.3), (0.93, 0.84, 0.82)))  # pearly
    if c.chance(0.72):
        k.blood += k.tree(c.count(1, 3), c.uniform(0.035, 0.06)) * c.uniform(0.5, 1.1)
    if c.chance(0.55):  # blue-grey ovoid nests, leaf-like areas
        n = c.count(2, 7)
        k.deep += k.dots(n, 0.1, 0.95, (0.035, 0.11)) * c.uniform(0.5, 1.0)
        k.melanin += k.dots(n, 0.4, 0.95, (0.02, 0.05)) * c.uniform(0.2, 0.6)
    if c.chance(0.35):  # ulcer
        x, y = k.scatter(1, 0.0, 0.5)
        ulcer = ramp(c.ellipse(float(x[0]), float(y[0]), 0.17, 0.12, k.turn) + 0.2 * c.noise(8), 1.1, 0.8)
        k.blood += ulcer * c.uniform(0.6, 1.3)
        k.melanin += ulcer * c.uniform(0.1, 0.6)
    if c.chance(0.3):  # shiny white lines
        _white_lines(k, c.count(3, 6))
    return k


def _actinic(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.07, 0.2), elongated=1.6, radius=(0.42, 0.82))
    inside = k.inside(c.uniform(0.35, 0.95))
    k.blood += inside * c.uniform(0.14, 0.5) * (1 + 0.22 * c.noise(5))
    if c.chance(0.3):
        k.melanin += inside * c.uniform(0.15, 0.5) * (1 + 0.3 * c.noise(5))
    if c.chance(0.75):  # strawberry: pale follicles in red
        x, y = k.scatter(c.count(10, 22), 0.0, 0.95)
        holes = c.stamp(x, y, c.uniform(0.05, 0.075))
        strength = c.uniform(0.4, 0.9)
        k.blood += inside * 0.25 * strength * (1 - holes)
        k.over.append((inside * holes * strength * 0.65, (0.95, 0.84, 0.72)))
        if c.chance(0.6):
            k.over.append((inside * c.stamp(x, y, 0.02) * strength, (0.80, 0.60, 0.40)))
    if c.chance(0.65):  # scale
        flakes = ramp(c.noise(14) + 0.6 * c.noise(5), c.uniform(0.7, 1.2), 1.9)
        k.over.append((inside * flakes * c.uniform(0.5, 0.95), SCALE))
    return k


def _keratosis(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.02, 0.12), elongated=1.7, radius=(0.38, 0.75))
    moth = c.chance(0.5)
    if moth:  # bites out of the border
        k.rho = k.rho + np.float32(c.uniform(0.05, 0.12)) * c.noise(15)
    inside = k.inside(c.uniform(0.06, 0.4))
    k.melanin += inside * c.uniform(0.25, 0.85) * (1 + 0.15 * c.noise(6))
    k.blood += inside * c.uniform(0, 0.12)
    if c.chance(0.45):  # ridges and fissures, like a fingerprint or a brain
        angle = k.turn + c.uniform(-0.4, 0.4)
        wave = (np.cos(angle) * c.x + np.sin(angle) * c.y).astype(np.float32) + np.float32(0.06) * c.noise(4)
        stripes = np.sin(np.float32(2 * np.pi / c.uniform(0.13, 0.18)) * wave)
        k.melanin += inside * ramp(stripes, -0.4, 0.9) * c.uniform(0.2, 0.55)
    if c.chance(0.68):  # milia-like cysts
        cysts = k.dots(c.count(3, 10), 0.0, 0.85, (0.022, 0.05))
        k.over.append((inside * cysts * c.uniform(0.4, 0.9), (0.97, 0.92, 0.80)))
    if c.chance(0.55):  # comedo-like openings
        plugs = k.dots(c.count(3, 9), 0.0, 0.85, (0.022, 0.05))
        k.melanin += inside * plugs * c.uniform(0.6, 1.3)
    return k


def _fibroma(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.03, 0.1), elongated=1.35, radius=(0.38, 0.66))
    inside = k.inside(c.uniform(0.4, 0.8))
    k.melanin += inside * c.uniform(0.2, 0.55)
    k.blood += inside * c.uniform(0.05, 0.25)
    if c.chance(0.75):  # delicate network around
        ring = ramp(k.rho, 0.35, 0.65)
        k.melanin += inside * ring * k.network(c.uniform(0.14, 0.19), 0.01) * c.uniform(0.25, 0.55)
    if c.chance(0.88):  # scar-like centre
        scar = ramp(k.rho + 0.1 * c.noise(7), c.uniform(0.5, 0.7), c.uniform(0.15, 0.35))
        k.over.append((scar * c.uniform(0.4, 0.85), (0.93, 0.83, 0.78)))
        if c.chance(0.4):
            _white_lines(k, c.count(2, 4))
    return k


def _vascular(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.02, 0.1), elongated=1.5, radius=(0.32, 0.66))
    inside = k.inside(c.uniform(0.1, 0.35))
    k.blood += inside * c.uniform(0.2, 0.7)
    if c.chance(0.8):  # lacunae
        lakes = k.dots(c.count(6, 16), 0.0, 0.88, (0.08, 0.17)) * np.clip(0.8 + 0.3 * c.noise(9), 0, 1)
        k.blood += lakes * c.uniform(0.5, 1.3)
        k.deep += lakes * c.uniform(0.05, 0.6)
        if c.chance(0.35):  # thrombosed
            k.melanin += k.dots(c.count(1, 3), 0.0, 0.7, (0.08, 0.16)) * c.uniform(0.8, 1.5)
    else:
        k.blood += inside * c.uniform(0.3, 1.0)
        k.deep += inside * c.uniform(0.1, 0.5)
    if c.chance(0.5):  # pale septa
        k.over.append((inside * ramp(np.abs(c.noise(7)), 0.22, 0.05) * c.uniform(0.3, 0.6), (0.90, 0.78, 0.80)))
    return k


def _squamous(c: Canvas) -> _Lesion:
    k = _Lesion(c, ragged=c.uniform(0.05, 0.18), elongated=1.6, radius=(0.42, 0.8))
    inside = k.inside(c.uniform(0.3, 0.9))
    k.blood += inside * c.uniform(0.13, 0.5) * (1 + 0.22 * c.noise(5))
    k.melanin += inside * c.uniform(0, 0.25)
    if c.chance(0.72):  # keratin mass, often with crust and blood
        x, y = k.scatter(1, 0.0, 0.3)
        size = k.radius * c.uniform(0.3, 0.65)
        mass = ramp(c.ellipse(float(x[0]), float(y[0]), size, size * 0.8, k.turn) + 0.25 * c.noise(7), 1.15, 0.8)
        k.over.append((mass * np.clip(0.7 + 0.3 * c.noise(13), 0, 1) * c.uniform(0.5, 0.9), KERATIN))
        if c.chance(0.55):
            k.over.append((mass * ramp(c.noise(9), 0.5, 1.1) * 0.8, CRUST))
    if c.chance(0.7):  # looped vessels around the mass
        k.blood += k.curls(c.count(6, 16), 0.45, 1.0, 0.16, 0.045) * c.uniform(0.6, 1.2)
    if c.chance(0.4):  # white circles
        x, y = k.scatter(c.count(3, 8), 0.1, 0.9)
        rings = np.clip(c.stamp(x, y, 0.075) - c.stamp(x, y, 0.035), 0, 1)
        k.over.append((inside * rings * c.uniform(0.4, 0.8), WHITE))
    if c.chance(0.45):  # blood spots
        k.blood += k.dots(c.count(2, 6), 0.0, 0.8, (0.025, 0.06)) * c.uniform(0.8, 1.4)
    if c.chance(0.3):
        flakes = ramp(c.noise(14) + 0.6 * c.noise(5), 1.0, 1.9)
        k.over.append((inside * flakes * c.uniform(0.4, 0.9), SCALE))
    return k


def _white_lines(k: _Lesion, count: int) -> None:
    c = k.canvas
    x, y = k.scatter(count, 0.0, 0.5)
    angle = c.uniform(0, np.pi) + np.where(c.rng.random(count) < 0.5, 0, np.pi / 2)
    reach = np.array([-1.0, 1.0])[None, :] * c.uniform(0.07, 0.15)
    lines = c.stroke(x[:, None] + reach * np.cos(angle)[:, None], y[:, None] + reach * np.sin(angle)[:, None], 0.035)
    k.over.append((lines * c.uniform(0.4, 0.75), WHITE))


LESIONS: Mapping[str, Callable[[Canvas], _Lesion]] = {
    "MEL": _melanoma, "NV": _nevus, "BCC": _basal_cell, "AK": _actinic,
    "BKL": _keratosis, "DF": _fibroma, "VASC": _vascular, "SCC": _squamous,
}  # fmt: skip


def draw_dermoscopy(c: Canvas, name: str, attribute: str | None = None) -> npt.NDArray[np.uint8]:
    """One lesion of a class of ISIC 2019 or 2018; ``attribute``: tone of the skin, default light."""
    if name == "AKIEC":  # of ISIC 2018: actinic keratoses and some in-situ carcinomas
        name = "SCC" if c.chance(0.25) else "AK"
    dark = attribute == "dark"
    tone = c.uniform(0.75, 1.2) if dark else c.uniform(0.0, 0.22)
    flush = c.uniform(0.0, 0.16)
    mottle = c.noise(5)
    lesion = LESIONS[name](c)
    c.fill(PALE_SKIN)
    grain = c.noise(22)
    # on dark skin pigment and redness stand out less, and what is pale or scaly is seen through the same pigment
    contrast = np.float32(c.uniform(0.45, 0.75) if dark else 1.0)
    c.absorb(
        (tone * (1 + 0.06 * mottle) + 0.035 * grain + contrast * lesion.melanin, MELANIN),
        (flush * (1 + 0.3 * mottle) + contrast * lesion.blood, BLOOD),
        (contrast * lesion.deep, DEEP),
    )
    for alpha, colour in lesion.over:
        c.paint(alpha * 0.7 * contrast if dark else alpha, colour)
    _extras(c)
    return c.finish(gain=0.07, cast=0.04, noise=0.012)


def _extras(c: Canvas) -> None:
    """Hairs, gel bubbles, a ruler, the dark corners of the dermatoscope."""
    if c.chance(0.45):
        n = c.count(1, 7)
        t = np.linspace(-1.5, 1.5, 12)
        turn = c.uniform(0, np.pi) + c.rng.normal(0, 0.5, (n, 1))
        aside = c.rng.uniform(-0.9, 0.9, (n, 1)) + c.rng.uniform(-0.25, 0.25, (n, 1)) * t**2
        hairs = c.stroke(np.cos(turn) * t - np.sin(turn) * aside, np.sin(turn) * t + np.cos(turn) * aside, 0.028)
        c.paint(hairs * c.uniform(0.5, 0.9), (0.16, 0.10, 0.07))
    if c.chance(0.12):
        n = c.count(2, 5)
        x, y, r = c.rng.uniform(-1, 1, n), c.rng.uniform(-1, 1, n), c.rng.uniform(0.05, 0.12, n)
        c.paint((c.stamp(x, y, r) - c.stamp(x, y, r - 0.035)) * 0.35, (1.0, 1.0, 1.0))
    if c.chance(0.18):
        at = c.uniform(0.86, 0.95) * (1 if c.chance(0.5) else -1)
        ticks = np.arange(-1, 1.05, 0.18) + c.uniform(0, 0.18)
        length = np.where(np.arange(len(ticks)) % 5 == 0, 0.16, 0.09)
        ends = np.stack([np.full_like(ticks, at), at - np.sign(at) * length], 1)
        along = np.stack([ticks, ticks], 1)
        marks = c.stroke(along, ends, 0.022) if c.chance(0.5) else c.stroke(ends, along, 0.022)
        c.paint(marks * 0.8, (0.10, 0.09, 0.10))
    if c.chance(0.35):
        reach = c.ellipse(c.uniform(-0.08, 0.08), c.uniform(-0.08, 0.08), 1, 1)
        radius = c.uniform(1.0, 1.3)
        c.shade(ramp(reach, radius + 0.05, radius - 0.05) * np.float32(0.97) + np.float32(0.03))
    elif c.chance(0.5):
        c.shade(1 - np.float32(c.uniform(0.05, 0.25)) * (c.x**2 + c.y**2))
