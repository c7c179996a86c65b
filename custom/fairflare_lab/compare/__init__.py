"""What compares runs."""
