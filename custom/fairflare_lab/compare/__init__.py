"""Compare runs of different methods or settings."""
