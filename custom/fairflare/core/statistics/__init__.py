"""Intervals, inequality between sites, maps of labels."""
