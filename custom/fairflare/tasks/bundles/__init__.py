"""The parts of a MONAI bundle's task."""
