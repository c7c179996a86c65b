"""Define the methods, one module for both halves of each; :mod:`fairflare.methods.base.catalog` finds them."""
