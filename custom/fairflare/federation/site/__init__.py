"""What happens at a site."""
