"""Collect the modules behind a task that is a MONAI bundle."""
