"""Parts that methods share."""
