"""Contain the server's side of a run: its check of the sites, first model, rounds and recalibration."""
