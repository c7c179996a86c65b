"""Implement ``fairflare run`` and ``export``: run a method on this machine, or write it as a job folder."""
