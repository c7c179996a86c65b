"""A gastrointestinal-endoscopy-like image, the 23 classes of HyperKvasir. No patient in it.

Four scenes (colon, stomach, gullet, view back along the endoscope) carry the landmarks and findings. Classes
that are degrees of one thing (ulcerative colitis, cleanliness of the bowel, oesophagitis, Barrett) are drawn
from one continuous degree with some spread, so that neighbours are as hard to tell apart as in reality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fairflare_lab.phantoms.canvas import Canvas, Colour, Map, ramp

_COUNTED: Mapping[str, int] = {  # images in HyperKvasir; the order of spec README 5.5
    "bbps-2-3": 1148, "polyps": 1028, "cecum": 1009, "dyed-lifted-polyps": 1002, "pylorus": 999,
    "dyed-resection-margins": 989, "z-line": 932,
    "retroflex-stomach": 764, "bbps-0-1": 646, "ulcerative-colitis-grade-2": 443, "esophagitis-a": 403,
    "retroflex-rectum": 391, "esophagitis-b-d": 260, "ulcerative-colitis-grade-1": 201,
    "ulcerative-colitis-grade-3": 133, "impacted-stool": 131,
    "barretts-short-segment": 53, "barretts": 41, "ulcerative-colitis-grade-0-1": 35,
    "ulcerative-colitis-grade-2-3": 28, "ulcerative-colitis-grade-1-2": 11, "ileum": 9, "hemorrhoids": 6,
}  # fmt: skip
HYPERKVASIR = tuple(_COUNTED)
HYPERKVASIR_COUNTS = tuple(_COUNTED.values())
# by the images of a training fold (80 %): head > 700, medium 70 to 700, tail < 70
HYPERKVASIR_GROUPS: Mapping[str, tuple[int, ...]] = {
    "head": tuple(range(7)),
    "medium": tuple(range(7, 16)),
    "tail": tuple(range(16, 23)),
}

BLOOD: Colour = (0.10, 0.80, 0.75)
DYE: Colour = (1.5, 0.55, 0.10)
SALMON: Colour = (0.80, 0.36, 0.28)
PEARL: Colour = (0.86, 0.66, 0.58)
STOOL: Colour = (0.48, 0.30, 0.13)
SLOUGH: Colour = (0.80, 0.74, 0.55)
BLEEDING: Colour = (0.40, 1.0, 0.95)


def draw_endoscopy(c: Canvas, name: str, attribute: str | None = None) -> npt.NDArray[np.uint8]:
    """One view of a class of HyperKvasir; there are no attributes."""
    SCENES[name](c)
    if c.chance(0.7):  # wet reflections
        c.paint(ramp(c.noise(8) + c.noise(17), 2.7, 3.3) * c.uniform(0.5, 0.95), (1.0, 0.98, 0.95))
    x, y = np.abs(c.x), np.abs(c.y)
    corner = c.uniform(1.6, 1.8)
    c.shade(c.cover(np.maximum(np.maximum(x, y) - 0.97, (x + y - np.float32(corner)) * 0.7), 0.04))
    if c.chance(0.35):  # the position of the endoscope, picture in picture
        box = c.cover(np.maximum(np.abs(c.x + 0.78) - 0.2, np.abs(c.y - 0.76) - 0.22))
        c.paint(box, (0.05, 0.30, 0.10) if c.chance(0.6) else (0.04, 0.08, 0.22))
        turns = np.linspace(0, c.uniform(5, 9), 12)
        c.paint(
            c.stroke(-0.78 + 0.1 * np.cos(turns), 0.76 + 0.011 * turns * np.sin(turns), 0.03) * 0.8, (0.8, 0.8, 0.7)
        )
    return c.finish(gain=0.12, cast=0.05, noise=0.012)


class _Tube:
    """Polar view into a hollow organ: ``rho`` from the middle of the lumen, (ux, uy) the direction outwards."""

    def __init__(self, c: Canvas, *, wobble: float = 0.06, away: float = 0.35) -> None:
        self.lx, self.ly = c.uniform(-away, away), c.uniform(-away, away)
        dx, dy = c.x - np.float32(self.lx), c.y - np.float32(self.ly)
        radius = np.sqrt(dx * dx + dy * dy) + np.float32(1e-3)
        self.light: Map = np.ones_like(radius)  # what is left of it; also falls on what lies on the wall
        self.ux, self.uy = dx / radius, dy / radius
        self.rho = np.maximum(radius * (1 + np.float32(wobble) * c.noise(4)), np.float32(0.01))

    def towards(self, angle: float, width: float) -> Map:
        """1 in the direction ``angle``, falling to 0 at ``width`` to either side."""
        along = np.float32(np.cos(angle)) * self.ux + np.float32(np.sin(angle)) * self.uy
        return ramp(along, float(np.cos(width)), 1.0)


def _wall(c: Canvas, vessels: float, blush: float = 0.0, grain: float = 0.0) -> None:
    """Mucosa of the bowel: pink, mottled, with a net of small vessels."""
    c.fill((c.uniform(0.76, 0.90), c.uniform(0.47, 0.60), c.uniform(0.38, 0.50)))
    c.shade(1 + 0.05 * c.noise(4) + np.float32(0.02 + grain) * c.noise(18))
    net = ramp(np.abs(c.noise(6)), 0.16, 0.02) + 0.7 * ramp(np.abs(c.noise(11)), 0.16, 0.02)
    c.absorb((np.float32(0.55 * vessels) * net + np.float32(blush) * (1 + 0.35 * c.noise(5)), BLOOD))


def _light(c: Canvas, tube: _Tube, depth: float, folds: float) -> None:
    """Folds around the lumen, the dark lumen, and light that falls off."""
    three = 4 * tube.ux**3 - 3 * tube.ux
    phase = np.log(tube.rho) * np.float32(c.uniform(4.0, 6.5)) + np.float32(c.uniform(0.2, 0.8)) * three
    wave = np.sin(phase + np.float32(c.uniform(0, 6.28)))
    c.shade(1 + np.float32(folds) * (ramp(wave, -1.0, 0.85) - ramp(wave, 0.85, 1.0) - 0.4))
    reach = np.float32(depth) * (1 + np.float32(0.12) * three)
    tube.light = np.float32(0.1) + np.float32(0.9) * np.clip(tube.rho / reach - 0.25, 0, 1)
    tube.light *= 1 - np.float32(c.uniform(0.05, 0.25)) * (c.x**2 + c.y**2)
    c.shade(tube.light)


def _colon(c: Canvas, vessels: float | None = None, blush: float | None = None, grain: float = 0.0) -> _Tube:
    vessels = c.uniform(0.3, 0.9) if vessels is None else vessels
    blush = c.uniform(0.0, 0.25) if blush is None else blush
    tube = _Tube(c, away=0.45)
    _wall(c, vessels, blush, grain)
    _light(c, tube, c.uniform(0.2, 0.55), c.uniform(0.15, 0.5))
    return tube


def _lit(tube: _Tube, colour: Colour) -> Map:
    """A colour in the light of its place, (3, size, size): what lies in the lumen is as dark as the lumen."""
    return np.asarray(colour, np.float32)[:, None, None] * tube.light


def _dirt(c: Canvas, share: float, light: Map | float = 1.0) -> None:
    """Liquid and bits of stool that cover about a ``share`` of the wall, in the light of their place."""
    if share <= 0:
        return
    field = c.noise(4) + 0.5 * c.noise(9) + 0.25 * c.noise(18)
    low = np.quantile(field[::3, ::3], max(0.0, 1 - share))
    colour = np.array(STOOL) * c.uniform(0.8, 1.45) + np.array([0, c.uniform(-0.03, 0.06), 0])
    rough = colour[:, None, None] * (1 + 0.18 * c.noise(12) + 0.1 * c.noise(22))
    c.paint(ramp(field, low - 0.1, low + 0.15) * c.uniform(0.75, 0.97), (rough * light).astype(np.float32))


def _dome(c: Canvas, x: float, y: float, a: float, b: float, turn: float, colour: Colour, rough: float = 0.06) -> None:
    """A bulge of the wall with a lit and a dark side, and a reflection."""
    d = c.ellipse(x, y, a, b, turn) * (1 + 0.05 * c.noise(6))
    shadow = c.ellipse(x + 0.05, y + 0.07, a * 1.15, b * 1.15, turn)
    c.shade(1 - np.float32(0.35) * ramp(shadow, 1.15, 0.8))
    height = np.sqrt(np.clip(1 - d * d, 0, 1))
    side = (-(c.x - x) / a - (c.y - y) / b).astype(np.float32)
    lit = 0.55 + 0.45 * height + 0.16 * side + np.float32(rough) * (c.noise(14) + c.noise(20))
    tint = np.array(colour, np.float32)[:, None, None] * np.clip(lit, 0.2, 1.4)
    c.paint(ramp(d, 1.08, 0.92), tint)
    if c.chance(0.8):
        c.paint(c.stamp(x - 0.3 * a, y - 0.35 * b, 0.16 * min(a, b)) * c.uniform(0.5, 0.95), (1.0, 0.97, 0.92))


def _bbps(c: Canvas, dirty: float) -> None:
    tube = _colon(c)
    _dirt(c, dirty, tube.light)


def _clean(c: Canvas) -> None:
    _bbps(c, c.uniform(0.02, 0.22) if c.chance(0.55) else 0.0)


def _unclean(c: Canvas) -> None:
    _bbps(c, c.uniform(0.18, 0.75))


def _impacted(c: Canvas) -> None:
    tube = _colon(c)
    shade = c.uniform(0.55, 1.0)
    for _ in range(c.count(2, 5)):
        x, y = tube.lx + c.uniform(-0.4, 0.4), tube.ly + c.uniform(-0.4, 0.4)
        colour = tuple(shade * c.uniform(0.85, 1.15) * v for v in STOOL)
        _dome(c, x, y, c.uniform(0.3, 0.6), c.uniform(0.25, 0.5), c.uniform(0, 3), colour, 0.16)  # type: ignore[arg-type]
    if c.chance(0.6):
        _dirt(c, c.uniform(0.05, 0.4), tube.light)


def _polyp_colour(c: Canvas) -> Colour:
    return c.uniform(0.72, 0.92), c.uniform(0.34, 0.52), c.uniform(0.28, 0.44)


def _polyp(c: Canvas) -> None:
    tube = _colon(c)
    if c.chance(0.25):
        _dirt(c, c.uniform(0.02, 0.12), tube.light)
    x, y = c.uniform(-0.5, 0.5), c.uniform(-0.5, 0.5)
    a = c.uniform(0.1, 0.2) if c.chance(0.35) else c.uniform(0.2, 0.45)
    b = a * c.uniform(0.65, 1.0)
    colour = _polyp_colour(c)
    if c.chance(0.3):  # on a stalk
        angle = c.uniform(0, 6.28)
        t = np.linspace(0, 1, 6) * (a + c.uniform(0.15, 0.4))
        stalk = c.stroke(x + t * np.cos(angle), y + t * np.sin(angle), 0.8 * b)
        c.paint(stalk * 0.85, tuple(0.85 * v for v in colour))  # type: ignore[arg-type]
    _dome(c, x, y, a, b, c.uniform(0, 3.1), colour, c.uniform(0.03, 0.1))


def _cecum(c: Canvas) -> None:
    tube = _Tube(c, away=0.35)
    _wall(c, c.uniform(0.3, 0.9), c.uniform(0, 0.2))
    c.shade(1 - np.float32(c.uniform(0.1, 0.4)) * (c.x**2 + c.y**2))
    turn = c.uniform(0, 6.28)
    if c.chance(0.8):  # three folds that meet
        for spoke in range(3):
            fold = tube.towards(turn + spoke * 2.094 + c.uniform(-0.25, 0.25), c.uniform(0.25, 0.4))
            c.shade(1 - np.float32(c.uniform(0.25, 0.5)) * fold * ramp(tube.rho, 0.12, 0.3) * ramp(tube.rho, 1.3, 0.5))
    # orifice of the appendix: a slit or crescent with a rim
    a = c.uniform(0.1, 0.2)
    slit = c.ellipse(tube.lx, tube.ly, a, a * c.uniform(0.35, 0.85), turn) * (1 + 0.08 * c.noise(8))
    c.shade(1 + np.float32(0.22) * ramp(np.abs(slit - 1.5), 0.5, 0.0))
    c.shade(1 - np.float32(c.uniform(0.45, 0.85)) * ramp(slit, 1.1, 0.75))
    if c.chance(0.5):  # lip of the valve
        angle = c.uniform(0, 6.28)
        x, y = tube.lx + 0.75 * np.cos(angle), tube.ly + 0.75 * np.sin(angle)
        _dome(c, x, y, 0.34, 0.15, angle + np.pi / 2, (0.90, 0.64, 0.40), 0.03)
    if c.chance(0.3):
        _dirt(c, c.uniform(0.03, 0.2), tube.light)


def _lifted(c: Canvas) -> None:
    _colon(c)
    x, y = c.uniform(-0.35, 0.35), c.uniform(-0.35, 0.35)
    a = c.uniform(0.45, 0.8)
    turn = c.uniform(0, 3.1)
    _dome(c, x, y, a, a * c.uniform(0.65, 1.0), turn, _polyp_colour(c), 0.03)
    near = ramp(c.ellipse(x, y, a * 1.25, a, turn) + 0.15 * c.noise(5), 1.3, 0.5)
    c.absorb((near * c.uniform(0.5, 1.3), DYE))
    if c.chance(0.85):  # the polyp on top, less blue
        s = a * c.uniform(0.25, 0.6)
        _dome(
            c,
            x + c.uniform(-0.15, 0.15),
            y + c.uniform(-0.15, 0.15),
            s,
            s * c.uniform(0.6, 1.0),
            turn,
            _polyp_colour(c),
        )
        if c.chance(0.5):
            c.absorb((c.uniform(0.1, 0.35), DYE))


def _resected(c: Canvas) -> None:
    _colon(c)
    x, y = c.uniform(-0.35, 0.35), c.uniform(-0.35, 0.35)
    a, turn = c.uniform(0.3, 0.65), c.uniform(0, 3.1)
    if c.chance(0.5):
        _dome(c, x, y, a * 1.5, a * 1.3, turn, _polyp_colour(c), 0.03)
    d = c.ellipse(x, y, a, a * c.uniform(0.6, 0.95), turn) + np.float32(0.1) * c.noise(6)
    c.absorb((ramp(d, 1.9, 0.9) * c.uniform(0.5, 1.3), DYE))
    # the floor of the wound: blue-grey with pale strands, a burnt margin
    floor = np.array([0.45, 0.56, 0.68], np.float32)[:, None, None] * (1 + 0.18 * c.noise(9) + 0.1 * c.noise(18))
    c.paint(ramp(d, 1.05, 0.95) * c.uniform(0.65, 0.95), floor.astype(np.float32))
    if c.chance(0.6):
        c.paint(ramp(d, 0.95, 0.8) * ramp(np.abs(c.noise(6)), 0.2, 0.05) * 0.6, (0.92, 0.92, 0.88))
    rim = ramp(np.abs(d - 1.03), 0.14, 0.03)
    c.paint(rim * c.uniform(0.3, 0.8), (0.95, 0.88, 0.78) if c.chance(0.6) else (0.70, 0.20, 0.16))
    if c.chance(0.4):
        c.absorb((ramp(d, 1.0, 0.8) * ramp(c.noise(6), 0.7, 1.2) * 0.9, BLOOD))
    if c.chance(0.2):  # a clip
        angle = c.uniform(0, 6.28)
        reach = np.array([0.0, 0.3])
        c.paint(c.stroke(x + reach * np.cos(angle), y + reach * np.sin(angle), 0.07) * 0.9, (0.55, 0.57, 0.60))


def _stomach_wall(c: Canvas) -> None:
    c.fill((c.uniform(0.78, 0.90), c.uniform(0.44, 0.58), c.uniform(0.32, 0.46)))
    c.shade(1 + 0.06 * c.noise(4) + 0.02 * c.noise(18))
    c.absorb((np.float32(c.uniform(0, 0.3)) * np.clip(c.noise(7), 0, 2), BLOOD))


def _pylorus(c: Canvas) -> None:
    tube = _Tube(c, away=0.4, wobble=0.05)
    _stomach_wall(c)
    ring = np.sin(tube.rho * np.float32(c.uniform(7, 12)) + np.float32(c.uniform(0, 6.28)))
    c.shade(1 + np.float32(c.uniform(0.03, 0.16)) * ring * ramp(tube.rho, 1.4, 0.4))
    c.shade(1 - np.float32(c.uniform(0.05, 0.4)) * ramp(tube.rho, 0.7, 0.1))
    size = c.uniform(0.06, 0.2)
    c.shade(1 + np.float32(0.25) * ramp(np.abs(tube.rho / size - 1.45), 0.5, 0.0))
    c.shade(1 - np.float32(c.uniform(0.6, 0.92)) * ramp(tube.rho / size, 1.1, 0.8))
    if c.chance(0.35):
        x, y = c.rng.normal(0, 0.5, (2, c.count(3, 12)))
        c.paint(c.stamp(x, y, c.rng.uniform(0.02, 0.06, len(x))) * 0.4, (0.96, 0.93, 0.85))  # foam


def _endoscope(c: Canvas, angle: float, wide: float) -> None:
    """The shaft, seen from its own tip: a black cylinder from the edge inwards."""
    s, t = np.float32(np.sin(angle)), np.float32(np.cos(angle))
    along, across = c.x * t + c.y * s, c.y * t - c.x * s
    across = across + np.float32(c.uniform(-0.12, 0.12)) + np.float32(c.uniform(-0.1, 0.1)) * along**2
    end = c.uniform(-0.25, 0.15)
    width = wide * (0.85 + 0.25 * along)
    shaft = np.maximum(np.abs(across) - width, end - along)
    c.shade(1 - np.float32(0.35) * ramp(shaft, 0.14, 0.0))
    c.paint(c.cover(shaft, 0.03) * 0.96, (0.06, 0.06, 0.07))
    c.paint(
        c.cover(np.maximum(np.abs(across + 0.4 * width) - 0.12 * width, end - along), 0.03) * 0.5, (0.45, 0.45, 0.5)
    )
    if c.chance(0.5):  # depth marks
        bands = np.sin(along * np.float32(c.uniform(12, 18)))
        c.paint(c.cover(shaft + 0.02) * ramp(bands, 0.8, 0.95) * 0.6, (0.8, 0.8, 0.78))


def _retroflex_stomach(c: Canvas) -> None:
    _stomach_wall(c)
    wave = c.x * np.float32(c.uniform(-1, 1)) + c.y + np.float32(0.2) * c.noise(4)
    rugae = np.sin(wave * np.float32(c.uniform(9, 16)))
    c.shade(1 + np.float32(c.uniform(0.06, 0.22)) * rugae * ramp(c.noise(3), -0.8, 0.4))
    c.shade(
        1
        - np.float32(c.uniform(0.1, 0.5)) * ramp(c.ellipse(c.uniform(-0.4, 0.4), c.uniform(0, 0.6), 0.8, 0.6), 1.0, 0.1)
    )
    _endoscope(c, -np.pi / 2 + c.uniform(-0.7, 0.7), c.uniform(0.12, 0.2))


def _retroflex_rectum(c: Canvas) -> None:
    _wall(c, c.uniform(0.4, 1.0), c.uniform(0.05, 0.35))
    angle = c.uniform(0, 6.28)
    x, y = 0.75 * np.cos(angle), 0.75 * np.sin(angle)
    ring = c.ellipse(x, y, 0.55, 0.5) + 0.1 * c.noise(6)
    c.paint(ramp(ring, 1.1, 0.85) * c.uniform(0.3, 0.7), (0.90, 0.76, 0.70))  # the pale skin of the anal canal
    fold = np.sin(c.ellipse(-x, -y, 0.5, 0.4) * np.float32(c.uniform(3, 5)) + 0.3 * c.noise(3))
    c.shade(1 + np.float32(c.uniform(0.08, 0.22)) * fold)
    c.shade(1 - np.float32(c.uniform(0.1, 0.3)) * (c.x**2 + c.y**2))
    _endoscope(c, angle, c.uniform(0.17, 0.28))
    if c.chance(0.3):
        _dirt(c, c.uniform(0.02, 0.12))


def _hemorrhoids(c: Canvas) -> None:
    """Purple cushions around the anal canal."""
    tube = _Tube(c, away=0.25)
    _wall(c, c.uniform(0.2, 0.7), c.uniform(0.1, 0.35))
    c.shade(np.float32(0.25) + np.float32(0.75) * ramp(tube.rho, 0.08, 0.3))
    start = c.uniform(0, 6.28)
    for number in range(c.count(2, 4)):
        angle = start + number * c.uniform(1.3, 2.1)
        x, y = tube.lx + 0.5 * np.cos(angle), tube.ly + 0.5 * np.sin(angle)
        colour = (c.uniform(0.5, 0.72), c.uniform(0.16, 0.28), c.uniform(0.22, 0.36))
        _dome(c, x, y, c.uniform(0.25, 0.4), c.uniform(0.2, 0.32), angle, colour, 0.04)
    if c.chance(0.4):
        _endoscope(c, c.uniform(0, 6.28), c.uniform(0.15, 0.25))


def _gullet(
    c: Canvas,
    *,
    tongues: list[tuple[float, float, float]],
    breaks: list[tuple[float, float, float]],
    slough: float = 0.0,
) -> None:
    """Where the pale gullet meets the salmon-red stomach: tongues of the red reach out, breaks are raw streaks.

    Both are (angle, length, half width).
    """
    tube = _Tube(c, wobble=0.05, away=0.25)
    c.fill(PEARL)
    c.shade(1 + 0.04 * c.noise(4) + 0.015 * c.noise(18))
    net = ramp(np.abs(c.noise(7, 1.0)), 0.12, 0.02)
    c.absorb((np.float32(c.uniform(0.05, 0.3)) * net + np.float32(c.uniform(0, 0.2)), BLOOD))
    border = np.float32(c.uniform(0.3, 0.48)) + np.float32(c.uniform(0.02, 0.06)) * (c.noise(8) + c.noise(14))
    for angle, length, width in tongues:
        border = border + np.float32(length) * np.sqrt(tube.towards(angle, width))
    red = np.array(SALMON, np.float32)[:, None, None] * (1 + 0.07 * c.noise(9))
    c.paint(ramp(tube.rho, border + 0.04, border - 0.04) * c.uniform(0.65, 0.95), red.astype(np.float32))
    for angle, length, width in breaks:
        streak = tube.towards(angle, width) * ramp(tube.rho, border - 0.08, border + 0.02)
        streak = streak * ramp(tube.rho, border + length, border + 0.7 * length)
        c.paint(ramp(streak, 0.05, 0.5) * c.uniform(0.6, 0.9), (0.68, 0.14, 0.12))
        if slough:
            c.paint(ramp(streak, 0.5, 0.9) * ramp(c.noise(12), -0.8, 0.5) * slough, SLOUGH)
    fold = np.cos(np.float32(c.count(4, 7)) * np.arctan2(tube.uy, tube.ux) + np.float32(c.uniform(0, 6.28)))
    c.shade(1 + np.float32(c.uniform(0.03, 0.14)) * fold)
    lumen = c.uniform(0.06, 0.22)
    c.shade(np.float32(0.15) + np.float32(0.85) * ramp(tube.rho + 0.04 * fold, 0.4 * lumen, 1.4 * lumen))
    c.shade(1 - np.float32(c.uniform(0.05, 0.25)) * (c.x**2 + c.y**2))


def _spokes(
    c: Canvas, number: int, length: tuple[float, float], width: tuple[float, float]
) -> list[tuple[float, float, float]]:
    start = c.uniform(0, 6.28)
    return [
        (start + k * 6.28 / max(number, 1) + c.uniform(-0.4, 0.4), c.uniform(*length), c.uniform(*width))
        for k in range(number)
    ]


def _z_line(c: Canvas) -> None:
    _gullet(c, tongues=_spokes(c, c.count(0, 3), (0.02, 0.12), (0.3, 0.6)), breaks=[])


def _esophagitis_a(c: Canvas) -> None:
    tongues = _spokes(c, c.count(0, 3), (0.02, 0.12), (0.3, 0.6))
    _gullet(c, tongues=tongues, breaks=_spokes(c, c.count(1, 3), (0.1, 0.28), (0.14, 0.28)), slough=c.uniform(0, 0.3))


def _esophagitis_b(c: Canvas) -> None:
    tongues = _spokes(c, c.count(0, 3), (0.02, 0.12), (0.3, 0.6))
    _gullet(c, tongues=tongues, breaks=_spokes(c, c.count(2, 5), (0.22, 0.6), (0.2, 0.5)), slough=c.uniform(0.2, 0.9))


def _barrett_short(c: Canvas) -> None:
    _gullet(c, tongues=_spokes(c, c.count(1, 3), (0.14, 0.32), (0.35, 0.7)), breaks=[])


def _barrett(c: Canvas) -> None:
    _gullet(c, tongues=_spokes(c, c.count(2, 4), (0.3, 0.6), (0.5, 1.1)), breaks=[])


def _colitis(degree: float, spread: float = 0.12) -> Callable[[Canvas], None]:
    """Mayo score: 1 red and veiled vessels, 2 no vessels and erosions, 3 ulcers and bleeding."""

    def scene(c: Canvas) -> None:
        s = float(np.clip(c.rng.normal(degree, spread), 0, 3.4))
        tube = _colon(
            c,
            vessels=max(0.0, 0.85 - 0.45 * s) * c.uniform(0.75, 1.1),
            blush=0.05 + 0.17 * s * c.uniform(0.8, 1.2),
            grain=0.035 * min(s, 2.0) * c.uniform(0.7, 1.3),
        )
        if s > 1.3:  # erosions
            n = int(6 * (s - 1) * c.uniform(0.5, 1.5))
            x, y = c.rng.uniform(-0.9, 0.9, (2, n))
            c.paint(c.stamp(x, y, c.rng.uniform(0.03, 0.07, n)) * c.uniform(0.4, 0.8), _lit(tube, SLOUGH))
        if s > 2.2:  # ulcers, bleeding
            field = c.noise(5) + 0.4 * c.noise(11)
            low = 2.6 - 0.6 * s
            c.paint(ramp(field, low, low + 0.3) * c.uniform(0.5, 0.9), _lit(tube, SLOUGH))
        if s > 1.8 and c.chance(0.3 * s - 0.3):
            field = c.noise(6) + 0.4 * c.noise(12)
            c.absorb((ramp(field, 1.6 - 0.3 * s, 2.0 - 0.3 * s) * c.uniform(0.6, 1.3), BLEEDING))
        if c.chance(0.25):
            _dirt(c, c.uniform(0.02, 0.12), tube.light)

    return scene


def _ileum(c: Canvas) -> None:
    """Velvet of villi, small lymph follicles, hardly a fold."""
    tube = _Tube(c, away=0.4)
    c.fill((c.uniform(0.78, 0.90), c.uniform(0.54, 0.66), c.uniform(0.38, 0.48)))
    c.shade(1 + 0.05 * c.noise(4) + np.float32(c.uniform(0.06, 0.13)) * np.clip(c.noise(20) + c.noise(24), -1.5, 1.5))
    for px, py in c.rng.uniform(-0.8, 0.8, (c.count(3, 9), 2)).tolist():
        bump = c.ellipse(px, py, 0.09, 0.08)
        c.shade(1 + np.float32(0.22) * ramp(bump, 1.0, 0.2) - np.float32(0.18) * ramp(np.abs(bump - 1.2), 0.3, 0))
    _light(c, tube, c.uniform(0.15, 0.4), c.uniform(0.03, 0.15))


SCENES: Mapping[str, Callable[[Canvas], None]] = {
    "bbps-2-3": _clean,
    "polyps": _polyp,
    "cecum": _cecum,
    "dyed-lifted-polyps": _lifted,
    "pylorus": _pylorus,
    "dyed-resection-margins": _resected,
    "z-line": _z_line,
    "retroflex-stomach": _retroflex_stomach,
    "bbps-0-1": _unclean,
    "ulcerative-colitis-grade-2": _colitis(2.0),
    "esophagitis-a": _esophagitis_a,
    "retroflex-rectum": _retroflex_rectum,
    "esophagitis-b-d": _esophagitis_b,
    "ulcerative-colitis-grade-1": _colitis(1.0),
    "ulcerative-colitis-grade-3": _colitis(3.0),
    "impacted-stool": _impacted,
    "barretts-short-segment": _barrett_short,
    "barretts": _barrett,
    "ulcerative-colitis-grade-0-1": _colitis(0.5),
    "ulcerative-colitis-grade-2-3": _colitis(2.5),
    "ulcerative-colitis-grade-1-2": _colitis(1.5),
    "ileum": _ileum,
    "hemorrhoids": _hemorrhoids,
}
