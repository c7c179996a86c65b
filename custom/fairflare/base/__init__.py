"""What every room stands on: settings, checks, the seam of a task."""
