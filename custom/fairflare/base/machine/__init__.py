"""How a network computes on the site's machine: precision, threads, memory."""
