"""federation.asking Asking sites and collecting what they answer."""
