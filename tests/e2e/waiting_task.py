"""Define a task for tests that stop a training within an epoch: a site's own setting ``wait`` holds it at a batch.

``{"wait": {"folder": ..., "batch": n}}``: when training has read its n-th batch (from 0), it writes its process id to
``reached`` in the folder, and waits until a file ``go_on`` is there, or is killed. Once, or with ``always`` at every
reading; in the first training of its process, or with ``epoch`` so many passes over the training images later.
"""

import os
import time
from pathlib import Path

from fairflare.base.stopping import check_stop
from fairflare.base.task import Proxy
from fairflare.tasks.segmentation import SegmentationTask


class Waiting(Proxy):
    def __init__(self, data, wait):
        super().__init__(data)
        self.folder, self.batch, self.always = Path(wait["folder"]), wait["batch"], wait.get("always", False)
        self.epoch = wait.get("epoch", 0)
        self.epochs = 0

    def batches(self, split, *, batch_size, shuffle_seed=None, augment=False):
        batches = self._inner.batches(split, batch_size=batch_size, shuffle_seed=shuffle_seed, augment=augment)
        if split != "training" or shuffle_seed is None:
            return batches
        self.epochs += 1
        return self.held(batches) if self.epochs == self.epoch + 1 else batches

    def held(self, batches):
        started = time.monotonic()
        for number, batch in enumerate(batches):
            done = self.folder / "been_here"
            if number == self.batch and (self.always or not done.exists()):
                done.touch()
                (self.folder / "partial").write_text(str(os.getpid()))
                (self.folder / "partial").replace(self.folder / "reached")
                while not (self.folder / "go_on").exists() and time.monotonic() < started + 300:
                    check_stop()
                    time.sleep(0.05)
            yield batch


class Task(SegmentationTask):
    def open_site(self, site, settings):
        own = dict(settings)
        wait = own.pop("wait", None)
        data = super().open_site(site, own)
        return Waiting(data, wait) if wait else data
