"""Compute how certain differences between methods are."""
