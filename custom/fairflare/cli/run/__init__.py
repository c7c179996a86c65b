"""``fairflare run`` and ``export``: a method as a run on this machine, or as a job folder."""
