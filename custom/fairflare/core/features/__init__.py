"""Find the layers of a network, and compute their features and norm statistics."""
