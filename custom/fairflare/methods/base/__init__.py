"""Define the parts of every method: its rule, its local training, its reports and the catalog of methods."""
