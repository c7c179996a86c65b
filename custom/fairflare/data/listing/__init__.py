"""What a datalist holds and how it is checked; :mod:`fairflare.data.datalist` reads and writes it."""
