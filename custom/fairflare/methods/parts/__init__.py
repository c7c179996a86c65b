"""Define parts that several methods share, or that are large enough for a module of their own."""
