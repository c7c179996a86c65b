"""Layers of a network, their features and norms."""
