"""core.adapting Layers of a network, their features and norms."""
