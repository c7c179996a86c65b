"""Find problems in the images of sites, read as a task reads them, for the command ``fairflare check-data``."""
