"""Connect FairFlare to NVIDIA FLARE: controller, executor, aggregator, Client API, exported jobs."""

import os

from fairflare.base.machine.environment import shield_imports, started_by_flare
from fairflare.base.machine.one_run import BELONGS_TO

if started_by_flare():
    shield_imports()
    os.environ.setdefault(BELONGS_TO, "a process of FLARE")  # for programs that the job's own code starts
