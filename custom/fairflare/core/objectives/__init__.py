"""Sharpness-aware steps and the loss around a model."""
