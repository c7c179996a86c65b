"""Define synthetic prostate MRI: axial T2-like slices between base and apex with the gland as mask.

Lengths are in mm from the middle of the gland: x to a side, y to the back, z to the head.
"""

from __future__ import annotations

import numpy as np

from fairflare_lab.phantoms.anatomy import Anatomy, Part, Scanner

SLICES = 4  # number of slices of each patient
ATTRIBUTE, ZONES = "zone", ("small", "enlarged")  # groups of patients, by the size of their transition zone

TISSUES = {
    "fat": 0.78, "muscle": 0.17, "levator": 0.17, "cortex": 0.05, "marrow": 0.50, "vein": 0.92, "wall": 0.33,
    "stool": 0.45, "bladder": 1.05, "vesicle": 0.95, "capsule": 0.16, "gland": 0.80, "zone": 0.42, "nodule": 0.65,
    "stroma": 0.20, "lesion": 0.28,
}  # fmt: skip
LONG = 500.0  # half axis of what runs through all slices
BOTH = (1, -1)
PARTS = (
    Part("fat", (0, 6, 0), (170, 108, LONG)),
    Part("muscle", (62, 86, 0), (62, 30, LONG), turn=0.45, sides=BOTH),  # gluteus maximus
    Part("muscle", (19, -92, 0), (24, 8, LONG), sides=BOTH),  # rectus abdominis
    Part("muscle", (72, -72, 0), (30, 16, LONG), turn=0.6, sides=BOTH),  # iliopsoas, pectineus
    Part("cortex", (83, 6, 0), (21, 37, LONG), turn=-0.12, sides=BOTH),  # ischium and acetabulum
    Part("marrow", (83, 6, 0), (18, 34, LONG), turn=-0.12, sides=BOTH),
    Part("marrow", (124, -16, 0), (24, 24, 60), sides=BOTH),  # femoral head
    Part("muscle", (55.5, 3, 0), (9.5, 38, LONG), turn=-0.16, sides=BOTH),  # obturator internus
    Part("levator", (41, 44, 0), (4, 25, LONG), turn=0.42, sides=BOTH),
    Part("vein", (24, -16, 0), (4, 3, 30), sides=BOTH),
    Part("wall", (0, 31, 0), (15, 14, LONG)),  # rectum
    Part("stool", (0, 31, 0), (11, 10, LONG), shift=0.5),
    Part("bladder", (0, -26, 34), (30, 22, 26)),
    Part("vesicle", (13, 15, 24), (10, 4, 12), sides=BOTH),
    Part("capsule", (0, 0, 0), (26, 18.5, 34), shift=0.0, label=1, grown=1.12),
    Part("gland", (0, 0, 0), (24.5, 17, 40), shift=0.0, within="capsule", grown=1.12),
    Part("zone", (0, -4, 1), (14, 10, 18), within="gland", grown=1.45),
    Part("nodule", (6, -4, 4), (5, 5, 8), within="zone", sides=BOTH, share=0.5, grown=1.3),
    Part("stroma", (0, -15, 0), (12, 6, 30), within="gland"),
    Part("lesion", (11, 9, -4), (5.5, 3.4, 9), shift=3.0, within="gland", share=None),
)

SCANNERS = {
    # a clean 3 T scanner with a phased-array coil
    "site-1": Scanner((12, 3, 6), (140.0, 48.0), gamma=0.9, bias=0.12, noise=0.025, blur=0.35, second=0.3),
    # 1.5 T with an endorectal coil: bright spot behind the gland, small field of view
    "site-2": Scanner((18, 3, 6), (115.0, 48.0), bias=0.25, coil=1.0, size=0.95, second=0.3),
    # wide field of view, small glands, an old coil
    "site-3": Scanner(
        (7, 3, 6), (190.0, 48.0), gamma=1.15, bias=0.35, noise=0.05, blur=0.85, size=0.92, second=0.15
    ),
    # fat suppression: fat and marrow dark
    "site-4": Scanner(
        (11, 3, 6), (155.0, 48.0), {"fat": 0.24, "marrow": 0.17, "muscle": 0.28}, gamma=0.85, bias=0.25, noise=0.055,
        blur=0.6, size=1.05, second=0.5,
    ),
    # strong contrast, large glands
    "site-5": Scanner((16, 3, 6), (145.0, 48.0), gamma=1.35, bias=0.18, noise=0.02, size=1.15, second=0.6),
    # another sequence: zones hardly differ, the gland is a grey one on bright fat; noisy, few patients
    "site-6": Scanner(
        (7, 3, 6), (165.0, 48.0),
        {"fat": 0.85, "gland": 0.50, "zone": 0.44, "stroma": 0.33, "capsule": 0.22, "muscle": 0.30, "vesicle": 0.6,
         "vein": 0.6},
        gamma=0.8, bias=0.4, noise=0.05, blur=0.7, size=0.95, second=0.4,
    ),
}  # fmt: skip

PELVIS = Anatomy(PARTS, TISSUES, SCANNERS, 200.0, np.uint8, coil=(0.0, 18.0, 0.0))
patients = PELVIS.patients
