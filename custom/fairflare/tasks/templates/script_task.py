"""What the server of this job knows of its training script: a job that carries code may name its own network."""

from fairflare.tasks.scripts import ScriptTask


class Task(ScriptTask):
    """Loss, metrics and data are the script's."""
