"""What a researcher adds to :mod:`fairflare` on a laptop: comparisons, pages, phantoms, public data sets."""
