"""Tasks on whole volumes (3D)."""
