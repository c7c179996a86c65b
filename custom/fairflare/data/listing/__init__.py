"""Represent and check the content of a datalist; :mod:`fairflare.data.datalist` reads and writes the file."""
