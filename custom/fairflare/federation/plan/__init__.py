"""Plan a run before it begins: its method, task, settings and bounds."""
