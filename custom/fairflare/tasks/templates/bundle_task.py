"""Define what this job learns: the MONAI bundle in the folder beside this file, or beside the job's ``custom``."""

from pathlib import Path

from fairflare.tasks.bundle import MonaiBundleTask

PLACES = [Path(__file__).with_name("monai_bundle"), Path(__file__).parents[1] / "monai_bundle"]


class Task(MonaiBundleTask):
    """Override ``open_site`` for another way to find images; network, loss and metric come from the MONAI bundle."""

    folder = PLACES[0] if PLACES[0].is_dir() else PLACES[1]
