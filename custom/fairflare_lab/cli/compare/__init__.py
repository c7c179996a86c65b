"""Implement ``fairflare compare``, which does many runs and writes tables that compare them."""
