"""Convert messages to and from FLARE's, and bound the memory that sending and receiving them takes."""
