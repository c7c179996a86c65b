"""Define tasks on whole volumes (3D)."""
