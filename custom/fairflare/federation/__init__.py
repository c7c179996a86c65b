"""Implement a run independently of FLARE: rounds, collection of replies, sites, checkpoints, local transports."""
