"""``fairflare compare``: many runs, and the tables over them."""
