"""federation.task_files What a run is to do, before it begins."""
