"""Define what the server knows of this job's training script; a job that carries code may name its own network."""

from fairflare.tasks.scripts import ScriptTask


class Task(ScriptTask):
    """Name the network of the sites' training script for the server; the script has loss, metrics and data."""
