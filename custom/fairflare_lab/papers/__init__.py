"""Hold the papers' tables for ``fairflare compare --preset``."""
