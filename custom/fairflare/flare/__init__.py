"""Connect FairFlare to NVIDIA FLARE: controller, executor, aggregator, Client API, exported jobs."""

import os

from fairflare.base.machine.environment import is_flare_process, shield_imports
from fairflare.base.machine.one_run import BELONGS_TO

if is_flare_process():
    shield_imports()
    os.environ.setdefault(BELONGS_TO, "a process of FLARE")  # for programs that the job's own code starts
