"""Reinforcement learning at the server."""
