"""Define a task for tests whose processes end themselves by SIGKILL, at points of a run that files in a folder name.

The file ``site-4.mask.1`` ends site-4's process when it has done all that ``mask`` of round 1 asks but answer;
``server.save.2`` the server's before the checkpoint of round 1. With ``.hold`` at its end it sleeps there instead.
"""

import os
import signal
import time
from pathlib import Path

from fairflare.federation.record.experiment import Experiment
from fairflare.federation.site.site_tasks import TASKS
from fairflare.tasks.segmentation import SegmentationTask

FOLDER = os.environ.get("FAIRFLARE_TEST_DEATHS")


def dies(*point):
    """End this process, or hold it, once, where a file names the point."""
    path = Path(FOLDER, ".".join(map(str, point)))
    if path.exists():
        path.rename(f"{path}.reached")
        os.kill(os.getpid(), signal.SIGKILL)
    if (hold := Path(f"{path}.hold")).exists():
        hold.rename(f"{path}.reached")
        time.sleep(600)


def dying(name, do):
    def done(worker, request, store):
        reply = do(worker, request, store)
        dies(worker.site, name, request.current_round)
        return reply

    return done


def saving(save):
    def saved(experiment, next_round, state):
        dies("server", "save", next_round)
        save(experiment, next_round, state)

    return saved


if FOLDER:
    TASKS.update({name: dying(name, TASKS[name]) for name in ("train", "mask", "release")})
    Experiment.save = saving(Experiment.save)


class Task(SegmentationTask):
    pass
