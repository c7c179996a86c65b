"""Compute intervals, metrics of groups, inequality between sites and maps of labels."""
