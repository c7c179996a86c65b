"""How sure differences between methods are."""
