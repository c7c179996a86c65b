"""Convert messages to and from FLARE's, and bound the memory that receiving them takes."""
