"""Provide sharpness-aware optimizers, and operations on lists of tensors."""
