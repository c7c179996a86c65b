"""The papers' tables."""
