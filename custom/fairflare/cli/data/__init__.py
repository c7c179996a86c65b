"""``fairflare check-data``, ``doctor`` and ``phantom``, and which sites a data file names."""
