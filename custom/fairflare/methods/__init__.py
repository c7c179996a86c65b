"""One file per method, both halves; :mod:`fairflare.methods.base.catalog` finds them."""
