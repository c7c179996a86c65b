"""What every method is made of: rule, training, reports, catalog."""
