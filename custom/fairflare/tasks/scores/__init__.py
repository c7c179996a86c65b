"""Compute metrics and statistics of a site's images."""
