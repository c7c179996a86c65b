"""What may be said of a site's cases: chance, draws, the smallest group."""
