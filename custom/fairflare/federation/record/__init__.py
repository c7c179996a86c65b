"""Save a run at the server: checkpoints, models, results, journal and curves."""
