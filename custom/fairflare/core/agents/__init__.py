"""Provide the reinforcement learning that runs at the server."""
