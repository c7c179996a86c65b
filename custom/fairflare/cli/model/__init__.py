"""Implement ``fairflare predict``, ``adapt`` and ``evaluate``, which use finished models."""
