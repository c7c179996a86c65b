"""Connect FairFlare to NVIDIA FLARE: controller, executor, aggregator, Client API, exported jobs."""

from fairflare.base.machine.environment import ignore_matplotlib_settings, started_by_flare

if started_by_flare():
    ignore_matplotlib_settings()
