"""Define synthetic abdomens as volumes: an organ with a lesion in most patients, and other structures beside it."""

from __future__ import annotations

import numpy as np

from fairflare_lab.phantoms.anatomy import Anatomy, Part, Scanner

TISSUES = {"body": 0.35, "other": 0.5, "organ": 0.62, "lesion": 0.85}
PARTS = (
    Part("body", (0, 0, 0), (40, 32, 60)),
    Part("other", (-18, -8, 0), (6.5, 6.5, 13)),
    Part("other", (-6, 14, 0), (6.5, 6.5, 13)),
    Part("organ", (12, 4, 0), (15.5, 13, 19), within="body", label=1, turn=0.3),
    Part("lesion", (12, 4, 0), (6.5, 6.5, 6.5), shift=3.0, within="organ", label=2, share=None),
)
SCANNERS = {
    "site-1": Scanner((6, 2, 3), (96.0, 96.0), noise=0.02, bias=0.1, lesions=0.8),
    # thin slices, lesions dark
    "site-2": Scanner(
        (8, 2, 3), (102.4, 76.8), {"body": 0.30, "organ": 0.60, "lesion": 0.42, "other": 0.75}, bias=0.2, lesions=0.7
    ),
    # thick slices, low contrast, an old receiver
    "site-3": Scanner(
        (4, 2, 3), (89.6, 120.0), {"body": 0.45, "organ": 0.58, "lesion": 0.72}, noise=0.05, bias=0.45, lesions=0.6
    ),
    # inverted contrast, wide field of view
    "site-4": Scanner(
        (5, 2, 3), (115.2, 105.6), {"body": 0.75, "organ": 0.45, "lesion": 0.20, "other": 0.60}, noise=0.04, bias=0.25,
        lesions=0.9,
    ),
}  # fmt: skip

ABDOMEN = Anatomy(PARTS, TISSUES, SCANNERS, 1000.0, np.int16)
patients = ABDOMEN.patients
