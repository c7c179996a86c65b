"""Compute confidence intervals and p-values of differences between methods."""
