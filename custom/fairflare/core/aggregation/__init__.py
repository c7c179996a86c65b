"""From reports and updates to weights and changes."""
