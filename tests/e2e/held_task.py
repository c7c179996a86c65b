"""Define a task for tests that kill processes: a site's own setting ``hold`` stops it in the middle of a phase.

``{"hold": {"folder": ..., "phase": "train" or "anchor", "times": n}}``: when the site begins its n-th training (or the
anchor report after it), it writes its process id to ``reached`` in the folder and sleeps, once. The job must train one
epoch a round.
"""

import os
import time
from pathlib import Path

from fairflare.tasks.base import SiteData
from fairflare.tasks.segmentation import SegmentationTask


class Held(SiteData):
    def __init__(self, data, hold):
        self.data = data
        self.synthetic, self.description = data.synthetic, data.description
        self.folder, self.phase, self.times = Path(hold["folder"]), hold["phase"], hold["times"]

    def num_samples(self, split):
        return self.data.num_samples(split)

    def batches(self, split, *, batch_size, shuffle_seed=None, augment=False):
        if split == "training":
            # Training shuffles, an anchor report does not. Counted in a file, as a process may do one task only.
            phase = "anchor" if shuffle_seed is None else "train"
            count = self.folder / "count"
            trained = int(count.read_text()) if count.exists() else 0
            if phase == "train":
                trained += 1
                count.write_text(str(trained))
            reached = self.folder / "reached"
            if (phase, trained) == (self.phase, self.times) and not reached.exists():
                partial = self.folder / "partial"
                partial.write_text(str(os.getpid()))
                partial.replace(reached)
                time.sleep(600)
        return self.data.batches(split, batch_size=batch_size, shuffle_seed=shuffle_seed, augment=augment)


class Task(SegmentationTask):
    def open_site(self, site, settings):
        own = dict(settings)
        hold = own.pop("hold", None)
        data = super().open_site(site, own)
        return Held(data, hold) if hold else data
