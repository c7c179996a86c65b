"""Decide by headers whether planes form a stack, and how a mask lies on its image.

Nothing is resampled, and where headers contradict each other none is preferred. A stack is ordered by the positions of
its planes; a mask is brought to the axes of its image by the affines of both. A contradiction is a :class:`Misfit`.

Positions are in mm. DICOM's axes lead to the left, the back and the head (PS3.3, C.7.6.2.1.1); the axes of an affine
here lead to the right, the front and the head, as NIfTI's do. An array's axes are (row, column, slice).
"""

from fairflare.data.geometry.channels import resample
from fairflare.data.geometry.misfits import Misfit, notes_of, refuse_misfit
from fairflare.data.geometry.nifti import describe_several, nifti_grid, three_axes
from fairflare.data.geometry.pairs import SEGMENTS, TWO_FORMS, DrawnOn, Fit, Grid, codes_of, fit, tag_turn
from fairflare.data.geometry.stacks import NO_SERIES, Plane, Stack, stack

__all__ = [
    "NO_SERIES", "SEGMENTS", "TWO_FORMS", "DrawnOn", "Fit", "Grid", "Misfit", "Plane", "Stack", "codes_of",
    "describe_several", "fit", "nifti_grid", "notes_of", "refuse_misfit", "resample", "stack", "tag_turn", "three_axes",
]  # fmt: skip
