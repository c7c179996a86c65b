"""One file per method, both halves; :mod:`fairflare.methods.catalog` finds them."""
