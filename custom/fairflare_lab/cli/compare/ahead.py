"""Imports what most runs need, once, in the process that the runs of a comparison are forked from."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress

#: Of runs in one process. A run imports the rest itself (torch's first optimizer takes its compiler).
NAMES = (
    "torch._dynamo", "monai.data", "monai.losses", "monai.networks.nets", "fairflare_lab.cli.compare.worker",
    "fairflare.federation.transports.local", "fairflare.tasks.classification", "fairflare.tasks.segmentation",
)  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a run says it in its own log
    for name in NAMES:
        with suppress(ImportError):
            importlib.import_module(name)
