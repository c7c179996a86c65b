"""Perform the server's tasks at a site, and decide what may leave the site."""
