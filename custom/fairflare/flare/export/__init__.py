"""Export runs as FLARE job folders and recipes, and prepare FLARE's provisioning."""
