"""Job folders, recipes and provisioning."""
