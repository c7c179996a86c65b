"""How the server leads a run."""
