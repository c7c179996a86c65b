"""Carry tasks to the sites of a run on one machine, without FLARE."""
