"""A run on one machine: how tasks reach sites without FLARE."""
