"""Define what this job learns: network, loss, metric and data source. Edit it to bring your own."""

from fairflare.tasks.volumes.nnunet import NnUNetTask


class Task(NnUNetTask):
    """Override ``loss`` for another loss, ``changes`` for another augmentation."""
