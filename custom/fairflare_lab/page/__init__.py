"""One self-contained HTML page about a run or a comparison, with its pictures and tables as files (docs/report.md)."""
