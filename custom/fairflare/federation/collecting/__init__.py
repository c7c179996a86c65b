"""Ask the sites to perform tasks, and collect their replies at the server."""
