"""Compute aggregation weights and model changes from the sites' reports and updates."""
