"""Train at a site under differential privacy, and count in the site's ledger what each round costs."""
