"""federation.first_model How the server leads a run."""
