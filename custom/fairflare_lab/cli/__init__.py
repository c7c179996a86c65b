"""Commands that a researcher adds to ``fairflare``."""
