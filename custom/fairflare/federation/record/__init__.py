"""What the server keeps and writes of a run."""
