"""federation.site_tasks federation.site_network What happens at a site."""
