"""What is wrong with a site's images as a task reads them, for ``fairflare check-data``."""
