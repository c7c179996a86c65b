"""Compute figures about a site's cases that may be reported: sampling error, bootstrap draws, smallest group."""
