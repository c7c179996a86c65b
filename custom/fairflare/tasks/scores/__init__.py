"""Compute metrics and statistics of a site's images, and draw example predictions."""
