"""Find problems in the images of sites, read as a task reads them; behind the command ``fairflare check-data``."""
