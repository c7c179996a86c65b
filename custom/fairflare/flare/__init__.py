"""Connect FairFlare to NVIDIA FLARE: controller, executor, aggregator, Client API, exported jobs."""

from fairflare.base.machine.environment import shield_imports, started_by_flare

if started_by_flare():
    shield_imports()
