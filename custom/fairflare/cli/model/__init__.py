"""``fairflare predict`` and ``adapt``: what is done with a finished model."""
