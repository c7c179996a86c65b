"""Metrics of images and examples of them."""
