"""Public multi-site data sets, brought into the form that a site reads."""

from fairflare.data.preparers.common import *  # noqa: F403
