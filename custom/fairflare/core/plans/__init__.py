"""Derive nnU-Net's plan of a segmentation from counts that sites can add up."""
