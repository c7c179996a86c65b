"""Where slices and voxels lie: the one judge of a stack of planes, and of an image with its mask.

Nothing is resampled and no header is believed against another one. A stack is ordered by the places of its planes; a
mask is brought to the axes of its image by the affines of both. What does not go together is a :class:`Misfit`.

Places are in mm. DICOM's axes lead to the left, the back and the head (PS3.3, C.7.6.2.1.1), those of an affine here to
the right, the front and the head, as NIfTI's do. An array's axes are (row, column, slice).
"""

from fairflare.data.geometry.misfits import Misfit, notes_of
from fairflare.data.geometry.nifti import nifti_grid, three_axes
from fairflare.data.geometry.pairs import TWO_FORMS, DrawnOn, Fit, Grid, codes_of, fit, tag_turn
from fairflare.data.geometry.stacks import NO_SERIES, Plane, Stack, stack

__all__ = [
    "NO_SERIES", "TWO_FORMS", "DrawnOn", "Fit", "Grid", "Misfit", "Plane", "Stack", "codes_of", "fit",
    "nifti_grid", "notes_of", "stack", "tag_turn", "three_axes",
]  # fmt: skip
