"""Write files whole or not at all, hold locks, save a log of records, and make temporary folders."""
