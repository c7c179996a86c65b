"""Files: written whole or not at all, locks, a log of records, temporary folders."""
