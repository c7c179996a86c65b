"""Define what this job learns: network, loss, metrics and data source. Edit it to bring your own."""

from fairflare import ClassificationTask


class Task(ClassificationTask):
    """Override ``build_model`` for another network, ``open_site`` for another way to find and read images."""
