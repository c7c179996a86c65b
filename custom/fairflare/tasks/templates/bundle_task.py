"""Define what this job learns: the MONAI bundle in the folder beside this file."""

from pathlib import Path

from fairflare.tasks.bundle import MonaiBundleTask


class Task(MonaiBundleTask):
    """Override ``open_site`` for another way to find images; network, loss and metric come from the MONAI bundle."""

    folder = Path(__file__).with_name("monai_bundle")
