"""Define what this job learns: network, loss, metric and data source. Edit it to bring your own."""

from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask


class Task(VolumeSegmentationTask):
    """Override ``build_model`` for another network, ``outputs`` for another way through a whole volume."""
