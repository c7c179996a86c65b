"""Implement the commands ``check-data``, ``stats``, ``doctor`` and ``policies``, and find the sites of a data file."""
