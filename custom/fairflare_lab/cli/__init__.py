"""Define commands for researchers that extend the command line ``fairflare``."""
