"""Build a self-contained HTML page about a run or a comparison, with pictures and tables as files (docs/report.md)."""
