"""Define what the server knows of this job's training script; a job that carries code may name its own network."""

from fairflare.tasks.scripts import ScriptTask


class Task(ScriptTask):
    """Name the script's network for the server; loss, metrics and data are the script's."""
