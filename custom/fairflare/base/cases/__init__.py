"""Compute what a site may report of its cases: sampling error, bootstrap draws, and the smallest group."""
