"""Control how a network computes on the site's machine: its precision, threads and memory."""
