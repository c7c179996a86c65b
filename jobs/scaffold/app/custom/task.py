"""Define what this job learns: network, loss, metric and data source. Edit it to bring your own."""

from fairflare import SegmentationTask


class Task(SegmentationTask):
    """Override ``build_model`` for another network, ``open_site`` for another way to find and read images."""
