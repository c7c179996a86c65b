"""``fairflare predict``, ``adapt``, ``landscape`` and ``similarity``: what is done with a finished model."""
