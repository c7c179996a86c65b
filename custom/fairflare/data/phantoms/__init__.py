"""Synthetic images: no patient in them."""
