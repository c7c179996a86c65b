"""Define the federated methods; a method's module holds its server half (rule) and its site half (training)."""
